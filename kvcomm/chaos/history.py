"""``History``: what the clients of a simulation did and saw, as JSON lines for a second opinion.

Times are seconds of the simulation, which no client knows.  An operation has one ``Invoked`` and, when it
came back, one ``Returned``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvcomm.errors import KVCommError, OutcomeUnknown, WriteOutcome
from kvcomm.stateplane import StateValue
from kvcomm.wire.messages import Dots, RecordVersion

Outcome = Literal["ok", "refused", "unknown"]
"""Done; not done and that is true; may have been done."""


class Write(msgspec.Struct, frozen=True):
    """One record of a put.  Values are unique; ``None`` deletes."""

    key: str
    value: str | None
    blind: bool = False
    """Whether it was sent without a context."""
    expected: str | None = None
    """Of a compare-and-set: the value whose version it names; ``None`` = it asks that there be no value."""


class Stored(msgspec.Struct, frozen=True):
    """What a put answered for one record."""

    replica: str
    counter: int
    context: Dots
    acks: int
    own: bool = False
    """Whether the next put names this write by its dot, beside the context."""


class Seen(msgspec.Struct, frozen=True):
    """What a get answered for one record."""

    values: list[str]
    context: Dots
    degraded: bool


class Swap(msgspec.Struct, frozen=True):
    """The last compare-and-set that a strong ``change`` tried."""

    expected: str | None
    value: str


class Began(msgspec.Struct, frozen=True, tag="began", tag_field="event"):
    """The first line: the world that the seed drew."""

    plan: dict[str, object]


class Invoked(msgspec.Struct, frozen=True, tag="invoked", tag_field="event"):
    at: float
    client: str
    operation: int
    kind: str
    keys: list[str]
    writes: list[Write] = []
    """Of a put; empty for a get."""


class Returned(msgspec.Struct, frozen=True, tag="returned", tag_field="event"):
    at: float
    client: str
    operation: int
    outcome: Outcome
    error: str = ""
    """Code and text of what was raised."""
    stored: Sequence[Stored | None] = []
    """By write; ``None`` = it was not done, or is not known to be."""
    each: list[Outcome] = []
    """Of a batch that was not done as a whole: what became of each write."""
    seen: list[Seen] = []
    """Also what a failed compare-and-set saw."""
    version: str = ""
    """Of a strong record, in hexadecimal, after a change that was done or as it was seen."""
    swap: Swap | None = None


class Happened(msgspec.Struct, frozen=True, tag="happened", tag_field="event"):
    """A fault, or what the nemesis did about it."""

    at: float
    what: str


Line = Began | Invoked | Returned | Happened

_encoder = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Operation:
    """An invocation with its return, if there is one."""

    invoked: Invoked
    returned: Returned | None

    @property
    def outcome(self) -> Outcome:
        """An operation that never came back may have been done."""
        return "unknown" if self.returned is None else self.returned.outcome

    def outcome_of_write(self, index: int) -> Outcome:
        if self.returned is not None and self.returned.each:
            return self.returned.each[index]
        return self.outcome


class History:
    """Lines in the order in which they happened."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(self, line: Line) -> None:
        self.lines.append(line)

    def operations(self) -> list[Operation]:
        """In the order in which they were invoked."""
        returned = {line.operation: line for line in self.lines if isinstance(line, Returned)}
        return [
            Operation(line, returned.get(line.operation)) for line in self.lines if isinstance(line, Invoked)
        ]

    def parted(self, kinds: Collection[str]) -> tuple[History, History]:
        """(the operations of these kinds, the others)."""
        chosen = {line.operation for line in self.lines if isinstance(line, Invoked) and line.kind in kinds}
        these, others = History(), History()
        for line in self.lines:
            if isinstance(line, Invoked | Returned):
                (these if line.operation in chosen else others).add(line)
        return these, others

    def encoded(self) -> bytes:
        """JSON lines; equal histories are equal bytes."""
        return b"".join(self._encode())

    def _encode(self) -> Iterator[bytes]:
        for line in self.lines:
            yield _encoder.encode(line) + b"\n"


def outcome_of(error: KVCommError) -> Outcome:
    """What an error promises: ``OutcomeUnknown`` nothing, any other that nothing was done."""
    return "unknown" if isinstance(error, OutcomeUnknown) else "refused"


def outcome_of_each(error: KVCommError) -> list[Outcome]:
    """What it says of each write of a batch; empty where it says nothing."""
    names: dict[str, Outcome] = {"done": "ok", "not_done": "refused", "unknown": "unknown"}
    return [names[outcome.status] for outcome in error.outcomes]


def seen_of(value: StateValue) -> Seen:
    """What a get answered, for the history."""
    return Seen([each.decode() for each in value.values], dict(value.context), value.degraded)


def stored_of(version: RecordVersion) -> Stored:
    """What a put answered, for the history."""
    return Stored(version.replica, version.counter, dict(version.context), version.acks, version.own)


def stored_in_part(outcome: WriteOutcome) -> Stored | None:
    """Of a write that was done though its batch was not.  How many acknowledged it is not told."""
    if outcome.dot is None or outcome.context is None:
        return None
    return Stored(*outcome.dot, dict(outcome.context), 0, outcome.own)
