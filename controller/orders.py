"""Operators' orders, and what the leader orders itself, as operations; refused with the reason where they
cannot be carried out.

New shards come in by one transition for all of them, and leave by one: with one each, keys would be copied to
the first that comes, and on from there to the second; and the cluster would be through fewer, not more,
states that nobody has asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from controller.journal import Journal, Kind, Operation
from controller.policies.port import Move
from controller.ranges import needed, with_range, without_nodes
from kvcomm.errors import Refused
from kvcomm.wire.messages import (
    DrainOrder,
    MoveOrder,
    NodePlan,
    RingMap,
    RingNode,
    RingRange,
    ScaleOrder,
)
from l3_shard.ring import POINT_MAX, RANGES_MAX, SHARDS_MAX, WEIGHT_MAX

_NUMBERED = re.compile(r"shard-(\d+)")


def scale(order: ScaleOrder, ring: RingMap, journal: Journal) -> Operation | None:
    """``None``: there are as many already.  Raises ``Refused``."""
    if order.shards < 1:
        raise Refused(f"a ring has at least one shard, not {order.shards}")
    present = _present(ring, journal)
    wanted = order.shards - len(present)
    if wanted == 0:
        return None
    if wanted > 0:
        if order.shards > SHARDS_MAX:
            raise Refused(f"a ring has at most {SHARDS_MAX} shards, not {order.shards}")
        joining = _new_shards(wanted, present, journal)
        names = [node.node for node in joining]
        what = f"{len(present)} to {order.shards} shards: {_listed(names)} join"
        return _operation(journal, "scale", what, [*present, *joining], ring.ranges, joins=names)
    leaving = [node.node for node in sorted(present, key=_number)[order.shards :]]
    what = f"{len(present)} to {order.shards} shards: {_listed(leaving)} leave"
    return _leave(journal, ring, "scale", what, leaving)


def drain(order: DrainOrder, ring: RingMap, journal: Journal, role: str = "") -> Operation:
    """``role``: as what the node was heard, if it was.  Raises ``Refused``."""
    plan = journal.node(order.node)
    role = role if plan is None else plan.role
    if role in ("controller", "launcher"):
        raise Refused(f"{order.node!r} is a {role}, which keeps no data: only shards and pools are drained")
    if plan is None:
        raise Refused(f"{order.node!r} is no node of this cluster: `kvcomm status` names them")
    if plan.role == "pool":
        shards = _present(ring, journal)
        return _operation(journal, "drain", f"drain {plan.node}", shards, ring.ranges, leaves=[plan.node])
    return _leave(journal, ring, "drain", f"drain {plan.node}", [plan.node])


def move(order: MoveOrder, ring: RingMap, journal: Journal) -> Operation | None:
    """``None``: it is so already.  Raises ``Refused``."""
    if not 0 <= order.first <= order.last <= POINT_MAX:
        raise Refused(f"a range is 0 <= first <= last < 2^64, got {order.first:#x}..{order.last:#x}")
    if order.node not in {node.node for node in ring.shards}:
        raise Refused(f"{order.node!r} is no shard of the ring")
    ranges = with_range(ring.ranges, order.first, order.last, order.node)
    if ranges == ring.ranges:
        return None
    _check_ranges(ranges)
    what = f"{order.first:#x}..{order.last:#x} to {order.node}"
    return _operation(journal, "move", what, _present(ring, journal), ranges)


def rebalance(policy: str, moves: Sequence[Move], ring: RingMap, journal: Journal) -> Operation | None:
    """``None``: the policy moves nothing.  Raises ``Refused``."""
    if not moves:
        return None
    shards = {node.node: node for node in _present(ring, journal)}
    ranges = list(ring.ranges)
    for each in moves:
        if each.node not in shards:
            raise Refused(f"the policy {policy!r} names {each.node!r}, which is no shard of the ring")
        if each.weight is not None:
            plan = shards[each.node]
            weight = max(1, min(WEIGHT_MAX, each.weight))
            shards[each.node] = NodePlan(plan.node, plan.role, plan.rack, weight)
        if each.first is not None and each.last is not None:
            ranges = with_range(ranges, each.first, each.last, each.node)
    changed = list(shards.values())
    ranges = needed(ranges, [_entry(node) for node in changed])
    if changed == _present(ring, journal) and ranges == ring.ranges:
        return None
    _check_ranges(ranges)
    what = f"rebalance ({policy}): " + _listed([each.what for each in moves])
    return _operation(journal, "rebalance", what, changed, ranges)


def replace_dead(dead: Collection[str], ring: RingMap, journal: Journal) -> Operation:
    """A transition without these.  Raises ``Refused``: too few would be left."""
    names = sorted(dead)
    return _leave(journal, ring, "replace", f"go on without {_listed(names)}, dead for too long", names)


def entries(operation: Operation) -> list[RingNode]:
    """The shards of the placement to reach, wherever they are."""
    return [_entry(node) for node in operation.shards]


def _entry(plan: NodePlan) -> RingNode:
    return RingNode(plan.node, "", "", "", plan.rack, plan.weight)


def _leave(journal: Journal, ring: RingMap, kind: Kind, what: str, leaving: Sequence[str]) -> Operation:
    present = _present(ring, journal)
    staying = [node for node in present if node.node not in leaving]
    if len(staying) < ring.replicas:
        raise Refused(
            f"{len(staying)} shards would be left for {ring.replicas} replicas of each record: "
            "add shards first"
        )
    return _operation(
        journal, kind, what, staying, without_nodes(ring.ranges, leaving), leaves=sorted(leaving)
    )


def _operation(
    journal: Journal,
    kind: Kind,
    what: str,
    shards: Sequence[NodePlan],
    ranges: Sequence[RingRange],
    *,
    joins: Sequence[str] = (),
    leaves: Sequence[str] = (),
) -> Operation:
    return Operation(journal.next_number, kind, what, list(shards), list(ranges), list(joins), list(leaves))


def _present(ring: RingMap, journal: Journal) -> list[NodePlan]:
    """The shards of the ring, as they are planned."""
    assert ring.transition is None
    return [NodePlan(node.node, "shard", node.rack, node.weight) for node in ring.shards]


def _new_shards(count: int, present: Sequence[NodePlan], journal: Journal) -> list[NodePlan]:
    """Numbered on, each in the rack with the fewest shards."""
    racks = Counter({node.rack: 0 for node in journal.nodes if node.role in ("shard", "pool")})
    racks.update(node.rack for node in present)
    first = 1 + max((_number(node)[0] for node in journal.of_role("shard")), default=-1)
    joining = []
    for number in range(first, first + count):
        rack = min(sorted(racks), key=lambda rack: racks[rack], default="")
        racks[rack] += 1
        joining.append(NodePlan(f"shard-{number}", "shard", rack))
    return joining


def _number(node: NodePlan) -> tuple[int, str]:
    found = _NUMBERED.fullmatch(node.node)
    return (int(found[1]) if found else -1, node.node)


def _check_ranges(ranges: Sequence[RingRange]) -> None:
    if len(ranges) > RANGES_MAX:
        raise Refused(f"a ring has at most {RANGES_MAX} ranges, and these would be {len(ranges)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
