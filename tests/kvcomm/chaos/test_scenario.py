"""Scenarios: those that come along are sound, and a file says what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm.chaos.scenario import LEADER, Promise, Scenario, resolved, scenario_of
from kvcomm.chaos.scenario_file import parse_scenario, written
from kvcomm.chaos.scenarios import SCENARIOS, scenario_named
from kvcomm.errors import ConfigError

CATALOGUE = {*range(1, 9), 10, 11, 12, *range(20, 26), 34, 35, 36}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_of_the_list_survives_its_own_text(name: str) -> None:
    scenario = scenario_named(name)
    assert scenario.name == name
    assert parse_scenario(written(scenario)) == scenario


@pytest.mark.parametrize("seed", range(40))
def test_random_splits_are_sound(seed: int) -> None:
    scenario = scenario_named("random-split", 3.0, seed)
    assert parse_scenario(written(scenario)) == scenario
    assert scenario == scenario_named("random-split", 3.0, seed)


def test_every_fault_of_the_catalogue_that_needs_processes_or_a_network_is_there() -> None:
    assert {fault for name in SCENARIOS for fault in scenario_named(name).faults} >= CATALOGUE


def test_the_hold_is_how_long_the_fault_lasts() -> None:
    cut, heal = scenario_named("halves", 7.5).steps
    assert heal.at_s - cut.at_s == 7.5


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="halves, halves-long"):
        scenario_named("halfs")


def document(**changes: Any) -> dict[str, Any]:
    return {
        "name": "mine",
        "promise": "all is well",
        "steps": [
            {"do": "cut", "at_s": 2, "shape": "isolate", "groups": [["n2"]]},
            {"do": "heal", "at_s": 4},
        ],
        "promises": [{"measure": "equal_s", "at_most": 5}],
    } | changes


def test_a_file_of_a_user() -> None:
    scenario = scenario_of(document())
    assert (scenario.nodes, scenario.end_s) == (5, 7.0)
    assert Promise("eventual_broken", at_most=0) in scenario.all_promises


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "Not Good"}, r"\$\.name"),
        ({"nodes": 50}, r"\$\.nodes"),
        ({"step": []}, "unknown field `step`"),
        ({"steps": [{"do": "explode", "at_s": 1}]}, "explode"),
        ({"steps": [{"do": "cut", "at_s": 1, "shape": "circle"}]}, r"\$\.steps\[0\]\.shape"),
        ({"steps": [{"do": "cut", "at_s": 1, "shape": "halves"}]}, "step 1 .cut.: .*none hears another"),
        ({"steps": [{"do": "kill", "at_s": 1, "node": "n7"}]}, "no node 'n7'"),
        ({"steps": [{"do": "heal", "at_s": 2}, {"do": "heal", "at_s": 1}]}, "before the step"),
        ({"promises": [{"measure": "speed", "at_most": 1}]}, "no measure 'speed'"),
        ({"promises": [{"measure": "equal_s"}]}, "neither at_most nor at_least"),
        ({"nodes": 2, "controllers": 3, "steps": []}, "need as many nodes"),
        ({"nodes": 3, "shards": 4}, "of 3 nodes"),
        ({"shards": 0}, r"\$\.shards"),
        ({"controllers": 2}, r"\$\.controllers"),
        ({"steps": [{"do": "kill", "at_s": 1, "node": "n5", "part": "controller"}]}, "n5 has no controller"),
        ({"steps": [{"do": "scale", "at_s": 1, "shards": 6}]}, "6 shards need as many nodes"),
        ({"steps": [{"do": "resume", "at_s": 1, "node": "n1"}]}, "no step above it paused n1, part all"),
        (
            {"steps": [{"do": "pause", "at_s": 1, "node": "n1"}, {"do": "restart", "at_s": 2, "node": "n1"}]},
            "no step above it killed or stopped n1",
        ),
        ({"steps": [{"do": "throttle", "at_s": 1, "node": "n1", "percent": 0}]}, r"\$\.steps\[0\]\.percent"),
        (
            {
                "steps": [
                    {"do": "throttle", "at_s": 1, "node": "n1", "percent": 10, "part": "shard"},
                    {"do": "unthrottle", "at_s": 2, "node": "n1"},
                ]
            },
            "no step above it throttled n1, part all",
        ),
        ({"promises": [{"measure": "equal_s", "at_most": float("nan")}]}, "is not a number"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        scenario_of(document(**changes))


@pytest.mark.parametrize("text", ["steps: [", "just words", "- 1", "[" * 5000])
def test_a_file_that_is_no_scenario(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_scenario(text)


def test_the_leader_is_taken_out_of_where_it_stands_besides() -> None:
    assert resolved([[LEADER], ["n1", "n2", "n3"]], "n2") == [["n2"], ["n1", "n3"]]
    assert resolved([["n1"], ["n2"]], "n2") == [["n1"], ["n2"]]


@pytest.mark.parametrize(
    ("promise", "value", "kept"),
    [
        (Promise("equal_s", at_most=1), 1.0, True),
        (Promise("equal_s", at_most=1), 1.1, False),
        (Promise("equal_s", at_most=1), float("inf"), False),
        (Promise("equal_s", at_most=1), None, True),
        (Promise("strong_share", at_least=0.5), 0.4, False),
        (Promise("strong_share", at_least=0.5), None, False),
    ],
)
def test_when_a_promise_is_kept(promise: Promise, value: float | None, kept: bool) -> None:
    assert promise.kept(value) == kept


def test_scenarios_have_defaults_only_where_nothing_must_be_said() -> None:
    assert Scenario("a", "b", []).node_names == ["n1", "n2", "n3", "n4", "n5"]
