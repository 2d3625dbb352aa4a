"""``Place``: where a record is by one ring, and which of its keepers are enough for what.

While keys are on their way between two placements (``l3_shard.ring``) a record has two groups of owners.  A
write is done when a write quorum of *each* has it.  Of what was acknowledged *before*, only the **old** group
has it for certain, so whoever looks for that must hear from enough of the old group, in either stage.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from l3_shard.ring import Ring

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Of one record, as shard ``me`` sees it."""

    me: str
    epoch: int
    groups: Groups
    """One, or two while the record moves: those that it is read from first."""
    old: tuple[str, ...]
    """The one of them that has had it since before."""
    others: tuple[str, ...]
    """Everybody in them but us."""
    write_quorum: int

    @property
    def ours(self) -> bool:
        """Whether we keep the record."""
        return any(self.me in group for group in self.groups)

    @property
    def gained(self) -> bool:
        """Whether we keep it, and are not of those that have had it since before."""
        return self.ours and self.me not in self.old

    def done(self, nodes: Collection[str]) -> bool:
        """Whether a write that ``nodes`` have is done."""
        return self.lacks(nodes) is None

    def lacks(self, nodes: Collection[str]) -> tuple[int, int] | None:
        """(copies, copies needed) of the first group in which ``nodes`` are too few for a write."""
        for group in self.groups:
            count, need = sum(node in nodes for node in group), self.quorum(group)
            if count < need:
                return count, need
        return None

    def meets_writes(self, nodes: Collection[str]) -> bool:
        """Whether everything acknowledged is known to one of ``nodes`` at least."""
        return sum(node in nodes for node in self.old) >= self.witnesses

    def could_write(self, nodes: Collection[str]) -> bool:
        """Whether ``nodes`` are enough of the old group for a write."""
        return sum(node in nodes for node in self.old) >= self.quorum(self.old)

    @property
    def witnesses(self) -> int:
        """So many of the old group meet every write quorum of it."""
        return len(self.old) - self.quorum(self.old) + 1

    def quorum(self, group: Collection[str]) -> int:
        """Copies in ``group`` that a write needs; 1 where there is nobody, for nothing is not enough."""
        return max(1, min(self.write_quorum, len(group)))

    def alike(self, other: Place) -> bool:
        """Whether the same shards keep the record in the same groups, whatever their order."""
        return set(map(frozenset, self.groups)) == set(map(frozenset, other.groups))

    def continues(self, other: Place) -> bool:
        """Whether whoever had the record by ``other`` has it still: by maps in between it may have been
        dropped, when a move was taken back and began anew."""
        return self.epoch <= other.epoch + 1 and self.alike(other)


def place_of(ring: Ring, me: str, groups: Groups) -> Place:
    """Of the records with these ``write_groups``."""
    nodes = dict.fromkeys(node for group in groups for node in group)
    old = groups[-1] if ring.stage == "serve" else groups[0]
    others = tuple(node for node in nodes if node != me)
    return Place(me, ring.epoch, groups, old, others, ring.to_map().write_quorum)
