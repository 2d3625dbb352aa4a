"""The graph of who fetched whose blocks: weights, forgetting, bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.traffic import Fetches, TrafficGraph

REPORTS = st.lists(
    st.tuples(
        st.floats(0, 400), st.integers(1, 6), st.dictionaries(st.integers(1, 6), st.integers(0, 1 << 30))
    ),
    max_size=40,
)


def far(sizes: dict[int, int]) -> dict[int, Fetches]:
    return {publisher: Fetches(0, size) for publisher, size in sizes.items()}


def rate(graph: TrafficGraph, one: int, other: int, now: float) -> float:
    return sum(graph.rates(half, now).get((one, other), 0.0) for half in (0, 1))


def test_a_pair_has_one_weight_whoever_read():
    graph = TrafficGraph(100.0)
    graph.heard(1, "a", far({2: 600}), 0.0)
    graph.heard(2, "b", far({1: 400}), 0.0)
    assert rate(graph, 1, 2, 10.0) == pytest.approx(100.0, rel=0.04)
    assert [agent.rack for agent in graph.agents()] == ["a", "b"]


def test_own_blocks_and_empty_reports_are_no_traffic():
    graph = TrafficGraph()
    graph.heard(1, "a", far({1: 500, 2: 0}), 0.0)
    assert len(graph) == 0 and [agent.agent for agent in graph.agents()] == [1]


def test_from_the_own_rack_only_its_residents_blocks_count():
    graph = TrafficGraph()
    graph.heard(2, "a", {}, 0.0)
    graph.heard(3, "b", {}, 0.0)
    graph.heard(1, "a", dict.fromkeys((2, 3, 4), Fetches(1_000, 0)), 0.0)
    assert sorted(graph.rates(0, 1.0)) == [(1, 2)], "copies of 3's and 4's had been brought by others"
    graph.heard(1, "a", dict.fromkeys((2, 3, 4), Fetches(0, 1_000)), 0.0)
    assert sorted(graph.rates(1, 1.0)) == [(1, 2), (1, 3), (1, 4)]


def test_negative_numbers_are_refused_and_change_nothing():
    graph = TrafficGraph()
    with pytest.raises(ValueError, match="agent 0000000000000001 reports negative traffic"):
        graph.heard(1, "a", far({2: 5, 3: -1}), 0.0)
    assert not graph.agents()


@pytest.mark.parametrize(("half_life_s", "agents_max"), [(0.0, 9), (-1.0, 9), (1.0, 1), (float("nan"), 9)])
def test_bounds_that_cannot_be(half_life_s: float, agents_max: int):
    with pytest.raises(ValueError, match="must be larger"):
        TrafficGraph(half_life_s, agents_max=agents_max)


@pytest.mark.parametrize("age_s", [5, 50, 5_000])
def test_a_steady_rate_is_told_as_it_is_at_any_age(age_s: int):
    graph = TrafficGraph(60.0)
    for second in range(age_s):
        graph.heard(1, "a", far({2: 1_000}), float(second))
    assert rate(graph, 1, 2, float(age_s)) == pytest.approx(1_000, rel=0.02)


def test_what_is_a_half_life_old_counts_half():
    graph = TrafficGraph(100.0)
    graph.heard(1, "a", far({2: 1_000_000}), 0.0)
    later = [rate(graph, 1, 2, float(now)) for now in (10_000, 10_100)]
    assert later[1] / later[0] == pytest.approx(0.5)


def test_reports_go_into_the_halves_by_turns():
    graph = TrafficGraph()
    for size in (100, 1, 100, 1):
        graph.heard(1, "a", far({2: size}), 0.0)
    first, second = (graph.rates(half, 10.0)[1, 2] for half in (0, 1))
    assert first == pytest.approx(100 * second)


def test_the_lightest_pairs_make_room():
    graph = TrafficGraph(pairs_max=8)
    graph.heard(1, "a", far({other: other for other in range(2, 11)}), 0.0)
    assert len(graph) == 6
    assert sorted(other for _, other in graph.rates(0, 1.0)) == [5, 6, 7, 8, 9, 10]


def test_the_agents_heard_longest_ago_make_room():
    graph = TrafficGraph(agents_max=4)
    for agent in range(1, 6):
        graph.heard(agent, "a", far({agent + 1: 5} if agent < 4 else {}), float(agent))
    assert [agent.agent for agent in graph.agents()] == [3, 4, 5]
    graph.check()


def test_a_rack_once_said_stays_when_a_report_says_none():
    graph = TrafficGraph()
    graph.heard(1, "a", {}, 0.0, name="planner")
    graph.heard(1, "", {}, 1.0)
    (agent,) = graph.agents()
    assert (agent.rack, agent.name) == ("a", "planner")


@given(REPORTS)
def test_it_is_the_sum_of_all_that_was_reported_each_decayed(reports: list):
    graph = TrafficGraph(3.0)  # so short that weights are scaled back on the way
    told: list[tuple[float, int, int, int]] = []
    now = 0.0
    for after_s, agent, fetched in reports:
        now += after_s
        graph.heard(agent, "a", far(fetched), now)
        told += [(now, *sorted((agent, other)), size) for other, size in fetched.items() if other != agent]
    graph.check()
    began = min((at for at, *_ in told), default=0.0)
    for pair in {(one, other) for _, one, other, _ in told}:
        decayed = sum(size * 2 ** ((at - now) / 3.0) for at, *ends, size in told if tuple(ends) == pair)
        ours = rate(graph, *pair, now)
        age_s = max(now - (now if not reports else _first(reports)), 1e-3)
        span_s = 3.0 / math.log(2) * (1 - 2 ** (-age_s / 3.0))
        assert ours * span_s == pytest.approx(decayed, rel=1e-6, abs=1.5), began


def _first(reports: list) -> float:
    return reports[0][0]
