"""Lists of ranges: ordered, without overlaps, neighbours of one shard joined."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvcomm.wire.messages import RingMap, RingNode, RingRange
from l3_shard.ring import POINT_MAX, Ring


def with_range(ranges: Sequence[RingRange], first: int, last: int, node: str) -> list[RingRange]:
    """As ``ranges``, but the points from ``first`` to ``last``, included, belong to ``node``.

    Raises:
        ValueError: they are no points of the circle, or in the wrong order.
    """
    if not 0 <= first <= last <= POINT_MAX:
        raise ValueError(f"a range is 0 <= first <= last < 2^64, got {first:#x}..{last:#x}")
    kept = [part for each in ranges for part in _outside(each, first, last)]
    return joined([*kept, RingRange(first, last, node)])


def without_nodes(ranges: Iterable[RingRange], gone: Iterable[str]) -> list[RingRange]:
    """Without those of these shards: their keys go back to the circle's owners."""
    names = {*gone}
    return [each for each in ranges if each.node not in names]


def needed(ranges: Iterable[RingRange], shards: Sequence[RingNode]) -> list[RingRange]:
    """Without those that say what the circle of these shards says anyhow."""
    plain = RingMap(0, 1, 1, 1, 1, list(shards), [])
    circle = Ring.from_map(plain).stretches
    lasts = [last for _, last, _ in circle]

    def idle(each: RingRange) -> bool:
        _, last, owner = circle[bisect_left(lasts, each.first)]
        return owner == each.node and each.last <= last

    return [each for each in ranges if not idle(each)]


def joined(ranges: Iterable[RingRange]) -> list[RingRange]:
    """In order, and neighbours of one shard as one range."""
    result: list[RingRange] = []
    for each in sorted(ranges, key=lambda each: each.first):
        if result and result[-1].node == each.node and result[-1].last + 1 == each.first:
            result[-1] = RingRange(result[-1].first, each.last, each.node)
        else:
            result.append(each)
    return result


def _outside(each: RingRange, first: int, last: int) -> list[RingRange]:
    """What is left of a range when another one is taken out of it."""
    parts = []
    if each.first < first:
        parts.append(RingRange(each.first, min(each.last, first - 1), each.node))
    if each.last > last:
        parts.append(RingRange(max(each.first, last + 1), each.last, each.node))
    return parts
