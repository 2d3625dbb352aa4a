"""What comes next in an operation: another journal entry, another map, or waiting, and for what.

Nothing here remembers anything: the answer follows from the journal's entry, the map and the shards' reports,
so it is the same for the leader that began the operation and for every later one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from controller import placement
from controller.journal import Back, Operation
from controller.moving import Heading, Moving, ShardReport, Turn
from controller.placement import Addresses
from kvcomm.wire.messages import NodePlan, RingMap


@dataclass(frozen=True, slots=True)
class Onward:
    """What is to be done; whatever is in ``operation`` is noted before ``ring`` is issued."""

    operation: Operation
    ring: RingMap | None = None
    """The next map but for its epoch, which is the caller's to give."""
    trouble: str = ""
    """What it waits for."""
    copied: bool = False
    """All has been got, and is only to be compared."""


def go_on(
    operation: Operation,
    ring: RingMap,
    shards: Mapping[str, ShardReport],
    where: Addresses,
    *,
    patience_s: float,
) -> Onward:
    """The next step of an operation that is under way.

    Args:
        ring: the newest map that was noted.
        patience_s: a shard that was to get records and has been dead for longer ends the operation.
    """
    names = [node.node for node in operation.shards]
    moving = Moving(ring, shards, target=names, patience_s=patience_s)
    if ring.transition is not None:
        return _in_transition(operation, ring, moving)
    if operation.back or at_target(operation, ring):
        return _purge(operation, ring, moving)
    return _start(operation, ring, moving, where)


def resumed(ring: RingMap, number: int) -> Operation:
    """The operation of a transition that no journal tells of."""
    transition = ring.transition
    assert transition is not None
    before, after = ({node.node for node in nodes} for nodes in (ring.shards, transition.shards))
    return Operation(
        number=number,
        kind="resume",
        what="a move that was found under way",
        shards=[NodePlan(node.node, "shard", node.rack, node.weight) for node in transition.shards],
        ranges=list(transition.ranges),
        joins=sorted(after - before),
        leaves=sorted(before - after),
        served=True,  # in stage copy it may be on its way back
    )


def taken_back(operation: Operation, how: Back, why: str) -> Operation:
    """It is to end as ``how`` says, back at the old placement."""
    return replace(operation, back=how, trouble=why)


def at_target(operation: Operation, ring: RingMap) -> bool:
    """Whether the map is the placement that the operation is for; racks are where nodes turn out to be."""
    wanted = sorted((node.node, node.weight) for node in operation.shards)
    there = sorted((node.node, node.weight) for node in ring.shards)
    return wanted == there and operation.ranges == ring.ranges


def _in_transition(operation: Operation, ring: RingMap, moving: Moving) -> Onward:
    assert ring.transition is not None
    verdict = moving.judge(_heading(operation))
    dead = moving.dead_gainers
    if verdict.turn is None and dead and not operation.back:
        why = f"{', '.join(dead)} stayed dead, and was to get keys"
        return Onward(taken_back(operation, "rolled back", why), trouble=verdict.trouble)
    operation = replace(operation, step="copying" if ring.transition.stage == "copy" else "serving")
    if verdict.turn == "serve":
        operation = replace(operation, served=True)
    following = None if verdict.turn is None else _MAPS[verdict.turn](ring, ring.epoch)
    return Onward(operation, following, verdict.trouble, moving.copied)


def _start(operation: Operation, ring: RingMap, moving: Moving, where: Addresses) -> Onward:
    verdict = moving.judge_start()
    if verdict.turn is None:
        dead = moving.dead_gainers
        if dead:
            return Onward(taken_back(operation, "failed", verdict.trouble), trouble=verdict.trouble)
        return Onward(operation, trouble=verdict.trouble)
    known = placement.shards_of(ring)
    there = {**known, **where}
    shards = [placement.racked(plan, there[plan.node], known.get(plan.node)) for plan in operation.shards]
    entries = [placement.placed(plan, there[plan.node]) for plan in shards]
    following = placement.copying(ring, ring.epoch, entries, operation.ranges)
    return Onward(replace(operation, shards=shards), following)


def _purge(operation: Operation, ring: RingMap, moving: Moving) -> Onward:
    operation = replace(operation, step="purging")
    if any(pool.node in operation.leaves for pool in ring.pools) and not operation.back:
        return Onward(operation, trouble="the map still holds what is to leave")
    verdict = moving.judge_purge()
    if verdict.turn is None:
        return Onward(operation, trouble=verdict.trouble)
    return Onward(replace(operation, step=operation.back or "done"))


def _heading(operation: Operation) -> Heading:
    if not operation.back:
        return "forth"
    return "back" if operation.served else "back unserved"


_MAPS: Mapping[Turn, Callable[[RingMap, int], RingMap]] = {
    "serve": placement.serving,
    "arrive": placement.arrived,
    "back": placement.going_back,
    "abandon": placement.abandoned,
}
