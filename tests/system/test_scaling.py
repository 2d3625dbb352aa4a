"""Shards that come, go and give each other their keys while clients work: nothing may be lost by it.

All steps of a move and all who can be killed at them take minutes: ``KVCOMM_LONG_FAULTS=1``, or
``kvcomm chaos run move-kills``.
"""

from __future__ import annotations

import pytest

from kvcomm.chaos.live.story import tell
from kvcomm.chaos.report import Report
from kvcomm.chaos.scenario import OPERATION_STEPS, Kill, Scale, Scenario
from kvcomm.chaos.scenarios import UNTOUCHED, WARM_S, move_kills
from tests.system.lab import LONG

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900 if LONG else 240)]


def carried_out(report: Report, count: int) -> None:
    """Whatever took how long: the orders are done, replicas agree, and no promise of the data was broken."""
    assert report.verdicts, report.why
    timed = {"equal_s"}
    assert all(verdict.kept for verdict in report.verdicts if verdict.measure not in timed), report.text()
    assert report.measured["equal_s"] != "never", report.text()
    assert report.measured["orders_open"] == 0, report.text()
    ended = [event.what for event in report.events if event.what.endswith((": done", ": rolled back"))]
    assert len(ended) == count, ended


def test_three_shards_become_six_and_then_four_under_load() -> None:
    scenario = Scenario(
        "scale",
        "nothing is lost",
        [Scale(at_s=WARM_S, shards=6), Scale(at_s=WARM_S + 1.0, shards=4)],
        [*UNTOUCHED],
        nodes=6,
        shards=3,
        settle_s=3.0,
        equal_within_s=90.0,
    )
    report = tell(scenario, "loopback", seed=1)
    carried_out(report, 2)
    assert report.measured["orders_undone"] == 0
    epochs = report.measured["epochs"]
    assert isinstance(epochs, float) and epochs >= 3, "three placements; how many epochs were seen is chance"


def test_who_is_killed_in_a_move_costs_nothing() -> None:
    scenario = move_kills() if LONG else move_kills(("copying",), ("source", "target"))
    report = tell(scenario, "loopback", seed=2)
    kills = [event.what for event in report.events if event.what.startswith("kill")]
    assert len(kills) == sum(isinstance(step, Kill) for step in scenario.steps)
    assert all(" while " in what for what in kills), kills
    carried_out(report, len(kills) + 1)
    if LONG:
        seen = {what.partition(" while ")[2] for what in kills}
        assert seen >= {*OPERATION_STEPS} - {"planned", "verifying"}, (
            "these two may be over too soon to be seen"
        )
