"""What the last rows attend."""

from __future__ import annotations

import pytest

from kvcomm.errors import ConfigError
from kvcomm.streams.compactor import Compactor
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.snap import LastAttention, Snap
from tests.kvcomm.streams.policies.test_budget import look
from tests.kvcomm.streams.symbolic import SymbolicEngine


def test_the_observing_rows_are_not_cut():
    scores = (9.0, 3.0, 1.0, 5.0, 1.0, 0.0, 0.0, 0.0)
    assert Snap(112, 48, observed=32).select(look(128, scores=scores)) == [
        SlotRange(32, 48),
        SlotRange(64, 96),
    ]
    with pytest.raises(ConfigError, match="observed 80 are more than window 112"):
        Snap(112, 48, observed=80)


@pytest.mark.parametrize("settings", [{"observed": 0}, {"pool": 0}, {"pool": 4}])
def test_settings_that_measure_nothing_are_refused(settings: dict[str, int]):
    with pytest.raises(ConfigError, match="odd number of slots"):
        Snap(160, 32, **settings)


def test_a_block_is_worth_its_best_slot_smoothed_over_its_neighbours():
    blocks = LastAttention(4, observed=2, pool=3)
    rows = list(range(12))
    blocks.observe(rows, [0, 0, 0, 3, 0, 0, 6, 0, 0, 0, 0, 0], 2)
    assert blocks.scores(rows) == [1.0, 2.0, 0.0], "slot 3 gives its neighbour in the next block a share, too"
    assert blocks.scores(rows[:7]) == [1.0], "a partial block has no score"


def test_only_the_last_rows_count():
    blocks = LastAttention(1, observed=2, pool=1)
    blocks.observe([0, 1, 2], [5.0, 0.0, 0.0], 3)
    assert blocks.scores([0, 1, 2]) == [5.0, 0.0, 0.0]
    blocks.observe([0, 1, 2, 3], [0.0, 1.0, 0.0, 0.0], 1)
    assert blocks.scores([0, 1, 2, 3]) == [5.0, 1.0, 0.0, 0.0], "one row more is needed"
    blocks.observe([0, 2, 3, 4], [0.0, 0.0, 2.0, 0.0], 1)
    assert blocks.scores([0, 2, 3, 4]) == [0.0, 0.0, 2.0, 0.0]


def test_a_block_that_was_brought_back_is_judged_by_the_rows_that_saw_it():
    blocks = LastAttention(2, observed=4, pool=1)
    blocks.observe([0, 1, 4, 5, 6, 7, 8], [0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0], 3)
    rows = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    blocks.observe(rows, [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
    assert blocks.scores(rows) == [0.0, 4.0, 4.0, 1.0, 0.0], "one row gave it as much as four gave the next"


def test_what_the_question_asks_about_survives_the_long_prompt():
    engine = SymbolicEngine()
    session = engine.session()
    compactor = Compactor(session, Snap(128, 32, observed=16, pool=5))
    engine.feed(session, [1] * 512)
    compactor.observe([1.0 if row in (200, 333) else 0.0 for row in session.view.rows], 16)
    events = compactor.after_forward()
    rows = set(session.view.rows)
    assert session.slot_count == 128
    assert len(events) == 12
    assert {*range(16), *range(192, 208), *range(320, 336), *range(496, 512)} <= rows
