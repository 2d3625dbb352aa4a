"""An open loop keeps to its rate whatever becomes of the calls, and what came of them is counted right."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from bench.openloop import Calls, closed_loop, failures_text, open_loop
from kvcomm.errors import Refused, Unavailable


def test_calls_are_begun_at_their_rate_though_none_is_over() -> None:
    async def story() -> Calls:
        over = asyncio.Event()
        calls = await open_loop(lambda number: over.wait(), 200.0, 0.5)
        assert not calls.done_at
        over.set()
        await asyncio.sleep(0.01)
        return calls

    calls = asyncio.run(story())
    assert calls.begun == len(calls.done_at) and 90 <= calls.begun <= 100


def test_a_closed_loop_waits_for_its_answers() -> None:
    under_way, most = 0, 0

    async def act(number: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1

    calls = asyncio.run(closed_loop(act, 3, 0.1))
    assert most == 3 and calls.begun == len(calls.done_at) > 3


def test_what_fails_is_counted_by_its_code() -> None:
    async def act(number: int) -> None:
        raise Unavailable("no") if number % 2 else Refused("no")

    calls = asyncio.run(open_loop(act, 100.0, 0.1))
    assert not calls.done_at and set(calls.failed) == {"unavailable", "refused"}
    assert sum(calls.failed.values()) == calls.begun
    assert (
        failures_text([Calls(0, 1, failed=Counter(a=1200)), Calls(0, 1, failed=Counter(a=1, b=2))])
        == "1,201 a, 2 b"
    )
    assert failures_text([]) == "none"


def test_rates_and_the_second_from_which_on_they_hold() -> None:
    done = [0.5, 1.1, 1.2, 2.1, 2.2, 3.1, 3.2, 9.0]
    calls = Calls(0.0, 4.0, done_at=done)
    assert calls.rate() == pytest.approx(7 / 4) and calls.rate(2.0) == pytest.approx(2.0)
    assert calls.steady_after_s(2.0, 0.9, 1) == 1.0, "the first second had one"
    assert calls.steady_after_s(1.0, 0.9, 1) == calls.steady_after_s(2.0, 0.7, 2) == 0.0
    assert calls.steady_after_s(3.0, 0.9, 1) == calls.steady_after_s(3.0, 0.9, 9) == 4.0, "never"
