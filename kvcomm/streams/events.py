"""``Event``: what changed the view of a rollout, and when.

Every token that is ever fed through the model is one **row**, numbered in feeding order; the number is also
its logical (RoPE) position and never goes back.  The **view** is the ordered list of the rows that the next
row may attend; a *slot* is a place in it.  An event changes the view and says from which row on: rows below
``at_row`` ran under the old view, rows from ``at_row`` on run under the new one::

    view before   [ 0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 52 ]      slots = rows, nothing was cut yet
    evict [16, 48) at row 53
    view after    [ 0 .. 15 | 48 .. 52 ] and row 53 comes next

Ranges are slots of the view *before* the event.  Each event carries the running digest of everything up to
it, the view after it included: an event that is lost, doubled, shifted or swapped on its way to a trainer is
noticed when the view is computed again (``kvcomm.streams.view``), and a missing last one by the count and
digest in the rollout's header.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, NewType, get_args

from kvcomm.block import POSITION_MAX, little_endian
from kvcomm.errors import Corrupt

EventKind = Literal["evict", "restore", "fork", "weights"]
KINDS: tuple[EventKind, ...] = get_args(EventKind)

SpanId = NewType("SpanId", bytes)
"""32 bytes: names archived rows by what they were computed from, whoever archived them."""
ViewDigest = NewType("ViewDigest", bytes)
"""32 bytes."""

NO_SPAN = SpanId(b"")
ROOT_DIGEST = ViewDigest(bytes(32))
"""Of a rollout without events."""

_DOMAIN = b"kvcomm.streams.event/1\x00"
_HEAD = struct.Struct("<BQqQII")
_PAIR = struct.Struct("<QQ")
_SPAN_BYTES: dict[EventKind, tuple[int, ...]] = {
    "evict": (0, 32), "restore": (32,), "fork": (32,), "weights": (0, 32),
}  # fmt: skip


class SlotRange(NamedTuple):
    """Half open."""

    start: int
    end: int

    @property
    def slot_count(self) -> int:
        return self.end - self.start


class Run(NamedTuple):
    """``length`` rows that follow one by one from ``first``."""

    first: int
    length: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a view.  Raises ``Corrupt`` when its parts contradict each other."""

    kind: EventKind
    at_row: int
    """Rows fed before it."""
    ranges: tuple[SlotRange, ...] = ()
    """``evict``: ascending, disjoint, not empty; in the view before the event."""
    span: SpanId = NO_SPAN
    """``evict``: under this name the rows are archived (empty = they are gone); ``restore``: those that come
    back; ``fork``: the digest of the parent's name, so that a log tells where it came from; ``weights``: the
    digest of the new ones (empty = their version alone names them)."""
    insert_at: int = -1
    """``restore``: slot, on a block border, where the rows come back; -1 otherwise."""
    reason: str = ""
    weights_version: int = 0
    """In force from ``at_row`` on."""
    view_digest: ViewDigest = ROOT_DIGEST
    """After it; see :func:`next_digest`."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise Corrupt(f"not an event: {problem}")

    def content(self) -> bytes:
        """What it does, in one form: not why, nor under which digest."""
        numbers = (KINDS.index(self.kind), self.at_row, self.insert_at, self.weights_version)
        head = _HEAD.pack(*numbers, len(self.ranges), len(self.span))
        return head + self.span + b"".join(_PAIR.pack(*each) for each in self.ranges)

    def _problem(self) -> str | None:
        numbers = (self.at_row, self.weights_version, *chain.from_iterable(self.ranges))
        if self.kind not in KINDS or not all(0 <= number <= POSITION_MAX for number in numbers):
            return f"kind {self.kind!r} at row {self.at_row}, weights {self.weights_version}"
        if bool(self.ranges) != (self.kind == "evict"):
            return f"{self.kind} with {len(self.ranges)} ranges"
        if not (0 <= self.insert_at <= POSITION_MAX if self.kind == "restore" else self.insert_at == -1):
            return f"{self.kind} with insert_at {self.insert_at}"
        if len(self.span) not in _SPAN_BYTES[self.kind]:
            return f"{self.kind} with a span of {len(self.span)} bytes"
        if len(self.view_digest) != 32:
            return "a view digest has 32 bytes"
        end = 0
        for start, stop in self.ranges:
            if not end <= start < stop:
                return f"ranges must ascend, be disjoint and not empty: {list(self.ranges)}"
            end = stop
        return None


def no_journal(event: Event) -> None:
    """Of a session whose log is kept in memory alone."""


def next_digest(before: ViewDigest, event: Event, view_after: Iterable[Run]) -> ViewDigest:
    """The digest of an event, over the one before it, what it says, and the rows that are in view after it,
    in the order of their slots; ``view_after`` is joined (:func:`joined`)."""
    digest = hashlib.sha256(_DOMAIN + before + event.content())
    digest.update(little_endian(array("Q", chain.from_iterable(view_after))))
    return ViewDigest(digest.digest())


def row_runs(rows: Iterable[int]) -> list[Run]:
    """``rows``, in their order, as runs; :func:`run_rows` is the way back."""
    runs: list[Run] = []
    first = end = 0
    for row in rows:
        if row != end:
            runs.append(Run(first, end - first))
            first = row
        end = row + 1
    runs.append(Run(first, end - first))
    return joined(runs)


def run_rows(runs: Iterable[Run]) -> array[int]:
    rows = array("q")
    for first, length in runs:
        rows.extend(range(first, first + length))
    return rows


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same rows in the same order, in as few runs as there can be: one form for one order."""
    result: list[Run] = []
    for first, length in runs:
        if result and first == result[-1].first + result[-1].length:
            result[-1] = Run(result[-1].first, result[-1].length + length)
        elif length:
            result.append(Run(first, length))
    return result
