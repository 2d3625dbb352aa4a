"""What is shared memory's own; what it has in common with the others is in tests/contracts/transports."""

import gc
import os
import weakref
from dataclasses import replace

import msgspec
import pytest

from kvcomm.errors import Corrupt, Refused, Unavailable
from l2_rdma.region import Region, host_id
from l2_rdma.transports.port import Extent, Provider, Transport
from l2_rdma.transports.shm import ShmOffer, ShmProvider, ShmTransport
from l2_rdma.words import Words
from tests.l2_rdma.regions import OTHER_TENANT, TENANT
from tests.peers import soon


def nothing_asked(proposal):
    raise AssertionError("a path needs no answer")


@pytest.fixture
def transport():
    made = ShmTransport()
    yield made
    made.close()


@pytest.fixture
def region(make_pool):
    return make_pool().region


def connect(transport, region, **changes):
    offer = msgspec.structs.replace(
        msgspec.msgpack.decode(ShmProvider(region).offer(), type=ShmOffer), **changes
    )
    return transport.connect(msgspec.msgpack.encode(offer), region.header, nothing_asked, soon())


def test_it_is_a_transport_and_a_provider(transport, region):
    as_transport: Transport = transport
    as_provider: Provider = ShmProvider(region)

    assert as_transport.name == as_provider.name == "shm"
    assert not as_provider.writes_unseen, "who maps a region pins what it writes to"
    with pytest.raises(Refused):
        as_provider.open(1, TENANT, b"")


def test_operations_are_done_when_they_are_posted(transport, region):
    channel = connect(transport, region)
    into = memoryview(bytearray(16))
    [reading] = channel.read([Extent(0, 16)], [into], soon())

    assert reading.done
    assert into == region.memory[:16]


def test_a_path_of_another_host_means_nothing(transport, region):
    with pytest.raises(Refused, match="another host"):
        connect(transport, region, host=host_id() + b"-not")


def test_a_file_that_is_gone_is_unavailable(transport, region):
    with pytest.raises(Unavailable):
        connect(transport, region, path=str(region.path) + "-not")


def test_a_path_that_is_none_is_corrupt(transport, region):
    with pytest.raises(Corrupt, match="no path"):
        connect(transport, region, path="/dev/shm/\0")


def test_another_life_of_the_pool_is_not_what_was_offered(transport, make_pool):
    old, new = make_pool().region, make_pool().region
    with pytest.raises(Unavailable, match="another life"):
        transport.connect(ShmProvider(new).offer(), old.header, nothing_asked, soon())


def test_another_tenants_region_is_refused(transport, region):
    header = replace(region.header, tenant=OTHER_TENANT)
    with pytest.raises(Refused, match="tenant"):
        transport.connect(ShmProvider(region).offer(), header, nothing_asked, soon())


def test_an_offer_that_is_none_is_corrupt(transport, region):
    with pytest.raises(Corrupt):
        transport.connect(b"\xc1", region.header, nothing_asked, soon())


def test_a_region_that_its_owner_closes_breaks_the_channel(transport, region):
    channel = connect(transport, region)
    assert channel.broken is None
    region.close()

    assert isinstance(channel.broken, Unavailable)
    operation = channel.write(Extent(region.header.layout.slots_offset, 1), b"x", soon())
    assert isinstance(operation.error, Unavailable)
    assert region.memory[region.header.layout.slots_offset] == 0


def test_a_word_that_somebody_holds_costs_the_deadline(transport, region):
    channel = connect(transport, region)
    descriptor = os.open(region.path, os.O_RDWR)
    offset = region.header.layout.hazard_offset
    assert Words(region.words, descriptor)._hold(offset)

    operation = channel.fetch_add(offset, 1, soon(0.02))
    os.close(descriptor)

    assert isinstance(operation.error, Unavailable)
    assert region.words[offset // 8] == 0


def test_a_transport_does_not_keep_what_was_forgotten(transport, region):
    channel = weakref.ref(connect(transport, region))
    gc.collect()

    assert channel() is None


def test_views_outlive_the_channel(transport, region):
    channel = connect(transport, region)
    mapped = Region.attach(region.path, TENANT)
    channel.close()
    transport.close()

    assert mapped.memory[:8] == region.memory[:8]
    mapped.close()
