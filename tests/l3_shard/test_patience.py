"""How long a question that may be repeated waits."""

from __future__ import annotations

import pytest

from l3_shard.patience import FIRST_S, Patience


def silences(patience: Patience, count: int) -> list[float]:
    """The waits of so many questions that nobody answers."""
    waits, now = list[float](), 100.0
    for _ in range(count):
        waits.append(patience.asked(now))
        now += waits[-1]
        patience.heard(now, answered=False)
    return waits


def test_it_grows_with_every_silence_up_to_the_limit() -> None:
    waits = silences(Patience(4.5), 8)
    assert waits[0] == FIRST_S and waits[-1] == 4.5
    assert waits == sorted(waits) and sum(waits[:5]) < 2 * 4.5, "five silences cost less than two time-outs"


def test_a_limit_below_the_first_wait_is_kept() -> None:
    assert silences(Patience(0.2), 3) == [0.2, 0.2, 0.2]


@pytest.mark.parametrize(("took_s", "wait_s"), [(0.01, FIRST_S), (0.9, 1.8), (9.0, 4.5)])
def test_an_answer_shows_how_long_answers_take(took_s: float, wait_s: float) -> None:
    patience = Patience(4.5)
    silences(patience, 5)
    patience.asked(7.0)
    patience.heard(7.0 + took_s, answered=True)
    assert patience.asked(8.0) == pytest.approx(wait_s)


def test_a_failure_that_came_at_once_says_nothing_of_time() -> None:
    patience = Patience(4.5)
    patience.asked(1.0)
    patience.heard(1.01, answered=False)
    assert patience.asked(2.0) == FIRST_S
