"""What a shard drops and when it says that it is clean; its stores are dictionaries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from kvcomm.block import BlockKey
from kvcomm.blockstore import DepotState, DepotUsage
from kvcomm.wire.messages import BlockItem
from l3_shard import shedding
from l3_shard.ring import NO_RING, Ring
from l3_shard.shedding import Shedding
from tests.blockstores import Copy, DictDepot, DictStore
from tests.l3_shard.test_blockmove import ring_of
from tests.l3_shard.test_refill import key_of

KEYS = [key_of(number) for number in range(90)]
COPY = bytes(100)


@dataclass
class Depot(DictDepot):
    state: DepotState = "on"

    def usage(self) -> DepotUsage:
        return replace(super().usage(), state=self.state)

    def listing(self, after: bytes, limit: int) -> list[BlockItem]:
        return super().listing(after, limit) if self.state in ("on", "full") else []


@dataclass
class World:
    """Shard ``a`` with every block, half of them on its disk."""

    ring: Ring
    orphan_s: float = 0.0
    store: DictStore = field(default_factory=DictStore)
    disk: Depot = field(default_factory=lambda: Depot(b"t" * 16))

    def __post_init__(self) -> None:
        self.fill(KEYS)
        self.work = Shedding("a", self.store, self.disk, ring=lambda: self.ring, orphan_s=self.orphan_s)

    def fill(self, keys: list[BlockKey]) -> None:
        for number, key in enumerate(keys):
            if number % 2:
                self.disk.held[key] = COPY
            else:
                self.store.copies[key] = Copy(key, b"t" * 16, bytearray(COPY), 1, 0.0)

    @property
    def held(self) -> set[BlockKey]:
        return {*self.store.copies, *self.disk.held}

    @property
    def kept(self) -> set[BlockKey]:
        return {key for key in KEYS if "a" in self.ring.block_keepers(key)}

    def take(self, ring: Ring) -> None:
        self.ring = ring
        self.work.ring_changed()

    async def eventually(self, look: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not look():
                await asyncio.sleep(0.001)


def run(world: World, story: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        task = asyncio.create_task(world.work.run())
        try:
            await story(world)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("page", [1, 7, 256])
def test_what_belongs_to_others_goes_from_memory_and_disk(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(shedding, "PAGE_KEYS", page)
    monkeypatch.setattr(shedding, "STEP_PAUSE_S", 0.0)

    async def story(world: World) -> None:
        assert world.work.clean_epoch == 0
        await world.eventually(lambda: world.work.clean_epoch == 5)
        assert world.held == world.kept and 0 < len(world.kept) < len(KEYS)
        counts = world.work.counts
        assert (counts.blocks, counts.block_bytes) == (90 - len(world.kept), 100 * (90 - len(world.kept)))
        assert world.work.left() == (0, 0)

    run(World(ring_of("abc", 5)), story)


def test_nothing_is_dropped_while_keys_are_being_moved_or_no_ring_is_known() -> None:
    async def story(world: World) -> None:
        for ring in (Ring.from_map(NO_RING), ring_of("bc", 4, "abc"), ring_of("bc", 5, "abc", "serve")):
            world.take(ring)
            for _ in range(20):
                await asyncio.sleep(0.0)
            assert len(world.held) == 90 and world.work.clean_epoch == 0
        world.take(ring_of("abc", 6))
        await world.eventually(lambda: world.work.clean_epoch == 6)
        assert world.held == world.kept

    run(World(Ring.from_map(NO_RING)), story)


def test_who_did_not_see_the_move_gives_the_others_time_to_fetch() -> None:
    async def story(world: World) -> None:
        await world.eventually(lambda: world.work._progress is not None)
        for _ in range(20):
            await asyncio.sleep(0.0)
        assert len(world.held) == 90 and world.work.clean_epoch == 0
        world.take(ring_of("abc", 6, "abcd"))
        world.take(ring_of("abcd", 7))  # this one it has seen
        await world.eventually(lambda: world.work.clean_epoch == 7)
        assert world.held == world.kept

    run(World(ring_of("abc", 5), orphan_s=3600.0), story)


def test_a_shard_that_left_the_ring_keeps_nothing() -> None:
    async def story(world: World) -> None:
        await world.eventually(lambda: world.work.clean_epoch == 5)
        assert not world.held

    run(World(ring_of("bc", 5)), story)


def test_the_next_epoch_with_the_same_shards_needs_no_walk_but_a_gap_does() -> None:
    async def story(world: World) -> None:
        await world.eventually(lambda: world.work.clean_epoch == 5)
        world.take(ring_of("abc", 6))
        assert world.work.clean_epoch == 6
        world.fill(KEYS)  # a client that knew of a ring that we have not heard of
        world.take(ring_of("abc", 8))
        assert world.work.clean_epoch == 6
        await world.eventually(lambda: world.work.clean_epoch == 8)
        assert world.held == world.kept

    run(World(ring_of("abc", 5)), story)


@pytest.mark.parametrize("state", ["opening", "stalled"])
def test_a_disk_that_does_not_say_what_it_has_is_not_called_clean(state: DepotState) -> None:
    world = World(ring_of("abc", 5))
    world.disk.state = state

    async def story(world: World) -> None:
        for _ in range(50):
            await asyncio.sleep(0.0)
        assert world.work.clean_epoch == 0
        world.disk.state = "on"
        await world.eventually(lambda: world.work.clean_epoch == 5)
        assert world.held == world.kept

    run(world, story)


def test_what_arrives_under_a_ring_that_is_over_is_looked_at_again() -> None:
    async def story(world: World) -> None:
        await world.eventually(lambda: world.work.clean_epoch == 5)
        world.fill(KEYS)
        strays = world.work.arrived(KEYS)
        assert set(strays) == set(KEYS) - world.kept and world.held == world.kept
        world.ring = ring_of("abc", 6, "abcd")
        assert world.work.arrived(KEYS) == [], "it may be kept in the end"

    run(World(ring_of("abc", 5)), story)


def test_what_is_left_is_told_by_what_has_been_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shedding, "PAGE_KEYS", 10)
    monkeypatch.setattr(shedding, "STEP_PAUSE_S", 3600.0)

    async def story(world: World) -> None:
        await world.eventually(lambda: world.work.counts.blocks > 0)
        blocks, size_bytes = world.work.left()
        assert 40 <= blocks <= 120 and abs(size_bytes - 100 * blocks) < 100

    run(World(ring_of("bc", 5)), story)
