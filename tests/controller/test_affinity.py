"""Advice on where agents should live: planted communities, none, prices, silence."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from controller.affinity import RACKS_MAX, Advice, Pricing, Survey
from controller.traffic import Fetches, TrafficGraph

pytest.importorskip("pymetis", reason="the extra affinity is not installed")

MIB = 1 << 20
NEAR, FAR = Fetches(MIB, 0), Fetches(0, MIB)
PRICING = Pricing(move_bytes=MIB)
AGENTS, RACKS = 24, 4


def heard(
    partner: Callable[[int, random.Random], int], *, reports: int = 1_500, seed: int = 5
) -> TrafficGraph:
    """Agents spread over the racks at random, each report some blocks of one partner each."""
    draw, graph = random.Random(seed), TrafficGraph()
    homes = [agent % RACKS for agent in range(AGENTS)]
    draw.shuffle(homes)
    for agent, home in enumerate(homes):
        graph.heard(1 + agent, f"rack-{home}", {}, 0.0, name=f"agent-{agent}")
    for number in range(reports):
        agent = draw.randrange(AGENTS)
        others = {partner(agent, draw) for _ in range(3)}
        fetched = {1 + other: NEAR if homes[other] == homes[agent] else FAR for other in others}
        graph.heard(1 + agent, f"rack-{homes[agent]}", fetched, number / 100, name=f"agent-{agent}")
    return graph


def of_community(agent: int, draw: random.Random) -> int:
    """Seven in ten from the own community of ``agent % RACKS``."""
    if draw.random() < 0.7:
        return draw.randrange(agent % RACKS, AGENTS, RACKS)
    return draw.randrange(AGENTS)


def of_all(agent: int, draw: random.Random) -> int:
    return draw.randrange(AGENTS)


def advice(
    graph: TrafficGraph, pricing: Pricing = PRICING, now: float = 15.0, rooms: dict[str, int] | None = None
) -> Advice:
    racks: dict[str, int | None] = {f"rack-{index}": None for index in range(RACKS)}
    return Survey.of(graph, {**racks, **(rooms or {})}, now, pricing).advice()


def test_communities_are_found_and_the_promise_is_kept_by_later_traffic():
    found = advice(heard(of_community))
    assert not found.reason and found.share_before < 0.35 and found.share_after > 0.6
    where = {residence.agent: residence.better_rack for residence in found.residences}
    draw = random.Random(99)
    pairs = [(agent, of_community(agent, draw)) for agent in range(AGENTS) for _ in range(200)]
    met = [where[1 + one] == where[1 + other] for one, other in pairs if one != other]
    assert sum(met) / len(met) == pytest.approx(found.share_after, abs=0.05)
    assert all(list(where.values()).count(f"rack-{index}") == 6 for index in range(RACKS))


@pytest.mark.parametrize("reports", [60, 1_500])
def test_without_communities_nobody_moves(reports: int):
    for seed in range(5):
        found = advice(heard(of_all, reports=reports, seed=seed))
        assert found.move_count == 0 and found.share_after == found.share_before
        assert "would not have fitted other" in found.reason or "worth its price" in found.reason


def test_a_move_that_costs_more_than_it_brings_is_not_advised():
    graph = heard(of_community)
    dear = advice(graph, Pricing(move_bytes=1e15))
    assert dear.move_count == 0 and dear.reason == "no move is worth its price"
    brief = advice(graph, Pricing(horizon_s=1e-3, move_bytes=MIB))
    assert brief.move_count == 0
    counts = [advice(graph, Pricing(move_bytes=price)).move_count for price in (1e6, 4.5e10, 1e12)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[1] >= counts[2] == 0


def test_a_single_large_transfer_moves_nobody():
    graph = TrafficGraph()
    for agent in range(1, 9):
        graph.heard(agent, f"rack-{agent % 2}", {}, 0.0)
    graph.heard(1, "rack-1", {2: Fetches(0, 1 << 40)}, 1.0)
    assert advice(graph, now=2.0).move_count == 0


def test_the_silent_stay_and_are_counted():
    graph = heard(of_community)
    silent = [residence for residence in advice(graph, now=1_000.0).residences if residence.moves]
    assert silent == []


def test_racks_that_are_made_up_are_bounded():
    """Each costs time with every agent."""
    graph = TrafficGraph()
    graph.heard(1, "rack-0", {2: FAR}, 0.0)
    graph.heard(2, "home", {1: FAR}, 0.0)
    graph.heard(3, "home", {1: FAR}, 0.0)
    for agent in range(4, 10 + 2 * RACKS_MAX):
        graph.heard(agent, f"made-up-{agent}", {1: FAR}, 0.0)
    survey = Survey.of(graph, {"rack-0": None}, 1.0, PRICING)
    assert len(survey.racks) == 1 + RACKS_MAX and {"rack-0", "home"} <= {*survey.racks}
    assert len(survey.agents) == len(survey.homes) == 2 + RACKS_MAX


def test_rooms_are_kept_to():
    found = advice(heard(of_community), rooms={"rack-0": 18, "rack-1": 2, "rack-2": 2, "rack-3": 6})
    counts = [sum(each.better_rack == f"rack-{index}" for each in found.residences) for index in range(4)]
    assert counts[1] <= 6 and counts[2] <= 6, "what is there may stay, no more come"
    with pytest.raises(ValueError, match="24 agents, but room for 4 in racks"):
        advice(heard(of_community), rooms={f"rack-{index}": 1 for index in range(RACKS)})
    with pytest.raises(ValueError, match="cannot take -1"):
        advice(heard(of_community), rooms={"rack-0": -1})


def test_traffic_with_agents_of_no_known_rack_is_told_apart():
    graph = TrafficGraph()
    for second in range(10):
        graph.heard(1, "rack-0", {7: Fetches(0, MIB), 2: Fetches(0, MIB)}, float(second))
        graph.heard(2, "rack-1", {}, float(second))
    found = advice(graph, Pricing(move_bytes=1e18), now=10.0)
    assert found.unplaced_bytes_s == pytest.approx(MIB, rel=0.1)
    assert found.bytes_s == pytest.approx(MIB, rel=0.1)
    assert [(each.agent, each.rack) for each in found.residences] == [(1, "rack-0"), (2, "rack-1")]


def test_nothing_to_say():
    graph = TrafficGraph()
    assert Survey.of(graph, {}, 0.0, PRICING).advice().reason == "no agent got another one's blocks"
    graph.heard(1, "a", {2: FAR}, 0.0)
    graph.heard(2, "a", {1: FAR}, 0.0)
    assert Survey.of(graph, {}, 1.0, PRICING).advice().reason == "there is one rack"


@pytest.mark.parametrize("pricing", [{"horizon_s": 0}, {"move_bytes": -1}, {"silent_after_s": 0}])
def test_prices_that_cannot_be(pricing: dict):
    with pytest.raises(ValueError, match="horizon and silence"):
        Pricing(**pricing)
