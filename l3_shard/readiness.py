"""``Readiness``: whether a shard has everything that a transition gives it, as far as it can know.

A record that a shard gains was acknowledged by a write quorum of its old owners, each of whom had it on disk
before it took the map of the transition (``l3_shard.writing``).  So a shard that has compared itself, under
that map, with as many of the old owners as meet every write quorum of them has all of it::

    N = 3, W = 2     old owners X, Y, Z     compared with X and Z: whoever acknowledged, one of these did

What is written since is sent to it like to every keeper.  A comparison counts only if the other shard could
vouch for what it has: one with a new disk, or with damaged records, may lack what its predecessor had
acknowledged.

The same rule says when a shard with a new store has *caught up* with what its predecessor knew.
"""

from __future__ import annotations

from collections.abc import Collection

from l3_shard.ring import Ring


class Readiness:
    """Of shard ``node``, under the placement of ``ring``, whatever its stage."""

    def __init__(self, node: str, ring: Ring) -> None:
        self._node = node
        self._write_quorum = ring.to_map().write_quorum
        self._before = ring.before(node)
        self._gained = [group for group in self._before if node not in group]
        self._compared: set[str] = set()
        self._vouched: set[str] = set()
        self.ready = not self._gained
        """It has all that it gains."""
        self.caught_up = self._has_all
        """It has all that it keeps, on a disk that began empty: at once where nobody else ever had any of
        it."""

    def compared(self, node: str, *, vouched: bool) -> None:
        """We are equal with ``node``, which ``vouched`` for what it has."""
        self._compared.add(node)
        if vouched:
            self._vouched.add(node)
        self.ready = all(self._enough(group, self._vouched) for group in self._gained)
        self.caught_up = self._has_all

    def wants(self, node: str) -> bool:
        """Whether a comparison with ``node`` would bring us nearer to being ready."""
        return node not in self._vouched and any(
            node in group and not self._enough(group, self._vouched) for group in self._gained
        )

    @property
    def _has_all(self) -> bool:
        return all(self._enough(group, self._compared) for group in self._before)

    def _enough(self, group: frozenset[str], nodes: Collection[str]) -> bool:
        """Whether ``nodes`` meet every write quorum of a group of old owners, of which we may be one."""
        others = group - {self._node}
        witnesses = len(group) - min(self._write_quorum, len(group)) + 1
        return len(others.intersection(nodes)) >= min(len(others), witnesses)
