"""Which device, port and GID are used, and what is said of the others."""

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.transports.verbs.device import Gid, open_device, survey
from tests.l2_rdma.transports.verbs.fabric import CONSTANTS, GLOBAL, IPV4, LINK_LOCAL, SITE, Card, Fabric

V1, V2, IB = CONSTANTS.IBV_GID_TYPE_ROCE_V1, CONSTANTS.IBV_GID_TYPE_ROCE_V2, CONSTANTS.IBV_GID_TYPE_IB
DOWN, ACTIVE = CONSTANTS.IBV_PORT_DOWN, CONSTANTS.IBV_PORT_ACTIVE
ZERO = ":".join(["0000"] * 8)


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(LINK_LOCAL, V2), (IPV4, V2)], 1),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2), (GLOBAL, V2)], 3),
        ([(LINK_LOCAL, V2), (GLOBAL, V2)], 1),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2)], 1),
        ([(ZERO, V2), (LINK_LOCAL, V2)], 1),
        ([(IPV4, V2), (IPV4, V2)], 0),
    ],
)
def test_the_routable_gid_of_roce_v2_is_chosen(gids, index):
    fabric = Fabric(Card(gids=gids))
    [report] = survey(fabric.binding)

    assert report.refused == ""
    assert (report.gid_index, report.gid_kind, report.gid) == (index, "RoCE v2", gids[index][0])
    assert fabric.objects == []


@pytest.mark.parametrize("gids", [[], [(IPV4, V1)], [(ZERO, V2)]])
def test_without_such_a_gid_the_advice_is_an_address(gids):
    [report] = survey(Fabric(Card(gids=gids)).binding)
    assert "IP address" in report.refused


def test_infiniband_goes_by_lid_and_gid_0():
    card = Card(gids=[(SITE, IB), (SITE, IB)], link_layer=CONSTANTS.IBV_LINK_LAYER_INFINIBAND, lid=7)
    device = open_device(Fabric(card).binding)

    assert device.infiniband
    assert (device.lid, device.report.gid_index, device.report.link_layer) == (7, 0, "InfiniBand")


def test_the_first_active_port_is_used():
    [report] = survey(Fabric(Card(port_states=(DOWN, ACTIVE))).binding)
    assert (report.port, report.state, report.mtu_bytes, report.firmware) == (2, "active", 4096, "1.2.3")


def test_the_first_device_that_can_be_used_is_used():
    fabric = Fabric(Card("a", port_states=(DOWN,)), Card("b", refuses="Failed to open"), Card("c"), Card("d"))
    device = open_device(fabric.binding)

    assert device.report.device == "c"
    device.close()
    device.close()
    assert fabric.objects == []
    assert [bool(report.refused) for report in survey(fabric.binding)] == [True, True, False, False]


def test_a_named_device_is_used_or_nothing():
    fabric = Fabric(Card("a"), Card("b"), Card("c", port_states=(DOWN,)))

    assert open_device(fabric.binding, "b").report.device == "b"
    with pytest.raises(Unavailable, match="c: port 1 is not active"):
        open_device(fabric.binding, "c")
    with pytest.raises(Unavailable, match=r"no RDMA device 'mlx5_9'.*there are: a, b, c"):
        open_device(fabric.binding, "mlx5_9")


def test_each_reason_is_told():
    fabric = Fabric(Card("a", port_states=(DOWN,)), Card("b", refuses="Failed to open"))
    with pytest.raises(
        Unavailable, match=r"a: port 1 is not active.*b: cannot be opened .*Permission denied"
    ):
        open_device(fabric.binding)


def test_no_device_is_not_no_rdma():
    fabric = Fabric()
    fabric.cards.clear()
    with pytest.raises(Unavailable, match="has no RDMA device"):
        open_device(fabric.binding)
    assert survey(fabric.binding) == []

    fabric.rdma = False
    with pytest.raises(Unavailable, match="no RDMA on this host"):
        open_device(fabric.binding)
    with pytest.raises(Unavailable, match="no RDMA on this host"):
        survey(fabric.binding)


def test_a_device_without_reads_is_of_no_use():
    [report] = survey(Fabric(Card(max_reads=0)).binding)
    assert "no one-sided reads" in report.refused


@pytest.mark.parametrize(
    ("atomics", "word"),
    [
        (CONSTANTS.IBV_ATOMIC_NONE, "none"),
        (CONSTANTS.IBV_ATOMIC_HCA, "hca"),
        (CONSTANTS.IBV_ATOMIC_GLOB, "global"),
    ],
)
def test_the_report_tells_what_it_can_do(atomics, word):
    [report] = survey(Fabric(Card(atomics=atomics, max_reads=4, on_demand=True)).binding)
    assert (report.atomics, report.max_reads, report.on_demand) == (word, 4, True)


def test_ranks():
    ranks = [Gid(0, address, "RoCE v2").rank for address in (IPV4, GLOBAL, LINK_LOCAL, ZERO)]
    assert ranks == sorted(ranks)
    assert Gid(0, IPV4, "RoCE v1").rank == Gid(0, ZERO, "RoCE v2").rank == 9
