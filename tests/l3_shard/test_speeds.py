"""Whom to ask first and for how long to wait, by what was measured; ``now`` is a literal."""

import pytest

from l3_shard.speeds import (
    FLOOR_S,
    HALF_LIFE_S,
    HEDGE_BURST,
    HEDGE_SHARE,
    PATIENCE_FIRST_S,
    PATIENCE_MIN_S,
    SAMPLES_MIN,
    UNIT_BYTES,
    Speeds,
)


def measured(**seconds: float) -> Speeds:
    speeds = Speeds()
    for node, taken in seconds.items():
        for _ in range(SAMPLES_MIN):
            speeds.took(node, taken, 0, 0.0)
    return speeds


def test_the_fastest_is_asked_first_and_about_equals_in_the_order_of_the_ring():
    speeds = measured(a=0.1, b=0.001, c=0.0011)
    assert speeds.ordered("abc", 0.0) == ["b", "c", "a"]
    assert speeds.ordered("cba", 0.0) == ["c", "b", "a"]
    assert measured(a=FLOOR_S / 50, b=FLOOR_S).ordered("ba", 0.0) == ["b", "a"], "that is noise"


def test_an_unknown_shard_is_tried():
    assert measured(a=0.01).ordered("az", 0.0) == ["z", "a"]


def test_large_answers_do_not_make_a_shard_slow():
    speeds = Speeds()
    speeds.took("a", 0.09, 89 * UNIT_BYTES, 0.0)
    speeds.took("b", 0.01, 0, 0.0)
    assert speeds.ordered("ba", 0.0) == ["a", "b"]


def test_a_slow_shard_is_tried_again_after_a_while_and_trusted_at_once_when_it_is_fast():
    speeds = measured(a=0.1, b=0.001)
    assert speeds.ordered("ab", 0.0) == ["b", "a"]
    for half_lives in range(1, 12):  # b is confirmed all the time, a is not asked
        speeds.took("b", 0.001, 0, half_lives * HALF_LIFE_S)
        if speeds.ordered("ab", half_lives * HALF_LIFE_S) == ["a", "b"]:
            break
    else:
        raise AssertionError("it was never tried again")
    assert 6 <= half_lives <= 8
    now = half_lives * HALF_LIFE_S
    speeds.outlasted("a", 0.2, 0, now)
    assert speeds.ordered("ab", now) == ["b", "a"]
    speeds.took("a", 0.001, 0, now)
    assert speeds.ordered("ab", now) == ["a", "b"]


def test_one_slow_answer_moves_the_estimate_by_a_quarter():
    speeds = measured(a=0.001, b=0.001)
    speeds.took("a", 0.0014, 0, 0.0)
    assert speeds.ordered("ab", 0.0) == ["a", "b"]
    speeds.took("a", 0.1, 0, 0.0)
    assert speeds.ordered("ab", 0.0) == ["b", "a"]


def test_patience_is_twice_what_nearly_all_answers_take():
    speeds = Speeds()
    assert speeds.patience_s(0) == PATIENCE_FIRST_S
    for number in range(100):
        speeds.took("a", 0.5 if number % 50 == 7 else 0.02, 0, 0.0)
    assert speeds.patience_s(0) == pytest.approx(0.04), "two of a hundred are the tail"
    assert speeds.patience_s(3 * UNIT_BYTES) == pytest.approx(0.16)
    assert measured(a=1e-5).patience_s(0) == PATIENCE_MIN_S


def test_hedges_are_a_small_share_of_the_requests():
    speeds = Speeds()
    hedges = 0
    for _ in range(1000):
        speeds.took("a", 0.01, 0, 0.0)
        hedges += speeds.may_hedge()
    assert 1000 * HEDGE_SHARE - 1 <= hedges <= 1000 * HEDGE_SHARE + HEDGE_BURST
