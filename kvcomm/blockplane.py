"""``BlockPlane``: fetch the longest known prefix and publish what nobody has, across the tiers, as sans-I/O
operations.

The path of a fetch, for ``n`` block keys::

    L1   dictionary look-ups, no I/O
    L2   one batched lookup in shared memory for what L1 lacks
    L3   one batched lookup, one request a shard, for what L2 lacks (unless an absence is remembered)
    ->   the run of leading blocks that somebody has is the prefix; only it is fetched:
         L1 and L2 as views, L3 pipelined, every copy verified, emitted in order as it arrives
    <-   what came from L3 goes into L1 and is promoted to L2 for the other agents of the rack

A block that was there at lookup and is gone (evicted, damaged, its shard died) ends the prefix at that point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvcomm.block import BlockKey
from kvcomm.steps import Emit, Park, Steps
from kvcomm.tier import Block, BlockCopy, Near, Presence, PutStatus, Tier, TierName

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The leading blocks that could be had, in order, all verified."""

    blocks: tuple[Block, ...]
    asked_count: int

    @property
    def tiers(self) -> dict[TierName, int]:
        """Blocks by the tier that served them."""
        counts: dict[TierName, int] = {"l1": 0, "l2": 0, "l3": 0}
        for block in self.blocks:
            counts[block.tier] += 1
        return counts


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of one published block: ``stored`` or ``present`` in at least one tier means others can
    read it."""

    l2: PutStatus | None
    """``None``: there is no pool on this host."""
    l3: PutStatus | None

    @property
    def readable(self) -> bool:
        return not {"stored", "present"}.isdisjoint((self.l2, self.l3))

    @property
    def wrote(self) -> bool:
        return "stored" in (self.l2, self.l3)


class BlockPlane:
    """The walk through the tiers.  ``l2`` and ``l3`` may be absent: a rack without L3, a host without a pool.

    ``clock`` gives monotonic seconds (for remembered absences).  Thread-safe as far as its tiers are.
    """

    def __init__(self, l1: Near, l2: Tier | None, l3: Tier | None, clock: Callable[[], float]) -> None:
        self._l1, self._l2, self._l3, self._clock = l1, l2, l3, clock

    def fetch(self, keys: Sequence[BlockKey]) -> Steps[Prefix]:
        """The longest prefix of ``keys`` that somebody has; emits each ``Block`` in order as soon as it is
        verified.

        Never raises for lost, damaged or unreachable blocks: they end the prefix.
        """
        near = self._l1.get(keys)
        where = yield from self._locate(keys, near)
        run = _Run(list(keys[: len(where)]), near[: len(where)])
        yield from run.emit_ready()
        yield from self._from_l2(run, [index for index, tier in enumerate(where) if tier == "l2"])
        yield from self._from_l3(run)
        return Prefix(tuple(run.delivered), len(keys))

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

    def _locate(self, keys: Sequence[BlockKey], near: list[Block | None]) -> Steps[list[TierName]]:
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
            self._l1.mark_absent([keys[end]], self._clock())
        return [tier for tier in where[:end] if tier]

    def _from_l2(self, run: _Run, indices: list[int]) -> Steps[None]:
        if self._l2 is None or not indices:
            return

        def found(position: int, block: Block) -> None:
            self._l1.put(block)
            run.blocks[indices[position]] = block

        yield from run.emitting(self._l2.get([run.keys[index] for index in indices], found))

    def _from_l3(self, run: _Run) -> Steps[None]:
        """What neither L1 nor L2 gave.  One load a key in this process: others' loads are waited for, after
        our own."""
        wanted = [index for index, block in enumerate(run.blocks) if block is None]
        if self._l3 is None or not wanted:
            return
        claim = self._l1.claim([run.keys[index] for index in wanted])
        try:
            mine = [wanted[position] for position in claim.mine]
            loaded = yield from self._load(run, mine)
            for position, flight in claim.theirs.items():
                yield Park(flight)
                block = flight.block
                if block is not None:
                    run.blocks[wanted[position]] = block
                yield from run.emit_ready()
        finally:
            claim.release()
        orphaned = [index for index in wanted if run.blocks[index] is None and index not in mine]
        if orphaned and orphaned[0] == len(
            run.delivered
        ):  # the other reader gave up or failed: load them ourselves
            loaded += yield from self._load(run, orphaned)
        if self._l2 is not None and loaded:
            yield from self._l2.put([BlockCopy(block.header, block.payload) for block in loaded])

    def _load(self, run: _Run, indices: list[int]) -> Steps[list[Block]]:
        loaded: list[Block] = []
        if self._l3 is None or not indices:
            return loaded

        def found(position: int, block: Block) -> None:
            self._l1.put(block)
            run.blocks[indices[position]] = block
            loaded.append(block)

        yield from run.emitting(self._l3.get([run.keys[index] for index in indices], found))
        return loaded


@dataclass(slots=True)
class _Run:
    """The prefix on its way to the caller: what has arrived, and how far it was handed on in order."""

    keys: list[BlockKey]
    blocks: list[Block | None]
    delivered: list[Block] = field(default_factory=list)

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
