"""``simulate``: one seed from the drawing of its world to the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcomm.chaos.cluster import CLIENT_TENANT, Cluster, Parts
from kvcomm.chaos.eventual import Ending, Replica, check_converged
from kvcomm.chaos.history import Began, History
from kvcomm.chaos.liveness import Core, check_liveness
from kvcomm.chaos.nemesis import Nemesis
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.watch import Violation
from kvcomm.chaos.workload import EventualWorkload, Work, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcomm.wire.messages import RecordState


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one plan."""

    plan: Plan
    history: History
    violations: list[Violation]
    event_count: int
    frame_count: int

    @property
    def simulated_s(self) -> float:
        return self.plan.active_s + self.plan.quiet_s


def simulate(
    plan: Plan,
    parts: Parts | None = None,
    *,
    workload: Callable[[Plan], Workload] = EventualWorkload,
    script: Callable[[Nemesis], None] | None = None,
) -> Result:
    """Run ``plan``; a broken invariant of a machine is a violation like any other.

    Args:
        parts: what the cluster is made of, in place of what is shipped.
        workload: what the clients do, and who judges it.
        script: puts faults on the agenda in place of the drawn ones.
    """
    cluster = Cluster(plan, parts)
    cluster.history.add(Began(plan.describe()))
    try:
        violations = _play(cluster, workload(plan), script)
    except AssertionError as error:
        violations = [*cluster.violations, Violation("invariant", f"at {cluster.world.now:.6f}: {error}")]
    return Result(plan, cluster.history, violations, cluster.world.event_count, cluster.network.frame_count)


def _play(cluster: Cluster, workload: Workload, script: Callable[[Nemesis], None] | None) -> list[Violation]:
    nemesis, work = Nemesis(cluster), Work(cluster, workload)
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
    plan, world = cluster.plan, cluster.world
    world.run(plan.active_s)
    nemesis.heal()
    world.run(plan.active_s + plan.quiet_s)
    quiet = ending(cluster, nemesis)
    work.finish()
    world.run(world.now + plan.operation_timeout_s + 1.0)
    for name in cluster.names:
        shard = cluster.shard(name)
        if shard is not None:
            shard.check_answers()
    violations = cluster.violations + work.workload.check(cluster.history, ending(cluster, nemesis))
    return violations + (check_converged(quiet) if plan.repair_interval_s is not None else [])


def ending(cluster: Cluster, nemesis: Nemesis) -> Ending:
    """What is left on the disks, without the code's own types."""
    from l3_shard.ring import Ring

    tenant = cluster.credentials.tenant_digest(CLIENT_TENANT)
    records: dict[str, dict[str, Replica]] = {}
    for name in cluster.names:
        for key, state in cluster.disks[name].states().items():
            records.setdefault(key.removeprefix(tenant).decode(), {})[name] = _replica(state)
    ring = Ring.from_map(cluster.map)
    owners = {key: ring.replicas(key.encode()) for key in records}
    return Ending(records, nemesis.intact, owners)


def _replica(state: RecordState) -> Replica:
    held = {
        (sibling.replica, sibling.counter): None if sibling.value is None else sibling.value.decode()
        for sibling in state.siblings
    }
    return Replica(dict(state.context), held)
