"""The judge of liveness, on histories of a few lines: what it condemns and what it lets pass."""

from __future__ import annotations

from itertools import count

import pytest

from kvcomm.chaos.history import History, Invoked, Outcome, Returned
from kvcomm.chaos.liveness import STARVED_MIN, TRIED_MIN, WINDOW_S, check_liveness

HEALTHY_FROM_S = 10.0


class Tries:
    """Operations as (client, kind, second after the healing, outcome)."""

    def __init__(self) -> None:
        self.history, self._numbers = History(), count()

    def at(self, after_s: float, client: str, kind: str, outcome: Outcome, error: str = "") -> Tries:
        number, at = next(self._numbers), HEALTHY_FROM_S + after_s
        self.history.add(Invoked(at, client, number, kind, ["k"]))
        self.history.add(Returned(at + 0.1, client, number, outcome, error=error))
        return self

    def broken(self) -> list[str]:
        return [violation.text for violation in check_liveness(self.history, HEALTHY_FROM_S)]


def failing(
    tries: Tries, client: str, kind: str, times: int, first_s: float = 0.0, apart_s: float = 0.5
) -> Tries:
    for number in range(times):
        tries.at(first_s + number * apart_s, client, kind, "refused", "unavailable: nobody")
    return tries


@pytest.mark.parametrize(("kind", "what"), [("put", "eventual writes"), ("get", "eventual reads")])
def test_one_client_that_cannot_get_on_with_eventual_records_is_noticed(kind: str, what: str) -> None:
    tries = failing(Tries(), "a", kind, TRIED_MIN)
    for number in range(9):
        tries.at(number * 0.5, "b", kind, "ok")
    assert tries.broken() == [f"a tried {TRIED_MIN} {what} from 10.0 on, none done"]


@pytest.mark.parametrize(("kind", "what"), [("set", "strong writes"), ("read", "strong reads")])
def test_strong_records_with_which_nobody_gets_on_are_noticed(kind: str, what: str) -> None:
    tries = failing(Tries(), "a", kind, 2, first_s=WINDOW_S)
    tries = failing(tries, "b", kind, 1, first_s=WINDOW_S)
    assert tries.broken() == [f"all clients tried 3 {what} from 15.0 on, none done"]


def test_a_client_may_give_way_to_another_but_not_for_ever() -> None:
    tries = Tries().at(0.0, "b", "set", "ok")
    failing(tries, "a", "set", STARVED_MIN - 1)
    assert tries.broken() == []
    failing(tries, "a", "set", 1, first_s=4.0)
    assert tries.broken() == [f"a tried {STARVED_MIN} strong writes from 10.0 on, none done"]


def test_what_failed_before_the_healing_is_no_fault() -> None:
    assert failing(Tries(), "a", "put", 9, first_s=-9.0).broken() == []


def test_a_conflict_is_an_answer() -> None:
    tries = failing(Tries(), "a", "cas", TRIED_MIN)
    assert tries.at(2.0, "a", "cas", "refused", "conflict: another version").broken() == []
