"""``Ring``: which shards own a key, for one epoch.

Consistent hashing with weighted virtual nodes (Karger et al., STOC 1997; Dynamo, SOSP 2007).  Every shard
puts ``POINTS_PER_WEIGHT * weight`` points on a circle of 64-bit numbers; a key belongs to the shards met
first when walking clockwise from its own point, those of racks not met yet before the others::

    circle   ... p0 ─── key ─── p1(A, rack 1) ─── p2(B, rack 1) ─── p3(C, rack 2) ─── ...
    owners(key, 2) = A, C        owners(key, 3) = A, C, B

A ring never changes: a new epoch is a new ring.  Owner lists are precomputed a point, so a lookup is one hash
and one binary search over the points.  They are the same for every epoch with the same shards, and made once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import mmh3
import msgspec
from xxhash import xxh3_64_digest

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import RingMap, RingNode

POINTS_PER_WEIGHT = 512
"""The spread of the shares falls with the square root of this number: 256 gave up to 1.15 of the mean with 8
shards.
"""
WEIGHT_MAX = 64
SHARDS_MAX = 1024

CIRCLES_MAX = 8
"""Circles kept for the next map with the same shards."""

NO_RING = RingMap(0, 1, 1, 1, 1, [], [])
"""Where a shard starts before it has heard of a map: epoch 0, nobody owns anything."""

_SEED = 0x4B56
_map_decoder = msgspec.msgpack.Decoder(RingMap)


class RingError(ValueError):
    """A ring map that contradicts itself."""


class Ring:
    """The shards of one epoch.

    Raises:
        RingError: names or addresses that repeat or are empty, weights or counts out of range, quorums above
        the number
            of replicas.
    """

    def __init__(self, ring_map: RingMap) -> None:
        _check(ring_map)
        self._map = ring_map
        self._nodes = {shard.node: shard for shard in ring_map.shards}
        self._listed_count = min(len(self._nodes), max(ring_map.replicas, ring_map.block_copies))
        places = sorted((shard.node, shard.weight, shard.rack) for shard in ring_map.shards)
        self._circle = _circle(tuple(places), self._listed_count)

    @classmethod
    def from_map(cls, ring_map: RingMap) -> Ring:
        """The ring that ``ring_map`` describes; the order of its shards does not matter.

        Placing 512 points a shard takes milliseconds, and those who share a process (clients, simulated
        shards) hear of the same maps: they share the rings, which never change.
        """
        return _ring_of(encode_map(ring_map))

    def to_map(self) -> RingMap:
        """The map that this ring was made from."""
        return self._map

    @property
    def epoch(self) -> int:
        return self._map.epoch

    @property
    def names(self) -> Sequence[str]:
        """Of all shards, sorted."""
        return sorted(self._nodes)

    @property
    def placement(self) -> bytes:
        """Equal for rings that put every record on the same shards, whatever their epochs and addresses."""
        weights = sorted((shard.node, shard.weight, shard.rack) for shard in self._map.shards)
        return xxh3_64_digest(msgspec.msgpack.encode((self._map.replicas, weights)))

    def neighbours(self, node: str) -> tuple[str, ...]:
        """The other shards that keep some record with ``node``, sorted."""
        lists = {owners[: self._map.replicas] for owners in self._circle.owners}
        together = {owner for owners in lists if node in owners for owner in owners}
        return tuple(sorted(together - {node}))

    def __contains__(self, node: str) -> bool:
        return node in self._nodes

    def shard(self, node: str) -> RingNode:
        """The entry of ``node``.  Raises ``KeyError`` when it is not in this ring."""
        return self._nodes[node]

    def owners(self, key: bytes, count: int) -> tuple[str, ...]:
        """The first ``count`` distinct shards of ``key``, distinct racks first; all shards when there are
        fewer.

        The order is the order of preference; ``owners(key, n)`` is the beginning of ``owners(key, n + 1)``.
        """
        circle = self._circle
        if not circle.walk:
            return ()
        at = bisect_left(circle.points, mmh3.hash64(key, _SEED, signed=False)[0])
        if at == len(circle.walk):
            at = 0
        if count <= self._listed_count:
            return circle.owners[at][:count]
        return tuple(circle.first(at, count))

    def replicas(self, key: bytes) -> tuple[str, ...]:
        """The shards that hold the record ``key``."""
        return self.owners(key, self._map.replicas)

    def groups(self) -> list[tuple[str, ...]]:
        """The different sets of shards that hold a record together, each sorted."""
        return list(self._groups)

    @cached_property
    def _groups(self) -> list[tuple[str, ...]]:
        lists = {owners[: self._map.replicas] for owners in self._circle.owners}
        return sorted({tuple(sorted(owners)) for owners in lists})

    def block_owners(self, key: bytes) -> tuple[str, ...]:
        """The shards that hold the block ``key``."""
        return self.owners(key, self._map.block_copies)


class _Circle:
    """Where the shards are; ``places``: (node, weight, rack) of each."""

    def __init__(self, places: Sequence[tuple[str, int, str]], listed_count: int) -> None:
        self._racks = {node: rack for node, _, rack in places}
        self._rack_count = len(set(self._racks.values()))
        points = sorted((point, node) for node, weight, _ in places for point in _points(node, weight))
        self.points = array("Q", [point for point, _ in points])
        self.walk = [node for _, node in points]
        """The shard of each point."""
        self.owners = [tuple(self.first(at, listed_count)) for at in range(len(points))]
        """The first ``listed_count`` of each point."""

    def first(self, at: int, count: int) -> list[str]:
        """Walk from point ``at``; shards of racks seen already wait until no new rack is left."""
        count = min(count, len(self._racks))
        chosen: list[str] = []
        waiting: list[str] = []
        racks: set[str] = set()
        for node in self._distinct(at):
            rack = self._racks[node]
            if rack in racks:
                waiting.append(node)
            else:
                racks.add(rack)
                chosen.append(node)
            if len(chosen) == count or (
                len(racks) == self._rack_count and len(chosen) + len(waiting) >= count
            ):
                break
        return (chosen + waiting)[:count]

    def _distinct(self, at: int) -> Iterator[str]:
        seen: set[str] = set()
        for step in range(len(self.walk)):
            node = self.walk[(at + step) % len(self.walk)]
            if node not in seen:
                seen.add(node)
                yield node


@lru_cache(maxsize=CIRCLES_MAX)
def _circle(places: tuple[tuple[str, int, str], ...], listed_count: int) -> _Circle:
    return _Circle(places, listed_count)


def encode_map(ring_map: RingMap) -> bytes:
    """As it travels in the detail of a ``stale_epoch`` failure."""
    return msgspec.msgpack.encode(ring_map)


def decode_map(data: bytes) -> RingMap:
    """The inverse of :func:`encode_map`.

    Raises:
        Corrupt: ``data`` is not an encoded map.
    """
    try:
        return _map_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not a ring map: {error}") from error


@lru_cache(maxsize=16)
def _ring_of(encoded: bytes) -> Ring:
    return Ring(decode_map(encoded))


def _points(node: str, weight: int) -> Iterator[int]:
    """A shard's points depend on its name and weight alone, so that no other shard's coming or going moves
    them.
    """
    name = node.encode()
    for index in range(0, POINTS_PER_WEIGHT * weight, 2):
        yield from mmh3.hash64(index.to_bytes(4, "little") + name, _SEED, signed=False)


def _check(ring_map: RingMap) -> None:
    shards = ring_map.shards
    if len(shards) > SHARDS_MAX:
        raise RingError(f"a ring has at most {SHARDS_MAX} shards, got {len(shards)}")
    if len({shard.node for shard in shards}) != len(shards) or not all(shard.node for shard in shards):
        raise RingError(f"every shard of epoch {ring_map.epoch} needs a name of its own")
    for shard in shards:
        if not 1 <= shard.weight <= WEIGHT_MAX:
            raise RingError(f"the weight of {shard.node!r} must be in [1, {WEIGHT_MAX}], got {shard.weight}")
    if (
        not 1 <= ring_map.write_quorum <= ring_map.replicas
        or not 1 <= ring_map.read_quorum <= ring_map.replicas
    ):
        raise RingError(
            f"quorums must be in [1, replicas = {ring_map.replicas}], "
            f"got write {ring_map.write_quorum}, read {ring_map.read_quorum}"
        )
    if ring_map.epoch < 0 or ring_map.block_copies < 1:
        raise RingError(f"impossible epoch {ring_map.epoch} or block_copies {ring_map.block_copies}")
