"""A pool's side: what it registers, what it answers, and what ends with a holder."""

import msgspec
import pytest

from kvcomm.errors import Corrupt, Refused, Unavailable
from l2_rdma.transports.port import Extent, Provider
from l2_rdma.transports.verbs.device import open_device
from l2_rdma.transports.verbs.pair import Endpoint
from l2_rdma.transports.verbs.provider import CHANNELS_PER_HOLDER_MAX, VerbsProvider
from tests.l2_rdma.regions import OTHER_TENANT, TENANT
from tests.l2_rdma.transports.verbs.fabric import CONSTANTS, IPV4, Card, Fabric
from tests.peers import soon

PEER = Endpoint(17, 5, IPV4, 0, 4096, 16, 1 << 20)


def proposal(**changes):
    return msgspec.msgpack.encode(msgspec.structs.replace(PEER, **changes))


def dead(net, channel):
    [reading] = channel.read([Extent(0, 8)], [memoryview(bytearray(8))], soon())
    net.transport.wait([reading])
    return isinstance(reading.error, Unavailable) and channel.broken is not None


def test_it_is_a_provider_whose_clients_write_unseen(net):
    provider: Provider = net.provider
    assert (provider.name, provider.writes_unseen) == ("verbs", True)


def test_the_whole_region_is_one_registration_with_all_rights(net):
    registration = net.provider._registration

    assert registration.length == net.region.header.layout.region_bytes
    assert registration.access == (
        CONSTANTS.IBV_ACCESS_LOCAL_WRITE
        | CONSTANTS.IBV_ACCESS_REMOTE_READ
        | CONSTANTS.IBV_ACCESS_REMOTE_WRITE
        | CONSTANTS.IBV_ACCESS_REMOTE_ATOMIC
    )


@pytest.mark.parametrize("on_demand", [False, True])
def test_memory_is_taken_at_the_start_unless_the_device_pages_it_in(region_of_nothing, on_demand):
    fabric = Fabric(Card(on_demand=on_demand))
    before = region_of_nothing.path.stat().st_blocks
    provider = VerbsProvider(region_of_nothing, open_device(fabric.binding))
    taken = (region_of_nothing.path.stat().st_blocks - before) * 512

    layout = region_of_nothing.header.layout
    assert taken == (0 if on_demand else layout.slots_end - layout.slots_offset)
    assert bool(provider._registration.access & CONSTANTS.IBV_ACCESS_ON_DEMAND) == on_demand
    provider.close()


def test_too_little_lockable_memory_is_told_with_advice(region):
    fabric = Fabric(Card(locked_bytes_max=1 << 20))
    with pytest.raises(Unavailable, match=r"Cannot allocate memory.*ulimit -l"):
        VerbsProvider(region, open_device(fabric.binding))
    assert fabric.objects == []


def test_a_holders_channels_end_with_it(net):
    mine, other = net.connect(1), net.connect(2)
    net.provider.close_holder(1)
    net.provider.close_holder(1)
    net.provider.close_holder(3)

    assert dead(net, mine)
    assert not dead(net, other)


def test_a_holder_that_opens_many_loses_its_oldest(net):
    channels = [net.connect(1) for _ in range(CHANNELS_PER_HOLDER_MAX + 1)]

    assert dead(net, channels[0])
    assert not any(dead(net, channel) for channel in channels[1:])


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(["17", 5, IPV4, 0, 4096, 16, 1]),
        proposal(queue_pair=1 << 24),
        proposal(queue_pair=-1),
        proposal(packet_number=1 << 24),
        proposal(gid="nonsense"),
        proposal(gid="127.0.0.1"),
        proposal(lid=1 << 16),
        proposal(mtu_bytes=0),
        proposal(mtu_bytes=1500),
        proposal(reads=0),
        proposal(message_bytes_max=0),
    ],
)
def test_a_proposal_that_is_none_opens_nothing(net, packed):
    objects = net.fabric.objects
    with pytest.raises(Corrupt):
        net.provider.open(1, TENANT, packed)
    assert net.fabric.objects == objects


def test_another_tenant_opens_nothing(net):
    objects = net.fabric.objects
    with pytest.raises(Refused, match="tenant"):
        net.provider.open(1, OTHER_TENANT, proposal())
    assert net.fabric.objects == objects


def test_a_device_without_room_refuses_and_leaves_nothing(net, monkeypatch):
    def no_room(self, attributes):
        raise net.fabric.binding.Error("Failed to modify QP")

    monkeypatch.setattr(net.fabric.binding.QP, "to_rtr", no_room)
    objects = net.fabric.objects
    with pytest.raises(Refused, match="cannot make a queue pair"):
        net.provider.open(1, TENANT, proposal())
    assert net.fabric.objects == objects


def test_a_closed_provider_opens_nothing(net):
    channel = net.connect()
    net.provider.close()
    net.provider.close()

    assert dead(net, channel)
    with pytest.raises(Refused):
        net.provider.open(1, TENANT, proposal())
    net.provider.close_holder(1)


def test_a_forked_child_closes_nothing_of_its_parents(net):
    net.connect()
    objects = net.fabric.objects
    net.provider.abandon()
    net.provider.close_holder(1)
    net.provider.close()

    assert net.fabric.objects == objects
    net.provider._closed = False  # the parent again
