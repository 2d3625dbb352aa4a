"""Reads through a channel: over shared memory against a real owner; over a wire that does as it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES, BlockHeader, BlockKey
from kvcomm.errors import Corrupt, KVCommError, Unavailable
from kvcomm.slabs import Slabs
from kvcomm.tier import Block
from l2_rdma.layout import BUCKET_BYTES, SUSPECT_COUNT, SUSPECT_FIRST_WORD, WORD_BYTES, RegionHeader
from l2_rdma.reader import Verification
from l2_rdma.region import Region
from l2_rdma.remote import _MARK, HINT_AGE_S, WINDOW_BLOCKS, RemoteReader, _runs
from l2_rdma.transports.port import Extent, Operation, Registration, TransportName
from l2_rdma.transports.shm import ShmChannel, ShmTransport
from tests.l2_rdma.conftest import SharedPool
from tests.l2_rdma.regions import COPY_BYTES, TENANT, header_of, key_of, payload_of
from tests.peers import soon


@pytest.fixture
def pool(make_pool: Callable[..., SharedPool]) -> SharedPool:
    pool = make_pool(slab_count=8)
    pool.put(1)
    return pool


def over_shm(pool: SharedPool, **options: Any) -> RemoteReader:
    channel = ShmChannel(Region.attach(pool.region.path, TENANT), time.monotonic)
    return RemoteReader(channel, ShmTransport(), **options)


def slot_of(pool: SharedPool, number: int) -> int:
    hint = pool.reader._index.probe(key_of(number))
    assert hint is not None
    return hint.offset


def keys_of(*numbers: int) -> list[BlockKey]:
    return [key_of(number) for number in numbers]


def got(reader: RemoteReader, *numbers: int) -> list[int]:
    """The numbers of the blocks that a get brings, every byte compared."""
    found: list[int] = []

    def take(index: int, block: Block) -> None:
        assert block.payload == payload_of(numbers[index])
        assert block.key == key_of(numbers[index]) and not block.pinned and block.copy.readonly
        found.append(numbers[index])

    reader.get(keys_of(*numbers), take, soon())
    return found


def suspects(pool: SharedPool) -> list[int]:
    return [
        word for word in pool.region.words[SUSPECT_FIRST_WORD : SUSPECT_FIRST_WORD + SUSPECT_COUNT] if word
    ]


# -- against an owner ----------------------------------------------------------------------------------------


def test_hits_come_in_order_and_misses_are_skipped(pool: SharedPool) -> None:
    reader = over_shm(pool)
    for number in range(2, 9):
        pool.put(number)

    assert got(reader, 8, 99, 1, 3, 98, 2) == [8, 1, 3, 2]
    counters = reader.counters
    assert (counters.hits, counters.misses, counters.hit_bytes) == (4, 2, 4 * COPY_BYTES)
    assert (counters.retries, counters.corrupt, counters.unavailable) == (0, 0, 0)
    assert reader.failure is None


def test_a_lookup_tells_what_the_index_names(pool: SharedPool) -> None:
    assert over_shm(pool).lookup(keys_of(1, 2, 1), soon()) == [True, False, True]
    assert over_shm(pool).lookup([], soon()) == []


def test_copies_are_received_into_the_memory_they_are_given_out_in(
    make_pool: Callable[..., SharedPool],
) -> None:
    pool = make_pool(slab_count=4, slab_bytes=1 << 18)
    payload = payload_of(1, 1 << 17)
    pool.put(1, payload)
    taken: list[memoryview] = []
    slabs = Slabs()

    def allocate(size: int) -> memoryview:
        taken.append(slabs.take(size))
        return taken[-1]

    block = over_shm(pool, allocate=allocate).read(key_of(1), soon())

    assert block is not None and block.payload == payload
    assert any(block.copy.obj is memory.obj for memory in taken)


def test_a_hit_marks_its_entry_unless_it_is_marked_and_a_lookup_does_not(pool: SharedPool) -> None:
    wire = Wire(pool)
    reader = RemoteReader(wire, wire)
    reader.lookup(keys_of(1), soon())
    entry = pool.reader._index.probe(key_of(1))
    assert entry is not None and not pool.owner._index.referenced(entry.entry)

    assert got(reader, 1) == [1]
    assert pool.owner._index.referenced(entry.entry)
    assert got(reader, 1) == [1]
    assert [data for _, data in wire.written] == [_MARK], "marked already"


@pytest.mark.parametrize("place", [0, 20, 100, 176, 192, 240, HEADER_BYTES, COPY_BYTES - 1])
def test_damage_anywhere_is_a_miss_and_reported(pool: SharedPool, place: int) -> None:
    reader = over_shm(pool)
    pool.region.memory[slot_of(pool, 1) + place] ^= 0x10

    assert got(reader, 1) == []
    assert (reader.counters.corrupt, reader.counters.retries) == (1, 1)
    assert suspects(pool) == [slot_of(pool, 1)]

    pool.owner.tick(1.0)
    assert pool.owner.usage().quarantined_count == 1
    assert pool.put(1) == "published"
    assert got(reader, 1) == [1]


def test_every_copy_is_verified_not_only_the_first(pool: SharedPool) -> None:
    reader = over_shm(pool)
    assert got(reader, 1) == [1]
    pool.region.memory[slot_of(pool, 1) + 300] ^= 1

    assert got(reader, 1) == []
    assert reader.counters.payloads_verified == 1


def test_a_hint_out_of_the_slots_is_never_followed(pool: SharedPool) -> None:
    wire = Wire(pool)
    entry = pool.reader._index.probe(key_of(1))
    assert entry is not None
    layout = pool.region.header.layout
    for offset, size in (
        (layout.slots_end, COPY_BYTES),
        (0, COPY_BYTES),
        (slot_of(pool, 1), 1 << 40),
        (slot_of(pool, 1) + 8, COPY_BYTES),
        (slot_of(pool, 1), 8),
    ):
        pool.owner._index.rewrite(entry.entry, key_of(1), entry.generation, offset, size)
        assert got(RemoteReader(wire, wire), 1) == []
    assert wire.slots_read(layout.slots_offset) == []
    assert suspects(pool) != []


def test_a_generation_that_is_not_the_hints_is_a_miss(pool: SharedPool) -> None:
    """The slot was handed to another block of the same size: its content is whole, and not what was meant."""
    reader = over_shm(pool)
    entry = pool.reader._index.probe(key_of(1))
    assert entry is not None
    pool.owner._index.rewrite(entry.entry, key_of(1), entry.generation + 1, entry.offset, entry.copy_bytes)  # type: ignore[arg-type]

    assert got(reader, 1) == []
    assert (reader.counters.retries, reader.counters.corrupt) == (1, 1), (
        "twice the same entry: it is reported"
    )


def test_what_a_lookup_found_needs_no_index_for_a_while(pool: SharedPool) -> None:
    now = [100.0]
    wire = Wire(pool, clock=lambda: now[0])
    reader = RemoteReader(wire, wire, clock=lambda: now[0])
    for pause_s, index_is_read in ((0.0, False), (HINT_AGE_S, True)):
        reader.lookup(keys_of(1), now[0] + 1)
        now[0] += pause_s
        wire.extents.clear()
        assert reader.read(key_of(1), now[0] + 1) is not None
        assert bool(wire.index_reads()) == index_is_read


def test_an_old_hint_costs_no_retry(pool: SharedPool) -> None:
    """Between a lookup and its get the block was evicted and came back elsewhere."""
    reader = over_shm(pool)
    reader.lookup(keys_of(1), soon())
    pool.region.memory[slot_of(pool, 1) + 300] ^= 1
    pool.owner.quarantine([key_of(1)], TENANT)
    pool.put(2)
    pool.put(1)

    assert got(reader, 1) == [1]
    assert reader.counters.retries == 0


def test_without_verification_wrong_bytes_come_through(pool: SharedPool) -> None:
    class Trusting(Verification):
        def payload(self, header: object, copy: object) -> bool:
            return True

    pool.region.memory[slot_of(pool, 1) + 300] ^= 1
    block = over_shm(pool, verify=Trusting()).read(key_of(1), soon())

    assert block is not None and block.payload != payload_of(1)


def test_a_region_that_its_pool_has_left_is_a_miss(pool: SharedPool) -> None:
    reader = over_shm(pool)
    pool.region.close()

    assert got(reader, 1, 2) == []
    assert reader.lookup(keys_of(1), soon()) == [None]
    assert reader.counters.unavailable == 2
    assert isinstance(reader.failure, Unavailable) and not reader.silent


# -- over a wire that does as it is told ---------------------------------------------------------------------


class Wire:
    """A transport and its channel over a pool's memory.  ``act`` decides when an operation that is posted
    ends: by default at once; what is held ends one by one, in :meth:`wait`."""

    name: TransportName = "tcp"
    transport: TransportName = "tcp"
    header: RegionHeader
    broken: KVCommError | None = None

    def __init__(self, pool: SharedPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.header = pool.region.header
        self.memory = pool.region.memory
        self.clock = clock
        self.extents: list[Extent] = []
        self.batches: list[list[Extent]] = []
        self.written: list[tuple[Extent, bytes]] = []
        self.held: list[tuple[Operation, Extent, memoryview]] = []
        self.holding = False
        self.before: Callable[[Extent], None] = lambda extent: None
        """Called when an operation ends, before its bytes are taken."""
        self.after: Callable[[Extent], None] = lambda extent: None
        self.fails: Callable[[Extent], KVCommError | None] = lambda extent: None
        self.until = 0.0

    def read(self, extents: Sequence[Extent], into: Sequence[memoryview], deadline: float) -> list[Operation]:
        operations = []
        self.batches.append(list(extents))
        for extent, view in zip(extents, into, strict=True):
            self.extents.append(extent)
            operations.append(Operation(deadline))
            self.held.append((operations[-1], extent, view))
            if not self.holding:
                self.end_one()
        return operations

    def write(self, extent: Extent, data: Any, deadline: float) -> Operation:
        self.written.append((extent, bytes(data)))
        self.memory[extent.offset : extent.offset + extent.length] = data
        operation = Operation(deadline)
        operation.complete()
        return operation

    def end_one(self, place: int = 0) -> None:
        operation, extent, view = self.held.pop(place)
        error = self.fails(extent)
        if error is not None:
            operation.fail(error)
            return
        self.before(extent)
        view[:] = self.memory[extent.offset : extent.offset + extent.length]
        operation.complete()
        self.after(extent)

    def wait(self, operations: Sequence[Operation]) -> None:
        assert operations, "a wait for nothing is a busy loop"
        while not all(operation.done for operation in operations):
            self.end_one(self.pick())

    def pick(self) -> int:
        return 0

    def slots_read(self, slots_offset: int) -> list[Extent]:
        return [each for each in self.extents if each.offset >= slots_offset and each.length > WORD_BYTES]

    def index_reads(self) -> list[Extent]:
        return [each for each in self.extents if not each.length % BUCKET_BYTES and not self._slot(each)]

    def _slot(self, extent: Extent) -> bool:
        return extent.offset >= self.header.layout.slots_offset

    def fetch_add(self, offset: int, amount: int, deadline: float) -> Operation:
        raise NotImplementedError

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> Operation:
        raise NotImplementedError

    def register(self, buffer: memoryview) -> Registration:
        raise NotImplementedError

    def connect(self, offer: bytes, header: RegionHeader, ask: Any, deadline: float) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture
def wire(pool: SharedPool) -> Iterator[Wire]:
    for number in range(2, 13):
        assert pool.put(number) == "published"
    return Wire(pool)  # type: ignore[return-value]


def test_a_batched_lookup_is_one_round_of_reads(wire: Wire) -> None:
    wire.holding = True
    reader = RemoteReader(wire, wire)
    keys = keys_of(*range(1, 13), *range(100, 140))
    probe = reader.ask(keys, soon())
    posted = len(wire.extents)
    buckets = sum(extent.length for extent in wire.extents) // BUCKET_BYTES

    assert reader.told(probe) == [True] * 12 + [False] * 40
    assert len(wire.extents) == posted
    assert buckets == wire.header.layout.bucket_count, "each bucket once, though the keys share them"
    assert posted < buckets, "and neighbours in one piece"


def test_a_run_is_three_posts_however_long_it_is(wire: Wire) -> None:
    wire.holding = True
    posts: list[int] = []
    post = wire.read

    def counted(extents: Sequence[Extent], into: Sequence[memoryview], deadline: float) -> list[Operation]:
        posts.append(len(extents))
        return post(extents, into, deadline)

    def all_at_once(operations: Sequence[Operation]) -> None:
        while wire.held:
            wire.end_one()

    wire.read, wire.wait = counted, all_at_once  # type: ignore[method-assign]
    numbers = list(range(1, 13))

    assert got(RemoteReader(wire, wire), *numbers) == numbers
    assert posts[1:] == [12, 12], "the slots together, then their generation words"


def test_operations_may_end_in_any_order(wire: Wire) -> None:
    wire.holding = True
    wire.pick = lambda: len(wire.held) - 1  # type: ignore[method-assign]
    numbers = [3, 99, 1, 12, 7, 98, 2, 2]

    assert got(RemoteReader(wire, wire), *numbers) == [3, 1, 12, 7, 2, 2]


def test_a_slot_that_is_reused_while_it_is_read_is_read_again(pool: SharedPool, wire: Wire) -> None:
    """The bytes are torn: the first half is of the block that was there, the second of its successor."""
    offset = slot_of(pool, 1)

    def reuse(extent: Extent) -> None:
        if extent == Extent(offset, COPY_BYTES):
            wire.before = lambda extent: None
            pool.region.memory[offset + 300] ^= 1
            pool.owner.quarantine([key_of(1)], TENANT)
            pool.owner.tick(1.0)
            assert pool.put(50) == "published"  # into the slot that has become free
            assert slot_of(pool, 50) == offset
            pool.put(1)

    wire.before = reuse
    reader = RemoteReader(wire, wire)

    assert got(reader, 1) == [1]
    assert (reader.counters.retries, reader.counters.corrupt) == (1, 0)


def test_a_slot_that_is_retired_after_it_was_read_is_no_hit(pool: SharedPool, wire: Wire) -> None:
    """Whole bytes of the right block, but it is not the owner's word any more."""
    offset = slot_of(pool, 1)

    def retire(extent: Extent) -> None:
        if extent == Extent(offset, COPY_BYTES):
            wire.after = lambda extent: None
            pool.region.memory[offset + 300] ^= 1
            pool.owner.quarantine([key_of(1)], TENANT)

    wire.after = retire
    reader = RemoteReader(wire, wire)

    assert got(reader, 1) == []
    assert (reader.counters.retries, reader.counters.misses, reader.counters.corrupt) == (1, 1, 0)


def test_a_slot_that_never_stands_still_is_a_miss_after_the_second_try(pool: SharedPool, wire: Wire) -> None:
    def move(extent: Extent) -> None:
        if extent.length == COPY_BYTES:
            pool.region.memory[slot_of(pool, 1) + 300] ^= 1
            pool.owner.quarantine([key_of(1)], TENANT)
            pool.put(1)

    wire.after = move
    reader = RemoteReader(wire, wire)

    assert got(reader, 1) == []
    assert (reader.counters.retries, reader.counters.corrupt) == (1, 0)
    assert len(wire.slots_read(wire.header.layout.slots_offset)) == 2


def test_a_byte_that_is_wrong_on_the_way_once_is_no_miss(wire: Wire, pool: SharedPool) -> None:
    offset = slot_of(pool, 1)

    def flip(extent: Extent) -> None:
        if extent == Extent(offset, COPY_BYTES):
            wire.before = lambda extent: None
            pool.region.memory[offset + 300] ^= 1
            wire.after = restore

    def restore(extent: Extent) -> None:
        wire.after = lambda extent: None
        pool.region.memory[offset + 300] ^= 1

    wire.before = flip
    reader = RemoteReader(wire, wire)

    assert got(reader, 1) == [1]
    assert (reader.counters.retries, reader.counters.corrupt) == (1, 0)


def test_a_long_run_streams_through_a_bounded_window(wire: Wire) -> None:
    wire.holding = True
    reader = RemoteReader(wire, wire, window_bytes=3 * COPY_BYTES)
    fetch = reader.fetch(keys_of(*range(1, 13)))
    fetch.start(soon())
    seen: list[int] = []
    for position in range(12):
        fetch.advance(position, soon())
        seen.append(len(wire.slots_read(wire.header.layout.slots_offset)))
        block = fetch.take(position)
        assert block is not None and block.payload == payload_of(position + 1)
        assert fetch.take(position) is None, "it is taken once"

    assert seen[0] <= 3, "the first block is there long before the last is asked for"
    assert all(read <= position + 3 for position, read in enumerate(seen))
    assert seen[-1] == 12


def test_a_run_is_posted_in_batches(wire: Wire) -> None:
    """A wire may send what is posted together in one go; a hundred small reads cost a hundred calls else."""
    wire.holding = True
    assert got(RemoteReader(wire, wire), *range(1, 13)) == list(range(1, 13))

    sizes = [{extent.length for extent in batch} for batch in wire.batches]
    assert sum(COPY_BYTES in each for each in sizes) <= 2, "the slots"
    assert sum(WORD_BYTES in each for each in sizes) <= 12
    assert len(wire.batches) <= 14


@pytest.mark.parametrize(("ahead_bytes", "at_most"), [(0, 1), (3 * COPY_BYTES, 4)])
def test_what_is_waited_for_is_verified_first_and_little_beyond(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, ahead_bytes: int, at_most: int
) -> None:
    """A large block is not held up by those behind it; small ones do not come one by one."""
    monkeypatch.setattr("l2_rdma.remote.VERIFY_AHEAD_BYTES", ahead_bytes)
    looked: list[int] = []

    class Counting(Verification):
        def payload(self, header: BlockHeader, copy: memoryview) -> bool:
            looked.append(int.from_bytes(copy[HEADER_BYTES : HEADER_BYTES + 8], "little"))
            return super().payload(header, copy)

    fetch = RemoteReader(wire, wire, verify=Counting()).fetch(keys_of(*range(1, 13)))
    wire.holding = True
    fetch.start(soon())
    while wire.held:
        wire.end_one()
    fetch.pump(soon())  # the generations
    while wire.held:
        wire.end_one()
    looked.clear()
    fetch.advance(5, soon())

    assert 6 in looked and len(looked) <= at_most
    while not all(fetch.done(position) for position in range(12)):
        fetch.advance(next(position for position in range(12) if not fetch.done(position)), soon())
    assert sorted(looked) == sorted({*looked}), "each once"


def test_a_copy_is_verified_while_its_generation_is_on_its_way(wire: Wire) -> None:
    wire.holding = True
    story: list[str] = []

    class Telling(Verification):
        def payload(self, header: BlockHeader, copy: memoryview) -> bool:
            story.append("verified")
            return super().payload(header, copy)

    wire.after = lambda extent: story.append(f"{extent.length}")

    assert RemoteReader(wire, wire, verify=Telling()).read(key_of(1), soon()) is not None
    assert story[-3:] == [f"{COPY_BYTES}", "verified", f"{WORD_BYTES}"]


def test_a_block_larger_than_the_window_goes_alone(wire: Wire) -> None:
    assert got(RemoteReader(wire, wire, window_bytes=1), *range(1, 13)) == list(range(1, 13))
    assert WINDOW_BLOCKS > 1


def test_whoever_asks_for_a_later_block_first_gets_it(wire: Wire) -> None:
    wire.holding = True
    fetch = RemoteReader(wire, wire, window_bytes=2 * COPY_BYTES).fetch(keys_of(*range(1, 13)))
    fetch.start(soon())
    fetch.advance(11, soon())

    assert fetch.take(11) is not None


@pytest.mark.parametrize("stage", ["index", "slot", "generation"])
def test_a_failure_at_any_stage_ends_the_trust_in_the_channel(wire: Wire, stage: str) -> None:
    slots = wire.header.layout.slots_offset

    def fails(extent: Extent) -> KVCommError | None:
        at = "index" if extent.offset < slots else "slot" if extent.length == COPY_BYTES else "generation"
        return Unavailable("unplugged") if at == stage else None

    wire.fails = fails
    reader = RemoteReader(wire, wire)

    assert got(reader, *range(1, 13)) == []
    assert reader.counters.unavailable == reader.counters.misses == 12
    assert reader.failure is not None and not reader.silent
    posted = len(wire.extents)
    assert got(reader, 1, 2) == []
    assert len(wire.extents) == posted, "nothing is asked of it any more"


def test_what_had_arrived_before_a_failure_is_given_out(wire: Wire, pool: SharedPool) -> None:
    broken_at = slot_of(pool, 4)
    wire.fails = lambda extent: Corrupt("nonsense") if extent.offset == broken_at else None

    assert got(RemoteReader(wire, wire), 1, 2, 3, 4, 5) == [1, 2, 3]


def test_a_deadline_that_has_passed_is_a_miss_and_the_channel_stays(pool: SharedPool) -> None:
    reader = over_shm(pool)

    assert reader.lookup(keys_of(1), time.monotonic()) == [None]
    assert reader.read(key_of(1), time.monotonic() - 1) is None
    assert reader.failure is None and reader.counters.unavailable == 1
    assert got(reader, 1) == [1]


def test_a_pool_that_does_not_answer_is_silent_and_a_short_deadline_says_nothing_of_it(wire: Wire) -> None:
    now = [100.0]

    def expire(extent: Extent) -> KVCommError:
        now[0] = max(now[0], wire.until)
        return Unavailable("no answer in time")

    wire.fails, wire.holding = expire, True
    for deadline_s, expected_s, silent in ((0.01, 0.01, False), (60.0, 2.0, True)):
        reader = RemoteReader(wire, wire, timeout_s=2.0, clock=lambda: now[0])
        begun = now[0]
        wire.until = begun + min(deadline_s, 2.0)
        assert reader.lookup(keys_of(1, 2), begun + deadline_s) == [None, None]
        assert all(operation.deadline == wire.until for operation, _, _ in wire.held)
        assert now[0] - begun == pytest.approx(expected_s)
        assert (reader.failure is not None, reader.silent) == (silent, silent)


def test_a_short_deadline_says_nothing_of_a_pool_however_late_it_is_seen(wire: Wire) -> None:
    now = [100.0]

    def expire(extent: Extent) -> KVCommError:
        now[0] += 5.0  # there was something else to do
        return Unavailable("no answer in time")

    wire.fails, wire.holding = expire, True
    reader = RemoteReader(wire, wire, clock=lambda: now[0])
    assert reader.lookup(keys_of(1, 2), now[0] + 0.01) == [None, None]
    assert reader.failure is None


@pytest.mark.parametrize("taken", [0, 1])
def test_a_run_that_is_taken_slowly_is_read_again_and_blames_nobody(wire: Wire, taken: int) -> None:
    now = [100.0]
    reader = RemoteReader(wire, wire, clock=lambda: now[0])
    fetch = reader.fetch(keys_of(*range(2, 7)))
    wire.holding = True
    fetch.pump(now[0] + 60)
    for position in range(taken):  # from then on all the others are under way
        fetch.advance(position, now[0] + 60)
        assert fetch.take(position) is not None
    overdue = list(wire.held)
    assert overdue and not fetch.done(taken)
    now[0] += 10

    def expire(extent: Extent) -> KVCommError | None:
        return Unavailable("no answer in time") if overdue and overdue.pop() else None

    wire.fails = expire
    for position in range(taken, 5):
        fetch.advance(position, now[0] + 50)
        assert fetch.take(position) is not None
    assert (reader.failure, reader.counters.misses, reader.counters.retries) == (None, 0, 0)
    assert fetch._held_bytes == fetch._held_count == 0


@pytest.mark.parametrize("shared", [True, False])
def test_who_waits_on_the_same_wire_waits_for_all(wire: Wire, pool: SharedPool, shared: bool) -> None:
    now = [100.0]
    reader = RemoteReader(wire, wire, clock=lambda: now[0])
    other_wire: Any = wire if shared else Wire(pool)
    beside = RemoteReader(other_wire, other_wire, clock=lambda: now[0]).fetch(keys_of(2))
    fetch = reader.fetch(keys_of(3))
    wire.holding = True
    fetch.pump(now[0] + 60)
    overdue = list(wire.held)
    now[0] += 10
    fetch.waited_with(beside)

    wire.fails = lambda _: Unavailable("no answer in time") if overdue and overdue.pop() else None
    fetch.advance(0, now[0] + 50)
    assert (fetch.take(0) is None, reader.silent) == (shared, shared)


def test_a_pool_that_is_silent_after_the_run_was_left_alone_is_waited_for_once(wire: Wire) -> None:
    now = [100.0]
    reader = RemoteReader(wire, wire, timeout_s=2.0, clock=lambda: now[0])
    fetch = reader.fetch(keys_of(2, 3))
    wire.holding = True
    fetch.pump(200.0)
    now[0] += 10

    def expire(extent: Extent) -> KVCommError:
        now[0] = max(now[0], wire.held[0][0].deadline if wire.held else 0.0)
        return Unavailable("no answer in time")

    wire.fails = expire
    for position in range(2):
        fetch.advance(position, 200.0)
        assert fetch.take(position) is None
    assert reader.silent and 111 < now[0] < 113


def test_runs_are_what_follows_each_other_and_no_longer_than_a_piece() -> None:
    assert _runs([]) == []
    assert _runs([5]) == [(0, 1)]
    assert _runs([1, 2, 3, 7, 9, 10]) == [(0, 3), (3, 4), (4, 6)]
    assert _runs(list(range(150))) == [(0, 64), (64, 128), (128, 150)]


def test_the_header_of_another_block_is_no_hit(pool: SharedPool) -> None:
    """The entry's tag is a part of the key only: the header has all of it."""
    header = header_of(2, payload_of(1)).pack()[:GENERATION_OFFSET]
    offset = slot_of(pool, 1)
    pool.region.memory[offset : offset + GENERATION_OFFSET] = header

    assert over_shm(pool).read(key_of(1), soon()) is None
