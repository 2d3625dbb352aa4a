"""``HazardTable``: the owner's side of the pins.

Theory of operation (hazard pointers: Michael, "Hazard Pointers: Safe Memory Reclamation for Lock-Free
Objects", IEEE TPDS 2004).  A word of the table holds the offset of the slot that one view (or one write) is
using, or 0.  Each word is written by one client process only.

======================================  ==========================================
reader                                  owner
======================================  ==========================================
1. hazard := offset                     1. generation word of the slot := 0
2. fence                                2. fence
3. generation = what the entry said?    3. is offset in any hazard?
   no: hazard := 0, miss                   yes: leave the slot retired, look later
   yes: use the bytes                      no: the slot is free
======================================  ==========================================

Both sides store, fence, load.  In every order of these, at least one of them sees the other's store: if the
owner's scan (3) missed the hazard, the reader's store (1) came after it, so the reader's load (3) came after
the owner's store (1), finds generation 0, and the reader does not touch the bytes.  A paused reader changes
nothing: its hazard stays.  A writer uses the same protocol, with the reservation's word in place of the
generation, so an expired reservation's slot is not handed on while its slow writer may still be writing.

**A hazard belongs to a process, not to a connection.**  A client holds a lock of the kernel's (an OFD lock)
on the bytes of its range; the kernel drops it when the last process that could still use the views is gone.
When a connection ends, its range is orphaned, and given out again only when the lock is free: views that
outlive a broken connection stay valid.  The scan covers every word ever given out, so even a hazard in an
orphaned range counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

SHARE_MAX = 8
"""One client gets at most one word in so many: the first to come does not take them all."""


@dataclass(frozen=True, slots=True)
class HazardRange:
    first: int
    count: int


class HazardTable:
    """Gives ranges of hazard words to clients and reads them all.

    Args:
        words: the table, format ``Q``.
        locked: whether some process still holds the lock on the words ``[first, first + count)``.
    """

    def __init__(self, words: memoryview, locked: Callable[[int, int], bool]) -> None:
        self._words = words
        self._locked = locked
        self._ranges: dict[int, HazardRange] = {}
        self._orphans: list[HazardRange] = []
        self._high = 0  # words at and above this were never given out

    @property
    def client_count(self) -> int:
        return len(self._ranges)

    def open(self, holder: int, wanted: int) -> HazardRange | None:
        """A range for ``holder``, at most ``wanted`` and an eighth of the table long, shorter when little is
        left; ``None`` when nothing is, or when it has one already."""
        wanted = min(wanted, max(1, len(self._words) // SHARE_MAX))
        if holder in self._ranges or wanted < 1:
            return None
        gap = max(self._gaps(), key=lambda each: min(each.count, wanted), default=None)
        if gap is None:
            return None
        given = HazardRange(gap.first, min(gap.count, wanted))
        self._ranges[holder] = given
        self._high = max(self._high, given.first + given.count)
        return given

    def release(self, holder: int) -> None:
        """The holder's connection ended; its range is free once its process is gone, too."""
        if (given := self._ranges.pop(holder, None)) is not None:
            self._orphans.append(given)

    def sweep(self) -> None:
        """Clear the orphaned ranges whose processes are gone."""
        kept = []
        for orphan in self._orphans:
            if self._locked(orphan.first, orphan.count):
                kept.append(orphan)
                continue
            for index in range(orphan.first, orphan.first + orphan.count):
                self._words[index] = 0
        self._orphans = kept

    def pinned(self) -> frozenset[int]:
        """Offsets in use now.  Membership only: never iterate over it without sorting."""
        return frozenset(self._words[: self._high].tolist()) - {0}

    def check(self) -> None:
        taken = sorted([*self._ranges.values(), *self._orphans], key=lambda each: each.first)
        for left, right in itertools.pairwise(taken):
            assert left.first + left.count <= right.first, "two clients share a hazard word"
        assert all(each.first + each.count <= self._high for each in taken)

    def _gaps(self) -> list[HazardRange]:
        gaps, at = [], 0
        for each in sorted([*self._ranges.values(), *self._orphans], key=lambda each: each.first):
            if each.first > at:
                gaps.append(HazardRange(at, each.first - at))
            at = each.first + each.count
        if at < len(self._words):
            gaps.append(HazardRange(at, len(self._words) - at))
        return gaps
