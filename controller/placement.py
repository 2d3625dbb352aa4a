"""Ring maps made from ring maps: the first one, the same with other addresses, and each step of a transition.

Every function gives a map of the epoch that it is told; the caller decides when there is to be a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvcomm.wire.messages import NodePlan, RingMap, RingNode, RingRange, RingTransition

Addresses = Mapping[str, RingNode]
"""Where each node that was heard is; of these entries only the addresses count."""


@dataclass(frozen=True, slots=True)
class RingRules:
    """How many copies of what the map promises."""

    replicas: int
    write_quorum: int
    read_quorum: int
    block_copies: int


def first_map(rules: RingRules, shards: Sequence[RingNode], pools: Sequence[RingNode]) -> RingMap:
    """Epoch 1."""
    return RingMap(
        1,
        rules.replicas,
        rules.write_quorum,
        rules.read_quorum,
        rules.block_copies,
        list(shards),
        list(pools),
    )


def placed(plan: NodePlan, at: RingNode) -> RingNode:
    """The entry of a planned node that was heard ``at``."""
    return RingNode(plan.node, at.address, at.local_address, at.control, plan.rack, plan.weight)


def racked(plan: NodePlan, at: RingNode, known: RingNode | None = None) -> NodePlan:
    """The plan with the node's rack: where it says it is when it is placed first; then as the map has it, for
    another rack would be another placement."""
    return replace(plan, rack=at.rack or plan.rack if known is None else known.rack)


def copying(ring: RingMap, epoch: int, shards: Sequence[RingNode], ranges: Sequence[RingRange]) -> RingMap:
    """The stable map ``ring``, on its way to another placement."""
    assert ring.transition is None, "one transition at a time"
    return replace(ring, epoch=epoch, transition=RingTransition("copy", list(shards), list(ranges)))


def serving(ring: RingMap, epoch: int) -> RingMap:
    """From stage copy to serve."""
    assert ring.transition is not None and ring.transition.stage == "copy"
    return replace(ring, epoch=epoch, transition=replace(ring.transition, stage="serve"))


def going_back(ring: RingMap, epoch: int) -> RingMap:
    """From stage serve to copy."""
    assert ring.transition is not None and ring.transition.stage == "serve"
    return replace(ring, epoch=epoch, transition=replace(ring.transition, stage="copy"))


def arrived(ring: RingMap, epoch: int) -> RingMap:
    """The new placement alone."""
    assert ring.transition is not None and ring.transition.stage == "serve"
    return replace(
        ring, epoch=epoch, shards=ring.transition.shards, ranges=ring.transition.ranges, transition=None
    )


def abandoned(ring: RingMap, epoch: int) -> RingMap:
    """The old placement alone."""
    assert ring.transition is not None and ring.transition.stage == "copy"
    return replace(ring, epoch=epoch, transition=None)


def at_addresses(ring: RingMap, where: Addresses) -> RingMap:
    """The same map, with the addresses of those who were heard."""

    def moved(nodes: Sequence[RingNode]) -> list[RingNode]:
        return [_readdressed(node, where) for node in nodes]

    transition = ring.transition
    if transition is not None:
        transition = replace(transition, shards=moved(transition.shards))
    return replace(ring, shards=moved(ring.shards), pools=moved(ring.pools), transition=transition)


def with_pools(ring: RingMap, pools: Sequence[NodePlan], where: Addresses) -> RingMap:
    """The same map, with exactly those of these pools that were heard or that it has already."""
    known = {pool.node: pool for pool in ring.pools}
    entries = []
    for plan in pools:
        at = where.get(plan.node) or known.get(plan.node)
        if at is not None:
            entries.append(placed(racked(plan, at), at))
    return replace(ring, pools=entries)


def shards_of(ring: RingMap) -> dict[str, RingNode]:
    """Of both placements."""
    transition = ring.transition
    return {node.node: node for node in (*ring.shards, *(transition.shards if transition else ()))}


def nodes_of(ring: RingMap) -> list[str]:
    """All shards and pools, sorted."""
    return sorted({*shards_of(ring), *(pool.node for pool in ring.pools)})


def alike(one: RingMap, other: RingMap) -> bool:
    """Whether they differ in their epochs at most."""
    return replace(one, epoch=0) == replace(other, epoch=0)


def _readdressed(node: RingNode, where: Addresses) -> RingNode:
    at = where.get(node.node)
    if at is None:
        return node
    return replace(node, address=at.address, local_address=at.local_address, control=at.control)
