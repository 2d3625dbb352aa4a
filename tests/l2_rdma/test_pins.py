import gc
import os
import threading

import pytest

from kvcomm.block import HEADER_BYTES
from tests.l2_rdma.regions import COPY_BYTES, PAYLOAD_BYTES, key_of, payload_of


@pytest.fixture
def pool(make_pool):
    pool = make_pool()
    pool.put(1)
    return pool


def pinned(pool):
    return pool.reader.pins.pinned_count


def test_a_view_is_pinned_until_its_last_slice_is_gone(pool):
    block = pool.reader.view(key_of(1))
    assert block.pinned
    assert pinned(pool) == 1
    assert pool.reader.pins.pinned_bytes == COPY_BYTES
    assert pool.owner.usage().pinned_bytes == COPY_BYTES

    rest = block.payload[100:200]
    del block
    gc.collect()
    assert pinned(pool) == 1

    del rest
    assert pinned(pool) == 0
    assert pool.reader.pins.pinned_bytes == 0
    assert pool.owner.usage().pinned_bytes == 0


def test_a_view_cannot_be_written_through(pool):
    block = pool.reader.view(key_of(1))

    with pytest.raises(TypeError):
        block.copy[0] = 1
    with pytest.raises(TypeError):
        block.payload[0] = 1


def test_numpy_arrays_keep_the_pin(pool):
    numpy = pytest.importorskip("numpy")
    array = numpy.frombuffer(pool.reader.view(key_of(1)).payload, dtype=numpy.uint64)[3:]
    assert pinned(pool) == 1
    assert not array.flags.writeable
    assert set(array.tolist()) == {1}

    del array
    assert pinned(pool) == 0


@pytest.mark.slow
def test_tensors_keep_the_pin_and_need_no_copy_and_no_warning(pool):
    torch = pytest.importorskip("torch")
    block = pool.reader.view(key_of(1))
    tensor = torch.frombuffer(block.copy.obj, dtype=torch.int64, offset=HEADER_BYTES).view(2, -1)[1]
    del block
    gc.collect()
    assert pinned(pool) == 1
    assert set(tensor.tolist()) == {1}

    del tensor
    assert pinned(pool) == 0


def test_a_pinned_slot_is_not_reused_while_others_come_and_go(make_pool):
    pool = make_pool(slab_count=1)
    pool.put(0)
    view = pool.reader.view(key_of(0))
    for number in range(1, 100):
        assert pool.put(number) == "published"

    assert bytes(view.payload) == payload_of(0)
    pool.owner.check()


def test_without_a_free_word_a_read_is_a_verified_copy(make_pool):
    pool = make_pool(pin_slots=1)
    pool.put(1)
    pool.put(2)
    held = pool.reader.view(key_of(1))

    block = pool.reader.view(key_of(2))

    assert held.pinned
    assert not block.pinned
    assert bytes(block.payload) == payload_of(2)
    assert pool.reader.counters.unpinned_copies == 1
    with pytest.raises(TypeError):
        block.copy[0] = 1


def test_over_budget_a_read_is_a_verified_copy(make_pool):
    pool = make_pool()
    pool.put(1)
    pool.put(2)
    reader = pool.client(budget_bytes=COPY_BYTES)
    first = reader.view(key_of(1))
    assert first.pinned
    assert not reader.view(key_of(2)).pinned

    del first
    assert reader.view(key_of(2)).pinned


def test_the_owners_share_bounds_every_client(make_pool):
    pool = make_pool()
    pool.put(1)
    pool.region.words[(1024 + 16) // 8] = COPY_BYTES - 1

    assert not pool.reader.view(key_of(1)).pinned


def test_views_outlive_reader_connection_and_file(make_pool):
    pool = make_pool(slab_count=1)
    pool.put(0)
    reader = pool.client()
    view = reader.view(key_of(0))
    pool.owner.release_holder(102)
    del reader
    gc.collect()
    pool.owner.tick(1.0)
    for number in range(1, 30):
        pool.put(number)
    pool.owner.tick(2.0)

    assert bytes(view.payload) == payload_of(0), "its process lives, so its slot was not reused"

    other = pool.reader.view(key_of(29))
    del view
    gc.collect()
    pool.owner.tick(3.0)
    assert pool.owner.usage().pinned_bytes == COPY_BYTES
    pool.region.close()
    assert bytes(other.payload) == payload_of(29)


def test_two_clients_cannot_share_hazard_words(make_pool):
    """A range that another process still holds is of no use, and reads fall back to copies."""
    from l2_rdma.pins import PinTable
    from l2_rdma.reader import Reader
    from l2_rdma.region import Region
    from tests.l2_rdma.regions import TENANT

    pool = make_pool(pin_slots=8)
    pool.put(1)
    region = Region.attach(pool.region.path, TENANT)
    intruder = Reader(region, PinTable(region, 0, 8))

    assert intruder.pins.count == 0
    block = intruder.view(key_of(1))
    assert block is not None
    assert not block.pinned


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_pins_nor_unpins_for_its_parent(pool):
    view = pool.reader.view(key_of(1))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            copy = pool.reader.view(key_of(1))
            assert copy is not None
            right = bytes(copy.payload) == payload_of(1) and not copy.pinned
            del view
            gc.collect()
            status = 0 if right else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert pinned(pool) == 1
    assert pool.owner.usage().pinned_bytes == COPY_BYTES
    assert bytes(view.payload) == payload_of(1)


@pytest.mark.slow
def test_threads_share_a_table(make_pool):
    pool = make_pool(slab_count=4, pin_slots=4)
    for number in range(12):
        pool.put(number)
    wrong = []

    def read(seed):
        held = []
        for step in range(1500):
            number = (seed * 31 + step * 7) % 12
            block = pool.reader.view(key_of(number))
            if block is None or bytes(block.payload[:8]) != payload_of(number)[:8]:
                wrong.append(number)
            held.append(block)
            if len(held) > 3:
                held.pop(0)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    gc.collect()
    assert pinned(pool) == 0
    assert pool.reader.pins.pinned_bytes == 0
    assert pool.owner.usage().pinned_bytes == 0
    assert PAYLOAD_BYTES < COPY_BYTES
