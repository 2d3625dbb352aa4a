"""``Forest``: one Merkle tree for each shard that keeps records with us, over the records that both keep.

Theory of operation.  The store keeps an index (leaf, key) -> digest, written with each record.  A tree is
only a
summary of it, so nothing here has to be right at every moment: a write *marks* its leaf, and before the trees
are used what is marked is *surveyed* again, first come first served::

    mark(key) ──► marked leaves ──► Survey (some leaves at a time) ──► digests of those leaves, in every tree

At start, and when the ring places records otherwise, the trees are made anew, from the records that there
are: a *sweep* goes once over the index, from the first leaf to the last, before anything marked is surveyed::

    mark_all() ──► empty trees ──► Sweep (some records at a time) ──► digests of the leaves that have records
                                        ▲ from here on nothing needs a mark: the sweep will meet it

A write that overtakes a survey or the sweep marks its leaf again when it is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from kvcomm.clock import Stamp
from kvcomm.machine import Ticket
from l3_shard.desk import Desk
from l3_shard.merkle import MerkleTree, leaf_digest, leaf_of
from l3_shard.storage import Entry, Survey, Surveyed, Sweep, Swept

SURVEY_RECORDS = 512
"""Records that one survey or sweep should meet, about: a few milliseconds."""
SURVEY_LEAVES_MAX = 512

Listed = Callable[[Sequence[Sequence[Entry]] | None], None]
"""Gets the entries of each leaf that was asked for; ``None`` = the store could not be read."""


class Forest:
    """The trees of shard ``node``.

    Args:
        replicas: of a stored key, in order of preference; empty if we are none of them.
    """

    def __init__(self, node: str, desk: Desk, replicas: Callable[[bytes], Sequence[str]]) -> None:
        self.failed_count = 0
        """Surveys that could not be done."""
        self._node, self._desk, self._replicas = node, desk, replicas
        self._trees: dict[str, MerkleTree] = {}
        self._dead: dict[int, Stamp] = {}
        self._marked: dict[int, int] = {}  # leaf -> number of the mark; in order of the marks
        self._mark_count = 0
        self._surveying: dict[int, int] = {}
        self._sweep_from: int | None = 0
        """The first leaf that no sweep has been ordered for; ``None`` = it is over."""
        self._sweeping: tuple[Ticket, int] | None = None
        """The sweep under way, and where it began."""
        self._waiting: list[tuple[int, Callable[[bool], None]]] = []  # (last mark that matters, then)
        self._listed: dict[Ticket, Listed] = {}
        self._records_a_leaf = 1.0

    def mark(self, key: bytes) -> None:
        """The record ``key`` is written, or about to be."""
        self._mark(leaf_of(key))

    def mark_all(self) -> None:
        """Nothing is known any more.  What is being read now counts for the trees that are gone."""
        self._trees.clear()
        self._dead.clear()
        self._marked.clear()
        self._surveying = {}
        self._sweep_from, self._sweeping = 0, None
        if self._waiting:
            self._go_on()

    @property
    def whole(self) -> bool:
        """Whether the trees are of all records, but for those written lately."""
        return self._sweep_from is None

    def tree(self, node: str) -> MerkleTree:
        """Over the records that ``node`` and we keep."""
        tree = self._trees.get(node)
        if tree is None:  # not setdefault: an empty tree is half a megabyte
            tree = self._trees[node] = MerkleTree()
        return tree

    def dead_before(self, stamp: Stamp) -> list[int]:
        """Leaves with a record that we are the first replica of and that has been dead since before
        ``stamp``."""
        return sorted(leaf for leaf, oldest in self._dead.items() if oldest < stamp)

    def settle(self, then: Callable[[bool], None]) -> None:
        """Call ``then`` once everything marked so far is in the trees (False: the store could not be
        read)."""
        self._waiting.append((self._mark_count, then))
        self._go_on()

    def list_leaves(self, leaves: Sequence[int], then: Listed) -> None:
        """What the store has in ``leaves`` now, whoever keeps it."""
        ticket = self._desk.ticket()
        self._listed[ticket] = then
        self._desk.order(Survey(ticket, tuple(leaves)))

    def surveyed(self, event: Surveyed) -> None:
        """Storage answered a ``Survey``."""
        self.failed_count += bool(event.failure)
        self._listed.pop(event.ticket)(None if event.failure else event.leaves)

    def swept(self, event: Swept) -> None:
        """Storage answered a ``Sweep``."""
        self.failed_count += bool(event.failure)
        if self._sweeping is None or self._sweeping[0] != event.ticket:
            return
        began_at, self._sweeping = self._sweeping[1], None
        if event.failure:
            self._sweep_from = began_at
            self._give_up()
            return
        for leaf, entries in event.leaves:
            self._plant(leaf, entries)
        self._sweep_from = event.resume
        self._go_on()

    def shared(self, entries: Sequence[Entry], node: str) -> list[Entry]:
        """Those that ``node`` and we keep."""
        return [entry for entry in entries if node in self._replicas(entry.key)]

    def _mark(self, leaf: int) -> None:
        """One that is marked already keeps its place, or a busy leaf would never get its turn.  A leaf that
        the sweep has yet to be ordered for needs none."""
        self._mark_count += 1
        if self._sweep_from is None or leaf < self._sweep_from or self._sweeping is not None:
            self._marked.setdefault(leaf, self._mark_count)

    def _go_on(self) -> None:
        """Sweep or survey while somebody waits, one at a time; tell those whose marks are all seen to."""
        if self._surveying or self._sweeping is not None:
            return
        if self._sweep_from is not None:
            if self._waiting:
                self._sweeping = (self._desk.ticket(), self._sweep_from)
                self._desk.order(Sweep(*self._sweeping, SURVEY_RECORDS))
            return
        standing, self._waiting = self._waiting, []
        first = next(iter(self._marked.values()), self._mark_count + 1)
        for last, then in standing:
            if last < first:
                then(True)
            else:
                self._waiting.append((last, then))
        if self._waiting and not self._surveying:
            count = max(1, min(SURVEY_LEAVES_MAX, int(SURVEY_RECORDS / self._records_a_leaf)))
            leaves = list(islice(self._marked, count))
            self._surveying = {leaf: self._marked.pop(leaf) for leaf in leaves}
            self.list_leaves(leaves, partial(self._take, self._surveying))

    def _take(self, surveyed: dict[int, int], leaves: Sequence[Sequence[Entry]] | None) -> None:
        if surveyed is not self._surveying:
            return  # ordered before everything was marked
        self._surveying = {}
        if leaves is None:
            since = {leaf: mark for leaf, mark in self._marked.items() if leaf not in surveyed}
            self._marked = surveyed | since  # still in order of the marks
            self._give_up()
            return
        for leaf, entries in zip(surveyed, leaves, strict=True):
            self._plant(leaf, entries)
        self._records_a_leaf = max(0.25, sum(map(len, leaves)) / len(leaves))
        self._go_on()

    def _give_up(self) -> None:
        """The store cannot be read; whoever asks next has it tried again."""
        standing, self._waiting = self._waiting, []
        for _, then in standing:
            then(False)

    def _plant(self, leaf: int, entries: Sequence[Entry]) -> None:
        if not entries:
            for tree in self._trees.values():
                tree.update(leaf, 0)
            self._dead.pop(leaf, None)
            return
        digests: dict[str, list[int]] = {}
        dead: list[Stamp] = []
        for entry in entries:
            replicas = self._replicas(entry.key)
            for node in replicas:
                digests.setdefault(node, []).append(entry.digest)
            if entry.dead_since and replicas and replicas[0] == self._node:
                dead.append(entry.dead_since)
        for node, tree in self._trees.items():
            if node not in digests:
                tree.update(leaf, 0)
        for node, theirs in digests.items():
            if node != self._node:
                self.tree(node).update(leaf, leaf_digest(theirs))
        if dead:
            self._dead[leaf] = min(dead)
        else:
            self._dead.pop(leaf, None)

    def check(self) -> None:
        """Assert that nobody waits for nothing."""
        under_way = self._surveying or self._sweeping is not None
        complete = self._sweep_from is None and not self._marked
        assert not self._waiting or under_way or complete, "somebody waits and nothing is surveyed"
        assert not self._surveying or self._listed
