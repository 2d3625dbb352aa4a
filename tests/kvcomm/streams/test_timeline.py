"""A rollout told in order, also when it is damaged."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import KVCommError
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Rollout, Sampling
from kvcomm.streams.rollout_codec import RowRun, encode, parsed, record_of, to_json, unpacked
from kvcomm.streams.session import Session
from kvcomm.streams.timeline import Happening, Stretch, timeline
from tests.kvcomm.streams.stories import Story, story


def told() -> Rollout:
    """20 rows of text, 3 sampled, 1 filler; a cut; 2 sampled, the second turn; a restore; a pending token."""
    telling = Story(1)
    telling.prompt(20 - telling.session.next_row)
    telling.sample(3, Sampling())
    telling.fill()
    event = telling.session.evict([(4, 12)], archive=True, reason="fifo")
    telling.sample(2, Sampling(0.0))
    telling.prompt(1)
    telling.session.restore(event.span)
    return telling.recorder.rollout()


def test_rows_and_events_in_order():
    found = timeline(record_of(told()))
    first, cut, then, back = found.entries
    assert first == Stretch(0, 24, 20, 3, 1, 0, 1, 0, 24)
    assert isinstance(cut, Happening)
    assert (cut.kind, cut.at_row, cut.rows, cut.ranges, cut.reason) == (
        "evict",
        24,
        ((4, 8),),
        ((4, 12),),
        "fifo",
    )
    assert (cut.row_count, cut.live_after) == (8, 16)
    assert then == Stretch(24, 3, 1, 2, 0, 0, 1, 16, 19)
    assert isinstance(back, Happening)
    assert (back.kind, back.rows, back.insert_at, back.span) == ("restore", ((4, 8),), 0, cut.span)
    assert (found.live_max, found.live_after, found.sample_count, found.damage) == (27, 27, 5, "")
    assert found.row_counts() == {"text": 21, "sampled": 5, "filler": 1, "repeated": 0}


def test_a_completion_that_an_event_divides_is_one_turn():
    telling = Story(1)
    telling.sample(9, Sampling())
    telling.session.evict([(0, 4)])
    telling.sample(4, Sampling())
    telling.fill()
    stretches = [
        each for each in timeline(record_of(telling.recorder.rollout())).entries if isinstance(each, Stretch)
    ]
    assert [each.completion_count for each in stretches] == [1, 0]


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_what_is_told_adds_up(seed: int):
    rollout = story(seed)
    found = timeline(record_of(rollout))
    counts = found.row_counts()
    assert sum(counts.values()) == rollout.row_count
    assert counts["filler"] == len(rollout.filler_rows)
    assert (found.sample_count, found.loss_count) == (
        len(rollout.samples),
        sum(each.loss for each in rollout.samples),
    )
    assert counts["sampled"] == sum(each.query_row + 1 < rollout.row_count for each in rollout.samples)
    assert found.weights[-1][1] == (rollout.events[-1].weights_version if rollout.events else 0)
    seen = rollout.visibility()
    last = rollout.row_count - 1
    cut_at_the_end = any(event.at_row > last for event in rollout.events)
    if not cut_at_the_end:
        assert found.live_after == sum(seen.sees(last, key) for key in range(rollout.row_count))
    assert not found.damage


def test_the_first_damage_is_named_and_what_came_before_is_told():
    rollout = told()
    tree = json.loads(to_json(rollout))
    tree["rollout"]["events"][1]["at_row"] -= 1
    found = timeline(parsed(json.dumps(tree).encode()))
    assert found.damage.startswith("event 1: the restore at row 26 was recorded over another history")
    assert len(found.entries) == 3
    tree["rollout"]["events"][1]["at_row"] = 1_000
    assert timeline(parsed(json.dumps(tree).encode())).damage.startswith(
        "event 1: an event at row 1000 of 27"
    )
    tree["rollout"]["events"][1]["insert_at"] = -1
    assert "not an event" in timeline(parsed(json.dumps(tree).encode())).damage


def test_damage_beside_the_events_is_named_when_all_is_told():
    record = msgspec.structs.replace(record_of(told()), name="other")
    found = timeline(record)
    assert "checksum" in found.damage
    assert len(found.entries) == 4
    lost = msgspec.structs.replace(record_of(told()), events=[])
    assert timeline(lost).damage


@pytest.mark.slow
@given(st.integers(0, 10_000), st.data())
def test_a_record_that_can_be_taken_apart_can_be_told_whatever_it_says(seed: int, data: st.DataObject):
    good = bytearray(encode(story(seed, 8)))
    at = data.draw(st.integers(16, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    try:
        record = unpacked(bytes(good))
    except KVCommError:
        return
    assert timeline(record).damage


def test_a_run_of_rows_that_are_not_there_costs_nothing():
    rollout = replace(told(), filler_rows=())
    record = record_of(rollout)
    claims = msgspec.structs.replace(record, filler_rows=[RowRun(0, 4_000_000_000)])
    assert timeline(claims).damage


def test_a_log_that_cuts_rows_without_end_is_told_up_to_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvcomm.streams.timeline.CUT_ROWS_MAX", 7)
    found = timeline(record_of(told()))
    assert "8 rows are cut up to here" in found.damage
    assert len(found.entries) == 2


def test_weights_of_which_no_row_was_computed_are_not_told():
    telling = Story(1)
    telling.session = Session(BlockPool(9), telling.session.namespace, rows_max=100)
    telling.recorder = Recorder(telling.session, "x")
    telling.session.set_weights(3)
    telling.prompt(5)
    telling.session.set_weights(4)
    telling.session.set_weights(6)
    assert timeline(record_of(telling.recorder.rollout())).weights == ((0, 3), (5, 6))


def test_rows_that_are_claimed_twice_are_told_once():
    record = record_of(replace(told(), filler_rows=()))
    claims = msgspec.structs.replace(record, filler_rows=[RowRun(20, 4), RowRun(0, 24), RowRun(22, 3)])
    found = timeline(claims)
    assert found.damage
    assert found.row_counts()["filler"] == 5
