"""``Ring``: which shards own a key, for one epoch.

Consistent hashing with weighted virtual nodes (Karger et al., STOC 1997; Dynamo, SOSP 2007).  Every shard
puts ``POINTS_PER_WEIGHT * weight`` points on a circle of 64-bit numbers; a key belongs to the shards met
first when walking clockwise from its own point, those of racks not met yet before the others::

    circle   ... p0 ─── key ─── p1(A, rack 1) ─── p2(B, rack 1) ─── p3(C, rack 2) ─── ...
    owners(key, 2) = A, C        owners(key, 3) = A, C, B

A ring never changes: a new epoch is a new ring.  Owner lists are precomputed a point, so a lookup is one hash
and one binary search over the points.  They are the same for every epoch with the same shards, and made once.

**Ranges** are exceptions to the circle: keys whose points lie in one have its shard as first owner, and the
circle's owners behind it.

**A transition** names a second placement, which the keys are being moved to; while there is one a key has
two *groups* of owners, and whoever is in either *keeps* it::

    epoch e     placement A                        reads: A          writes: W of A
    epoch e+1   A -> B, stage copy                 reads: A          writes: W of A and W of B
                    B's shards get what A has; each says when it has all of it
    epoch e+2   A -> B, stage serve                reads: B          writes: W of A and W of B
                    whoever still works by e+1 reads from A, and misses nothing
    epoch e+3   placement B                        reads: B          writes: W of B
                    A's shards drop what they do not keep any more

In both stages the writes that are acknowledged are at both groups, so either may be read and the move can go
back as well as forward.  Requests of an older epoch are refused with the new map.  Going on to the next epoch
needs, of every group, so many shards at the present one that no write quorum of an older epoch can be met
without them (``controller.moving``).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Literal

import mmh3
import msgspec
from xxhash import xxh3_64_digest

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import RingMap, RingNode, RingRange

POINTS_PER_WEIGHT = 512
"""The spread of the shares falls with the square root of this number: 256 gave up to 1.15 of the mean with 8
shards.
"""
WEIGHT_MAX = 64
SHARDS_MAX = 1024
RANGES_MAX = 4096
POINT_MAX = 2**64 - 1

KEEPERS_MAX = 16_384
"""Blocks whose keepers a ring remembers, about 3 MiB."""
POINTS_KEPT = 256
"""Shards whose points are kept for the next circle that they are on, 4 KiB each by a weight of 1."""
SPOTS_MAX = 4_096
"""Remembered while a circle is made; of more shards hardly one is met twice."""
CIRCLES_MAX = 8
"""Circles kept for the next map with the same shards."""

CHANGE_REST_S = 0.25
"""So long after a change of the ring what a shard does of itself waits: callers' requests that were under way
are placed again, and come first."""

NO_RING = RingMap(0, 1, 1, 1, 1, [], [])
"""Where a shard starts before it has heard of a map: epoch 0, nobody owns anything."""

Pair = tuple[tuple[str, ...], tuple[str, ...]]
"""Owners before and after."""

_SEED = 0x4B56
_map_decoder = msgspec.msgpack.Decoder(RingMap)


class RingError(ValueError):
    """A ring map that contradicts itself."""


class Ring:
    """The shards of one epoch.

    Raises:
        RingError: names or addresses that repeat or are empty, weights or counts out of range, quorums above
        the number
            of replicas, ranges that overlap or name a shard that is none.
    """

    def __init__(self, ring_map: RingMap) -> None:
        _check(ring_map)
        self._map = ring_map
        moving = ring_map.transition
        listed_count = max(ring_map.replicas, ring_map.block_copies)
        self._now = _Placement(ring_map.shards, ring_map.ranges, listed_count)
        self._next = self._now if moving is None else _Placement(moving.shards, moving.ranges, listed_count)
        self._serving, self._other = self._now, self._next
        if moving is not None and moving.stage == "serve":
            self._serving, self._other = self._next, self._now
        self._unions: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, ...]] = {}
        self._before: dict[str, frozenset[frozenset[str]]] = {}
        self._block_keepers: dict[bytes, tuple[str, ...]] = {}
        """Of blocks that were asked for lately: after a change all shards ask each about the same ones."""

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
    def moving(self) -> bool:
        """Whether keys are on their way from one placement to another."""
        return self._map.transition is not None

    @property
    def stage(self) -> Literal["", "copy", "serve"]:
        """Of the transition; empty = there is none."""
        return "" if self._map.transition is None else self._map.transition.stage

    @cached_property
    def serving(self) -> Ring:
        """The placement that is read from, alone, as a ring of the same epoch."""
        if not self.moving:
            return self
        return Ring.from_map(_alone(self._map, self._serving))

    @cached_property
    def names(self) -> Sequence[str]:
        """Of all shards, of both placements, sorted."""
        return sorted({*self._now.nodes, *self._next.nodes})

    @cached_property
    def placement(self) -> bytes:
        """Equal for rings that keep every record on the same shards, whatever their epochs and addresses, and
        whatever the stage of a transition."""
        places = sorted({self._now.places, self._next.places})
        if self.moving and len(places) == 2:
            places = [self._now.places, self._next.places]
        return xxh3_64_digest(msgspec.msgpack.encode((self._map.replicas, places)))

    def neighbours(self, node: str) -> tuple[str, ...]:
        """The other shards that keep some record with ``node``, sorted."""
        together = {each for group in self._keeping for each in group if node in group}
        return tuple(sorted(together - {node}))

    def __contains__(self, node: str) -> bool:
        return node in self._now.nodes or node in self._next.nodes

    def shard(self, node: str) -> RingNode:
        """The entry of ``node``, of the serving placement first.  Raises ``KeyError`` when it is not in this
        ring."""
        found = self._serving.nodes.get(node)
        return self._other.nodes[node] if found is None else found

    def owners(self, key: bytes, count: int) -> tuple[str, ...]:
        """The first ``count`` distinct shards of ``key`` by the serving placement, distinct racks first; all
        shards when there are fewer.

        The order is the order of preference; ``owners(key, n)`` is the beginning of ``owners(key, n + 1)``.
        """
        return self._serving.owners(point_of(key), count)

    def replicas(self, key: bytes) -> tuple[str, ...]:
        """The shards that the record ``key`` is read from."""
        return self.owners(key, self._map.replicas)

    def keepers(self, key: bytes) -> tuple[str, ...]:
        """All shards that hold the record ``key``: :meth:`replicas` first, then those of the other
        placement."""
        return self._kept(key, self._map.replicas)

    def write_groups(self, key: bytes) -> tuple[tuple[str, ...], ...]:
        """A write of ``key`` is done when a write quorum of each of these has it."""
        point, count = point_of(key), self._map.replicas
        if not self.moving:
            return (self._serving.owners(point, count),)
        groups = (self._serving.owners(point, count), self._other.owners(point, count))
        return groups[:1] if set(groups[0]) == set(groups[1]) else groups

    def groups(self) -> list[tuple[str, ...]]:
        """The different sets of shards that a record is read from together, each sorted."""
        return list(self._groups)

    @cached_property
    def _groups(self) -> list[tuple[str, ...]]:
        return sorted({tuple(sorted(owners)) for owners in self._serving.lists(self._map.replicas)})

    def block_owners(self, key: bytes) -> tuple[str, ...]:
        """The shards that the block ``key`` is read from."""
        return self.owners(key, self._map.block_copies)

    def block_keepers(self, key: bytes) -> tuple[str, ...]:
        """All shards that should have the block ``key``: :meth:`block_owners` first."""
        found = self._block_keepers.get(key)
        if found is None:
            if len(self._block_keepers) >= KEEPERS_MAX:
                self._block_keepers.clear()
            found = self._block_keepers[key] = self._kept(key, self._map.block_copies)
        return found

    def gains(self, node: str) -> bool:
        """Whether ``node`` is to keep records after the transition that it does not keep before it."""
        return bool(self.moving and any(node not in before for before in self.before(node)))

    def before(self, node: str) -> frozenset[frozenset[str]]:
        """Of every record that ``node`` keeps, the shards that had it before the transition, or have it."""
        found = self._before.get(node)
        if found is None:
            found = self._before[node] = frozenset(
                frozenset(now) for now, then in self._stretches if node in now or node in then
            )
        return found

    def gains_blocks(self, node: str) -> bool:
        """The same for blocks."""
        return self.moving and any(
            node in next_owners and node not in now_owners
            for now_owners, next_owners in self._pairs(self._map.block_copies)
        )

    @property
    def block_placement(self) -> tuple[bytes, int]:
        """As :attr:`placement`, for blocks."""
        return self.placement, self._map.block_copies

    def covers(self, nodes: Collection[str]) -> bool:
        """Whether every group of owners, of both placements, has so many members among ``nodes`` that no
        write quorum of it is without one of them: N-W+1 of N.

        When these shards have taken up a map, nothing is acknowledged under an older one any more.
        """
        return all(self._met(owners, nodes) for owners in self._record_groups)

    def flows(self, count: int) -> dict[tuple[tuple[str, ...], tuple[str, ...]], int]:
        """The first ``count`` owners before and after the transition -> how many of the 2^64 points of the
        circle they have."""
        ends = sorted({*self._now.ends, *self._next.ends})
        measured: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
        before = -1
        for end in ends:
            pair = (self._now.owners(end, count), self._next.owners(end, count))
            measured[pair] = measured.get(pair, 0) + end - before
            before = end
        return measured

    @cached_property
    def stretches(self) -> Sequence[tuple[int, int, str]]:
        """The circle as the serving placement has it: (first point, last point, first owner), in order."""
        found: list[tuple[int, int, str]] = []
        first = 0
        for end in sorted({*self._serving.ends}):
            owner = next(iter(self._serving.owners(end, 1)), "")
            if found and found[-1][2] == owner:
                found[-1] = (found[-1][0], end, owner)
            else:
                found.append((first, end, owner))
            first = end + 1
        return found

    @cached_property
    def _record_groups(self) -> set[tuple[str, ...]]:
        return {owners for pair in self._stretches for owners in pair}

    def _met(self, owners: Sequence[str], nodes: Collection[str]) -> bool:
        quorum = min(self._map.write_quorum, len(owners))
        return sum(1 for node in owners if node in nodes) > len(owners) - quorum

    def _kept(self, key: bytes, count: int) -> tuple[str, ...]:
        point = point_of(key)
        first = self._serving.owners(point, count)
        if not self.moving:
            return first
        pair = (first, self._other.owners(point, count))
        union = self._unions.get(pair)
        if union is None:
            union = self._unions[pair] = tuple(dict.fromkeys((*pair[0], *pair[1])))
        return union

    @cached_property
    def _keeping(self) -> list[set[str]]:
        """The different sets of shards that keep a record together."""
        together = {frozenset((*now, *then)) for now, then in self._stretches}
        return [set(group) for group in together]

    @cached_property
    def _stretches(self) -> frozenset[Pair]:
        return self._pairs(self._map.replicas)

    def _pairs(self, count: int) -> frozenset[Pair]:
        """What becomes of whom: the owner lists before and after, of every stretch of the circle."""
        return _pairs_of(self._now, self._next, count)


def point_of(key: bytes) -> int:
    """Where ``key`` lies on the circle, in [0, 2^64)."""
    return int(mmh3.hash64(key, _SEED, signed=False)[0])


class _Placement:
    """A circle and the ranges that are exceptions to it.  Two that place alike are equal."""

    def __init__(self, shards: Sequence[RingNode], ranges: Sequence[RingRange], listed_count: int) -> None:
        self.nodes = {shard.node: shard for shard in shards}
        self.shards, self.ranges = shards, ranges
        places = tuple(sorted((shard.node, shard.weight, shard.rack) for shard in shards))
        self.places = (places, tuple((each.first, each.last, each.node) for each in ranges))
        self._listed_count = min(len(self.nodes), listed_count)
        self._circle = _circle(places, self._listed_count)
        self._firsts = [each.first for each in ranges]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Placement) and self._alike == other._alike

    def __hash__(self) -> int:
        return hash(self._alike)

    @property
    def _alike(self) -> tuple[object, int]:
        return self.places, self._listed_count

    def owners(self, point: int, count: int) -> tuple[str, ...]:
        """Of the keys that lie there."""
        owners = self._around(point, count)
        if not self.ranges:
            return owners
        at = bisect_right(self._firsts, point) - 1
        if at < 0 or point > self.ranges[at].last:
            return owners
        first = self.ranges[at].node
        return (first, *(node for node in owners if node != first))[:count]

    def _around(self, point: int, count: int) -> tuple[str, ...]:
        circle = self._circle
        if not circle.walk:
            return ()
        at = bisect_left(circle.points, point)
        if at == len(circle.walk):
            at = 0
        if count <= self._listed_count:
            return circle.owners[at][:count]
        return tuple(circle.first(at, count))

    @property
    def ends(self) -> Iterator[int]:
        """The last point of every stretch with the same owners, at least."""
        yield from self._circle.points
        yield POINT_MAX
        for each in self.ranges:
            yield from (max(0, each.first - 1), each.last)

    def lists(self, count: int) -> set[tuple[str, ...]]:
        """The different lists of owners."""
        if not self.ranges:
            return {owners[:count] for owners in self._circle.owners}
        return {self.owners(point, count) for point in self.ends}

    def beside(self, other: _Placement, count: int) -> Iterator[Pair]:
        """The owners by both, of every stretch."""
        if self.ranges or other.ranges or count > min(self._listed_count, other._listed_count):
            for at in sorted({*self.ends, *other.ends}):
                yield self.owners(at, count), other.owners(at, count)
            return
        for ours, theirs in _beside(self._circle, other._circle):
            yield ours[:count], theirs[:count]


@dataclass(eq=False, slots=True)
class _Spot:
    """What is met first when walking from some points of the circle."""

    nearest: tuple[str, ...]
    """Shards, as they come."""
    by_rack: tuple[str, ...]
    """The first shard of each rack."""
    list_number: int
    before: dict[str, _Spot] = field(default_factory=dict)
    """What the point before these is, by its shard."""


class _Circle:
    """Where the shards are; ``places``: (node, weight, rack) of each."""

    def __init__(self, places: Sequence[tuple[str, int, str]], listed_count: int) -> None:
        self._racks = {node: rack for node, _, rack in places}
        self._rack_count = len(set(self._racks.values()))
        self._places = frozenset((node, weight) for node, weight, _ in places)
        points = [point for node, weight, _ in places for point in _points(node, POINTS_PER_WEIGHT * weight)]
        nodes = [node for node, weight, _ in places for _ in range(POINTS_PER_WEIGHT * weight)]
        order = sorted(range(len(points)), key=points.__getitem__)
        self.points = array("Q", map(points.__getitem__, order))
        self.walk = list(map(nodes.__getitem__, order))
        """The shard of each point."""
        self.lists, self._numbers = self._all_lists(listed_count)
        """The different lists of the first ``listed_count``."""
        self.owners = [self.lists[number] for number in self._numbers]
        """Those of each point."""

    def has_points_of(self, other: _Circle) -> bool:
        """Whether all of the other's points are ours too, as where shards only join or only leave."""
        return other._places <= self._places

    def lists_at(self, ends: Sequence[int]) -> list[int]:
        """Numbers of the lists, the last end's first; ``ends``: in order, all our points and the end of the
        circle among them."""
        ours = dict(zip(self.points, self._numbers, strict=True))
        number, found = self._numbers[0], []
        for end in reversed(ends):
            number = ours.get(end, number)
            found.append(number)
        return found

    def _all_lists(self, count: int) -> tuple[list[tuple[str, ...]], array[int]]:
        """The different lists of the first ``count``, and by point which it is.

        Against the walk, so that each point's follow from what is behind it; it begins where every shard has
        been met beyond the last point.  A circle has thousands of points, and a shard that takes up a map
        answers nobody meanwhile; of few shards there are few different spots, and those are remembered.
        """
        racks, rack_count = self._racks, min(count, self._rack_count)
        known: dict[tuple[tuple[str, ...], tuple[str, ...]], _Spot] = {}
        lists: dict[tuple[str, ...], int] = {}
        beyond = self.walk[: max((self.walk.index(node) for node in racks), default=-1) + 1]
        spot, found = _Spot((), (), 0), array("I")
        for node in chain(reversed(beyond), reversed(self.walk)):
            following = spot.before.get(node)
            if following is None:
                nearest = (node, *[each for each in spot.nearest if each != node][: count - 1])
                others = [each for each in spot.by_rack if racks[each] != racks[node]]
                by_rack = (node, *others[: rack_count - 1])
                following = known.get((nearest, by_rack))
                if following is None:
                    rest = [each for each in nearest if each not in by_rack]
                    owners = (*by_rack, *rest)[: len(nearest)]
                    following = _Spot(nearest, by_rack, lists.setdefault(owners, len(lists)))
                if len(known) < SPOTS_MAX:
                    known[nearest, by_rack] = spot.before[node] = following
            spot = following
            found.append(spot.list_number)
        return list(lists), found[: len(beyond) - 1 : -1] if beyond else found

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
def _pairs_of(now: _Placement, then: _Placement, count: int) -> frozenset[Pair]:
    if now == then:
        return frozenset((owners, owners) for owners in now.lists(count))
    return frozenset(now.beside(then, count))


@lru_cache(maxsize=CIRCLES_MAX)
def _beside(one: _Circle, other: _Circle) -> Sequence[Pair]:
    """The different owners by both, of all stretches."""
    if one.has_points_of(other) or other.has_points_of(one):
        ends = [*max(one.points, other.points, key=len), POINT_MAX]
    else:
        ends = sorted({*one.points, *other.points, POINT_MAX})
    pairs = set(zip(one.lists_at(ends), other.lists_at(ends), strict=True))
    return [(one.lists[ours], other.lists[theirs]) for ours, theirs in pairs]


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


@lru_cache(maxsize=POINTS_KEPT)
def _points(node: str, count: int) -> Sequence[int]:
    """A shard's points, in order; they depend on its name and their number alone, so that no other shard's
    coming or going moves them.
    """
    name = node.encode()
    pairs = [
        mmh3.hash64(index.to_bytes(4, "little") + name, _SEED, signed=False) for index in range(0, count, 2)
    ]
    return array("Q", sorted(chain.from_iterable(pairs)))


def _alone(ring_map: RingMap, placement: _Placement) -> RingMap:
    """One of the two placements of a transition."""
    return msgspec.structs.replace(
        ring_map, shards=list(placement.shards), ranges=list(placement.ranges), transition=None
    )


def _check(ring_map: RingMap) -> None:
    _check_placement(ring_map.epoch, ring_map.shards, ring_map.ranges)
    if ring_map.transition is not None:
        _check_placement(ring_map.epoch, ring_map.transition.shards, ring_map.transition.ranges)
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


def _check_placement(epoch: int, shards: Sequence[RingNode], ranges: Sequence[RingRange]) -> None:
    if len(shards) > SHARDS_MAX:
        raise RingError(f"a ring has at most {SHARDS_MAX} shards, got {len(shards)}")
    names = {shard.node for shard in shards}
    if len(names) != len(shards) or "" in names:
        raise RingError(f"every shard of epoch {epoch} needs a name of its own")
    for shard in shards:
        if not 1 <= shard.weight <= WEIGHT_MAX:
            raise RingError(f"the weight of {shard.node!r} must be in [1, {WEIGHT_MAX}], got {shard.weight}")
    if len(ranges) > RANGES_MAX:
        raise RingError(f"a ring has at most {RANGES_MAX} ranges, got {len(ranges)}")
    before = -1
    for each in ranges:
        if not before < each.first <= each.last <= POINT_MAX:
            raise RingError(f"the ranges of epoch {epoch} are not in order, at {each.first:#x}")
        if each.node not in names:
            raise RingError(f"a range of epoch {epoch} belongs to {each.node!r}, which is no shard of it")
        before = each.last
