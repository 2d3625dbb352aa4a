"""The shipped code under drawn faults, a small number of worlds; ``make sim`` tries more."""

from __future__ import annotations

import json

import pytest

from kvcomm.chaos.plan import Mode
from kvcomm.chaos.simulation import Result, simulate
from kvcomm.chaos.swarm import draw_plan
from tests.sim.planted import PLANTED, SEEDS_MAX, caught_at


def explain(result: Result) -> str:
    world = json.dumps(result.plan.describe(), sort_keys=True)
    found = "\n".join(f"{violation.promise}: {violation.text}" for violation in result.violations[:10])
    return f"seed {result.plan.seed} in {result.plan.mode} mode\n{found}\n{world}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_promise_is_broken(first: int) -> None:
    done = 0
    for seed in range(first, first + 10):
        result = simulate(draw_plan(seed))
        assert not result.violations, explain(result)
        done += sum(operation.outcome == "ok" for operation in result.history.operations())
    assert done > 300, "a cluster that refuses everything keeps every promise"


@pytest.mark.slow
def test_a_healed_core_answers_again() -> None:
    mode: Mode = "liveness"
    for seed in range(15):
        result = simulate(draw_plan(seed, mode))
        assert not result.violations, explain(result)


QUICK = sorted(set(PLANTED) - {"damage forgotten", "group commit lies"})
"""Those that the first few seeds show; ``make sim-planted`` tries all of them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_caught(name: str) -> None:
    assert caught_at(PLANTED[name], range(30)) is not None, PLANTED[name].lie


def test_there_are_enough_planted_bugs() -> None:
    assert len(PLANTED) >= 15
    assert SEEDS_MAX == 200
