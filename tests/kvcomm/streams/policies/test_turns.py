"""Whole turns, at admission."""

from __future__ import annotations

import pytest

from kvcomm.errors import ConfigError
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.port import Look
from kvcomm.streams.policies.turns import WholeTurns


@pytest.mark.parametrize(
    ("max_turns", "stride", "why"),
    [
        (0, 1, "at least one turn each"),
        (4, 0, "at least one turn each"),
        (4, -2, "at least one turn each"),
        (4, 5, "never so many turns to cut"),
    ],
)
def test_settings_that_contradict_each_other_say_why(max_turns: int, stride: int, why: str):
    with pytest.raises(ConfigError, match=why):
        WholeTurns(max_turns, stride)


def test_the_oldest_turns_go_from_first_to_last_token_and_only_at_admission():
    turns = [(20, 50), (50, 90), (90, 130)]
    at_admission = Look(140, 32, 16, turns, 140, "admission")
    assert WholeTurns(3, 2).select(at_admission) == [SlotRange(20, 90)]
    assert WholeTurns(4, 2).select(at_admission) == []
    assert WholeTurns(3, 2).select(Look(140, 32, 16, turns, 140, "forward")) == []
