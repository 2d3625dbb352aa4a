"""Leases and fences in simulated worlds; every promise of their judge kept and broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from kvcomm.chaos.cluster import Parts, shipped_shard
from kvcomm.chaos.leases import Hold, LeaseWorkload, check_leases
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.simulation import Result, simulate
from kvcomm.chaos.swarm import draw_plan
from kvcomm.lease import Claim, Tenure
from kvcomm.machine import Origin
from kvcomm.wire.messages import StrongChange, StrongOrder
from l3_shard.shard import Shard

SEEDS = 16


def promises(holds: list[Hold], writes: list[tuple[str, int]]) -> list[str]:
    return [violation.promise for violation in check_leases(holds, writes)]


def test_what_is_kept_and_what_is_broken() -> None:
    first, second = Hold("a", 1, 0.0, 2.0), Hold("b", 2, 2.0, 3.0)
    assert promises([second, first], [("01", 1), ("03", 2), ("02", 1)]) == []
    assert promises([first, Hold("b", 2, 1.9, 3.0)], []) == ["one holder"]
    assert promises([first, Hold("b", 1, 2.0, 3.0)], []) == ["epochs"]
    assert promises([Hold("a", 1, 0.0, 9.0), second, Hold("c", 3, 4.0, 5.0)], []) == ["one holder"] * 2
    assert promises([], [("01", 1), ("02", 2), ("03", 1)]) == ["fenced"]


def plans() -> Iterator[Plan]:
    """Worlds in which voters lose their disks within bounds only, and clients do nothing else."""
    for seed in range(10_000):
        plan = draw_plan(seed, controlled=False)
        if plan.strong_percent:
            yield dataclasses.replace(plan, pace_s=min(plan.pace_s, 0.2))


def play(
    plan: Plan, parts: Parts | None = None, tenure: Callable[[str, float], Tenure] = Tenure
) -> tuple[LeaseWorkload, Result]:
    made: list[LeaseWorkload] = []

    def workload(plan: Plan) -> LeaseWorkload:
        made.append(LeaseWorkload(plan, tenure))
        return made[0]

    result = simulate(plan, parts, workload=workload)
    return made[0], result


@pytest.mark.slow
def test_one_holder_and_no_smaller_epoch_whatever_happens() -> None:
    held = written = fenced = 0
    for plan, _ in zip(plans(), range(SEEDS), strict=False):
        work, result = play(plan)
        assert result.violations == [], plan.seed
        held, written, fenced = (
            held + len(work.holds),
            written + len(work.writes),
            fenced + work.fenced_count,
        )
    assert held > SEEDS and written > SEEDS and fenced > 0, (held, written, fenced)


class _FenceForgotten(Shard):
    """Takes every change for one without a lease."""

    def _strong_change(self, origin: Origin, message: StrongChange) -> None:
        free = [StrongOrder(each.key, each.op, each.expected, each.value) for each in message.changes]
        fenced = [each for each in message.changes if each.key != b"fenced"]
        super()._strong_change(origin, StrongChange(message.epoch, fenced or free))


class _CountsFromTheAnswer(Tenure):
    def granted(self, claim: Claim, version: bytes) -> None:
        super().granted(claim, version)
        self._until += 1.0


def caught(promise: str, parts: Parts | None, tenure: Callable[[str, float], Tenure] = Tenure) -> bool:
    for plan, _ in zip(plans(), range(60), strict=False):
        _, result = play(plan, parts, tenure)
        if promise in {violation.promise for violation in result.violations}:
            return True
    return False


@pytest.mark.slow
def test_a_shard_that_forgets_the_fence_is_caught() -> None:
    assert caught("fenced", Parts(shard=lambda birth: shipped_shard(birth, _FenceForgotten)))


@pytest.mark.slow
def test_a_holder_that_counts_from_the_answer_is_caught() -> None:
    assert caught("one holder", None, _CountsFromTheAnswer)
