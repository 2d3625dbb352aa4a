"""``simulate``: one seed from the drawing of its world to the verdict."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvcomm.chaos.cluster import CLIENT_TENANT, Cluster, Parts
from kvcomm.chaos.eventual import Ending, Replica, check_converged
from kvcomm.chaos.history import Began, History
from kvcomm.chaos.liveness import Core, check_liveness
from kvcomm.chaos.moves import check_moves
from kvcomm.chaos.nemesis import Nemesis
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.registers import UNDECIDED, MixedWorkload
from kvcomm.chaos.splits import Splits, SplitWork
from kvcomm.chaos.watch import Violation
from kvcomm.chaos.workload import Work, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcomm.wire.messages import RecordState

FOUNDED_WITHIN_S = 60.0
RESTARTED_WITHIN_S = 4.0
LED_WITHIN_S = 20.0
"""When the controllers were killed, too: until there is a leader again, and shards have their map."""
LOOKED_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one plan."""

    plan: Plan
    history: History
    violations: list[Violation]
    undecided: list[Violation]
    """Registers whose history was too hard to judge: no verdict, and no clean bill either."""
    event_count: int
    frame_count: int
    simulated_s: float
    move_count: int
    """Times that records were on their way to another placement."""


def simulate(
    plan: Plan,
    parts: Parts | None = None,
    *,
    workload: Callable[[Plan], Workload] = MixedWorkload,
    script: Callable[[Nemesis], None] | None = None,
    splits: Splits | None = None,
) -> Result:
    """Run ``plan``; a broken invariant of a machine, and whatever else it raises, is a violation like any
    other.

    Args:
        parts: what the cluster is made of, in place of what is shipped.
        workload: what the clients do, and who judges it.
        script: puts faults on the agenda in place of the drawn ones.
        splits: in place of faults, splits that are healed and measured one after the other.
    """
    cluster = Cluster(plan, parts)
    cluster.history.add(Began(plan.describe()))
    try:
        if splits is not None:
            violations = _play_splits(cluster, workload(plan), splits)
        else:
            violations = _play(cluster, workload(plan), script)
    except AssertionError as error:
        violations = [*cluster.violations, Violation("invariant", f"at {cluster.world.now:.6f}: {error}")]
    except Exception:
        text = f"at {cluster.world.now:.6f}: {traceback.format_exc(limit=-3)}"
        violations = [*cluster.violations, Violation("crash", text)]
    return Result(
        plan,
        cluster.history,
        [violation for violation in violations if violation.promise != UNDECIDED],
        [violation for violation in violations if violation.promise == UNDECIDED],
        cluster.world.event_count,
        cluster.network.frame_count,
        cluster.world.now,
        _move_count(cluster),
    )


def _move_count(cluster: Cluster) -> int:
    moving = [cluster.maps[epoch].transition is not None for epoch in sorted(cluster.maps)]
    return sum(now and not before for before, now in pairwise([False, *moving]))


def _play(cluster: Cluster, workload: Workload, script: Callable[[Nemesis], None] | None) -> list[Violation]:
    nemesis, work = Nemesis(cluster), Work(cluster, workload)
    cluster.found(FOUNDED_WITHIN_S)
    work.begin()
    if script is None:
        nemesis.begin()
    else:
        script(nemesis)
    if cluster.plan.mode == "liveness":
        return _play_liveness(cluster, nemesis)
    return _play_safety(cluster, nemesis, work)


def _play_liveness(cluster: Cluster, nemesis: Nemesis) -> list[Violation]:
    plan, core = cluster.plan, Core(cluster, nemesis)
    cluster.world.after(plan.active_s / 2, core.settle)
    cluster.world.run(plan.active_s + plan.quiet_s)
    return cluster.violations + check_liveness(cluster.history, core.healthy_from_s)


def _play_safety(cluster: Cluster, nemesis: Nemesis, work: Work) -> list[Violation]:
    cluster.world.run(cluster.plan.active_s)
    nemesis.heal()
    return _settle(cluster, nemesis, work)


def _play_splits(cluster: Cluster, workload: Workload, splits: Splits) -> list[Violation]:
    nemesis, work = Nemesis(cluster), SplitWork(cluster, workload)
    cluster.found(FOUNDED_WITHIN_S)
    work.begin()
    late = splits.play(cluster, nemesis, work)
    nemesis.heal()
    return late + _settle(cluster, nemesis, work)


def _settle(cluster: Cluster, nemesis: Nemesis, work: Work) -> list[Violation]:
    """Let everything that was begun come to its end, look at what is left, and judge."""
    plan, world = cluster.plan, cluster.world
    world.run(world.now + plan.quiet_s)
    moved = check_moves(cluster) if cluster.controllers is not None else []
    quiet = ending(cluster, nemesis)
    work.finish()
    _until_looked(cluster, work)
    for name in cluster.names:
        shard = cluster.shard(name)
        if shard is not None:
            shard.check_answers()
    last = ending(cluster, nemesis)
    if plan.strong_percent:
        cluster.power_cut()
        world.run(world.now + RESTARTED_WITHIN_S)
        if cluster.controllers is not None:
            cluster.recover(LED_WITHIN_S)
        work.look_again()
        _until_looked(cluster, work)
    violations = cluster.violations + moved + work.workload.check(cluster.history, last)
    return violations + (check_converged(quiet) if plan.repair_interval_s is not None else [])


def _until_looked(cluster: Cluster, work: Work) -> None:
    """And one second, for what is still on its way."""
    until = cluster.world.now + LOOKED_WITHIN_S
    while work.looking and cluster.world.now < until:
        cluster.world.run(cluster.world.now + 0.1)
    cluster.world.run(cluster.world.now + 1.0)


def ending(cluster: Cluster, nemesis: Nemesis) -> Ending:
    """What is left on the disks, without the code's own types."""
    from l3_shard.ring import Ring

    tenant = cluster.credentials.tenant_digest(CLIENT_TENANT)
    records: dict[str, dict[str, Replica]] = {}
    place = Ring.from_map(cluster.map)
    for name in place.names if cluster.controllers is not None else cluster.names:
        for key, state in cluster.disks[name].states().items():
            records.setdefault(key.removeprefix(tenant).decode(), {})[name] = _replica(state)
    owners = {key: place.replicas(key.encode()) for key in records}
    return Ending(records, nemesis.intact, owners)


def _replica(state: RecordState) -> Replica:
    held = {
        (sibling.replica, sibling.counter): None if sibling.value is None else sibling.value.decode("latin-1")
        for sibling in state.siblings
    }
    return Replica(dict(state.context), held)
