"""Attention that adds up and fades."""

from __future__ import annotations

import pytest

from kvcomm.errors import ConfigError
from kvcomm.streams.compactor import Compactor
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.heavy_hitter import AccumulatedAttention, HeavyHitter
from tests.kvcomm.streams.policies.test_budget import look
from tests.kvcomm.streams.symbolic import SymbolicEngine


def test_the_blocks_of_least_attention_go_and_the_recent_ones_stay():
    scores = (9.0, 3.0, 1.0, 5.0, 1.0, 0.5, 0.0, 0.0)
    policy = HeavyHitter(112, 48, recent=32)
    assert policy.select(look(128, scores=scores)) == [SlotRange(32, 48), SlotRange(64, 96)]
    assert policy.select(look(112, scores=scores)) == []


def test_a_block_loses_a_share_of_its_score_with_each_row():
    blocks = AccumulatedAttention(2, decay=0.5)
    blocks.observe([0, 1, 2], [1.0, 1.0, 4.0], 3)
    assert blocks.scores([0, 1, 2]) == [2.0]
    blocks.observe([0, 1, 2, 3], [0.0, 0.0, 0.0, 1.0], 1)
    assert blocks.scores([0, 1, 2, 3]) == [1.0, 3.0]
    blocks.observe([0, 1, 2, 3, 4, 5], [0.0, 8.0, 0.0, 0.0, 0.0, 0.0], 2)
    assert blocks.scores([0, 1, 2, 3, 4, 5]) == [8.25, 0.75, 0.0]


def test_a_score_goes_with_its_block_through_cuts_and_restores():
    blocks = AccumulatedAttention(1, decay=1.0)
    blocks.observe([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0], 4)
    assert blocks.scores([0, 3]) == [4.0, 1.0]
    blocks.observe([0, 3, 4], [1.0, 1.0, 1.0], 1)
    assert blocks.scores([0, 2, 3, 4]) == [5.0, 2.0, 2.0, 1.0]


def test_a_needle_that_is_attended_outlives_what_is_not():
    engine = SymbolicEngine()
    session = engine.session()
    compactor = Compactor(session, HeavyHitter(160, 32, recent=32, decay=0.95))
    needle = {*range(52, 56)}
    for step in range(600):
        engine.feed(session, [step % 900])
        mass = [1.0 if row in needle else 0.01 * (row > step - 80) for row in session.view.rows]
        compactor.observe(mass, 1)
        compactor.after_forward()
    rows = list(session.view.rows)
    assert rows[:32] == [*range(16), *range(48, 64)]
    assert rows[32] > 400, "of what else there is, the newest is left"
    session.check()


@pytest.mark.parametrize("decay", [0.0, -0.1, 1.1, float("nan")])
def test_a_decay_that_is_none_is_refused(decay: float):
    with pytest.raises(ConfigError, match="above 0, and at most 1"):
        HeavyHitter(256, 16, decay=decay)
