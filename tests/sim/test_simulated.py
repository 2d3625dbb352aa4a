"""Scenarios in virtual time: told to their end, judged by the judges of real processes, the same twice."""

from __future__ import annotations

import pytest

from kvcomm.chaos.scenario import (
    Cut,
    Heal,
    Kill,
    Load,
    Pause,
    Promise,
    Restart,
    Resume,
    Scale,
    Scenario,
    Slow,
)
from kvcomm.chaos.simulated import run_in_simulator

pytestmark = pytest.mark.slow

LOAD = Load(eventual=1, strong=1, blocks=0, pace_s=0.2, keys=3)


def scenario(*steps: object, **words: object) -> Scenario:
    return Scenario("told", "everything is kept", list(steps), nodes=5, load=LOAD, **words)  # type: ignore[arg-type]


def test_a_split_heals_and_the_report_is_the_same_twice() -> None:
    story = scenario(
        Cut(at_s=1.0, shape="halves", groups=[["n1", "n2"], ["n3", "n4", "n5"]]),
        Heal(at_s=5.0),
        promises=[Promise("equal_s", at_most=10.0), Promise("strong_wrong_side", at_most=0)],
    )
    report = run_in_simulator(story, 3)
    assert report.outcome == "passed", report.text()
    assert report.calls["eventual good"] > 20 and report.calls["strong good"] > 20
    assert [list(fault.sides) for fault in report.faults] == [[["n1", "n2"], ["n3", "n4", "n5"]]]
    assert run_in_simulator(story, 3).encoded() == report.encoded()


def test_the_leader_is_killed_while_records_move() -> None:
    story = scenario(
        Scale(at_s=0.5, shards=5),
        Kill(at_s=1.2, node="leader", part="controller"),
        Restart(at_s=6.0, node="leader", part="controller"),
        shards=4,
        settle_s=12.0,
        promises=[Promise("orders_open", at_most=0), Promise("epochs_doubled", at_most=0)],
    )
    report = run_in_simulator(story, 1)
    assert report.outcome == "passed", report.text()
    assert report.measured["leader_changes"] and report.measured["epochs"] >= 2  # type: ignore[operator]


def test_the_leader_that_was_paused_goes_on_though_others_are_down() -> None:
    story = scenario(
        Kill(at_s=0.5, node="n5", part="shard"),
        Pause(at_s=1.0, node="leader", part="controller"),
        Resume(at_s=2.0, node="leader", part="controller"),
        Restart(at_s=2.5, node="n5", part="shard"),
    )
    told = [event.what for event in run_in_simulator(story, 2).events]
    assert told[2] == told[1].replace("pause", "resume")


def test_a_promise_that_cannot_be_kept_fails() -> None:
    story = scenario(
        Cut(at_s=1.0, shape="alone"), Heal(at_s=6.0), promises=[Promise("strong_failed", at_most=0)]
    )
    assert run_in_simulator(story, 1).outcome == "failed"


def test_what_has_no_bandwidth_is_skipped_with_the_reason() -> None:
    report = run_in_simulator(scenario(Slow(at_s=1.0, node="n1", kbit_s=64)))
    assert report.outcome == "skipped" and "bandwidth" in report.why
