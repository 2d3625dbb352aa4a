"""Hot blocks on their way into a pool: what is taken, how fast, and what it never does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcomm.block import HEADER_BYTES, BlockKey
from kvcomm.errors import Refused
from kvcomm.machine import ConnectionId, Origin
from kvcomm.serve import ReplyFunction
from kvcomm.tier import Block
from kvcomm.wire.messages import HOT_KEYS_MAX, Done, Message, Ping, WarmOrder
from l2_rdma.pool import PoolService
from l2_rdma.warming import ABSENT_S, SHARE, WINDOW_KEYS, Warming, no_source
from tests.l2_rdma.regions import COPY_BYTES, TENANT, OwnedMemory, header_of, key_of, payload_of


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


class World:
    """A pool, shards that have some blocks, and a clock."""

    def __init__(self, runner: asyncio.Runner, *there: int) -> None:
        self.runner = runner
        self.pool = OwnedMemory(slab_count=8)
        self.there = {key_of(number): number for number in there}
        self.damaged: set[BlockKey] = set()
        self.now = 0.0
        self.asked: list[list[BlockKey]] = []
        self.pauses: list[float] = []
        self.warming = Warming(self.pool.owner, TENANT, self.source, lambda: self.now, self.pause)

    async def source(self, keys: Sequence[BlockKey]) -> Sequence[Block]:
        self.asked.append(list(keys))
        return [self.block(self.there[key]) for key in keys if key in self.there]

    def block(self, number: int) -> Block:
        header, payload = header_of(number), bytearray(payload_of(number))
        if header.key in self.damaged:
            payload[0] ^= 1
        return Block(header, memoryview(header.pack() + bytes(payload)), "l3", pinned=False)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def run(self, *numbers: int, rate_bytes: int = 1 << 20) -> None:
        """Order these and let it do what it can."""
        self.warming.order(WarmOrder([key_of(number) for number in numbers], rate_bytes))

        async def main() -> None:
            task = asyncio.create_task(self.warming.run())
            for _ in range(20):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        self.runner.run(main())
        self.pool.owner.check()


def test_what_is_hot_and_not_here_is_fetched_verified_and_published(runner):
    world = World(runner, 1, 2)
    world.pool.put(1)
    world.run(1, 2)
    assert world.asked == [[key_of(2)]]
    lease = world.pool.owner.lease(key_of(2), TENANT)
    assert lease is not None and bytes(lease.copy[HEADER_BYTES:]) == payload_of(2)
    lease.release()
    assert world.warming.counts.blocks == {"stored": 1, "absent": 0, "full": 0, "failed": 0}
    assert world.warming.warm_count == 1


def test_it_keeps_to_its_rate(runner):
    world = World(runner, *range(4))
    world.run(*range(4), rate_bytes=COPY_BYTES)
    assert sum(world.pauses) == pytest.approx(4.0)


def test_without_a_rate_nothing_is_fetched(runner):
    world = World(runner, 1)
    world.run(1, rate_bytes=0)
    assert world.asked == []


def test_a_damaged_copy_is_never_published(runner):
    world = World(runner, 1)
    world.damaged.add(key_of(1))
    world.run(1)
    assert world.pool.present(1) == [False]
    assert world.warming.counts.blocks["failed"] == 1


def test_what_nobody_has_is_not_asked_for_again_soon(runner):
    world = World(runner)
    world.run(7)
    world.run(7)
    assert world.asked == [[key_of(7)]]
    world.now += ABSENT_S + 1.0
    world.run(7)
    assert len(world.asked) == 2


def test_it_takes_a_part_of_the_pool_and_only_what_was_not_read_lately_makes_room(runner):
    world = World(runner, *range(1_000, 2_000))
    capacity = world.pool.owner.usage().capacity_bytes // COPY_BYTES
    for number in range(capacity):
        world.pool.put(number)
    world.pool.owner.tick(1.0)
    before = world.pool.owner.usage().evicted_count
    world.run(*range(1_000, 1_000 + capacity))
    warm = world.warming.warm_count
    assert 0 < warm * COPY_BYTES <= world.pool.owner.usage().capacity_bytes // SHARE
    assert world.pool.owner.usage().evicted_count - before <= warm + 1
    assert world.warming.counts.blocks["full"] > 0


def test_a_copy_that_was_evicted_is_counted_and_may_come_again(runner):
    world = World(runner, 1)
    world.run(1)
    for number in range(10, 10 + world.pool.owner.usage().capacity_bytes // COPY_BYTES):
        world.pool.put(number)
    assert world.pool.present(1) == [False]
    assert world.warming.warm_count == 0 and world.warming.counts.dropped_count == 1
    world.run(1)
    assert world.warming.warm_count == 1


def test_orders_are_bounded_and_the_last_one_comes_first(runner):
    world = World(runner, *range(HOT_KEYS_MAX + 5))
    world.warming.order(WarmOrder([b"short", *(key_of(number) for number in range(HOT_KEYS_MAX))], 0))
    world.run(HOT_KEYS_MAX + 1)
    assert world.asked[0][0] == key_of(HOT_KEYS_MAX + 1)
    assert all(len(asked) <= WINDOW_KEYS for asked in world.asked)


@dataclass
class Blocks:
    """A block service that answers nothing."""

    handled: list[Message] = field(default_factory=list)
    welcome: Any = None
    sink: Any = None
    closed: Any = None

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        self.handled.append(message)


def test_only_nodes_order_and_everything_else_is_the_block_services():
    blocks: Any = Blocks()
    replies: list[Message] = []

    def reply(message: Message, payload: Any = (), left: Any = None, /) -> None:
        replies.append(message)

    warming = Warming(OwnedMemory().owner, TENANT, no_source, lambda: 0.0)
    service = PoolService(blocks, warming, b"N" * 16)
    node, agent = (Origin(ConnectionId(1), 1, tenant, 7) for tenant in (b"N" * 16, b"T" * 16))
    with pytest.raises(Refused, match="own nodes"):
        service.handle(agent, WarmOrder([key_of(1)], 1), [], reply)
    service.handle(node, WarmOrder([key_of(1)], 1), [], reply)
    service.handle(agent, Ping(), [], reply)
    assert replies == [Done()] and blocks.handled == [Ping()]
