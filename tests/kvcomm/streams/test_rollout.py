"""A rollout and its header: what was cut off, dropped, doubled, shifted or swapped is noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcomm.errors import Corrupt, TokenError
from kvcomm.streams.events import ROOT_DIGEST, Event, SlotRange, SpanId, ViewDigest
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Rollout, Sample, Sampling, rest_of
from kvcomm.streams.rollout_codec import decode, encode
from kvcomm.streams.view import Visibility, weights_runs
from tests.kvcomm.streams.stories import Story, story

seeds = st.integers(0, 10_000)


def noticed(rollout: Rollout, **parts: Any) -> bool:
    """Whether ``rollout`` with other ``parts`` is refused, at once or when its mask is computed."""
    try:
        replace(rollout, **parts).visibility()
    except Corrupt:
        return True
    return False


def event_noticed(rollout: Rollout, at: int, **parts: Any) -> bool:
    """Likewise, with other parts of event ``at``."""
    events = list(rollout.events)
    try:
        events[at] = replace(events[at], **parts)
    except Corrupt:
        return True
    return noticed(rollout, events=tuple(events))


def seen(found: Visibility, rows: int) -> list[set[int]]:
    return [{key for key in range(query + 1) if found.sees(query, key)} for query in range(rows)]


# -- G8


@pytest.mark.slow
@given(seeds, st.data())
def test_gate_g08_an_event_that_is_dropped_doubled_or_swapped_is_noticed(seed: int, data: st.DataObject):
    rollout = story(seed)
    events = rollout.events
    assume(events)
    at = data.draw(st.integers(0, len(events) - 1))
    dropped = events[:at] + events[at + 1 :]
    doubled = events[: at + 1] + events[at:]
    for other in (dropped, doubled, (), events[:-1], events[1:], (*events, events[0])):
        assert noticed(rollout, events=other)
        # A stage that counts what it has, and passes the digest on.
        assert noticed(rollout, events=other, event_count=len(other))
    assert noticed(rollout, event_count=len(events) + 1)
    if len(events) > 1:
        one = data.draw(st.integers(0, len(events) - 2))
        swapped = [*events[:one], events[one + 1], events[one], *events[one + 2 :]]
        assert noticed(rollout, events=tuple(swapped))
    if at < len(events) - 1:  # a stage that makes a header of its own
        with pytest.raises(Corrupt):
            Rollout.sealed("x", rollout.namespace, 4, rollout.tokens, dropped, ()).visibility()


@pytest.mark.slow
@given(seeds, st.data())
def test_gate_g08_an_event_that_says_something_else_is_noticed(seed: int, data: st.DataObject):
    rollout = story(seed)
    assume(rollout.events)
    at = data.draw(st.integers(0, len(rollout.events) - 1))
    event = rollout.events[at]
    assert event_noticed(rollout, at, at_row=event.at_row + 1)
    assert event_noticed(rollout, at, at_row=event.at_row - 1)
    assert event_noticed(rollout, at, weights_version=event.weights_version + 1)
    assert event_noticed(rollout, at, view_digest=bytes(32))
    assert event_noticed(rollout, at, insert_at=event.insert_at + 4)
    assert event_noticed(rollout, at, span=SpanId(bytes(32)))
    if event.span:
        assert event_noticed(rollout, at, span=SpanId(b""))
    for each in range(len(event.ranges)):
        start, end = event.ranges[each]
        for other in ((start + 4, end), (start, end - 4), (start, end + 4), (start + 4, end + 4)):
            ranges = (*event.ranges[:each], SlotRange(*other), *event.ranges[each + 1 :])
            assert event_noticed(rollout, at, ranges=ranges), other
        assert event_noticed(rollout, at, ranges=event.ranges[:each] + event.ranges[each + 1 :])


@pytest.mark.slow
@given(seeds, st.integers(1, 20))
def test_fault_b00_tokens_that_were_cut_off_without_the_events_are_noticed(seed: int, fewer: int):
    rollout = story(seed)
    short = rollout.tokens[:-fewer]
    assert noticed(rollout, tokens=short)
    assert noticed(rollout, tokens=(*rollout.tokens, 1))
    if rollout.events and rollout.events[-1].at_row > len(short):
        assert noticed(rollout, tokens=short, row_count=len(short), samples=(), filler_rows=())


@pytest.mark.slow
@given(seeds, st.floats(0, 1.1))
def test_fault_b00_rows_events_and_samples_are_cut_off_together(seed: int, share: float):
    rollout = story(seed)
    rows = int(share * rollout.row_count)
    short = rollout.truncated(rows)
    if rows >= rollout.row_count:
        assert short is rollout
        return
    assert short.tokens == rollout.tokens[:rows]
    assert [each.query_row for each in short.samples] == [
        each.query_row for each in rollout.samples if each.query_row < rows
    ]
    assert all(event.at_row < rows for event in short.events)
    # No row that stays sees anything else than before.
    assert seen(short.visibility(), rows) == seen(rollout.visibility(), rows)
    assert short.truncated(rows) == short


def test_fault_b01_a_rollout_without_events_says_so():
    rollout = story(3)
    assert rollout.events
    with pytest.raises(Corrupt, match=f"0 of {len(rollout.events)} events"):
        replace(rollout, events=())
    with pytest.raises(Corrupt, match="0 of 0 events, or other ones"):
        replace(rollout, events=(), event_count=0)


def test_fault_b02_where_a_cut_starts_is_said_not_computed():
    telling = Story(1)
    telling.prompt(50)
    telling.session.protect(10)
    telling.session.evict([(12, 20)])
    (event,) = telling.recorder.rollout().events
    assert event.ranges == ((12, 20),)  # the protected prefix ends inside a block: 10 would be the guess
    assert event_noticed(telling.recorder.rollout(), 0, ranges=(SlotRange(8, 16),))


def test_fault_b06_later_requests_of_a_rollout_are_in_the_same_rows():
    telling = Story(1)
    for _ in range(3):  # requests: a prompt, a completion, its fillers, a cut
        telling.prompt(11)
        telling.sample(5, Sampling())
        telling.fill()
        telling.session.evict([(4, 8)])
    rollout = telling.recorder.rollout()
    assert rollout.row_count == telling.session.next_row
    assert [event.at_row for event in rollout.events] == sorted({event.at_row for event in rollout.events})
    assert [sample.token for sample in rollout.samples] == [
        rollout.tokens[sample.query_row + 1] for sample in rollout.samples
    ]


def test_edge_24_an_event_that_comes_twice_late_or_never_is_noticed():
    telling = Story(2)
    telling.prompt(40)
    for _ in range(3):
        telling.session.evict([(0, 4)])  # at one row: only their order tells them apart
    rollout = telling.recorder.rollout()
    first, second, third = rollout.events
    for events in ((first, first, second), (second, first, third), (first, third, second), (first, third)):
        assert noticed(rollout, events=events, event_count=len(events))
    assert not noticed(rollout)


# -- the rest of the header


def test_samples_and_marks_that_do_not_fit_are_refused():
    telling = Story(5)
    telling.sample(3, Sampling())
    telling.fill()
    rollout = telling.recorder.rollout()
    last = rollout.samples[-1]
    for parts in (
        {"samples": (*rollout.samples, last)},
        {"samples": tuple(reversed(rollout.samples))},
        {"samples": (replace(last, token=last.token + 1),)},
        {"samples": (replace(last, query_row=rollout.row_count),)},
        {"samples": (Sample(rollout.filler_rows[0] - 1, 0, -1.0, Sampling()),)},
        {"filler_rows": (rollout.row_count,)},
        {"filler_rows": (-1,)},
        {"filler_rows": (2, 1)},
        {"filler_rows": (1, 1)},
        {"repeated_rows": rollout.filler_rows},
        {"filler_rows": (last.query_row + 1,)},
        {"block_tokens": 0},
        {"namespace": b"model"},
    ):
        with pytest.raises(Corrupt, match="rollout 'story-5'"):
            replace(rollout, **parts)


@pytest.mark.parametrize(
    "parts",
    [{"temperature": -1.0}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_edge_20_what_nobody_can_draw_with_is_refused(parts: dict[str, Any]):
    with pytest.raises(ValueError, match="top_p is in"):
        Sampling(**parts)


def test_edge_17_rows_carry_the_version_of_their_weights_to_the_trainer():
    telling = Story(7)
    start = telling.session.next_row
    telling.session.set_weights(3)
    telling.prompt(5)
    telling.session.set_weights(4)
    telling.session.set_weights(5)
    telling.prompt(1)
    sent = decode(encode(telling.recorder.rollout()))
    assert weights_runs(sent.row_count, sent.events) == [
        (0, (0, start)),
        (3, (start, 5)),
        (5, (start + 5, 1)),
    ]


def test_edge_18_text_is_what_is_left_without_fillers_and_repetitions():
    rollout = Rollout.sealed("x", bytes(32), 4, [1, 0, 0, 2, 1], (), (), filler_rows=(2,), repeated_rows=(4,))
    assert rollout.text() == (1, 0, 2)


def test_fault_b07_the_rest_of_a_conversation_is_what_follows_the_same_ids():
    assert rest_of([1, 2, 3], [1, 2]) == (3,)
    assert rest_of([1, 2], (1, 2)) == ()
    with pytest.raises(TokenError, match="at token 1 of 2: the template"):
        rest_of([1, 3, 2], [1, 2])


def test_an_empty_log_has_the_root_digest():
    nothing = Rollout.sealed("x", bytes(32), 4, (), (), ())
    assert nothing.view_digest == ROOT_DIGEST
    with pytest.raises(Corrupt):
        replace(nothing, view_digest=ViewDigest(bytes([1]) * 32))


def test_an_event_behind_the_end_is_noticed():
    rollout = Story(1).recorder.rollout()
    late = Event("fork", rollout.row_count + 1, span=SpanId(bytes(32)))
    with pytest.raises(Corrupt, match="has an event at row"):
        Rollout.sealed("x", rollout.namespace, 4, rollout.tokens, (late,), ())


def test_a_recorder_of_a_story_never_contradicts_itself():
    for seed in range(30):
        recorder: Recorder = Story(seed).told(20)
        recorder.session.check()
        recorder.rollout().visibility()
        assert rest_of((*recorder.text(), 1), recorder.text()) == (1,)
