"""``Policy``: looks at a view and names the slots to cut.

A policy is settings alone, without state, so one serves any number of streams.  What it must remember of a
stream (attention, for those that go by it) is in a ``Scorer`` of that stream, which the ``Compactor`` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from kvcomm.streams.events import SlotRange

Moment = Literal["forward", "admission"]
"""``forward``: after a forward pass (a decode step, a chunk of a prompt).  ``admission``: before the first
token of the next message is fed, so that no row runs under a view which is about to die."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a policy sees of a session."""

    slot_count: int
    protected: int
    """Slots from the start that are never cut, in whole blocks."""
    block_tokens: int
    turns: Sequence[tuple[int, int]]
    """Slots of finished turns."""
    next_row: int
    moment: Moment
    scores: Sequence[float] = field(default=())
    """One a full block, if the policy is due and goes by them; larger = keep."""

    @property
    def full_slots(self) -> int:
        """Slots in full blocks."""
        return self.slot_count // self.block_tokens * self.block_tokens


class Policy(Protocol):
    """Asked again after each cut until it names nothing."""

    @property
    def name(self) -> str:
        """Stands in the events as their reason."""
        ...

    @property
    def needs_scores(self) -> bool:
        """Of attention; an engine then has to measure it, see ``Scoring``."""
        ...

    def select(self, look: Look) -> list[SlotRange]:
        """Slots to cut now, ascending and disjoint; empty = no cut.

        They need not end on block borders: what is cut is the whole blocks inside them that are full and
        behind ``protected``, maybe none.  A turn that lies in them counts no more, cut or not.
        """
        ...


@runtime_checkable
class Checked(Policy, Protocol):
    """A policy whose settings may not fit an engine, or a stream."""

    def check(self, block_tokens: int) -> None:
        """Raises ``ConfigError``."""
        ...

    def obstacle(self, look: Look) -> str | None:
        """Why it never cuts a stream that looks like this, if so."""
        ...


class Scorer(Protocol):
    """What a stream's blocks are worth, from the attention that they got."""

    def observe(self, rows: Sequence[int], mass: Sequence[float], query_rows: int) -> None:
        """After a forward pass.

        Args:
            rows: of the view, by slot, those of the pass included.
            mass: by slot: attention probability, summed over layers, heads and the ``query_rows`` last rows.
        """
        ...

    def scores(self, rows: Sequence[int]) -> list[float]:
        """One a full block of a view."""
        ...


@runtime_checkable
class Scoring(Policy, Protocol):
    """A policy that goes by attention."""

    @property
    def query_rows(self) -> int:
        """Measure the attention of so many last rows of a forward pass; 0 = of all its rows."""
        ...

    def scorer(self, block_tokens: int) -> Scorer:
        """For one stream."""
        ...

    def due(self, look: Look) -> bool:
        """Whether it would cut now if it had scores, which are not worth computing otherwise."""
        ...
