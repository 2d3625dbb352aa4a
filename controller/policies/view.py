"""``LoadView``: what load policies see; made from heartbeats by ``LoadHistory``, smoothed.

A single heartbeat says what two seconds were like.  Averages here are exponential with the time constant
:data:`SMOOTH_S`: what has happened once is soon forgotten, what goes on is seen within a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import exp

from kvcomm.wire.messages import RingMap, ShardLoad
from l3_shard.ring import Ring

SMOOTH_S = 30.0
TREND_S = 120.0
"""Time constant of the trend."""
STALE_S = 30.0
"""What a shard said so long ago says nothing of it now."""
CIRCLE = 2**64


@dataclass(frozen=True, slots=True)
class ShardView:
    """One shard of the ring, smoothed."""

    node: str
    weight: int
    share: float
    """Of all keys, that it is the first owner of."""
    ops_s: float
    trend: float
    """By how much ``ops_s`` grows, in operations a second, each second."""
    hit_share: float
    p99_s: float
    held_bytes: int
    """Records and blocks, memory and disk."""


@dataclass(frozen=True)
class LoadView:
    """The cluster at one moment, while nothing is being moved."""

    now: float
    ring: RingMap
    shards: tuple[ShardView, ...]
    """Of the ring, in its order."""
    move_rate_bytes_s: float
    """That one shard may take while keys are moved to it."""
    stretches: Mapping[str, list[tuple[int, int]]]
    """Shard -> the stretches of the circle that it is the first owner of: first and last point."""

    @cached_property
    def mean_ops_s(self) -> float:
        return sum(shard.ops_s for shard in self.shards) / len(self.shards) if self.shards else 0.0

    @cached_property
    def held_bytes(self) -> int:
        """Of all copies."""
        return sum(shard.held_bytes for shard in self.shards)

    @property
    def imbalance(self) -> float:
        """The busiest shard against the mean; 1 = all alike."""
        busiest = max((shard.ops_s for shard in self.shards), default=0.0)
        return busiest / self.mean_ops_s if self.mean_ops_s else 1.0


@dataclass(slots=True)
class _Shard:
    at: float
    ops_s: float
    slow_ops_s: float
    """Over a longer time: what the trend is measured against."""
    hit_share: float
    p99_s: float
    load: ShardLoad


class LoadHistory:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._shards: dict[str, _Shard] = {}
        self._measured: tuple[RingMap, _Owned] | None = None
        """What each shard of the last map is the first owner of."""

    def saw(self, node: str, load: ShardLoad, now: float) -> None:
        """From a heartbeat."""
        shard = self._shards.get(node)
        if shard is None or now - shard.at > STALE_S:
            self._shards[node] = _Shard(now, load.ops_s, load.ops_s, load.hit_share, load.p99_s, load)
            return
        passed_s = now - shard.at
        new, slow = 1 - exp(-passed_s / SMOOTH_S), 1 - exp(-passed_s / TREND_S)
        shard.ops_s += new * (load.ops_s - shard.ops_s)
        shard.slow_ops_s += slow * (load.ops_s - shard.slow_ops_s)
        shard.hit_share += new * (load.hit_share - shard.hit_share)
        shard.p99_s += new * (load.p99_s - shard.p99_s)
        shard.at, shard.load = now, load

    def forget(self) -> None:
        """The placement has changed: what was learnt of it is of no use."""
        self._shards.clear()

    def view(self, ring: RingMap, move_rate_bytes_s: float, now: float) -> LoadView | None:
        """``None``: some shard of the ring has not been heard lately, or keys are being moved."""
        if ring.transition is not None or not ring.shards:
            return None
        if any(
            node.node not in self._shards or now - self._shards[node.node].at > STALE_S
            for node in ring.shards
        ):
            return None
        owned = self._owned(ring)
        shards = []
        for node in ring.shards:
            seen = self._shards[node.node]
            held_bytes = seen.load.record_bytes + seen.load.block_bytes + seen.load.disk_bytes
            shards.append(
                ShardView(
                    node=node.node,
                    weight=node.weight,
                    share=owned.shares.get(node.node, 0.0),
                    ops_s=seen.ops_s,
                    trend=(seen.ops_s - seen.slow_ops_s) / (TREND_S - SMOOTH_S),
                    hit_share=seen.hit_share,
                    p99_s=seen.p99_s,
                    held_bytes=held_bytes,
                )
            )
        return LoadView(now, ring, tuple(shards), move_rate_bytes_s, owned.stretches)

    def _owned(self, ring: RingMap) -> _Owned:
        if self._measured is None or self._measured[0] is not ring:
            self._measured = (ring, _Owned.of(ring))
        return self._measured[1]


@dataclass(frozen=True, slots=True)
class _Owned:
    """What each shard of a map is the first owner of."""

    stretches: dict[str, list[tuple[int, int]]]
    shares: dict[str, float]

    @staticmethod
    def of(ring: RingMap) -> _Owned:
        found: dict[str, list[tuple[int, int]]] = {}
        for first, last, owner in Ring.from_map(ring).stretches:
            found.setdefault(owner, []).append((first, last))
        shares = {
            owner: sum(last - first + 1 for first, last in spans) / CIRCLE for owner, spans in found.items()
        }
        return _Owned(found, shares)
