"""``Dot`` and ``VersionVector``: who wrote what, and who had seen it.

A dot names one write: the replica incarnation that accepted it and that replica's counter.  A version vector
says what was ever seen: every write of each named replica up to its counter.  Replicas that lost their state
come back under another id, so a dot is never used twice and a vector never claims a write that its owner has
not seen.

Vectors are bounded by the number of replica incarnations, never truncated: a truncated vector forgets that a
write was seen and turns it into a silent conflict.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from kvcomm.errors import TooLarge

ENTRIES_MAX = 256
"""Replica incarnations that one record's vector may name."""
REPLICA_BYTES_MAX = 64
COUNTER_MAX = 2**63 - 1


class VersionError(ValueError):
    """A version vector or dot that no replica could have written."""


@dataclass(frozen=True, slots=True, order=True)
class Dot:
    """One write.  Ordered by replica, then counter.

    Raises ``VersionError`` for an empty or overlong replica id and a counter outside ``[1, COUNTER_MAX]``.
    """

    replica: str
    counter: int

    def __post_init__(self) -> None:
        _check_entry(self.replica, self.counter)


@dataclass(frozen=True, slots=True, order=True)
class VersionVector:
    """Replica -> largest counter seen; equal vectors are equal objects and encode to equal bytes.

    ``<`` is the canonical total order (for deterministic choices), not causality: that is :meth:`descends`.
    Make one with :meth:`from_wire`; an absent replica counts as 0.
    """

    entries: tuple[tuple[str, int], ...] = ()
    """Sorted by replica, counters at least 1, at most ``ENTRIES_MAX``."""

    @classmethod
    def from_wire(cls, dots: Mapping[str, int]) -> VersionVector:
        """The vector that ``dots`` spells.

        Raises:
            VersionError: a replica id or counter is out of range.
            TooLarge: more than ``ENTRIES_MAX`` replicas.
        """
        if len(dots) > ENTRIES_MAX:
            raise TooLarge(f"a version vector names at most {ENTRIES_MAX} replicas, got {len(dots)}")
        for replica, counter in dots.items():
            _check_entry(replica, counter)
        return cls(tuple(sorted(dots.items())))

    def to_wire(self) -> dict[str, int]:
        """The inverse of :meth:`from_wire`, keys in canonical order."""
        return dict(self.entries)

    def counter(self, replica: str) -> int:
        """Largest counter of ``replica`` that was seen; 0 = none."""
        at = bisect_left(self.entries, (replica, 0))
        if at < len(self.entries) and self.entries[at][0] == replica:
            return self.entries[at][1]
        return 0

    def covers(self, dot: Dot) -> bool:
        """Whether the write ``dot`` was seen."""
        return self.counter(dot.replica) >= dot.counter

    def descends(self, other: VersionVector) -> bool:
        """Whether everything that ``other`` saw was seen here too (equal vectors descend each other)."""
        return all(self.counter(replica) >= counter for replica, counter in other.entries)

    def concurrent(self, other: VersionVector) -> bool:
        """Whether each saw something that the other did not."""
        return not self.descends(other) and not other.descends(self)

    def merge(self, other: VersionVector) -> VersionVector:
        """What either saw: the least vector that descends both.

        Raises:
            TooLarge: the union names more than ``ENTRIES_MAX`` replicas.
        """
        if not other.entries or self == other:
            return self
        if not self.entries:
            return other
        union = dict(self.entries)
        for replica, counter in other.entries:
            union[replica] = max(counter, union.get(replica, 0))
        return VersionVector.from_wire(union)

    def including(self, dot: Dot) -> VersionVector:
        """This vector, grown to cover ``dot``."""
        return self.merge(VersionVector(((dot.replica, dot.counter),)))


def joined(first: Mapping[str, int], *others: Mapping[str, int]) -> dict[str, int]:
    """The least vector that descends all of them, as it is written: for vectors that were checked before.

    Raises:
        TooLarge: the union names more than ``ENTRIES_MAX`` replicas.
    """
    union = dict(first)
    for other in others:
        for replica, counter in other.items():
            if counter > union.get(replica, 0):
                union[replica] = counter
    if len(union) == len(first):
        return union  # no new names: still in order
    if len(union) > ENTRIES_MAX:
        raise TooLarge(f"a version vector names at most {ENTRIES_MAX} replicas, got {len(union)}")
    return dict(sorted(union.items()))


def _check_entry(replica: str, counter: int) -> None:
    if not 0 < len(replica.encode()) <= REPLICA_BYTES_MAX:
        raise VersionError(f"a replica id has 1 to {REPLICA_BYTES_MAX} bytes, got {replica!r}")
    if not 1 <= counter <= COUNTER_MAX:
        raise VersionError(f"the counter of {replica!r} must be in [1, 2**63), got {counter}")
