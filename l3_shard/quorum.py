"""``Quorum``: which answers of which acceptors are enough.

**Majorities, of every group.**  A round needs a majority of the owners of the record.  When the ring gives
the record other owners, their majorities need not meet; so a round then needs a majority of *both* the
settled owners and the new ones (joint quorums; Rystsov 2018, section 2.3), until the new ones have everything
that was decided (``l3_shard.settling``).

**Entries.**  An acceptor that lost its state is a new one under an old name.  Votes that it gave before may
be forgotten, so they must not be counted any more, not even those whose answers are still on their way.  It
therefore *enters* again: it gets itself a higher entry number from a majority of the others, who note it
before they tell what they have (see ``l3_shard.entering``).  Every answer carries the number of its sender
and the numbers that the sender has noted, and an answer counts only if none of the others knows a higher
one::

    x votes (entry 1)     x loses its disk, enters as 2: tells y        y votes, and says "x is at 2"
        └── the proposer has x:1 and y, y knows x:2  ──►  x's vote does not count

Two majorities meet, so either y had voted before it was told, then x has learned of that vote, or y's answer
gives x's old vote away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """What an answer says of its sender's membership."""

    entry: int
    entries: Mapping[str, int]
    """Of others, as far as the sender has noted them."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The acceptors of one record.  ``groups``: a majority of each is needed."""

    groups: tuple[tuple[str, ...], ...]
    maps: tuple[int, ...] = ()
    """Epochs of the configuration that they are from."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """All acceptors, each once."""
        return tuple(dict.fromkeys(node for group in self.groups for node in group))

    def met(self, standings: Mapping[str, Standing]) -> bool:
        """Whether these answers are enough."""
        return self._enough(counted(standings))

    def possible(self, standings: Mapping[str, Standing], outstanding: Collection[str]) -> bool:
        """Whether they can still become enough."""
        return self._enough([*counted(standings), *outstanding])

    def _enough(self, nodes: Collection[str]) -> bool:
        return all(sum(node in nodes for node in group) >= majority(group) for group in self.groups)


def majority(group: Sequence[str]) -> int:
    return len(group) // 2 + 1


def counted(standings: Mapping[str, Standing]) -> list[str]:
    """The senders whose answers count: nobody among them all knows a later entry of theirs."""
    latest: dict[str, int] = {}
    for standing in standings.values():
        for node, entry in standing.entries.items():
            latest[node] = max(entry, latest.get(node, 0))
    return [node for node, standing in standings.items() if standing.entry >= latest.get(node, 0)]


def informed(groups: Sequence[Sequence[str]], node: str, told: Collection[str]) -> bool:
    """Whether ``node``, which lost its state, has heard from enough others to vote again.

    In each of the groups that it belongs to a majority of the *others* is needed: whatever had been decided
    with its vote had the votes of so many others that such a majority contains one of them.  A group of one
    has no others, so what it lost is lost.
    """
    for group in groups:
        others = [other for other in group if other != node]
        if len(others) < len(group) and sum(other in told for other in others) < majority(others):
            return False
    return True
