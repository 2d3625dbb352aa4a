"""Deadlines on another process's clock."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.wire.deadlines import AHEAD_S_MAX, DRIFT, SLACK_S, STAMP_BITS, ServerClock, overdue_s, stamp_of

WRAP_S = (1 << STAMP_BITS) / 1_000
ROUNDING_S = 0.003


def test_a_stamp_is_a_moment_and_never_the_sign_for_none() -> None:
    assert overdue_s(stamp_of(5.0), 7.5) == 2.5
    assert overdue_s(stamp_of(7.5), 5.0) == -2.5
    assert overdue_s(stamp_of(WRAP_S - 1.0), WRAP_S + 1.0) == 2.0, "over the end of the numbers"
    assert overdue_s(0, 7.5) == 0.0
    assert overdue_s(stamp_of(5.0), 5.0 + 5 * 86_400.0) == 5 * 86_400.0, "after five days"
    assert stamp_of(0.0) == stamp_of(WRAP_S) == 1


def test_nothing_is_said_of_a_clock_that_was_not_heard() -> None:
    clock = ServerClock()
    assert clock.stamp(5.0, 1.0) == 0
    clock.heard(0, 0.0, 1.0)
    assert clock.stamp(5.0, 1.0) == 0
    clock.heard(stamp_of(100.0), 0.0, 1.0)
    assert clock.stamp(5.0, 1.0) != 0
    assert clock.stamp(1.0 + AHEAD_S_MAX + 1.0, 1.0) == 0


def test_a_deadline_is_told_on_the_servers_clock() -> None:
    clock = ServerClock()
    clock.heard(stamp_of(1_000.0), 9.99, 10.0)  # theirs is 990 s ahead of ours, give or take 10 ms
    assert overdue_s(clock.stamp(12.0, 10.0), 1_002.0) == pytest.approx(0.0, abs=0.02)


def test_a_welcome_that_took_long_to_come_back_makes_no_deadline_late_and_the_next_answer_mends_it() -> None:
    clock = ServerClock()
    clock.heard(stamp_of(1_000.0), -inf, 15.0)  # it was said at 10: 5 s ago
    assert overdue_s(clock.stamp(20.0, 15.0), 1_010.0) > 4.0, "early, which costs one request"
    clock.heard(stamp_of(1_006.0), 15.99, 16.01)
    assert overdue_s(clock.stamp(20.0, 16.1), 1_010.0) == pytest.approx(0.0, abs=0.03)


def test_an_answer_that_was_late_changes_nothing() -> None:
    clock = ServerClock()
    clock.heard(stamp_of(1_000.0), 9.99, 10.01)
    clock.heard(stamp_of(1_001.0), 10.9, 16.0)
    assert overdue_s(clock.stamp(20.0, 16.1), 1_010.0) == pytest.approx(0.0, abs=0.1)


def test_a_clock_that_was_changed_is_followed() -> None:
    clock = ServerClock()
    clock.heard(stamp_of(1_000.0), 9.99, 10.01)
    clock.heard(stamp_of(500.0), 10.99, 11.01)  # another machine's clock after a restore, say
    assert overdue_s(clock.stamp(12.0, 11.1), 501.0) == pytest.approx(0.0, abs=0.03)


EXCHANGES = st.lists(
    st.tuples(
        st.floats(0.05, 30.0),  # rest before it
        st.floats(0.0, 0.5),  # there
        st.floats(0.0, 0.05),  # and back
    ),
    min_size=1,
    max_size=8,
)


@given(
    offset=st.floats(-3 * WRAP_S, 3 * WRAP_S),
    rate=st.floats(1.0 - DRIFT / 2, 1.0 + DRIFT / 2),
    exchanges=EXCHANGES,
    budget_s=st.floats(0.2, 10.0),
    taken_s=st.floats(0.0, 30.0),
)
def test_never_begun_late_and_never_refused_early(
    offset: float, rate: float, exchanges: list[tuple[float, float, float]], budget_s: float, taken_s: float
) -> None:
    """``taken_s``: between the sending and when the server looks at it, for whatever reason."""
    clock, now = ServerClock(), 1_000.0

    def server(ours: float) -> float:
        return ours * rate + offset + 10 * WRAP_S

    for rest_s, there_s, back_s in exchanges:
        sent_at = now + rest_s
        now = sent_at + there_s + back_s
        clock.heard(stamp_of(server(sent_at + there_s)), sent_at, now)
    deadline = now + budget_s
    late_s = overdue_s(clock.stamp(deadline, now), server(now + taken_s))
    over_s = taken_s - budget_s  # how long the sender has not been waiting any more
    imprecision_s = ROUNDING_S + DRIFT * (taken_s + budget_s)
    if over_s > SLACK_S + imprecision_s:
        assert late_s > 0
    if over_s < -max(back for _, _, back in exchanges) - imprecision_s:
        assert late_s <= 0
