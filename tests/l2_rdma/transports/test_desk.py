"""The pool's side of the negotiation, over providers that remember what they were asked."""

import pytest

from kvcomm.channels import Channels
from kvcomm.errors import Refused
from kvcomm.wire.messages import ChannelOffer, ChannelOffers
from l2_rdma.layout import RegionHeader
from l2_rdma.transports.desk import Desk
from tests.l2_rdma.regions import OTHER_TENANT, TENANT, layout_of, region_header

HEADER = region_header(layout_of())


class Ways:
    """A provider."""

    def __init__(self, name, writes_unseen):
        self.name = name
        self.writes_unseen = writes_unseen
        self.calls = []

    def offer(self):
        return b"by " + self.name.encode()

    def open(self, holder, tenant, proposal):
        if proposal == b"no":
            raise Refused("not like this")
        self.calls.append(("open", holder, tenant, proposal))
        return proposal[::-1]

    def close_holder(self, holder):
        self.calls.append(("close_holder", holder))

    def close(self):
        self.calls.append(("close",))


@pytest.fixture
def shm():
    return Ways("shm", writes_unseen=False)


@pytest.fixture
def tcp():
    return Ways("tcp", writes_unseen=True)


@pytest.fixture
def desk(shm, tcp):
    return Desk(HEADER, [shm, tcp], {"verbs": "no device"})


def test_it_offers_what_runs_in_order_and_says_why_the_rest_does_not(desk):
    port: Channels = desk
    offers = port.offers(TENANT)

    assert RegionHeader.unpack(offers.header) == HEADER
    assert offers.offers == [ChannelOffer("shm", b"by shm"), ChannelOffer("tcp", b"by tcp")]
    assert offers.refused == [ChannelOffer("verbs", b"no device")]


def test_another_tenant_learns_nothing_and_opens_nothing(desk, tcp):
    assert desk.offers(OTHER_TENANT) == ChannelOffers(b"", [], [])
    with pytest.raises(Refused, match="tenant"):
        desk.open(1, OTHER_TENANT, "tcp", b"hello")
    assert tcp.calls == []
    assert not desk.writes_unseen(1)


def test_a_proposal_goes_to_the_provider_it_is_for(desk, shm, tcp):
    assert desk.open(7, TENANT, "tcp", b"hello") == b"olleh"

    assert tcp.calls == [("open", 7, TENANT, b"hello")]
    assert shm.calls == []


@pytest.mark.parametrize("transport", ["verbs", "", "carrier pigeon"])
def test_what_is_not_served_is_refused(desk, transport):
    with pytest.raises(Refused, match="does not serve"):
        desk.open(1, TENANT, transport, b"hello")


def test_a_holder_writes_unseen_from_its_first_such_channel_until_it_is_closed(desk):
    desk.open(1, TENANT, "shm", b"hello")
    assert not desk.writes_unseen(1)

    desk.open(1, TENANT, "tcp", b"hello")
    assert desk.writes_unseen(1)
    assert not desk.writes_unseen(2)

    desk.close(1)
    assert not desk.writes_unseen(1)


def test_a_holder_whose_proposal_fails_counts_as_one_that_writes(desk):
    """A channel of several steps may be half open: better one that is watched for nothing."""
    with pytest.raises(Refused):
        desk.open(1, TENANT, "tcp", b"no")

    assert desk.writes_unseen(1)


def test_the_end_of_a_holder_is_told_to_every_provider_again_and_again(desk, shm, tcp):
    desk.close(3)
    desk.close(3)

    assert shm.calls == tcp.calls == [("close_holder", 3)] * 2


def test_the_end_of_the_pool_closes_every_provider(desk, shm, tcp):
    desk.stop()

    assert shm.calls == tcp.calls == [("close",)]
