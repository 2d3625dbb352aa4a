"""``Moves``: did the controllers bring to an end what they began, and is every key where it belongs?

Looked at when everything is healed.  Promised:

* **over**: every operation is done, cancelled or taken back in bounded time, and every shard works by the
  newest map, which is a stable one;
* **clean**: no shard keeps a record that it does not keep by that map;
* **maps** (looked at all the time, by the cluster): one map an epoch, and no shard ever goes back;
* **leases**: no two leaders act in one term.

That every keeper has every record, and has the same, is what ``check_converged`` sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcomm.chaos.watch import Violation

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import Cluster
    from kvcomm.chaos.controllers import Controllers

OVER_WITHIN_S = 180.0
LOOK_S = 0.5


def check_moves(cluster: Cluster) -> list[Violation]:
    """Let operations come to their end; the broken promises."""
    assert cluster.controllers is not None
    until = cluster.world.now + OVER_WITHIN_S
    while (why := _unsettled(cluster, cluster.controllers)) and cluster.world.now < until:
        cluster.world.run(cluster.world.now + LOOK_S)
    if why:
        return [Violation("moves", f"after {OVER_WITHIN_S:.0f} s: {why}")]
    return list(_orphans(cluster))


def _unsettled(cluster: Cluster, controllers: Controllers) -> str:
    """What is not over yet."""
    leaders = [name for name in controllers.names if controllers.leads(name)]
    if len(leaders) != 1:
        return f"{leaders} lead"
    under_way = controllers.under_way(leaders[0])
    if under_way:
        return f"{leaders[0]} is still at {under_way}"
    ring_map = cluster.map
    if ring_map.transition is not None:
        return f"epoch {ring_map.epoch} is on its way to another"
    if {node.node for node in ring_map.shards} != set(controllers.wanted):
        return (
            f"the ring has {[node.node for node in ring_map.shards]}, to run are {sorted(controllers.wanted)}"
        )
    for node in ring_map.shards:
        shard = cluster.shard(node.node)
        if shard is None or shard.machine.ring.epoch != ring_map.epoch:
            return f"{node.node} does not work by epoch {ring_map.epoch}"
        move = shard.machine.move_status()
        if move.clean_epoch < ring_map.epoch:
            return f"{node.node} is not clean by epoch {ring_map.epoch}: {move}"
    return ""


def _orphans(cluster: Cluster) -> Iterator[Violation]:
    """Records on shards that do not keep them."""
    from l3_shard.entering import MEMBERSHIP_KEY
    from l3_shard.ring import Ring
    from l3_shard.shard import TENANT_BYTES

    place = Ring.from_map(cluster.map)
    for node in cluster.map.shards:
        for kind, held in (
            ("eventual", cluster.disks[node.node].values),
            ("strong", cluster.strong_disks[node.node].values),
        ):
            stray = [
                key[TENANT_BYTES:]
                for key in sorted(held.keys() - {MEMBERSHIP_KEY})
                if node.node not in place.replicas(key[TENANT_BYTES:])
            ]
            if stray:
                yield Violation("clean", f"{node.node} says that it is clean, and keeps {kind} {stray[:5]}")
