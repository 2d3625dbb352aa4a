"""What a change costs, against counting keys."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from msgspec.structs import replace

from controller.placement import copying
from controller.price import Holdings, gained, planned_moves
from kvcomm.wire.messages import RingMap, RingNode, RingRange, ShardLoad
from l3_shard.ring import POINT_MAX, Ring

KEYS = [b"key/%d" % index for index in range(4_000)]


def shard(index: int) -> RingNode:
    return RingNode(f"shard-{index}", "", "", "", f"rack-{index % 2}", 1)


RING = RingMap(4, 3, 2, 2, 1, [shard(index) for index in range(5)], [])


@pytest.mark.parametrize("count", [1, 3])
def test_shares_are_those_of_the_keys(count: int) -> None:
    target = [shard(index) for index in range(6)]
    moving = Ring.from_map(copying(RING, 5, target, []))
    before, after = Ring.from_map(RING), Ring.from_map(replace(RING, shards=target))
    for node, share in gained(moving, count).items():
        gain = sum(node in after.owners(key, count) and node not in before.owners(key, count) for key in KEYS)
        assert gain / len(KEYS) == pytest.approx(share, abs=0.03)


def test_what_nobody_gains_costs_nothing() -> None:
    assert planned_moves(RING, RING.shards, [], Holdings(100, 100, 100, 100), 1.0) == []


def test_each_record_is_counted_once() -> None:
    loads = {
        node.node: ShardLoad(
            record_count=600, record_bytes=6_000, block_count=10, block_bytes=50, disk_bytes=50
        )
        for node in RING.shards
    }
    assert Holdings.of(loads, RING) == Holdings(1000, 10_000, 50, 500)
    del loads["shard-0"]
    without = astuple(Holdings.of(loads, RING))
    assert without == pytest.approx((1000, 10_000, 50, 500)), "who is not heard holds as much as the others"
    assert Holdings.of({}, RING) == Holdings()


def test_a_range_moves_its_share_of_records_and_blocks() -> None:
    quarter = [RingRange(0, POINT_MAX // 4, "shard-3")]
    moves = planned_moves(RING, RING.shards, quarter, Holdings(1000, 64_000, 400, 640_000), 10_000)
    by_name = {move.what: move for move in moves}
    (gains,) = [move for what, move in by_name.items() if what == "shard-3 gets keys"]
    assert 0.05 < gains.share < 0.2, "of a quarter, those that it had no replica of"
    assert gains.records == pytest.approx(1000 * gains.share, abs=1)
    assert gains.block_bytes == pytest.approx(640_000 / 4 * 4 / 5, rel=0.15), "it had a fifth of these"
    assert gains.seconds == pytest.approx((gains.record_bytes + gains.block_bytes) / 10_000, rel=0.01)
