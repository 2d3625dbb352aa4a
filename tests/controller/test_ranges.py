"""Ranges against an oracle that keeps an owner for every point of a small circle."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.ranges import joined, needed, with_range, without_nodes
from kvcomm.wire.messages import RingMap, RingNode, RingRange
from l3_shard.ring import Ring

POINTS = 24
orders = st.lists(
    st.tuples(st.integers(0, POINTS - 1), st.integers(0, POINTS - 1), st.sampled_from("abc")), max_size=12
)


def owner_of(ranges: list[RingRange], point: int) -> str:
    return next((each.node for each in ranges if each.first <= point <= each.last), "")


@given(orders)
def test_each_range_overrides_what_was_there(given_away):
    ranges: list[RingRange] = []
    owners = [""] * POINTS
    for one, other, node in given_away:
        first, last = min(one, other), max(one, other)
        ranges = with_range(ranges, first, last, node)
        owners[first : last + 1] = [node] * (last - first + 1)
        assert [owner_of(ranges, point) for point in range(POINTS)] == owners
        for before, after in pairwise(ranges):
            assert before.last < after.first
            assert before.last + 1 < after.first or before.node != after.node, "neighbours are joined"
    kept = without_nodes(ranges, ["a"])
    assert [owner_of(kept, point) for point in range(POINTS)] == [
        "" if owner == "a" else owner for owner in owners
    ]


@pytest.mark.parametrize(("first", "last"), [(5, 4), (-1, 4), (0, 2**64)])
def test_what_is_no_range_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="first <= last"):
        with_range([], first, last, "a")


def test_joined_sorts() -> None:
    assert joined([RingRange(5, 9, "a"), RingRange(0, 4, "a")]) == [RingRange(0, 9, "a")]


def test_only_ranges_that_change_something_are_needed() -> None:
    shards = [RingNode(f"shard-{index}", "", "", "", "r", 1) for index in range(3)]
    first, last, owner = Ring.from_map(RingMap(1, 1, 1, 1, 1, shards, [])).stretches[7]
    other = next(shard.node for shard in shards if shard.node != owner)
    idle = RingRange(first, last, owner)
    useful = RingRange(first, last, other)
    longer = RingRange(first, last + 1, owner)
    assert needed([idle], shards) == []
    assert needed([useful], shards) == [useful]
    assert needed([longer], shards) == [longer], "its last point would be another's"
