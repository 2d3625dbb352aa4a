"""Spreads and ratios from given times; interleaving from operations that only count."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.timing import CALLS_MAX, Call, Rounds, Spread, clock_cost_s, interleave, repeated


@dataclass
class Scripted:
    """An operation that takes what it is told to, and writes down when it was called."""

    name: str
    takes_s: float
    log: list[tuple[str, int]] = field(default_factory=list)

    def times(self, count: int) -> list[float]:
        self.log.append((self.name, count))
        return [self.takes_s] * count


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_a_spread_is_in_order_and_inside_the_values(values: list[float]):
    spread = Spread.of(values)
    assert min(values) <= spread.p10 <= spread.median <= spread.p90 <= max(values)
    assert spread.median == median(values)


def test_a_spread_of_a_hundred():
    assert Spread.of(list(range(101))) == Spread(10, 50, 90)
    assert Spread.of([1.0, 2.0, 4.0]).scaled(10) == Spread(10, 20, 40)


def test_a_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_a_ratio_is_taken_within_each_round():
    # The machine became ten times slower in the second round: the ratio does not care.
    rounds = Rounds({"ours": [[3.0], [30.0], [3.0]], "base": [[1.0], [10.0], [1.0]]}, (0.0, 0.0))
    assert rounds.ratio("ours", "base") == Spread(3.0, 3.0, 3.0)
    assert rounds.spread("ours") == Spread(3.0, 3.0, 30.0)


def test_who_goes_first_rotates():
    log: list[tuple[str, int]] = []
    operations = [Scripted(name, 1.0, log) for name in "abc"]
    rounds = interleave(operations, rounds=4, turn_s=1.0)
    assert "".join(name for name, _ in log) == "aabbcc" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(taken) for name, taken in rounds.seconds.items()} == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize(("takes_s", "count"), [(1.0, 1), (0.1, 5), (0.01, 50), (1e-9, CALLS_MAX)])
def test_a_turn_is_as_long_as_asked_within_bounds(takes_s: float, count: int):
    operation = Scripted("a", takes_s)
    interleave([operation], rounds=1, turn_s=0.5)
    assert operation.log == [("a", 3), ("a", 3), ("a", count)]


def test_names_must_differ():
    with pytest.raises(ValueError, match="one name"):
        interleave([Scripted("a", 1.0), Scripted("a", 1.0)], rounds=1, turn_s=0.1)


def test_a_call_is_made_as_often_as_asked_and_cleaned_up_after_each():
    seen: list[str] = []
    call = Call("c", lambda: seen.append("call"), items=4, after=lambda: seen.append("after"))
    taken = call.times(3)
    assert seen == ["call", "after"] * 3
    assert len(taken) == 3 and all(each >= 0 for each in taken)


def test_a_call_can_be_repeated_between_two_looks_at_the_clock():
    seen: list[int] = []
    call = repeated(Call("c", lambda: seen.append(1), items=2), 5)
    assert (call.name, call.items) == ("c", 10)
    assert len(call.times(3)) == 3 and len(seen) == 15


def test_the_clock_has_a_cost():
    assert 0 < clock_cost_s() < 1e-3
