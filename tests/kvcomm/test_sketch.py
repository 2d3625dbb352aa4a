"""The sketches against exact counts: never too low, too high within the bound, decaying, mergeable."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate
from math import exp, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.sketch import Counted, CountMin, HeavyHitters, Hotness

ROUNDING = 1e-5
"""Single precision, over as many updates as these tests make."""

streams = st.lists(st.tuples(st.integers(0, 30), st.floats(0, 400), st.floats(0.125, 8)), max_size=200).map(
    lambda events: sorted(events, key=lambda event: event[1])
)
"""(key, time, amount) in the order of time."""
DENORMAL = 1e-30
half_lives = st.sampled_from([inf, 1.0, 7.0, 60.0])


def key(number: int) -> bytes:
    return b"key-%08d" % number


def exact(stream, half_life_s: float, now: float) -> dict[bytes, float]:
    counts: dict[bytes, float] = {}
    for number, at, amount in stream:
        counts[key(number)] = counts.get(key(number), 0.0) + amount * 0.5 ** ((now - at) / half_life_s)
    return counts


def zipf(draw: random.Random, key_count: int, count: int, exponent: float) -> list[bytes]:
    weights = list(accumulate(1 / rank**exponent for rank in range(1, key_count + 1)))
    return [key(number) for number in draw.choices(range(key_count), cum_weights=weights, k=count)]


@given(streams, half_lives, st.integers(1, 20), st.integers(1, 4))
def test_a_sketch_never_counts_too_low_and_decays(stream, half_life_s, width, depth):
    sketch = CountMin(width, depth, half_life_s)
    for number, at, amount in stream:
        assert sketch.add(key(number), at, amount) >= amount * (1 - ROUNDING)
    now = stream[-1][1] + 3.0 if stream else 3.0
    truth = exact(stream, half_life_s, now)
    for each, count in truth.items():
        assert sketch.estimate(each, now) >= count * (1 - ROUNDING) - DENORMAL
    assert sketch.total(now) == pytest.approx(sum(truth.values()), rel=1e-6, abs=1e-12)
    assert sketch.estimate(b"never", now) <= sketch.total(now) * (1 + ROUNDING)


@given(streams, streams, half_lives, st.integers(1, 20))
def test_the_merge_of_two_sketches_is_the_sum_of_their_cells(one, two, half_life_s, width):
    first, second = CountMin(width, 3, half_life_s), CountMin(width, 3, half_life_s)
    for sketch, stream in ((first, one), (second, two)):
        for number, at, amount in stream:
            sketch.add(key(number), at, amount)
    now = 500.0
    rows = [[sketch.estimate(key(number), now) for number in range(31)] for sketch in (first, second)]
    total = first.total(now) + second.total(now)
    first.merge(second, now)
    truth = exact([*one, *two], half_life_s, now)
    for number in range(31):
        merged = first.estimate(key(number), now)
        assert merged >= truth.get(key(number), 0.0) * (1 - ROUNDING) - DENORMAL
        assert merged >= (rows[0][number] + rows[1][number]) * (1 - ROUNDING) - DENORMAL, (
            "a sum of two minima"
        )
        assert merged <= total * (1 + ROUNDING) + 1e-30
    assert first.total(now) == pytest.approx(total, rel=1e-6, abs=1e-30)


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.sampled_from([(0.02, 0.05), (0.005, 0.01)]))
def test_estimates_are_within_epsilon_of_all_at_their_confidence(seed, bound):
    epsilon, delta = bound
    sketch = CountMin.for_error(epsilon, delta)
    events = zipf(random.Random(seed), 2_000, 4_000, 0.9)
    for each in events:
        sketch.add(each, 0.0)
    truth = Counter(events)
    over = sum(sketch.estimate(each, 0.0) - count > epsilon * len(events) for each, count in truth.items())
    assert over <= delta * len(truth), f"{over} of {len(truth)} are more than {epsilon} of all too high"
    assert exp(-sketch.depth) <= delta


def test_the_landmark_moves_without_a_trace():
    moved, fresh = CountMin(64, 2, 1.0), CountMin(64, 2, 1.0)
    summary = HeavyHitters(4, 1.0)
    for second in range(1_000):
        moved.add(b"steady", float(second))
        summary.add(b"steady", float(second))
    for second in range(970, 1_000):
        fresh.add(b"steady", float(second))
    expected = fresh.estimate(b"steady", 1_000.0)
    assert moved.estimate(b"steady", 1_000.0) == pytest.approx(expected, rel=1e-6)
    assert summary.count(b"steady", 1_000.0) == pytest.approx(expected, rel=1e-6)


def test_sketches_of_other_shapes_or_half_lives_are_not_merged():
    for other in (CountMin(8, 3), CountMin(9, 2), CountMin(8, 2, 5.0)):
        with pytest.raises(ValueError, match="one shape and half life"):
            CountMin(8, 2).merge(other, 0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CountMin(0, 1), lambda: CountMin(1, 0), lambda: CountMin(1, 1, 0.0),
        lambda: CountMin.for_error(0.0, 0.1), lambda: CountMin.for_error(0.1, 1.0),
        lambda: HeavyHitters(0), lambda: Hotness(8, 2, 0), lambda: Hotness.of_size(1_000, 25),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ValueError, match=r"at least|above 0|between 0 and 1|hold no sketch"):
        make()


@given(streams, half_lives, st.integers(1, 40))
def test_a_summary_brackets_the_truth(stream, half_life_s, capacity):
    summary = HeavyHitters(capacity, half_life_s)
    for number, at, amount in stream:
        summary.add(key(number), at, amount)
    now = stream[-1][1] if stream else 0.0
    _brackets(summary, exact(stream, half_life_s, now), capacity, now)


@given(streams, streams, half_lives, st.integers(1, 40))
def test_a_merged_summary_brackets_the_truth_of_both(one, two, half_life_s, capacity):
    summaries = HeavyHitters(capacity, half_life_s), HeavyHitters(capacity, half_life_s)
    for summary, stream in zip(summaries, (one, two), strict=True):
        for number, at, amount in stream:
            summary.add(key(number), at, amount)
    now = 400.0
    summaries[0].merge(summaries[1], now)
    _brackets(summaries[0], exact([*one, *two], half_life_s, now), capacity, now)
    summaries[0].add(b"later", now, 1e30)
    assert summaries[0].top(1, now)[0].key == b"later", "its heap is in order"


def _brackets(summary: HeavyHitters, truth: dict[bytes, float], capacity: int, now: float) -> None:
    total = sum(truth.values())
    tiny = 1e-9 * total
    assert summary.total(now) == pytest.approx(total, rel=1e-6, abs=1e-30)
    assert len(summary) == min(capacity, len(truth))
    found = summary.top(capacity, now)
    assert [each.count for each in found] == sorted((each.count for each in found), reverse=True)
    for each in found:
        count = truth.get(each.key, 0.0)
        assert each.count - each.error - tiny <= count <= each.count + tiny
    for each_key, count in truth.items():
        assert count <= summary.count(each_key, now) + tiny
        assert each_key in summary or count <= 2 * total / capacity + tiny, "a heavy one is not here"


def test_below_its_capacity_a_summary_is_exact():
    summary = HeavyHitters(3)
    for each in (b"a", b"b", b"a", b"c", b"a"):
        summary.add(each, 0.0)
    assert summary.top(2, 0.0) == [Counted(b"a", 3.0), Counted(b"b", 1.0)]
    summary.clear()
    assert summary.top(2, 5.0) == [] and summary.total(5.0) == 0.0


def test_a_new_key_takes_the_lightest_ones_place_and_its_count_as_an_error():
    summary = HeavyHitters(2)
    for each in (b"a", b"a", b"b", b"c"):
        summary.add(each, 0.0)
    assert summary.top(2, 0.0) == [Counted(b"a", 2.0), Counted(b"c", 2.0, 1.0)]


@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_the_hottest_keys_are_named(exponent):
    events = zipf(random.Random(7), 5_000, 20_000, exponent)
    hotness = Hotness.of_size(16 << 10, 100)
    for each in events:
        hotness.add(each, 0.0)
    truth = [each for each, _ in Counter(events).most_common(20)]
    found = [each.key for each in hotness.top(25, 0.0)]
    assert len(set(truth) & set(found)) >= 19
    assert len(hotness) <= 100


def test_what_is_hot_now_displaces_what_was():
    hotness = Hotness(256, 4, names_max=4, half_life_s=10.0)
    for number in range(4):
        for _ in range(100):
            hotness.add(key(number), 0.0)
    for _ in range(30):
        hotness.add(key(9), 40.0)
    assert hotness.top(1, 40.0)[0].key == key(9)
    assert hotness.estimate(key(0), 40.0) == pytest.approx(100 / 16, rel=0.01)
    assert hotness.total(40.0) == pytest.approx(30 + 400 / 16)


def test_two_of_them_merge():
    one, two = Hotness(256, 4, names_max=2, half_life_s=10.0), Hotness(256, 4, names_max=2, half_life_s=10.0)
    for each, amount in ((b"a", 5.0), (b"b", 4.0)):
        one.add(each, 0.0, amount)
    for each, amount in ((b"b", 4.0), (b"c", 3.0)):
        two.add(each, 0.0, amount)
    one.merge(two, 0.0)
    assert one.top(9, 0.0) == [Counted(b"b", 8.0), Counted(b"a", 5.0)]
    one.add(b"d", 0.0, 6.0)
    assert [each.key for each in one.top(9, 0.0)] == [b"b", b"d"]
