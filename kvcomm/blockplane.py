"""``BlockPlane``: fetch the longest known prefix and publish what nobody has, across the tiers, as sans-I/O
operations.

The path of a fetch, for ``n`` block keys::

    L1   dictionary look-ups, no I/O
    L2   one batched, one-sided lookup in the pools' memory for what L1 lacks
    L3   one batched lookup, one request a shard, for what L2 lacks (unless an absence is remembered)
    ->   the run of leading blocks that somebody has is the prefix; only it is fetched:
         L1 and this host's L2 as views, the rest pipelined, every copy verified, emitted in order as it
         arrives
    <-   what came from L3 goes into L1 and is promoted to L2 for the other agents of the rack

A block that was there at lookup and is gone (evicted, damaged, its shard died) ends the prefix at that point.
So does a copy whose header names another lineage than the one asked for: its bytes were computed under
another view, whatever its key says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvcomm.block import BlockKey
from kvcomm.steps import Emit, Park, Steps
from kvcomm.tier import Block, BlockCopy, Claim, Near, Presence, PutStatus, Tier, TierName

M = TypeVar("M")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The leading blocks that could be had, in order, all verified."""

    blocks: tuple[Block, ...]
    asked_count: int
    foreign_count: int = 0
    """Blocks of which a copy was refused because it is of another lineage."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of one published block: ``stored`` or ``present`` in at least one tier means others can
    read it."""

    l2: PutStatus | None
    """``None``: there is no pool."""
    l3: PutStatus | None

    @property
    def readable(self) -> bool:
        return not {"stored", "present"}.isdisjoint((self.l2, self.l3))

    @property
    def wrote(self) -> bool:
        return "stored" in (self.l2, self.l3)


class BlockPlane(Generic[M]):
    """The walk through the tiers.  ``l2`` and ``l3`` may be absent: a cluster without pools, or without
    shards.

    ``clock`` gives monotonic seconds (for remembered absences).  Thread-safe as far as its tiers are.
    """

    def __init__(self, l1: Near[M], l2: Tier | None, l3: Tier | None, clock: Callable[[], float]) -> None:
        self._l1, self._l2, self._l3, self._clock = l1, l2, l3, clock

    def fetch(self, keys: Sequence[BlockKey], lineages: Sequence[bytes]) -> Steps[Prefix]:
        """The longest prefix of ``keys`` that somebody has; emits each ``Block`` in order as soon as it is
        verified.

        Args:
            lineages: one a key, that its copies must name.

        Never raises for lost, damaged or unreachable blocks: they end the prefix.
        """
        since, near = self._l1.moment, self._l1.get(keys)
        where = yield from self._locate(keys, near, since)
        run = _Run(list(keys[: len(where)]), list(lineages[: len(where)]))
        run.take(block for block in near[: len(where)] if block)
        yield from run.emit_ready()
        yield from self._from_l2(run, [index for index, tier in enumerate(where) if tier == "l2"])
        yield from self._from_l3(run)
        self._l1.touch(keys[: len(run.delivered)])
        return Prefix(tuple(run.delivered), len(keys), len(run.foreign))

    def present(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        """Which of ``keys`` somebody seems to have; ``None`` where one who may have it did not answer.
        Fetches, pins and verifies nothing."""
        where: list[TierName | None] = ["l1" if block else None for block in self._l1.get(keys)]
        silent: set[int] = set()
        tiers: tuple[tuple[TierName, Tier | None], ...] = (("l2", self._l2), ("l3", self._l3))
        for name, tier in tiers:
            if tier is not None:
                said = yield from _fill(where, name, tier, keys)
                silent |= {index for index, present in said.items() if present is None}
        return [True if tier else None if index in silent else False for index, tier in enumerate(where)]

    def publish(self, keys: Sequence[BlockKey], build: Callable[[int], BlockCopy]) -> Steps[list[Stored]]:
        """Write to each tier what it lacks.  ``build(index)`` makes a copy (and hashes it) only where one is
        needed.

        Never raises for a full or unreachable tier: the statuses say what happened.
        """
        has_l2 = yield from _lookup(self._l2, keys)
        has_l3 = yield from _lookup(self._l3, keys)
        copies = {
            index: build(index)
            for index in range(len(keys))
            if (self._l2 and not has_l2[index]) or (self._l3 and not has_l3[index])
        }
        put_l2 = yield from _put(self._l2, copies, has_l2)
        put_l3 = yield from _put(self._l3, copies, has_l3)
        self._l1.forget_absent(keys)
        return [Stored(*statuses) for statuses in zip(put_l2, put_l3, strict=True)]

    def _locate(self, keys: Sequence[BlockKey], near: list[Block | None], since: M) -> Steps[list[TierName]]:
        """The tier of each block of the prefix; as long as the prefix, L2 and L3 asked in one batch each."""
        where: list[TierName | None] = ["l1" if block else None for block in near]
        yield from _fill(where, "l2", self._l2, keys)
        rest = [index for index, tier in enumerate(where) if tier is None]
        absent = self._l1.known_absent([keys[index] for index in rest], self._clock())
        end = next((index for index, gone in zip(rest, absent, strict=True) if gone), len(keys))
        del where[end:]
        asked = yield from _fill(where, "l3", self._l3, keys)
        end = where.index(None) if None in where else len(where)
        if end < len(where) and asked.get(end) is False:  # None = nobody could say; that is not an absence
            self._l1.mark_absent([keys[end]], self._clock(), since)
        return [tier for tier in where[:end] if tier]

    def _from_l2(self, run: _Run, indices: list[int]) -> Steps[None]:
        if self._l2 is None or not indices:
            return

        def found(position: int, block: Block) -> None:
            if run.take([block]):
                self._l1.put(block)

        yield from run.emitting(self._l2.get([run.keys[index] for index in indices], found))

    def _from_l3(self, run: _Run) -> Steps[None]:
        """What neither L1 nor L2 gave.  One load a key in this process: others' loads are waited for, after
        our own."""
        wanted = [key for key, block in zip(run.keys, run.blocks, strict=True) if block is None]
        if self._l3 is None or not wanted:
            return
        loaded: list[Block] = []
        claim = self._l1.claim(wanted, self._clock(), math.inf)
        try:
            run.take(block for block in claim.blocks if block)  # landed since we looked
            yield from run.emit_ready()
            yield from self._load(self._l3, run, claim, claim.mine, loaded)
            while claim.follows:
                until = claim.patience()
                woken = yield Park(claim, max(0.0, until - self._clock()))
                if not woken and self._clock() < until:
                    break  # our own deadline has passed
                news = claim.take(self._clock())
                run.take(block for _, block in news.landed if block)
                yield from run.emit_ready()
                inherited = [BlockKey(key) for key in news.inherited]
                yield from self._load(self._l3, run, claim, inherited, loaded)
        finally:
            claim.close(self._clock())
        if self._l2 is not None and loaded:
            yield from self._l2.put([BlockCopy(block.header, block.payload) for block in loaded])

    def _load(
        self, l3: Tier, run: _Run, claim: Claim, keys: Sequence[BlockKey], loaded: list[Block]
    ) -> Steps[None]:
        if not keys:
            return
        keys = list(keys)  # the claim's own list shrinks as blocks land

        def found(position: int, block: Block) -> None:
            if run.take([block]):
                claim.landed(block, self._clock())
                loaded.append(block)

        yield from run.emitting(l3.get(keys, found))
        claim.failed([key for key in keys if not run.has(key)], self._clock())


@dataclass(slots=True)
class _Run:
    """The prefix on its way to the caller: what has arrived, and how far it was handed on in order."""

    keys: list[BlockKey]
    lineages: list[bytes]
    delivered: list[Block] = field(default_factory=list)
    foreign: set[BlockKey] = field(default_factory=set)
    blocks: list[Block | None] = field(init=False)
    _index: dict[BlockKey, int] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [None] * len(self.keys)
        self._index = {key: index for index, key in enumerate(self.keys)}

    def take(self, blocks: Iterable[Block]) -> int:
        """How many of them are what was asked for; the others are let go."""
        taken = 0
        for block in blocks:
            index = self._index[block.key]
            if block.header.lineage == self.lineages[index]:
                self.blocks[index] = block
                taken += 1
            else:
                self.foreign.add(block.key)
        return taken

    def has(self, key: BlockKey) -> bool:
        return self.blocks[self._index[key]] is not None

    def ready(self) -> Iterator[Block]:
        while len(self.delivered) < len(self.blocks):
            block = self.blocks[len(self.delivered)]
            if block is None:
                return
            self.delivered.append(block)
            yield block

    def emit_ready(self) -> Steps[None]:
        for block in self.ready():
            yield Emit(block)

    def emitting(self, steps: Steps[T]) -> Steps[T]:
        """Run a tier's operation; at each of its ``Emit`` s emit the blocks that have become ready
        instead."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Emit):
                    yield from self.emit_ready()
                    step = next(steps)
                else:
                    step = steps.send((yield step))
        except StopIteration as stop:
            yield from self.emit_ready()
            result: T = stop.value
            return result
        finally:
            steps.close()


def _lookup(tier: Tier | None, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
    if tier is None or not keys:
        return [None] * len(keys)
    return (yield from tier.lookup(keys))


def _fill(
    where: list[TierName | None], name: TierName, tier: Tier | None, keys: Sequence[BlockKey]
) -> Steps[dict[int, Presence]]:
    """Ask ``tier`` for every block that is not located yet; what it said, by index."""
    rest = [index for index, place in enumerate(where) if place is None]
    said = yield from _lookup(tier, [keys[index] for index in rest])
    for index, present in zip(rest, said, strict=True):
        if present:
            where[index] = name
    return dict(zip(rest, said, strict=True))


def _put(
    tier: Tier | None, copies: dict[int, BlockCopy], has: list[Presence]
) -> Steps[list[PutStatus | None]]:
    if tier is None:
        return [None] * len(has)
    statuses: list[PutStatus | None] = ["present"] * len(has)
    lacking = [index for index in copies if not has[index]]
    if lacking:
        put = yield from tier.put([copies[index] for index in lacking])
        for index, status in zip(lacking, put, strict=True):
            statuses[index] = status
    return statuses
