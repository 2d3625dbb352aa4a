import pytest

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES, BlockHeader
from kvcomm.errors import PayloadError
from l2_rdma.reader import Verification
from tests.l2_rdma.regions import COPY_BYTES, PAYLOAD_BYTES, TENANT, header_of, key_of, payload_of


@pytest.fixture
def pool(make_pool):
    pool = make_pool()
    pool.put(1)
    return pool


def slot_of(pool, number):
    return pool.reader._index.probe(key_of(number)).offset


def test_a_hit_is_the_block_as_it_was_published(pool):
    block = pool.reader.view(key_of(1))

    assert block.key == key_of(1)
    assert block.tier == "l2"
    assert bytes(block.payload) == payload_of(1)
    assert BlockHeader.unpack(block.copy).key == key_of(1)
    assert (pool.reader.counters.hits, pool.reader.counters.misses) == (1, 0)


def test_what_is_not_there_is_a_miss(pool):
    assert pool.reader.view(key_of(2)) is None
    assert pool.reader.lookup([key_of(1), key_of(2)]) == [True, False]
    assert pool.reader.counters.misses == 1


def test_looking_up_neither_pins_nor_marks(pool):
    pool.reader.lookup([key_of(1)])

    assert pool.reader.pins.pinned_count == 0
    entry = pool.reader._index.probe(key_of(1)).entry
    assert not pool.owner._index.referenced(entry)
    pool.reader.view(key_of(1))
    assert pool.owner._index.referenced(entry)


def test_a_payload_is_verified_once_a_process_and_generation(pool):
    for _ in range(3):
        assert pool.reader.view(key_of(1)) is not None
    assert pool.reader.counters.payloads_verified == 1

    assert pool.client().view(key_of(1)) is not None, "another process verifies for itself"

    pool.memory = pool.region.memory
    pool.memory[slot_of(pool, 1) + 300] ^= 1
    pool.owner.quarantine([key_of(1)], TENANT)
    pool.put(1)
    assert pool.reader.view(key_of(1)) is not None
    assert pool.reader.counters.payloads_verified == 2


@pytest.mark.parametrize("place", [0, 20, 100, 176, 192, 240, HEADER_BYTES, COPY_BYTES - 1])
def test_damage_anywhere_is_a_miss_and_reported(pool, place):
    pool.region.memory[slot_of(pool, 1) + place] ^= 0x10

    assert pool.reader.view(key_of(1)) is None
    assert pool.reader.counters.corrupt == 1
    assert pool.reader.pins.pinned_count == 0

    pool.owner.tick(1.0)
    assert pool.owner.usage().quarantined_count == 1
    assert pool.put(1) == "published"
    assert pool.reader.view(key_of(1)) is not None


def test_a_header_damaged_after_it_was_verified_is_noticed(pool):
    """The memory of an earlier verification covers exactly the bytes that were verified."""
    assert pool.reader.view(key_of(1)) is not None
    pool.region.memory[slot_of(pool, 1) + 60] ^= 1

    assert pool.reader.view(key_of(1)) is None


def test_a_generation_word_that_lies_is_a_miss_and_repaired(pool):
    pool.region.words[(slot_of(pool, 1) + GENERATION_OFFSET) // 8] += 1

    assert pool.reader.view(key_of(1)) is None
    assert pool.reader.counters.corrupt == 1
    pool.owner.tick(1.0)
    assert pool.put(1) == "published"


def test_an_entry_that_points_out_of_the_slots_is_not_followed(pool):
    hint = pool.reader._index.probe(key_of(1))
    for offset, size in [(0, COPY_BYTES), (hint.offset + 8, 512), (hint.offset, 1 << 40), (hint.offset, 8)]:
        pool.owner._index.rewrite(hint.entry, key_of(1), hint.generation, offset, size)
        assert pool.reader.view(key_of(1)) is None


class Moves(Verification):
    """The slot is reused just after the index was read, as often as told."""

    def __init__(self):
        self.moves = []

    def current(self, word, generation):
        if self.moves:
            self.moves.pop()()
            return False
        return super().current(word, generation)


def test_a_slot_that_moved_is_tried_once_more(make_pool):
    verify = Moves()
    pool = make_pool()
    pool.put(1)
    reader = pool.client(verify=verify)

    def move():
        pool.region.memory[slot_of(pool, 1) + 300] ^= 1
        pool.owner.quarantine([key_of(1)], TENANT)
        pool.put(1)

    verify.moves = [move]
    assert bytes(reader.view(key_of(1)).payload) == payload_of(1)
    assert reader.counters.retries == 1

    verify.moves = [move, move]
    assert reader.view(key_of(1)) is None
    assert reader.counters.corrupt == 0, "moving is not damage"


def test_a_block_evicted_between_index_and_slot_is_a_miss(make_pool):
    pool = make_pool(slab_count=1)
    pool.put(1)
    stale = pool.reader._index.probe(key_of(1))
    for number in range(2, 8):
        pool.put(number)

    assert pool.reader._read(stale, key_of(1)) == "moved"
    assert pool.reader.pins.pinned_count == 0


def test_small_blocks_are_copied_out_above_the_threshold_they_are_views(make_pool):
    pool = make_pool()
    pool.put(1)

    assert not pool.client(view_bytes_min=COPY_BYTES + 1).view(key_of(1)).pinned
    assert pool.client(view_bytes_min=COPY_BYTES).view(key_of(1)).pinned


def test_copying_into_a_destination(pool):
    destination = bytearray(PAYLOAD_BYTES)

    header = pool.reader.copy_into(key_of(1), memoryview(destination))

    assert header.key == key_of(1)
    assert destination == payload_of(1)
    assert pool.reader.pins.pinned_count == 0
    assert pool.reader.copy_into(key_of(2), memoryview(destination)) is None
    assert destination == payload_of(1)


def test_a_destination_that_does_not_fit_is_the_callers_mistake(pool):
    for destination in (
        memoryview(bytearray(PAYLOAD_BYTES - 1)),
        memoryview(bytes(PAYLOAD_BYTES)),
        memoryview(bytearray(2 * PAYLOAD_BYTES))[::2],
    ):
        with pytest.raises(PayloadError, match=f"{PAYLOAD_BYTES} contiguous writable bytes"):
            pool.reader.copy_into(key_of(1), destination)


def test_writing_needs_a_living_reservation_of_this_region(pool):
    from kvcomm.wire.messages import Want

    grant = pool.owner.reserve([Want(key_of(2), COPY_BYTES)], 1, TENANT, 0.0)[0]
    reader = pool.reader
    assert reader.begin_write(grant.offset, grant.generation + 1, COPY_BYTES) is None
    assert reader.begin_write(grant.offset + 256, grant.generation, COPY_BYTES) is None
    assert reader.begin_write(0, grant.generation, COPY_BYTES) is None
    assert reader.begin_write(grant.offset, 5, COPY_BYTES) is None
    published = reader._index.probe(key_of(1))
    assert reader.begin_write(published.offset, published.generation, COPY_BYTES) is None

    pin = reader.begin_write(grant.offset, grant.generation, COPY_BYTES)
    assert pin is not None
    reader.write(grant.offset, header_of(2).pack(), memoryview(payload_of(2)))
    reader.end_write(pin)
    assert reader.pins.pinned_count == 0

    pool.owner.abort([grant.token], 1)
    assert reader.begin_write(grant.offset, grant.generation, COPY_BYTES) is None
