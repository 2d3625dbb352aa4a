"""``L1Tier``: blocks, pins and memory; and single flight under both drivers, with real threads and tasks."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest

from kvcomm.block import (
    GENERATION_OFFSET,
    HEADER_BYTES,
    NO_PARENT,
    BlockKey,
    Generation,
    Incarnation,
    block_keys,
    header_for,
)
from kvcomm.errors import ConfigError
from kvcomm.rpc import AsyncPeers, Identity, Peers
from kvcomm.rpc.asynchronous import run_async
from kvcomm.rpc.blocking import run_blocking
from kvcomm.steps import Park, Steps
from kvcomm.tier import Block, Near
from l1.flight import News
from l1.negative import Moment
from l1.tier import Claim, L1Tier
from tests.namespaces import namespace

T = TypeVar("T")

NAMESPACE = namespace()
KEYS = block_keys(NAMESPACE, [7] * (16 * NAMESPACE.block_tokens))
COPY_BYTES = HEADER_BYTES + NAMESPACE.block_bytes
WAIT_S = 20.0
"""Far more than anything here takes; a test that needs it has failed."""


def block(index: int, *, pinned: bool = False, generation: int = 0) -> Block:
    payload = bytes([index]) * NAMESPACE.block_bytes
    parent = KEYS[index - 1] if index else NO_PARENT
    header = header_for(
        NAMESPACE, KEYS[index], parent, memoryview(payload), logical_start=0, producer=Incarnation(1)
    )
    header = replace(header, generation=Generation(generation))
    return Block(header, memoryview(bytearray(header.pack() + payload)), "l2", pinned)


def tier(blocks: int = 100, **options: object) -> L1Tier:
    return L1Tier(blocks * COPY_BYTES, **options)  # type: ignore[arg-type]


def keys_of(blocks: Sequence[Block | None]) -> list[BlockKey | None]:
    return [None if each is None else each.key for each in blocks]


# -- blocks


def test_it_is_the_near_end_of_the_walk():
    near: Near[Moment] = tier()
    assert near.get(KEYS[:1]) == [None]


def test_what_was_put_is_found_in_l1():
    l1 = tier()
    assert l1.put(block(1)) == "stored"
    found = l1.get(KEYS[:3])
    assert keys_of(found) == [None, KEYS[1], None]
    assert found[1] is not None
    assert found[1].tier == "l1"
    assert found[1].payload == block(1).payload
    stats = l1.stats()
    assert (stats.hits_total, stats.misses_total, stats.block_count) == (1, 2, 1)
    assert stats.used_bytes == COPY_BYTES


def test_the_first_copy_stays():
    l1 = tier()
    first, second = block(1), block(1)
    l1.put(first)
    assert l1.put(second) == "present"
    (found,) = l1.get(KEYS[1:2])
    assert found is not None
    assert found.copy.obj is first.copy.obj


def test_too_large_is_said_and_nothing_goes():
    l1 = L1Tier(COPY_BYTES - 1)
    assert l1.put(block(1)) == "too_large"
    assert l1.stats().refused_total == 1
    assert L1Tier(0).put(block(1)) == "too_large"


def test_heads_outlive_tails_when_a_run_was_looked_up():
    l1 = tier(8)
    for index in range(8):
        l1.put(block(index))
    l1.get(KEYS[:8])
    for index in range(8, 12):
        l1.put(block(index))
    assert keys_of(l1.get(KEYS[:8])) == [*KEYS[:4], None, None, None, None]
    assert l1.stats().evicted_total == 4


def test_touch_makes_heads_outlive_tails_without_a_look():
    l1 = tier(4)
    for index in range(4):
        l1.put(block(index))
    assert l1.keys() == KEYS[:4]
    l1.touch(KEYS[:4])
    assert l1.keys() == KEYS[3::-1]
    assert l1.stats().hits_total == 0


def test_discard_and_clear():
    l1 = tier()
    for index in range(4):
        l1.put(block(index, pinned=True))
    l1.discard([KEYS[0], KEYS[9]])
    l1.check()
    assert l1.stats().block_count == 3
    l1.clear()
    l1.check()
    assert l1.stats().pinned_bytes == l1.stats().used_bytes == 0


def test_nonsense_is_refused():
    for arguments in ({"capacity_bytes": -1}, {"capacity_bytes": 1, "negative_ttl_s": -1.0}):
        with pytest.raises(ConfigError):
            L1Tier(**arguments)


# -- pins and memory


class Slot(bytearray):
    """Pool memory whose last view can be waited for."""

    __slots__ = ("__weakref__",)


def pinned_in(slot: Slot, index: int) -> Block:
    plain = block(index, generation=5)
    slot[:] = plain.copy
    return Block(plain.header, memoryview(slot), "l2", pinned=True)


def test_a_pinned_view_counts_and_eviction_ends_its_pin():
    l1 = tier(1)
    slot = Slot(COPY_BYTES)
    l1.put(pinned_in(slot, 0))
    assert l1.stats().pinned_bytes == COPY_BYTES
    (held,) = l1.get(KEYS[:1])
    l1.put(block(1))
    assert l1.stats().pinned_bytes == 0
    with pytest.raises(BufferError):
        slot.append(0)  # the reader still holds the view
    del held
    slot.append(0)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(GENERATION_OFFSET, struct.pack("<Q", 0)), (GENERATION_OFFSET, struct.pack("<Q", 6)), (20, b"\xff")],
    ids=["retired", "reused", "damaged header"],
)
def test_a_slot_that_changed_is_a_miss_and_is_let_go(offset, value):
    l1 = tier()
    slot = Slot(COPY_BYTES)
    l1.put(pinned_in(slot, 0))
    assert l1.get(KEYS[:1]) != [None]
    memoryview(slot)[offset : offset + len(value)] = value
    assert l1.claim(KEYS[:1], 0.0, math.inf).blocks == [None]
    assert l1.get(KEYS[:1]) == [None]
    slot.append(0)  # no view is left
    l1.check()
    stats = l1.stats()
    assert (stats.hits_total, stats.misses_total, stats.rejected_total) == (1, 2, 1)


def test_a_fresh_copy_takes_the_place_of_a_slot_that_changed():
    l1 = tier()
    slot = Slot(COPY_BYTES)
    l1.put(pinned_in(slot, 0))
    memoryview(slot)[GENERATION_OFFSET : GENERATION_OFFSET + 8] = bytes(8)
    assert l1.put(block(0)) == "stored"
    assert keys_of(l1.get(KEYS[:1])) == KEYS[:1]
    l1.check()


def test_a_slice_does_not_keep_the_buffer_it_was_received_in():
    l1 = tier()
    received = Slot(8 * COPY_BYTES)
    for index in range(8):
        received[index * COPY_BYTES : (index + 1) * COPY_BYTES] = block(index).copy
    view = memoryview(received)
    for index in range(8):
        l1.put(replace(block(index), copy=view[index * COPY_BYTES : (index + 1) * COPY_BYTES]))
    view.release()
    received.append(0)  # nobody looks into it any more
    assert [found.payload for found in l1.get(KEYS[:8]) if found] == [
        block(index).payload for index in range(8)
    ]


def test_a_copy_in_a_buffer_of_its_own_is_not_copied_again():
    l1 = tier()
    own = block(0)
    l1.put(own)
    (found,) = l1.get(KEYS[:1])
    assert found is not None
    assert found.copy.obj is own.copy.obj


# -- absences and the filter


def test_absences_end_with_the_ttl_or_a_put():
    l1 = tier(negative_ttl_s=5.0)
    l1.mark_absent(KEYS[:3], 0.0, l1.moment)
    assert l1.known_absent(KEYS[:4], 4.0) == [True, True, True, False]
    l1.forget_absent(KEYS[:1])
    l1.put(block(1))
    assert l1.known_absent(KEYS[:3], 4.0) == [False, False, True]
    assert l1.known_absent(KEYS[2:3], 5.0) == [False]


def test_a_put_of_any_outcome_ends_an_absence():
    l1 = L1Tier(0)
    l1.mark_absent(KEYS[:1], 0.0, l1.moment)
    assert l1.put(block(0)) == "too_large"
    assert l1.known_absent(KEYS[:1], 0.0) == [False]


def test_absent_keys_are_in_no_flight():
    l1 = tier()
    l1.put(block(0))
    l1.mark_absent(KEYS[2:3], 0.0, l1.moment)
    claim = l1.claim(KEYS[:4], 1.0, math.inf)
    assert keys_of(claim.blocks) == [KEYS[0], None, None, None]
    assert claim.absent == [KEYS[2]]
    assert claim.mine == [KEYS[1], KEYS[3]]
    claim.close(1.0)


def test_what_a_claim_finds_missing_is_absent_unless_it_was_put_since():
    l1 = tier()
    claim = l1.claim(KEYS[:2], 0.0, math.inf)
    l1.forget_absent(KEYS[:1])
    claim.missed(KEYS[:2], 1.0)
    claim.close(1.0)
    assert l1.known_absent(KEYS[:2], 1.0) == [False, True]


def test_a_failure_is_not_remembered_as_an_absence():
    l1 = tier()
    claim = l1.claim(KEYS[:1], 0.0, math.inf)
    claim.failed(KEYS[:1], 1.0)
    claim.close(1.0)
    assert l1.known_absent(KEYS[:1], 1.0) == [False]


# -- single flight


class Door:
    """A ``Waiter`` that the test opens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = False
        self._calls: list[Callable[[], None]] = []

    def add_callback(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_open:
                self._calls.append(call)
                return
        call()

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()


Load = Callable[[Claim, Sequence[BlockKey]], Steps[None]]


def read(l1: L1Tier, keys: Sequence[BlockKey], load: Load) -> Steps[list[Block | None]]:
    """A reader as the documentation of ``l1.tier`` has it."""
    found: dict[bytes, Block | None] = {}
    claim = l1.claim(keys, time.monotonic(), math.inf)
    found.update(zip(keys, claim.blocks, strict=True))
    try:
        mine = claim.mine
        yield from load(claim, mine)
        while claim.follows:
            until = claim.patience()
            woken = yield Park(claim, max(0.0, until - time.monotonic()))
            if not woken and time.monotonic() < until:
                break
            news: News[Block] = claim.take(time.monotonic())
            found.update(news.landed)
            inherited = [BlockKey(key) for key in news.inherited]
            mine += inherited
            yield from load(claim, inherited)
    finally:
        claim.close(time.monotonic())
    own = dict(zip(mine, l1.get(mine), strict=True))
    return [own.get(key) or found.get(key) for key in keys]


class Loader:
    """Counts loads; each waits for ``door``.  ``fails`` readers fail first."""

    def __init__(self, fails: int = 0) -> None:
        self.door = Door()
        self.loads: Counter[BlockKey] = Counter()
        self.fails = fails

    def __call__(self, claim: Claim, keys: Sequence[BlockKey]) -> Steps[None]:
        if not keys:
            return
        self.loads.update(keys)
        yield Park(self.door)
        self.fails -= 1
        if self.fails >= 0:
            claim.failed(keys, time.monotonic())
            return
        for key in keys:
            claim.landed(block(KEYS.index(key)), time.monotonic())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.001)


async def until_async(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        await asyncio.sleep(0)


IDENTITY = Identity("nobody:", Incarnation(1))


def blocking(steps: Steps[T], wait_s: float = WAIT_S) -> T:
    return run_blocking(steps, Peers(IDENTITY), time.monotonic() + wait_s)


async def asynchronous(steps: Steps[T], wait_s: float = WAIT_S) -> T:
    return await run_async(steps, AsyncPeers(IDENTITY), time.monotonic() + wait_s)


@pytest.mark.parametrize("fails", [0, 1], ids=["leader loads", "leader fails"])
def test_fifty_threads_cause_one_load(fails):
    l1, load = tier(), Loader(fails)
    with ThreadPoolExecutor(50) as pool:
        readers = [pool.submit(blocking, read(l1, KEYS[:1], load)) for _ in range(50)]
        until(lambda: l1.stats().followed_total == 49)
        load.door.open()
        results = [reader.result(WAIT_S) for reader in readers]
    found = Counter(keys_of(result)[0] for result in results)
    assert found == ({KEYS[0]: 50} if not fails else {KEYS[0]: 49, None: 1})
    assert load.loads == {KEYS[0]: 1 + fails}
    assert l1.stats().flight_count == 0


@pytest.mark.parametrize("fails", [0, 1], ids=["leader loads", "leader fails"])
def test_fifty_tasks_cause_one_load(fails):
    l1, load = tier(), Loader(fails)

    async def all_of_them() -> list[list[Block | None]]:
        readers = [asyncio.create_task(asynchronous(read(l1, KEYS[:1], load))) for _ in range(50)]
        await until_async(lambda: l1.stats().followed_total == 49)
        load.door.open()
        return await asyncio.gather(*readers)

    found = Counter(keys_of(result)[0] for result in asyncio.run(all_of_them()))
    assert found == ({KEYS[0]: 50} if not fails else {KEYS[0]: 49, None: 1})
    assert load.loads == {KEYS[0]: 1 + fails}
    assert l1.stats().flight_count == 0


def test_threads_and_tasks_share_one_flight():
    l1, load = tier(), Loader()

    async def tasks() -> list[list[Block | None]]:
        return await asyncio.gather(*(asynchronous(read(l1, KEYS[:4], load)) for _ in range(10)))

    with ThreadPoolExecutor(11) as pool:
        threads = [pool.submit(blocking, read(l1, KEYS[:4], load)) for _ in range(10)]
        loop = pool.submit(asyncio.run, tasks())
        until(lambda: l1.stats().followed_total == 19 * 4)
        load.door.open()
        results = [thread.result(WAIT_S) for thread in threads] + loop.result(WAIT_S)
    assert all(keys_of(result) == KEYS[:4] for result in results)
    assert load.loads == dict.fromkeys(KEYS[:4], 1)


def test_followers_stream_behind_the_leader_block_by_block():
    l1 = tier()
    leader = l1.claim(KEYS[:4], 0.0, math.inf)
    follower = l1.claim(KEYS[:4], 0.0, math.inf)
    calls: list[int] = []
    for index in range(4):
        follower.add_callback(partial(calls.append, index))
        leader.landed(block(index), 0.0)
        assert calls == list(range(index + 1)), "woken by each block, not by the last"
        ((key, landed),) = follower.take(0.0).landed
        assert landed is not None
        assert key == landed.key == KEYS[index]
    assert follower.follows == []
    follower.add_callback(lambda: calls.append(4))
    assert calls[-1] == 4, "nothing to wait for: called at once"


def test_overlapping_runs_under_threads_load_every_block_once():
    """Readers of every window of the run at once, whoever comes first."""
    l1, load = tier(), Loader()
    load.door.open()
    windows = [KEYS[first : first + length] for first in range(12) for length in (1, 3, 5)]
    with ThreadPoolExecutor(len(windows)) as pool:
        results = list(pool.map(lambda keys: blocking(read(l1, keys, load)), windows, timeout=WAIT_S))
    assert [keys_of(result) for result in results] == windows
    assert set(load.loads.values()) == {1}
    l1.check()


def test_a_follower_out_of_time_goes_without():
    l1 = tier()
    leader = l1.claim(KEYS[:1], time.monotonic(), math.inf)
    assert blocking(read(l1, KEYS[:1], Loader()), wait_s=0.02) == [None]
    leader.landed(block(0), time.monotonic())
    leader.close(time.monotonic())
    l1.check()


def test_a_wait_that_timed_out_leaves_no_call_behind():
    l1 = tier(stall_s=3.0)
    l1.claim(KEYS[:1], 0.0, math.inf)
    follower = l1.claim(KEYS[:1], 0.0, math.inf)
    calls: list[str] = []
    follower.add_callback(lambda: calls.append("too late"))
    assert follower.take(3.0).inherited == KEYS[:1]
    l1.check()
    follower.landed(block(0), 3.0)
    l1.check()
    assert calls == []


def test_a_leader_that_sits_on_its_claim_is_taken_over():
    l1, load = tier(stall_s=0.02), Loader()
    load.door.open()
    leader = l1.claim(KEYS[:1], time.monotonic(), math.inf)
    assert keys_of(blocking(read(l1, KEYS[:1], load))) == KEYS[:1]
    assert l1.stats().stalled_total == 1
    leader.close(time.monotonic())


def test_a_cancelled_leader_hands_over():
    l1, load = tier(), Loader()

    async def scene() -> list[Block | None]:
        leader = asyncio.create_task(asynchronous(read(l1, KEYS[:1], load)))
        await until_async(lambda: l1.stats().flight_count == 1)
        follower = asyncio.create_task(asynchronous(read(l1, KEYS[:1], load)))
        await until_async(lambda: l1.stats().followed_total == 1)
        leader.cancel()
        load.door.open()
        return await follower

    assert keys_of(asyncio.run(scene())) == KEYS[:1]
    assert load.loads == {KEYS[0]: 2}


def test_what_landed_between_a_look_and_a_claim_is_not_loaded_again():
    l1 = tier()
    assert l1.get(KEYS[:1]) == [None]
    leader = l1.claim(KEYS[:1], 0.0, math.inf)
    leader.landed(block(0), 0.0)
    leader.close(0.0)
    late = l1.claim(KEYS[:1], 0.0, math.inf)
    assert keys_of(late.blocks) == KEYS[:1]
    assert late.mine == []


def test_followers_get_blocks_that_l1_has_no_room_for():
    l1 = L1Tier(0)
    leader, follower = l1.claim(KEYS[:1], 0.0, math.inf), l1.claim(KEYS[:1], 0.0, math.inf)
    leader.landed(block(0), 0.0)
    assert [key for key, landed in follower.take(0.0).landed if landed is not None] == KEYS[:1]


def test_one_reader_that_cannot_be_woken_does_not_stop_the_others(caplog):
    l1 = tier()
    leader, *followers = (l1.claim(KEYS[:1], 0.0, math.inf) for _ in range(3))
    calls: list[str] = []

    def broken() -> None:
        raise RuntimeError("the loop is closed")

    followers[0].add_callback(broken)
    followers[1].add_callback(lambda: calls.append("woken"))
    with caplog.at_level(logging.ERROR, "kvcomm.l1"):
        leader.landed(block(0), 0.0)
    assert calls == ["woken"]
    assert "could not be woken" in caplog.text


def test_a_closed_follower_is_not_called():
    l1 = tier()
    leader, follower = l1.claim(KEYS[:1], 0.0, math.inf), l1.claim(KEYS[:1], 0.0, math.inf)
    calls: list[str] = []
    follower.add_callback(lambda: calls.append("called"))
    follower.close(0.0)
    leader.landed(block(0), 0.0)
    assert calls == []


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collector_off")
def test_a_reader_that_the_collector_closes_inside_the_lock_leaves_all_the_same():
    """The collector runs at any allocation: a jitter that collects makes it run where the lock is held."""
    held: list[bool] = []

    def collect() -> float:
        held.append(l1._gate._lock.locked())
        gc.collect()
        return 0.0

    l1 = tier(jitter=collect)
    abandoned = read(l1, KEYS[:1], Loader())
    assert isinstance(next(abandoned), Park)
    cycle: list[object] = [abandoned]
    cycle.append(cycle)
    del abandoned, cycle
    follower = l1.claim(KEYS[:1], time.monotonic(), math.inf)
    calls: list[str] = []
    follower.add_callback(lambda: calls.append("inherited"))
    l1.mark_absent(KEYS[5:6], 0.0, l1.moment)
    assert held == [True]
    assert calls == ["inherited"]
    assert follower.take(time.monotonic()).inherited == KEYS[:1]
    follower.close(time.monotonic())
    assert l1.stats().flight_count == 0


def test_many_threads_on_everything_keep_the_books():
    l1, load = tier(6, stall_s=0.05), Loader()
    load.door.open()

    def work(seed: int) -> None:
        for step in range(60):
            first = (seed * 7 + step * 5) % 12
            run = KEYS[first : first + 1 + (seed + step) % 4]
            result = blocking(read(l1, run, load))
            assert all(each is None or each.key == key for each, key in zip(result, run, strict=True))
            if step % 9 == seed % 9:
                l1.mark_absent(run, time.monotonic(), l1.moment)
                l1.forget_absent(run)
                l1.discard(run[:1])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result(60)
    l1.check()
    assert l1.stats().flight_count == 0
    assert l1.stats().used_bytes <= 6 * COPY_BYTES


def test_a_forked_child_begins_empty_and_counts_on():
    """As the fork may have found it: locked by a thread, with a reader that will never come back."""
    l1 = tier()
    key = block(0).key
    l1.put(block(1, pinned=True))
    l1.get([block(1).key])
    l1.claim([key], 0.0, 100.0)
    l1.claim([key], 0.0, 100.0)
    before = l1.stats()
    l1._gate.__enter__()
    l1.forked()
    after = l1.stats()
    assert (after.block_count, after.used_bytes, after.pinned_bytes, after.flight_count) == (0, 0, 0, 0)
    assert (after.hits_total, after.led_total, after.followed_total) == (
        before.hits_total,
        before.led_total,
        before.followed_total,
    )
    assert l1.claim([key], 0.0, 100.0).mine == [key], "the lost leader is not waited for"
    l1.check()
