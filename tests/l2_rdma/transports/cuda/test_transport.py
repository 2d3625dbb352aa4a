"""What the cuda channel does beyond the contract of all transports: device memory, events, deadlines,
failure."""

import time

import msgspec
import pytest

from kvcomm.block import Incarnation
from kvcomm.errors import Corrupt, Refused, Unavailable
from l2_rdma.copying import address_of
from l2_rdma.transports.cuda import make_provider, transport
from l2_rdma.transports.cuda.provider import CudaAnswer, CudaProvider
from l2_rdma.transports.cuda.transport import CudaTransport
from l2_rdma.transports.port import Extent, WireOptions
from tests.l2_rdma.regions import OTHER_TENANT, TENANT, payload_of
from tests.l2_rdma.transports.cuda.conftest import DevicePool, download, upload
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu


def soon():
    return time.monotonic() + 10


@pytest.fixture
def wire(make_pool):
    """A pool, a transport on its GPU, and a channel between them."""
    pool = make_pool()
    provider = make_provider(pool.region.file, WireOptions())
    mine = CudaTransport(pool.gpu)
    channel = mine.connect(
        provider.offer(), pool.region.header, lambda asked: provider.open(1, TENANT, asked), soon()
    )
    yield pool, mine, channel
    mine.close()


def test_a_slot_is_read_whole_like_on_every_transport(wire):
    pool, mine, channel = wire
    pool.put(1)
    offset = pool.offset_of(1)
    copy = memoryview(bytearray(1024))
    word = memoryview(bytearray(8))

    mine.wait(channel.read([Extent(offset, 1024), Extent(offset + 248, 8)], [copy, word], soon()))

    assert bytes(copy[256:]) == payload_of(1)
    assert bytes(copy[248:256]) == bytes(word)
    assert int.from_bytes(word, "little") == pool.generation_on_gpu(offset)


def test_device_memory_may_stand_where_host_memory_does(wire):
    pool, mine, channel = wire
    begin = pool.region.header.layout.slots_offset
    data = payload_of(9, 512)
    source, target = upload(pool.gpu, data), upload(pool.gpu, bytes(512))

    mine.wait([channel.write(Extent(begin, 512), source, soon())])
    mine.wait(channel.read([Extent(begin, 512)], [target], soon()))

    assert download(pool.gpu, target) == data


def test_index_and_words_are_in_the_file(wire):
    pool, mine, channel = wire
    head = memoryview(bytearray(1024))
    on_gpu = upload(pool.gpu, bytes(1024))

    mine.wait(channel.read([Extent(0, 1024)], [head], soon()))
    mine.wait(channel.read([Extent(0, 1024)], [on_gpu], soon()))
    added = channel.fetch_add(2048, 5, soon())
    swapped = channel.compare_swap(2048, 5, 7, soon())

    assert bytes(head) == pool.region.header.pack() == download(pool.gpu, on_gpu)
    assert (added.value, swapped.value, pool.region.file.words[256]) == (0, 5, 7)


def test_an_extent_across_the_border_is_read_from_both(wire):
    pool, mine, channel = wire
    border = pool.region.header.layout.slots_offset
    pool.region.file.memory[border - 8 : border] = b"in file."
    mine.wait([channel.write(Extent(border, 8), b"on gpu!!", soon())])
    both = memoryview(bytearray(16))

    mine.wait(channel.read([Extent(border - 8, 16)], [both], soon()))
    [across] = channel.read([Extent(border - 8, 16)], [upload(pool.gpu, bytes(16))], soon())

    assert bytes(both) == b"in file.on gpu!!"
    assert isinstance(across.error, Refused)


def test_a_word_in_the_slots_has_no_atomics(wire):
    pool, _, channel = wire

    assert isinstance(channel.fetch_add(pool.region.header.layout.slots_offset, 1, soon()).error, Refused)


def test_registered_memory_is_locked_once_and_given_back(wire):
    _, mine, _ = wire
    memory = memoryview(bytearray(64 << 10))

    first = mine.register(memory)
    again = mine.register(memory)
    first.close()
    again.close()
    third = mine.register(memory)

    assert (third.pinned, again.refusal) == (True, "locked already")
    third.close()
    third.close()
    assert not third.pinned


def test_a_registration_may_be_forgotten_while_memory_is_locked_or_copied(wire, monkeypatch):
    """The collector of garbage comes at any time, in any thread."""
    _, mine, _ = wire
    memory, other = memoryview(bytearray(64 << 10)), memoryview(bytearray(64 << 10))
    forgotten = [mine.register(memory)]
    register = mine.gpu.register

    def collected(address, nbytes):
        forgotten.clear()
        register(address, nbytes)

    monkeypatch.setattr(mine.gpu, "register", collected)

    second = mine.register(other)
    assert second.pinned
    assert mine.register(memory).pinned, "the first one is gone"
    second.close()


def test_memory_is_cut_before_it_is_locked_and_until_it_no_longer_is(wire, monkeypatch):
    _, mine, _ = wire
    memory = memoryview(bytearray(64 << 10))
    address = address_of(memory)
    whole = []
    for name in ("register", "unregister"):
        call = getattr(mine.gpu, name)

        def looked(*arguments, call=call):
            call(*arguments)
            whole.append(mine._locked.whole(address, len(memory)))

        monkeypatch.setattr(mine.gpu, name, looked)

    mine.register(memory[8192:16384]).close()

    assert whole == [False, False]
    assert mine._locked.whole(address, len(memory))


def test_a_registration_that_is_forgotten_ends_with_its_last_reference(wire):
    _, mine, _ = wire
    memory = memoryview(bytearray(64 << 10))
    assert mine.register(memory).pinned

    assert mine.register(memory).pinned, "the first one is gone"


@pytest.mark.parametrize(("begin", "length"), [(0, 100), (50, 4096), (4000, 20_000), (0, 60_000), (8200, 8)])
def test_a_copy_half_in_registered_memory_is_cut(wire, begin, length):
    pool, mine, channel = wire
    slots = pool.region.header.layout.slots_offset
    length = min(length, pool.region.header.layout.slots_end - slots)
    data = payload_of(6, 64 << 10)[:length]
    mine.wait([channel.write(Extent(slots, length), data, soon())])
    memory = memoryview(bytearray(64 << 10))
    registration = mine.register(memory[100:8200])

    [operation] = channel.read([Extent(slots, length)], [memory[begin : begin + length]], soon())
    mine.wait([operation])

    assert operation.error is None
    assert bytes(memory[begin : begin + length]) == data
    registration.close()


def test_what_is_outside_the_region_is_refused(wire):
    pool, _, channel = wire
    end = pool.region.header.layout.region_bytes

    assert isinstance(channel.write(Extent(end - 4, 8), bytes(8), soon()).error, Refused)


class Clock:
    """Can be put forward."""

    def __init__(self):
        self.ahead_s = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead_s


HOUR_S = 3600.0


@pytest.fixture
def held(make_pool, gpu):
    """A channel whose copies stay under way."""
    if not isinstance(gpu, HostGpu):
        pytest.skip("only a GPU of plain memory can be held")
    pool = make_pool()
    pool.put(1)
    mine = CudaTransport(gpu, Clock())
    provider = CudaProvider(pool.region)
    channel = mine.connect(
        provider.offer(), pool.region.header, lambda asked: provider.open(1, TENANT, asked), soon()
    )
    stream = gpu.streams[-1]
    assert stream is channel._stream
    stream.held = True
    yield pool, mine, channel
    stream.held = False
    mine.close()


def test_an_operation_past_its_deadline_is_over_and_its_memory_is_nobodys(held):
    pool, mine, channel = held
    into = memoryview(bytearray(1024))

    [late] = channel.read([Extent(pool.offset_of(1), 1024)], [into], time.monotonic() + HOUR_S)
    assert not late.done
    mine._clock.ahead_s = 2 * HOUR_S
    mine.wait([late])

    assert isinstance(late.error, Unavailable)
    into[:] = bytes(1024)
    channel._stream.run()
    assert bytes(into) == bytes(1024), "nothing arrives after the end"
    assert channel.broken is None, "copies end by themselves: the channel lives on"


def test_more_than_fits_waits_in_the_channel(held, monkeypatch):
    pool, mine, channel = held
    monkeypatch.setattr(transport, "FLIGHT_COPIES_MAX", 2)
    extent = Extent(pool.offset_of(1), 1024)
    into = [memoryview(bytearray(1024)) for _ in range(5)]

    posted = channel.read([extent] * 5, into, soon())
    assert len(channel._stream._copies) == 2
    channel._stream.held = False
    channel._stream.run()
    mine.wait(posted)

    assert [each.error for each in posted] == [None] * 5
    assert {bytes(each) for each in into} == {bytes(into[0])}


def test_what_waits_in_the_channel_has_deadlines_too(held, monkeypatch):
    pool, mine, channel = held
    monkeypatch.setattr(transport, "FLIGHT_COPIES_MAX", 1)
    extent = Extent(pool.offset_of(1), 1024)
    into = [memoryview(bytearray(1024)) for _ in range(2)]
    [first] = channel.read([extent], into[:1], time.monotonic() + 3 * HOUR_S)

    [queued] = channel.read([extent], into[1:], time.monotonic() + HOUR_S)
    mine._clock.ahead_s = 2 * HOUR_S
    mine.wait([queued])

    assert isinstance(queued.error, Unavailable)
    assert not first.done


def test_closing_ends_what_is_under_way(held):
    pool, _, channel = held
    [operation] = channel.read([Extent(pool.offset_of(1), 1024)], [memoryview(bytearray(1024))], soon())

    channel.close()

    assert isinstance(operation.error, Unavailable)
    assert isinstance(channel.broken, Unavailable)
    [after] = channel.read([Extent(0, 8)], [memoryview(bytearray(8))], soon())
    assert isinstance(after.error, Unavailable)


def test_a_failed_gpu_breaks_the_channel_and_nothing_waits_for_it(held, gpu):
    pool, mine, channel = held
    [operation] = channel.read([Extent(pool.offset_of(1), 1024)], [memoryview(bytearray(1024))], soon())
    gpu.failed = "cudaErrorIllegalAddress"

    mine.wait([operation])
    gpu.failed = ""

    assert "IllegalAddress" in str(operation.error)
    assert channel.broken is operation.error


def test_a_channel_whose_pool_closes_its_region_still_ends_what_is_under_way(held):
    pool, mine, channel = held
    [operation] = channel.read([Extent(pool.offset_of(1), 1024)], [memoryview(bytearray(1024))], soon())
    other = DevicePool(pool.region.file.path.parent, pool.gpu)
    provider = CudaProvider(other.region)

    pool.region.file.close()
    mine.connect(provider.offer(), other.region.header, lambda asked: provider.open(1, TENANT, asked), soon())
    channel._stream.held = False
    channel._stream.run()
    mine._poll(0.0)

    assert operation.done
    other.close()


def test_what_is_read_after_the_gpu_failed_in_the_middle_of_a_batch_fails_at_once(held, gpu):
    pool, _, channel = held
    into = [memoryview(bytearray(1024)) for _ in range(5)]
    gpu.fails_after_copies = 1

    posted = channel.read([Extent(pool.offset_of(1), 1024)] * 5, into, soon())

    assert [str(each.error) for each in posted] == ["a copy failed"] * 5


def test_a_broken_channel_leaves_its_region_mapped_until_it_is_closed(held, gpu):
    pool, _, channel = held
    address = channel.region.slots.pointer
    gpu.fails_after_copies = 0

    [failed] = channel.read([Extent(pool.offset_of(1), 1024)], [memoryview(bytearray(1024))], soon())

    assert failed.error is channel.broken
    assert address in gpu._maps, "views of a reader are still there"
    channel.close()
    assert address not in gpu._maps


def test_memory_is_unlocked_although_the_gpu_failed(held, gpu):
    pool, mine, channel = held
    memory = memoryview(bytearray(1024))
    registration = mine.register(memory)
    [operation] = channel.read([Extent(pool.offset_of(1), 1024)], [memory], soon())
    gpu.failed = "cudaErrorIllegalAddress"

    registration.close()
    gpu.failed = ""

    assert isinstance(operation.error, Unavailable)
    assert not gpu.registered


def test_a_pool_that_closes_its_region_breaks_the_channel(wire):
    pool, _, channel = wire
    pool.region.file.close()

    assert isinstance(channel.broken, Unavailable)
    assert isinstance(channel.write(Extent(0, 8), bytes(8), soon()).error, Unavailable)


@pytest.mark.parametrize("what", ["host", "tenant", "life", "bytes"])
def test_who_cannot_or_may_not_map_it_is_told_so(make_pool, what, monkeypatch):
    pool = make_pool()
    provider = CudaProvider(pool.region)
    mine = CudaTransport(pool.gpu)
    offer, header, tenant = provider.offer(), pool.region.header, TENANT
    expected: type[Exception] = Refused
    if what == "host":
        monkeypatch.setattr(transport, "host_id", lambda: b"elsewhere")
    elif what == "tenant":
        tenant = OTHER_TENANT
    elif what == "life":
        header, expected = (
            type(header)(
                header.instance, header.node, TENANT, 99, header.generation_base, header.layout, True
            ),
            Unavailable,
        )
    else:
        offer, expected = b"\xc1", Corrupt
    with pytest.raises(expected):
        mine.connect(offer, header, lambda asked: provider.open(1, tenant, asked), soon())
    with pytest.raises(Corrupt):
        provider.open(1, TENANT, b"\xc1")


def test_who_is_closed_or_fails_while_connecting_leaves_nothing_mapped(make_pool, gpu, monkeypatch):
    if not isinstance(gpu, HostGpu):
        pytest.skip("CUDA maps a process's own memory without counting")
    pool = make_pool()
    provider = CudaProvider(pool.region)
    mapped = dict(gpu._maps)

    def connect(while_asked):
        mine = CudaTransport(gpu)

        def ask(proposal):
            while_asked(mine)
            return provider.open(1, TENANT, proposal)

        return mine.connect(provider.offer(), pool.region.header, ask, soon())

    def fail():
        raise Unavailable("no stream")

    assert isinstance(connect(lambda mine: mine.close()).broken, Unavailable)
    monkeypatch.setattr(gpu, "stream", fail)
    with pytest.raises(Unavailable, match="no stream"):
        connect(lambda mine: None)

    assert gpu._maps == mapped


def test_a_handle_that_is_none_is_the_pools_fault(make_pool):
    pool = make_pool()
    provider = CudaProvider(pool.region)
    answer = msgspec.msgpack.encode(CudaAnswer(str(pool.region.file.path), bytes(63)))

    with pytest.raises(Corrupt, match="64 bytes"):
        CudaTransport(pool.gpu).connect(provider.offer(), pool.region.header, lambda asked: answer, soon())


def test_a_pool_in_host_memory_offers_no_cuda(tmp_path):
    from l2_rdma.region import Region
    from tests.l2_rdma.regions import layout_of

    plain = Region.create(
        tmp_path, instance="t", node="n", tenant=TENANT, incarnation=Incarnation(3), layout=layout_of(1)
    )
    with pytest.raises(Unavailable, match="host memory"):
        make_provider(plain, WireOptions())
    plain.close()


@pytest.mark.gpu
def test_unregistered_and_registered_memory_get_the_same_bytes(wire):
    pool, mine, channel = wire
    begin = pool.region.header.layout.slots_offset
    data = payload_of(5, 8192)
    mine.wait([channel.write(Extent(begin, 8192), data, soon())])
    plain, locked = memoryview(bytearray(8192)), memoryview(bytearray(8192))
    registration = mine.register(locked)

    mine.wait(channel.read([Extent(begin, 8192)] * 2, [plain, locked], soon()))

    assert registration.pinned
    assert bytes(plain) == bytes(locked) == data
    registration.close()
