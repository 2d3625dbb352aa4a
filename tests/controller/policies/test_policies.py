"""Load policies: they converge, they rest, and they do not go to and fro."""

from __future__ import annotations

from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.policies.giving import give, given_share
from controller.policies.greedy import Greedy
from controller.policies.port import Policy
from controller.policies.table import NAMES, policy_named
from controller.policies.threshold import Threshold, ThresholdOptions
from controller.policies.view import STALE_S, LoadHistory, LoadView
from controller.ranges import with_range
from kvcomm.errors import Refused
from kvcomm.wire.messages import ShardLoad
from l3_shard.ring import Ring
from tests.controller.policies.load import EVEN, Cluster, ring_of, zipf

STRETCHES = Ring.from_map(ring_of(3)).stretches


def view_of(loads: dict[str, float], now: float = 1000.0, held_bytes: int = 0) -> LoadView:
    history = LoadHistory()
    for node, ops_s in loads.items():
        history.saw(node, ShardLoad(ops_s=ops_s, block_bytes=held_bytes), now)
    view = history.view(ring_of(len(loads)), 64e6, now)
    assert view is not None
    return view


# -- the view


def test_the_view_smooths_and_sees_a_trend() -> None:
    history = LoadHistory()
    ring = ring_of(1)
    for second in range(0, 200, 2):
        history.saw("shard-0", ShardLoad(ops_s=100.0 + second), float(second))
    view = history.view(ring, 1.0, 200.0)
    assert view is not None
    (shard,) = view.shards
    assert 250 < shard.ops_s < 290, "half a minute behind"
    assert 0.3 < shard.trend < 1.1
    assert isclose(shard.share, 1.0)


def test_a_single_beat_changes_little() -> None:
    history = LoadHistory()
    for second in range(0, 100, 2):
        history.saw("shard-0", ShardLoad(ops_s=100.0), float(second))
    history.saw("shard-0", ShardLoad(ops_s=10_000.0), 100.0)
    view = history.view(ring_of(1), 1.0, 100.0)
    assert view is not None and view.shards[0].ops_s < 1_000


def test_there_is_no_view_of_whom_nobody_has_heard() -> None:
    history = LoadHistory()
    history.saw("shard-0", ShardLoad(), 0.0)
    assert history.view(ring_of(2), 1.0, 0.0) is None
    history.saw("shard-1", ShardLoad(), 0.0)
    assert history.view(ring_of(2), 1.0, 0.0) is not None
    assert history.view(ring_of(2), 1.0, STALE_S + 1) is None


# -- giving


@given(st.floats(0.001, 0.1), st.integers(1, 64))
@settings(max_examples=15, deadline=None)
def test_about_the_share_is_given_and_only_what_is_the_givers(share: float, stretches_max: int) -> None:
    view = view_of(dict.fromkeys(("shard-0", "shard-1", "shard-2"), 1.0))
    moves = give(view, "shard-1", "shard-2", share, stretches_max)
    owned = [(first, last) for first, last, owner in STRETCHES if owner == "shard-1"]
    assert 0 < len(moves) <= stretches_max
    assert given_share(moves) <= share * 1.6
    if len(moves) < stretches_max:
        assert given_share(moves) > share * 0.5
    for move in moves:
        assert move.node == "shard-2" and move.first is not None and move.last is not None
        assert any(first <= move.first and move.last <= last for first, last in owned)


def test_what_was_given_goes_on_first() -> None:
    view = view_of(dict.fromkeys(("shard-0", "shard-1", "shard-2"), 1.0))
    first, last = view.stretches["shard-0"][3]
    ring = ring_of(3)
    given = with_range(ring.ranges, first, last, "shard-1")
    history = LoadHistory()
    for node in view.ring.shards:
        history.saw(node.node, ShardLoad(ops_s=1.0), 0.0)
    again = history.view(replace(ring, ranges=given), 1.0, 0.0)
    assert again is not None
    (move, *_) = give(again, "shard-1", "shard-2", 0.01, 8)
    assert (move.first, move.last) == (first, last)


# -- the policies


@pytest.mark.slow
def test_an_even_load_moves_nothing() -> None:
    for policy in (Threshold(), Greedy()):
        cluster = Cluster(policy)
        spread = cluster.ops_s(EVEN)
        cluster.factors = {node: 1000.0 / ops_s for node, ops_s in spread.items()}
        cluster.run(1800, EVEN)
        assert cluster.plans == []


@pytest.mark.slow
def test_a_hot_shard_is_relieved_and_then_there_is_rest() -> None:
    cluster = Cluster(Threshold())
    cluster.run(300, EVEN)
    assert cluster.plans == []
    cluster.factors["shard-2"] = 2.0
    before = cluster.imbalance(EVEN)
    cluster.run(3600, EVEN)
    assert before > 1.5
    assert cluster.imbalance(EVEN) < ThresholdOptions().high + 0.05
    assert 1 <= len(cluster.plans) <= 4
    plans = len(cluster.plans)
    cluster.run(3600, EVEN)
    assert len(cluster.plans) == plans, "no oscillation under a steady load"


@pytest.mark.slow
@pytest.mark.parametrize("period_s", [20, 60])
def test_a_load_that_alternates_fast_moves_nothing(period_s: int) -> None:
    """Twice the load, now on one shard and now on another: on average they are alike."""
    cluster = Cluster(Threshold())
    for turn in range(3600 // period_s):
        busy = f"shard-{turn % 2}"
        cluster.factors = {node: 1.8 if node == busy else 1.0 for node in cluster.factors}
        cluster.run(period_s, EVEN)
    assert len(cluster.plans) <= 1


@pytest.mark.slow
def test_a_load_that_wanders_is_run_after_ever_less_often() -> None:
    options = ThresholdOptions()
    cluster = Cluster(Threshold(options))
    for turn in range(24):
        busy = f"shard-{turn % 2}"
        cluster.factors = {node: 2.0 if node == busy else 1.0 for node in cluster.factors}
        cluster.run(300, EVEN)
    times = [at for at, _ in cluster.plans]
    assert 2 <= len(times) <= 10, "not one a turn"
    rests = [after - before for before, after in pairwise(times)]
    assert min(rests) >= options.cool_down_s
    assert max(rests) >= 4 * options.cool_down_s


@pytest.mark.slow
def test_what_costs_more_than_it_brings_is_not_moved() -> None:
    for rate_bytes_s, moved in ((64e6, True), (1_000.0, False)):
        cluster = Cluster(Threshold(), rate_bytes_s=rate_bytes_s)
        cluster.factors["shard-2"] = 2.0
        cluster.run(600, EVEN)
        assert bool(cluster.plans) == moved


def test_an_idle_cluster_is_left_alone() -> None:
    policy = Threshold(ThresholdOptions(sustain_s=0.0))
    assert policy.plan(view_of({"shard-0": 90.0, "shard-1": 0.0})) == []
    assert policy.plan(view_of({"shard-0": 900.0, "shard-1": 0.0})) != []


def test_greedy_halves_the_gap_without_waiting() -> None:
    (first, *_) = Greedy().plan(view_of({"shard-0": 300.0, "shard-1": 100.0, "shard-2": 200.0}))
    assert first.node == "shard-1"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Threshold(), Greedy()])
def test_a_skewed_load_becomes_more_even(policy: Policy) -> None:
    popularity = zipf(0.9, seed=5)
    cluster = Cluster(policy)
    before = cluster.imbalance(popularity)
    cluster.run(3600, popularity)
    assert before > 1.35
    assert cluster.imbalance(popularity) < before - 0.1


def test_policies_by_name() -> None:
    for name in NAMES:
        assert policy_named(name).plan(view_of({"shard-0": 1.0})) == []
    with pytest.raises(Refused, match="no policy 'best'"):
        policy_named("best")


def test_hysteresis_needs_a_gap() -> None:
    with pytest.raises(ValueError, match="no gap"):
        ThresholdOptions(high=1.1, low=1.1)
