"""Shards in one process get lost copies back over real sockets, and never one that does not verify."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import cast

import pytest

from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for, verify_copy
from kvcomm.blockstore import DepotUsage
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.steps import Answer, Ask
from kvcomm.tier import BlockCopy
from kvcomm.wire.messages import (
    BlockCopies,
    BlockGet,
    BlockHeld,
    BlockHoldings,
    Failure,
    Holding,
    Message,
    RingMap,
    RingNode,
)
from l3_shard import refill, refilling
from l3_shard.refilling import Refilling, RefillOptions
from l3_shard.ring import Ring
from tests.blockstores import DictDepot, DictStore
from tests.l3_shard.test_server import NAMESPACE, Cluster, make_copies
from tests.namespaces import namespace
from tests.peers import CREDENTIALS, until

COUNT = 24


class TwoCopies(Cluster):
    @property
    def map(self) -> RingMap:
        one = super().map
        return RingMap(one.epoch, one.replicas, one.write_quorum, one.read_quorum, 2, one.shards, one.pools)

    def owned(self, node: str, keys: list[BlockKey]) -> set[BlockKey]:
        ring = Ring.from_map(self.map)
        return {key for key in keys if node in ring.block_owners(key)}

    def held(self, node: str) -> set[BlockKey]:
        return set(self.on_loop(lambda: list(self.stores[node].copies)))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoCopies]:
    monkeypatch.setattr(refilling, "RETRY_S", 0.05)
    running = TwoCopies()
    yield running
    running.close()


def filled(cluster: TwoCopies) -> list[BlockKey]:
    copies = make_copies(COUNT)
    assert cluster.run(cluster.tier().put(copies)) == ["stored"] * COUNT
    return [copy.key for copy in copies]


def lose(cluster: TwoCopies, node: str, memory: DictStore | None = None) -> None:
    """The shard ends and comes back with other memory, and at once begins to fill it."""
    cluster.stop(node)
    cluster.stores[node] = memory or DictStore()
    cluster.start(node)


def test_an_empty_shard_gets_its_copies_back(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    lose(cluster, "a")
    cluster.issue()
    until(lambda: cluster.held("a") == cluster.owned("a", keys))
    counts = cluster.running["a"].refill_counts()
    assert counts.blocks["stored"] == len(cluster.owned("a", keys)) > 0
    assert not any(cluster.on_loop(lambda: cluster.stores["b"].used(keys))), "copying is no use of a block"
    assert {node: cluster.running[node].refill_counts().blocks["stored"] for node in "bc"} == {"b": 0, "c": 0}


def test_damaged_copies_are_not_taken(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    bad = sorted(cluster.owned("a", keys))[0]
    for node in "bc":
        if bad in cluster.held(node):
            buffer = cluster.stores[node].copies[bad].buffer
            cluster.on_loop(lambda buffer=buffer: buffer.__setitem__(-1, buffer[-1] ^ 1))
    lose(cluster, "a")
    cluster.issue()
    until(lambda: cluster.held("a") == cluster.owned("a", keys) - {bad})
    until(lambda: cluster.running["a"].refill_counts().blocks["failed"] >= 1)
    assert cluster.held("a") == cluster.owned("a", keys) - {bad}
    for key in cluster.held("a"):
        verify_copy(cluster.stores["a"].copies[key].buffer, key)


def test_a_shard_whose_peer_is_away_tries_again_until_it_is_back(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    cluster.stop("b")
    lose(cluster, "a")
    cluster.issue()
    until(lambda: cluster.running["a"].refill_counts().rounds["failed"] > 0)
    cluster.start("b")  # with what it had
    cluster.issue()
    until(lambda: cluster.held("a") == cluster.owned("a", keys))


def test_a_shard_takes_no_more_than_there_is_free_room(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    size = len(cluster.stores["b"].copies[sorted(cluster.held("b"))[0]].buffer)
    lose(cluster, "a", DictStore(capacity_bytes=3 * size))
    cluster.issue()
    until(lambda: len(cluster.held("a")) == 3)
    assert cluster.running["a"].refill_counts().blocks["full"] > 0
    assert cluster.held("a") < cluster.owned("a", keys)
    assert cluster.stores["a"].evicting == {False}


@pytest.mark.slow
def test_a_huge_block_goes_alone_and_holds_up_nobody(cluster: TwoCopies) -> None:
    small = filled(cluster)
    size = 48 << 20
    wide = namespace(head_dim=256, layers=size // NAMESPACE.block_bytes * NAMESPACE.layers)
    wide = wide.for_tenant(CREDENTIALS.tenant_digest("acme"))
    (key,) = block_keys(wide, range(16))
    payload = memoryview(bytes(wide.block_bytes))
    header = header_for(wide, key, NO_PARENT, payload, logical_start=0, producer=Incarnation(5))
    for store in cluster.stores.values():
        store.capacity_bytes, store.copy_bytes_max = 1 << 30, 1 << 30
    copy = BlockCopy(header, payload)
    assert cluster.run(cluster.tier().put([copy])) == ["stored"]
    owner, *_ = Ring.from_map(cluster.map).block_owners(key)
    until(lambda: all(key in cluster.held(node) for node in Ring.from_map(cluster.map).block_owners(key)))
    lose(cluster, owner, DictStore(capacity_bytes=1 << 30, copy_bytes_max=1 << 30))
    for _ in range(20):
        cluster.put(b"k", b"v", cluster.get(b"k").context)
    until(lambda: cluster.held(owner) == cluster.owned(owner, [*small, key]))
    assert cluster.running[owner].refill_counts().blocks["failed"] == 0


class Told:
    """Peers that answer at once, from a script by kind of message; no wire."""

    def __init__(self, answer: Callable[[Ask], Message]) -> None:
        self.asked: list[Ask] = []
        self.deadlines: list[float] = []
        self._answer = answer

    def start(self, asks: Sequence[Ask], deadline: float) -> list[Told.Request]:
        self.asked += asks
        self.deadlines.append(deadline)
        return [Told.Request(Answer(self._answer(ask), [], 0.0)) for ask in asks]

    def give_up(self, _request: Told.Request, _reason: str) -> None:
        pass

    @dataclass
    class Request:
        given: Answer

        async def answer(self) -> Answer:
            return self.given


def ring_of(names: str, epoch: int) -> Ring:
    shards = [RingNode(name, f"unix:///{name}", "", "", name, 1) for name in names]
    return Ring.from_map(RingMap(epoch, 1, 1, 1, 2, shards, []))


async def refilled(
    answer: Callable[[Ask], Message],
    rings: Callable[[], Ring],
    done: Callable[[Refilling, Told], bool],
    disk: DictDepot | None = None,
    rate_bytes: int = 64 << 20,
) -> Told:
    peers = Told(answer)
    work = Refilling(
        "a", RefillOptions(rate_bytes), DictStore(copy_bytes_max=1 << 30), disk, cast("AsyncPeers", peers),
        ring=rings, resolve=lambda node: rings().shard(node).address, clock=time.monotonic,
    )  # fmt: skip
    task = asyncio.create_task(work.run())
    try:
        async with asyncio.timeout(10.0):
            while not done(work, peers) and not task.done():
                await asyncio.sleep(0.002)
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return peers


def test_a_peer_that_leaves_the_ring_while_copies_are_paced_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rings = [ring_of("ab", 1)]

    async def main() -> Told:
        def answer(ask: Ask) -> Message:
            assert isinstance(ask.message, BlockHoldings)
            asyncio.get_running_loop().call_soon(lambda: rings.__setitem__(0, ring_of("a", 2)))
            return BlockHeld([Holding(bytes(32), 4096, True)], None)

        return await refilled(answer, lambda: rings[0], lambda work, _: work.counts.rounds["failed"] > 0)

    assert len(asyncio.run(main()).asked) == 1


def test_copies_that_were_paced_when_another_epoch_came_are_asked_for_under_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rings = [ring_of("ab", 1)]
    keys = [key for key in (bytes([n]) * 32 for n in range(99)) if "a" in rings[0].block_keepers(key)][:3]

    async def main() -> Told:
        def answer(ask: Ask) -> Message:
            if isinstance(ask.message, BlockHoldings):
                asyncio.get_running_loop().call_soon(lambda: rings.__setitem__(0, ring_of("ab", 2)))
                return BlockHeld([Holding(key, refill.WINDOW_BYTES, True) for key in keys], None)
            return BlockCopies([0])

        def done(work: Refilling, _peers: Told) -> bool:
            return sum(work.counts.rounds.values()) > 0

        return await refilled(answer, lambda: rings[0], done, rate_bytes=1 << 40)

    asked = [ask.message for ask in asyncio.run(main()).asked]
    assert asked[1:4] == [BlockGet(2, [key]) for key in keys]


def test_what_the_disk_may_have_is_not_asked_for_before_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = BlockKey(bytes(32))

    class Opening(DictDepot):
        looks = 0

        def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]:
            return [opened(self) for _ in keys]

        def usage(self) -> DepotUsage:
            self.looks += 1
            return replace(super().usage(), state="on" if opened(self) else "opening")

    def opened(disk: Opening) -> bool:
        return disk.looks > 2

    async def main() -> Told:
        ring = ring_of("ab", 1)
        return await refilled(
            lambda ask: BlockHeld([Holding(key, 4096, True)], None),
            lambda: ring,
            lambda work, _: sum(work.counts.rounds.values()) > 0,
            Opening(b""),
        )

    asked = asyncio.run(main()).asked
    assert [type(ask.message) for ask in asked] == [BlockHoldings], "no copy was asked for"


def test_a_request_for_a_huge_block_may_take_as_long_as_its_bytes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be given up and begun again for ever, and nothing behind it would ever be moved."""
    ring, size = ring_of("ab", 1), 7 << 20
    monkeypatch.setattr(refilling, "RATE_MIN_BYTES", 1 << 20)
    key = next(key for key in (bytes([n]) * 32 for n in range(99)) if "a" in ring.block_keepers(key))

    async def main() -> Told:
        def answer(ask: Ask) -> Message:
            if isinstance(ask.message, BlockHoldings):
                return BlockHeld([Holding(key, size, True)], None)
            return Failure("unavailable", "scripted")

        return await refilled(answer, lambda: ring, lambda _work, peers: len(peers.asked) == 2)

    told = asyncio.run(main())
    assert isinstance(told.asked[1].message, BlockGet)
    assert 6.5 < told.deadlines[1] - told.deadlines[0] < 17.0


def test_further_pages_are_asked_for_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refilling, "PAGE_PAUSE_S", 3600.0)
    ring = ring_of("ab", 1)

    async def main() -> Told:
        def done(_work: Refilling, peers: Told) -> bool:
            return len(peers.asked) == 1 and next(turns) > 10

        turns = count()
        return await refilled(lambda ask: BlockHeld([], b"\x01" * 32), lambda: ring, done)

    assert len(asyncio.run(main()).asked) == 1


def test_a_peer_that_stays_away_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refilling, "RETRY_S", 0.01)
    ring, at = ring_of("ab", 1), list[float]()

    async def main() -> Told:
        def away(_ask: Ask) -> Message:
            at.append(asyncio.get_running_loop().time())
            return Failure("unavailable", "scripted")

        return await refilled(away, lambda: ring, lambda _work, peers: len(peers.asked) == 5)

    asyncio.run(main())
    waits = [after - before for before, after in pairwise(at)]
    assert all(wait_s >= 0.99 * 0.01 * 2**number for number, wait_s in enumerate(waits)), waits
