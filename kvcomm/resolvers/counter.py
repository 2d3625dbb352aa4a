"""``Counter``: a sum to which many add without reading it.

State: for each replica incarnation the sum of what it added as coordinator, an *entry*.  Only its owner
changes an entry, one write after the other, so of two states of one entry the later has all of the earlier
and a join takes it.  (A G-counter [Shapiro et al. 2011], whose entries may fall because they are ordered by
when, not by how much.)

**Deletes** make this delicate.  An owner may start again at 0 after a delete that some other coordinator had
not seen; that one's sibling then brings the old entry back.  Were both one entry, the larger would swallow
the other, and acknowledged adds with it.  So an entry is named by the write that began it too, and its owner
goes on with it only if its own last write of the record made it: else its copy of the entry may be older than
what it once wrote.
"""

from __future__ import annotations

from typing import cast

import msgspec

from kvcomm.errors import Refused
from kvcomm.resolvers.resolver import INTEGER_MAX, Moment, Resolver

Entries = dict[tuple[str, int], tuple[int, int]]
"""(owner, counter of the write that began the entry) -> (counter of its last write, sum)."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    replica: str
    began: int
    last: int
    total: int


class Counter(Resolver[Entries, int, int]):
    """Deltas are whole numbers, also negative; shown as the sum, 0 if absent."""

    uses_known = False

    def __init__(self, name: str) -> None:
        super().__init__(name, list[_Entry], int)

    def _load(self, stored: object) -> Entries:
        entries = cast("list[_Entry]", stored)
        if not entries or not all(0 < entry.began <= entry.last for entry in entries):
            raise ValueError("an entry cannot be")
        return {(entry.replica, entry.began): (entry.last, entry.total) for entry in entries}

    def _store(self, state: Entries) -> object:
        return [_Entry(*entry, *state[entry]) for entry in sorted(state)]

    def _merge(self, one: Entries, two: Entries) -> Entries:
        none = (0, 0)
        return {entry: max(one.get(entry, none), two.get(entry, none)) for entry in one | two}

    def _change(self, state: Entries | None, delta: int, moment: Moment) -> Entries:
        entries = dict(state or {})
        replica, counter = moment.dot.replica, moment.dot.counter
        last = moment.seen.counter(replica)
        mine = [entry for entry, held in entries.items() if entry[0] == replica and held[0] == last]
        entry = max(mine, default=(replica, counter))  # one at most: a write makes one entry
        total = entries.get(entry, (0, 0))[1] + delta
        if not -INTEGER_MAX - 1 <= total <= INTEGER_MAX:
            raise Refused(f"the counter would leave the range of 64 bits: {total}")
        entries[entry] = counter, total
        return entries

    def _show(self, state: Entries | None) -> int:
        return sum(total for _, total in (state or {}).values())

    def _check_delta(self, delta: int) -> None:
        if not -INTEGER_MAX - 1 <= delta <= INTEGER_MAX:
            raise ValueError(f"{delta} has more than 64 bits")
