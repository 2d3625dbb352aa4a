"""Meeting a pool, and memory that is registered."""

from dataclasses import replace

import msgspec
import pytest

from kvcomm.block import Incarnation
from kvcomm.errors import Corrupt, Refused, Unavailable
from l2_rdma.transports.port import Extent, Transport
from l2_rdma.transports.verbs.pair import Endpoint
from l2_rdma.transports.verbs.provider import VerbsAnswer, VerbsOffer
from tests.l2_rdma.regions import TENANT
from tests.l2_rdma.transports.verbs.fabric import CONSTANTS, Card
from tests.peers import soon


def connect(net, *, offer=None, header=None, change=lambda answer: answer):
    """Like ``net.connect``, with something wrong."""

    def ask(proposal):
        packed = net.provider.open(1, TENANT, proposal)
        return msgspec.msgpack.encode(change(msgspec.msgpack.decode(packed, type=VerbsAnswer)))

    return net.transport.connect(offer or net.provider.offer(), header or net.region.header, ask, soon())


def nothing_is_left(net, call, *errors, match):
    """``call`` fails; our side has as many queue pairs as before."""
    objects = net.fabric.objects.count("QP")
    with pytest.raises(errors, match=match):
        call()
    net.provider.close_holder(1)
    assert net.fabric.objects.count("QP") == objects


def test_it_is_a_transport(net):
    transport: Transport = net.transport
    assert transport.name == "verbs"
    assert net.transport.report.device == net.provider.report.device == "mlx_0"


def test_the_smaller_side_sets_the_limits(net):
    def weaker(answer):
        endpoint = msgspec.structs.replace(answer.endpoint, mtu_bytes=1024, reads=2, message_bytes_max=4096)
        return msgspec.structs.replace(answer, endpoint=endpoint)

    channel = connect(net, change=weaker)
    attributes = net.fabric.pairs[channel.endpoint().queue_pair].attributes
    assert (attributes.path_mtu, attributes.max_rd_atomic) == (3, 2)

    into = memoryview(bytearray(10_000))
    registration = net.transport.register(into)
    net.fabric.posted_chains.clear()
    reads = channel.read([Extent(0, 10_000)], [into], soon())
    net.transport.wait(reads)
    assert [len(chain) for chain in net.fabric.posted_chains] == [3]
    assert into == net.region.memory[:10_000]
    registration.close()


def test_another_kind_of_network_is_refused(net):
    offer = msgspec.msgpack.encode(VerbsOffer("mlx5_7", "InfiniBand", ""))
    nothing_is_left(net, lambda: connect(net, offer=offer), Refused, match="mlx5_7 is on InfiniBand")


def test_what_is_no_offer_and_no_answer_is_damaged(net):
    nothing_is_left(net, lambda: connect(net, offer=b"\xc1"), Corrupt, match="offer")

    def junk():
        net.transport.connect(net.provider.offer(), net.region.header, lambda _: b"\xc1", soon())

    nothing_is_left(net, junk, Corrupt, match="answer")

    def wrong(answer):
        return msgspec.structs.replace(answer, endpoint=Endpoint(1, 1, "x", 0, 4096, 16, 1))

    nothing_is_left(net, lambda: connect(net, change=wrong), Corrupt, match="wrongly")

    def short(answer):
        return msgspec.structs.replace(answer, length=answer.length - 1)

    nothing_is_left(net, lambda: connect(net, change=short), Corrupt, match="of its region only")


def test_a_pool_that_does_not_answer(net):
    def silent(_proposal):
        raise Unavailable("gone")

    def attempt():
        net.transport.connect(net.provider.offer(), net.region.header, silent, soon())

    nothing_is_left(net, attempt, Unavailable, match="gone")


def test_a_path_without_packets_names_both_ends(net):
    def elsewhere(answer):
        return msgspec.structs.replace(
            answer, endpoint=msgspec.structs.replace(answer.endpoint, queue_pair=9_999)
        )

    match = r"no packet comes back from .*c633:6401 .*look at their route and MTU"
    nothing_is_left(net, lambda: connect(net, change=elsewhere), Unavailable, match=match)


def test_the_memory_of_another_life_is_found_out(net):
    header = replace(net.region.header, incarnation=Incarnation(12))
    nothing_is_left(net, lambda: connect(net, header=header), Unavailable, match="another life")


def test_a_closed_transport(net):
    channel = net.connect()
    net.transport.close()
    net.transport.close()

    [reading] = channel.read([Extent(0, 8)], [memoryview(bytearray(8))], soon())
    assert isinstance(reading.error, Unavailable)
    net.transport.wait([reading])
    with pytest.raises(ValueError, match="closed"):
        net.connect()
    with pytest.raises(ValueError, match="closed"):
        net.transport.register(memoryview(bytearray(8)))


def test_what_cannot_be_registered(net):
    for view in (memoryview(bytearray()), memoryview(bytearray(8))[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            net.transport.register(view)


def test_read_only_memory_can_be_written_from(net):
    channel, data = net.connect(), memoryview(bytes(range(256)) * 16)
    registration = net.transport.register(data)
    assert net.fabric.regions[registration.key].access == 0
    offset = net.region.header.layout.slots_offset
    writing = channel.write(Extent(offset, 4096), data, soon())
    net.transport.wait([writing])

    assert writing.error is None
    assert net.region.memory[offset : offset + 4096] == data
    registration.close()


class TestLittleLockableMemory:
    @pytest.fixture
    def card(self):
        return Card(locked_bytes_max=16 << 20)

    def test_too_large_a_registration_is_told_with_advice(self, net):
        with pytest.raises(Unavailable, match="ulimit -l"):
            net.transport.register(memoryview(bytearray((16 << 20) + 1)))


def test_gpu_memory_that_the_device_cannot_reach_is_refused(net):
    with pytest.raises(Refused, match=r"mlx_0 cannot reach GPU memory: .*\(Operation not supported\)"):
        net.transport.register_dmabuf(5, 0, 4096)
    for offset, length in ((0, 0), (-1, 10)):
        with pytest.raises(ValueError, match="no part"):
            net.transport.register_dmabuf(5, offset, length)


class TestGpuDirect:
    @pytest.fixture
    def card(self):
        return Card(dmabuf=True)

    def test_reads_land_in_gpu_memory(self, net):
        channel = net.connect()
        begin = net.region.header.layout.slots_offset
        net.region.memory[begin : begin + 8192] = data = bytes(range(256)) * 32
        memory = net.transport.register_dmabuf(5, 4096, 8192)
        reads = channel.read_device(
            [Extent(begin, 100), Extent(begin + 100, 200)], [(memory, 0), (memory, 500)], soon()
        )
        net.transport.wait(reads)

        assert [each.error for each in reads] == [None, None]
        assert bytes(net.fabric.gpu)[4096:4196] == data[:100]
        assert bytes(net.fabric.gpu)[4596:4796] == data[100:300]
        for misplaced in ([(memory, 8100)], [(memory, -1)], []):
            with pytest.raises(ValueError):  # noqa: PT011
                channel.read_device([Extent(begin, 100)], misplaced, soon())
        memory.close()

    def test_it_has_no_address_here(self, net):
        memory = net.transport.register_dmabuf(5, 0, 4096)
        assert net.transport._hub.memory.empty
        assert net.fabric.regions[memory.key].access == CONSTANTS.IBV_ACCESS_LOCAL_WRITE
        memory.close()


def test_a_channel_that_is_being_opened_is_closed_too(net):
    """By another thread, while the pool is asked."""

    def ask(proposal):
        net.transport.close()
        return net.provider.open(1, TENANT, proposal)

    with pytest.raises(ValueError, match="the transport is closed"):
        net.transport.connect(net.provider.offer(), net.region.header, ask, soon())

    assert len(net.fabric.pairs) == 1, "the pool's, until its holder ends"
