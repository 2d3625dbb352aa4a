"""Controllers that stand still, die and forget, in worlds written down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcomm.chaos.cluster import Parts
from kvcomm.chaos.history import Happened
from kvcomm.chaos.nemesis import Nemesis
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.simulation import Result, simulate
from kvcomm.wire.messages import ScaleOrder
from tests.sim.planted_moves import MOVES
from tests.sim.scenarios.test_named import at, kept, returned

pytestmark = pytest.mark.slow

FOUR = Plan(
    seed=4, shards=4, clients=2, keys=4, pace_s=0.3, active_s=30.0, controllers=3, repair_interval_s=3.0,
    strong_percent=30,
)  # fmt: skip


def told(result: Result) -> str:
    return "\n".join(line.what for line in result.history.lines if isinstance(line, Happened))


def leader(nemesis: Nemesis) -> str:
    (name,) = [name for name in nemesis.controllers.names if nemesis.controllers.leads(name)]
    return name


def scale(shards: int, nemesis: Nemesis) -> None:
    nemesis.controllers.operator().order(ScaleOrder(shards))


def test_a_fifth_shard_joins() -> None:
    result = kept(simulate(FOUR, script=at({6.0: lambda n: scale(5, n)})))
    assert result.move_count == 1 and "shard-0 is to run" in told(result)


def stand_still(nemesis: Nemesis) -> None:
    """The leader is stopped for longer than its lease; back again it is given an order before it can look."""
    host = nemesis.cluster.host(leader(nemesis))
    host.pause()

    def go_on() -> None:
        nemesis.controllers.operator().order(ScaleOrder(5), first=host.name)
        host.resume()

    nemesis.cluster.world.after(12.0, go_on)


def plays(parts: Parts | None = None) -> Result:
    return simulate(FOUR, parts, script=at({6.0: stand_still}))


def test_a_leader_that_stood_still_leads_no_more() -> None:
    kept(plays())


def test_one_that_does_not_look_at_the_time_is_condemned() -> None:
    bug = MOVES["leader acts after its lease"]
    assert "leases" in {violation.promise for violation in plays(bug.parts).violations}


def test_no_call_fails_because_all_controllers_are_gone() -> None:
    def kill(nemesis: Nemesis) -> None:
        for name in nemesis.controllers.names:
            nemesis.cluster.broken.add(name)
            nemesis.cluster.kill(name)

    def bring_back(nemesis: Nemesis) -> None:
        nemesis.cluster.broken.clear()

    result = kept(simulate(FOUR, script=at({6.0: kill, 29.0: bring_back})))
    calls = returned(result, 6.5, 28.0)
    assert len(calls) > 50
    assert all(line.outcome == "ok" or line.error.startswith("conflict") for line in calls)


def test_the_map_outlives_the_loss_of_all_metadata() -> None:
    def forget(nemesis: Nemesis) -> None:
        nemesis.strike("controllers_disks")

    result = kept(
        simulate(replace(FOUR, fault_for_s=1.0), script=at({8.0: forget, 16.0: lambda n: scale(5, n)}))
    )
    assert result.move_count == 1


def test_the_map_outlives_a_power_cut_of_everybody_that_costs_all_records_and_all_metadata() -> None:
    """The records' databases are not synced; those of the strong records are."""

    def cut(nemesis: Nemesis) -> None:
        nemesis.cluster.power_cut()
        nemesis.strike("controllers_disks")

    plan = replace(FOUR, fsync="never", strong_percent=100, fault_for_s=1.0)
    result = kept(simulate(plan, script=at({6.0: lambda n: scale(5, n), 20.0: cut})))
    assert result.move_count == 1
    assert [line for line in returned(result, 26.0, 30.0) if line.outcome == "ok"]
