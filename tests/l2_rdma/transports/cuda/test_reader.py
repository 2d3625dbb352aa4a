"""One-sided reads into a process's own GPU memory."""

import time

import pytest

from kvcomm.errors import PayloadError, Unavailable
from l2_rdma.transports.cuda.gpu import DeviceBuffer
from tests.l2_rdma.regions import key_of, payload_of
from tests.l2_rdma.transports.cuda.conftest import download, upload
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu

PAYLOAD_BYTES = 768


def soon():
    return time.monotonic() + 10


@pytest.fixture
def buffer(gpu):
    buffer = upload(gpu, b"\xaa" * PAYLOAD_BYTES)
    yield buffer
    gpu.free(buffer.pointer)


def test_a_view_is_the_pools_memory_pinned_for_as_long_as_it_lives(make_pool):
    pool = make_pool()
    pool.put(1)

    [block] = pool.reader.view([key_of(1)])

    assert download(pool.gpu, block.payload) == payload_of(1)
    assert block.key == key_of(1)
    assert pool.reader.pins.pinned_count == 1
    part = block.payload.part(8, 8)
    del block
    assert pool.reader.pins.pinned_count == 1, "what was made from it keeps the pin"
    del part
    assert pool.reader.pins.pinned_count == 0


def test_a_pinned_block_is_not_evicted(make_pool):
    pool = make_pool(slab_count=1)
    pool.put(0)
    [kept] = pool.reader.view([key_of(0)])
    for number in range(1, 20):
        pool.put(number)
        pool.owner.tick(float(number))

    assert download(pool.gpu, kept.payload) == payload_of(0)


def test_payloads_are_verified_once_a_generation(make_pool, gpu):
    pool = make_pool()
    pool.put(1)
    pool.put(2)

    for _ in range(3):
        assert all(pool.reader.view([key_of(1), key_of(2)]))

    assert pool.reader.counters.payloads_verified == 2
    assert pool.client().view([key_of(1)]) != [None]


def test_a_damaged_payload_is_a_miss_and_reported(make_pool, buffer):
    pool = make_pool()
    pool.put(1)
    pool.put(2)
    pool.damage(1)

    first, second = pool.reader.view([key_of(1), key_of(2)])

    assert first is None
    assert second is not None
    assert pool.reader.counters.corrupt == 1
    pool.owner.tick(1.0)
    assert pool.owner.present([key_of(1)], b"tenant-of-tests!") == [False]


def test_fetch_copies_and_misses(make_pool, gpu, buffer):
    pool = make_pool()
    pool.put(1)
    other = upload(gpu, b"\xbb" * PAYLOAD_BYTES)

    headers = pool.reader.fetch([key_of(7), key_of(1)], [other, buffer], soon())

    assert [header is not None for header in headers] == [False, True]
    assert download(gpu, buffer) == payload_of(1)
    assert pool.reader.pins.pinned_count == 0
    gpu.free(other.pointer)


def test_without_pins_the_copy_itself_is_verified(make_pool, gpu, buffer):
    pool = make_pool()
    pool.put(1)
    reader = pool.client(0)
    assert reader.view([key_of(1)]) == [None]

    [header] = reader.fetch([key_of(1)], [buffer], soon())

    assert header.key == key_of(1)
    assert download(gpu, buffer) == payload_of(1)
    pool.damage(1)
    assert reader.fetch([key_of(1)], [buffer], soon()) == [None]
    assert reader.counters.corrupt == 1


def test_a_buffer_of_another_length_is_refused_before_anything_is_copied(make_pool, gpu, buffer):
    pool = make_pool()
    pool.put(1)

    with pytest.raises(PayloadError):
        pool.reader.fetch([key_of(1)], [buffer.part(0, 760)], soon())
    assert download(gpu, buffer) == b"\xaa" * PAYLOAD_BYTES


@pytest.mark.parametrize("end", ["deadline", "interrupt"])
def test_a_fetch_that_is_given_up_leaves_no_copy_under_way(make_pool, gpu, buffer, monkeypatch, end):
    if not isinstance(gpu, HostGpu):
        pytest.skip("only a GPU of plain memory can be held")
    pool = make_pool()
    pool.put(1)
    stream = pool.reader._stream
    stream.held = True

    def interrupted():
        raise KeyboardInterrupt

    if end == "interrupt":
        monkeypatch.setattr(stream, "idle", interrupted)
    with pytest.raises(KeyboardInterrupt if end == "interrupt" else Unavailable):
        pool.reader.fetch([key_of(1)], [buffer], 0.0)

    assert stream._copies == []
    assert pool.reader.pins.pinned_count == 0
    stream.held = False


def test_a_fetch_ends_although_other_threads_keep_the_stream_busy(make_pool, gpu, buffer, monkeypatch):
    pool = make_pool()
    pool.put(1)
    monkeypatch.setattr(pool.reader._stream, "idle", lambda: False)

    [header] = pool.reader.fetch([key_of(1)], [buffer], soon())

    assert header.key == key_of(1)
    assert download(gpu, buffer) == payload_of(1)


def test_an_entry_that_leads_out_of_the_slots_is_not_followed(make_pool):
    pool = make_pool()
    pool.put(1)
    hint = pool.reader._index.probe(key_of(1))
    end = pool.region.header.layout.slots_end
    pool.owner._index.rewrite(hint.entry, key_of(1), hint.generation, end, 1024)

    assert pool.reader.view([key_of(1)]) == [None]


def test_a_stale_reservation_cannot_be_written_to(make_pool):
    pool = make_pool()
    pool.put(1)
    hint = pool.reader._index.probe(key_of(1))

    assert pool.reader.begin_write(hint.offset, hint.generation, 1024) is None
    assert pool.reader.begin_write(hint.offset, 1, 1024) is None
    assert pool.reader.pins.pinned_count == 0


def test_digest_is_what_headers_carry(make_pool, gpu):
    pool = make_pool()
    pool.put(1)
    [block] = pool.reader.view([key_of(1)])

    assert pool.reader.digest(block.payload) == block.header.payload_checksum


def test_a_device_buffer_checks_itself():
    with pytest.raises(ValueError, match="address"):
        DeviceBuffer(0, 8)
    with pytest.raises(ValueError, match="not inside"):
        DeviceBuffer(4096, 8).part(4, 8)
    with pytest.raises(ValueError, match="not memory of a GPU"):
        DeviceBuffer.of(b"bytes")
    assert DeviceBuffer.of(DeviceBuffer(4096, 8)).nbytes == 8


@pytest.mark.gpu
def test_a_tensor_made_from_a_view_shares_its_memory_and_keeps_its_pin(make_pool, gpu):
    if isinstance(gpu, HostGpu):
        pytest.skip("torch shares memory of a real GPU only")
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    pool = make_pool()
    pool.put(1)
    [block] = pool.reader.view([key_of(1)])

    tensor = torch.as_tensor(block.payload, device="cuda")
    assert tensor.data_ptr() == block.payload.pointer
    assert DeviceBuffer.of(tensor).nbytes == PAYLOAD_BYTES
    del block
    assert tensor.cpu().numpy().tobytes() == payload_of(1)
    assert pool.reader.pins.pinned_count == 1
    del tensor
    assert pool.reader.pins.pinned_count == 0
