"""``Configuration``: whose majorities decide strong records while the ring changes.

A configuration is the *settled* map and the *pending* ones, by epoch.  A quorum needs a majority of a
record's owners by every one of them.  Configurations only move forward, each node's by itself::

    {1}  ──a map with other owners──►  {1, 4}  ──its owners have everything──►  {4}
      └────────── another one on top ──►  {1, 4, 7}  ────────────────────────────►  {7}

and a vote is given only to a proposer with the very same configuration.  Why and how they move is in
``l3_shard.settling``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import RingMap, StrongSettle
from l3_shard.quorum import Quorum
from l3_shard.ring import Ring, RingError

PENDING_MAX = 3
"""Maps that may be pending at once; a newer one waits."""
_decoder = msgspec.msgpack.Decoder(StrongSettle)


@dataclass(frozen=True, slots=True)
class Configuration:
    """See the module.  ``pending`` are ordered, and above ``settled``.

    ``origin``: epochs of the configuration under which the settled map was settled; empty = it is the first,
    or was settled before anybody noted that.
    """

    settled: Ring
    pending: tuple[Ring, ...] = ()
    origin: tuple[int, ...] = ()

    rings: tuple[Ring, ...] = field(init=False, compare=False)
    maps: tuple[int, ...] = field(init=False, compare=False)
    """Epochs of all: two configurations with the same ones are the same."""
    names: Sequence[str] = field(init=False, compare=False)
    """Of all shards in any of the maps, sorted."""

    def __post_init__(self) -> None:
        rings = (self.settled, *self.pending)
        object.__setattr__(self, "rings", rings)
        object.__setattr__(self, "maps", tuple(ring.epoch for ring in rings))
        object.__setattr__(self, "names", sorted({name for ring in rings for name in ring.names}))

    @property
    def target(self) -> Ring:
        """The map that is to be the settled one."""
        return self.rings[-1]

    def quorum(self, name: bytes) -> Quorum:
        """Of the record ``name``."""
        groups = [self.settled.replicas(name)]
        for ring in self.pending:
            owners = ring.replicas(name)
            if all(set(owners) != set(group) for group in groups):
                groups.append(owners)
        return Quorum(tuple(groups), self.maps)

    def owned_by(self, node: str, name: bytes) -> bool:
        return any(node in ring.replicas(name) for ring in self.rings)

    def merged(self, other: Configuration) -> Configuration:
        """What a node knows that has heard of both: the newest settled map, and all maps pending above it."""
        newest = max(self, other, key=lambda known: (known.settled.epoch, bool(known.origin)))
        settled = newest.settled
        above = {ring.epoch: ring for ring in (*other.pending, *self.pending) if ring.epoch > settled.epoch}
        return Configuration(settled, tuple(above[epoch] for epoch in sorted(above)), newest.origin)

    def is_beyond(self, origin: Sequence[int]) -> bool:
        """Whether a node with this configuration is where ``origin`` is, or has gone on from there."""
        pending = [ring.epoch for ring in self.pending]
        at = self.settled.epoch
        return at >= origin[0] and all(epoch <= at or epoch in pending for epoch in origin)

    def reaching(self, ring: Ring) -> Configuration:
        """With one map more to settle, if that is newer than all and puts records elsewhere."""
        newer = ring.epoch > self.target.epoch and ring.placement != self.target.placement
        if not newer or len(self.pending) >= PENDING_MAX:
            return self
        return Configuration(self.settled, (*self.pending, ring), self.origin)

    def reached(self) -> Configuration:
        """The target's owners have everything."""
        return Configuration(self.target, (), self.maps)

    def to_message(self, epoch: int, floor: bytes) -> StrongSettle:
        pending = [ring.to_map() for ring in self.pending]
        return StrongSettle(epoch, self.settled.to_map(), pending, floor, list(self.origin))


def from_maps(
    settled: RingMap, pending: Sequence[RingMap], origin: Sequence[int] = (), known: Iterable[Ring] = ()
) -> Configuration:
    """The configuration that another node told; ``known`` are rings that need not be made again.

    Raises:
        Corrupt: it is none.
    """
    epochs = [settled.epoch, *(ring.epoch for ring in pending)]
    if any(older >= newer for older, newer in pairwise(epochs)):
        raise Corrupt(f"not a configuration: its epochs are {epochs}")
    if origin and (origin[-1] != settled.epoch or any(a >= b for a, b in pairwise(origin))):
        raise Corrupt(f"not a configuration: {settled.epoch} was not settled by {list(origin)}")
    try:
        made = {ring.epoch: ring for ring in known}
        rings = [_ring(ring_map, made.get(ring_map.epoch)) for ring_map in (settled, *pending)]
        return Configuration(rings[0], tuple(rings[1:]), tuple(origin))
    except RingError as error:
        raise Corrupt(f"not a configuration: {error}") from error


def _ring(ring_map: RingMap, known: Ring | None) -> Ring:
    return known if known is not None and known.to_map() == ring_map else Ring.from_map(ring_map)


def encode(message: StrongSettle) -> bytes:
    """As it travels in the detail of a failure."""
    return msgspec.msgpack.encode(message)


def decode(detail: bytes) -> StrongSettle:
    """The inverse of :func:`encode`.

    Raises:
        Corrupt: it is something else.
    """
    try:
        return _decoder.decode(detail)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not a configuration: {error}") from error
