"""``Policy``: looks at a view and names the slots to cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
    """One a full block, if the policy asked for them; larger = keep."""

    @property
    def full_slots(self) -> int:
        """Slots in full blocks."""
        return self.slot_count // self.block_tokens * self.block_tokens


class Policy(Protocol):
    """Asked again after each cut until it names nothing."""

    name: str
    needs_scores: bool
    """Of attention; an engine then has to compute them."""

    def select(self, look: Look) -> list[SlotRange]:
        """Whole full blocks behind ``protected``, ascending and disjoint; empty = no cut now."""
        ...
