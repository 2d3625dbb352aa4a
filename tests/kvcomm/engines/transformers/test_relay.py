"""Conversations that move to a new stream, and streams that fork: on a real model, replayed exactly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvcomm.engines.transformers.generating import Prompt, Stream, generate, prefill
from kvcomm.engines.transformers.relay import Relay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import ConfigError, PoolFull
from kvcomm.streams.archive import Repeated
from kvcomm.streams.events import SpanId
from kvcomm.streams.policies.restarts import Reprefill, Summary
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.policies.window import WindowFifo
from kvcomm.streams.rollout import Sampling
from kvcomm.streams.session import Session
from tests.kvcomm.engines.transformers.test_generating import (
    CHAT,
    END,
    NEWLINE,
    answered,
    assert_exact,
    engine_of,
    message,
)

pytestmark = pytest.mark.slow
PREFIX = (8, 9)


def begun(engine: StreamEngine, **settings) -> Stream:
    stream = Stream(engine, "talk", markup=CHAT, seed=3, **settings)
    prefill(engine, [(stream, Prompt([message(1, 20)]))])
    return stream


def told(relay: Relay, engine: StreamEngine, turns: Sequence[int]) -> list[int]:
    """The live turns that each message found."""
    live = []
    for turn in turns:
        relay.move()
        live.append(len(relay.stream.session.turns))
        answered(engine, relay.stream, Prompt([message(turn, 9)], PREFIX), 7, end=END)
    return live


@pytest.mark.parametrize("adopt", [False, True])
def test_a_re_prefilled_conversation_is_what_it_would_be_if_the_rest_had_never_been(adopt: bool):
    engine = engine_of()
    relay = Relay(engine, begun(engine), Reprefill(WholeTurns(3, 2)), adopt=adopt)
    assert told(relay, engine, range(10, 16)) == [0, 1, 2, 1, 2, 1]
    assert [rollout.name for rollout in relay.all_rollouts()] == ["talk", "talk/1", "talk/2"]
    assert_exact(engine, *relay.all_rollouts())
    assert all(not rollout.events for rollout in relay.all_rollouts())
    kept = 32 + 32
    assert relay.computed_again == 2 * (kept - 32 * adopt)
    counted = engine.counts.metrics.snapshot()['kvcomm_streams_rows_total{what="reprefilled"}']
    assert counted == relay.computed_again
    held = engine.pool.block_count - engine.pool.free_count
    assert held == len(relay.stream.session.table), "those that ended hold nothing"

    fresh = engine.session()
    (logits,) = engine.feed([(fresh, relay.stream.session.tokens)])
    assert relay.stream.logits is not None
    torch.testing.assert_close(relay.stream.logits, logits, atol=1e-4, rtol=0)


def test_a_summary_is_sampled_by_the_stream_that_it_sums_up():
    engine = engine_of()
    stream = begun(engine, sampling=Sampling(temperature=0.7))

    written: list[list[int]] = []

    def write(session: Session, dropped: Sequence[int]) -> Sequence[int]:
        assert session is relay.stream.session
        assert len(dropped) == 64
        answer = answered(engine, relay.stream, Prompt([message(99, 6)], PREFIX), 10, end=END)
        written.append([token for token in answer.tokens if token != END])
        return [*PREFIX, *written[-1], END, NEWLINE]

    relay = Relay(engine, stream, Summary(WholeTurns(3, 2), write))
    assert told(relay, engine, range(10, 14)) == [0, 1, 2, 1]
    first, second = relay.all_rollouts()
    assert_exact(engine, first, second)
    (summary,) = written
    assert second.tokens[32 : 34 + len(summary) + 2] == (*PREFIX, *summary, END, NEWLINE)
    sampled = [each.token for each in first.samples if each.loss]
    assert sampled[3 * 7 :][: len(summary)] == summary, "samples of the stream before, to be trained on"


def test_edge_22_text_that_was_read_again_is_still_that_where_the_conversation_moves():
    engine = engine_of()
    relay = Relay(engine, begun(engine), Reprefill(WholeTurns(3, 1)))
    told(relay, engine, range(10, 12))
    stream = relay.stream
    text = [*message(40, 9), *message(41, 5), *message(42, 4)]
    (logits,) = engine.feed([(stream.session, text)])
    stream.recorder.repeated(len(text))
    stream.repeated(Repeated(SpanId(bytes(32)), stream.session.next_row - len(text), len(text), logits))
    assert len(stream.session.turns) == 3 and stream.logits is logits
    told(relay, engine, range(12, 14))
    first, second, third = relay.all_rollouts()
    for rollout in (first, second, third):
        assert [rollout.tokens[row] for row in rollout.repeated_rows] == text
    assert relay.stream.recorder.text().count(END) == 1 + 2 * 2, (
        "two turns of two messages are left beside it"
    )
    assert_exact(engine, first, second, third)


def test_where_memory_does_not_hold_both_the_stream_stays():
    engine = engine_of(block_count=12)
    relay = Relay(engine, begun(engine), Reprefill(WholeTurns(3, 1)))
    told(relay, engine, range(10, 13))
    before, held = relay.stream, engine.pool.free_count
    with pytest.raises(PoolFull):
        relay.move()
    assert relay.stream is before
    assert engine.pool.free_count == held
    assert not relay.rollouts


def test_only_a_stream_that_knows_messages_and_does_not_cut_moves():
    engine = engine_of()
    with pytest.raises(ConfigError, match="give it a markup"):
        Relay(engine, Stream(engine, "plain"), Reprefill(WholeTurns(3, 1)))
    with pytest.raises(ConfigError, match="give it no policy"):
        Relay(engine, begun(engine, policy=WholeTurns(3, 1)), Reprefill(WholeTurns(3, 1)))


def test_edge_15_siblings_share_the_prompt_and_part_where_they_draw():
    engine = engine_of()
    parent = begun(engine, policy=WholeTurns(2, 1))
    answered(engine, parent, Prompt([message(5, 9)], PREFIX), 7, end=END)
    answered(engine, parent, Prompt([message(6, 9)], PREFIX), 7, end=END)
    prefill(engine, [(parent, Prompt([message(7, 9)], PREFIX))])
    assert [event.reason for event in parent.session.events] == ["turns"]
    siblings = [parent.fork(f"sibling {seed}", seed=seed) for seed in range(3)]
    answers = generate(engine, siblings, 12, end=END)
    assert len({tuple(answer.tokens) for answer in answers}) == 3
    for stream in siblings:
        prefill(engine, [(stream, Prompt([message(8, 9)], PREFIX))])
        assert len(stream.session.turns) == 1
    generate(engine, siblings, 5, end=END)
    rollouts = [stream.rollout() for stream in siblings]
    assert_exact(engine, *rollouts)
    shared = len(parent.rollout().samples)
    assert all(not each.loss for rollout in rollouts for each in rollout.samples[:shared])
    assert all(each.loss for rollout in rollouts for each in rollout.samples[shared:])
    assert len(set.intersection(*({*stream.session.table} for stream in siblings))) >= 3


def test_edge_03_a_stream_that_is_never_cut_says_so_once(caplog: pytest.LogCaptureFixture):
    engine = engine_of()
    stream = begun(engine, policy=WindowFifo(31, 16))
    answered(engine, stream, Prompt([message(5, 9)], PREFIX), 30, end=END)
    assert [record.getMessage() for record in caplog.records] == [
        "stream talk runs on full context: 32 slots are protected (the first message, in whole blocks), more "
        "than window 31: nothing is ever cut; enlarge the window or shorten the first message"
    ]
    assert not stream.session.events


def test_an_answer_under_way_is_not_forked():
    engine = engine_of()
    stream = begun(engine)
    stream.begin_answer()
    with pytest.raises(ValueError, match="an answer is under way"):
        stream.fork("child", seed=1)


def test_a_session_with_a_past_goes_on_as_a_conversation():
    """As one does that was adopted: nothing is known but the session and how messages end."""
    engine = engine_of()
    parent = begun(engine, policy=WholeTurns(2, 1))
    for turn in (5, 6, 7):
        answered(engine, parent, Prompt([message(turn, 9)], PREFIX), 7, end=END)
    parent_filler = parent.rollout().filler_rows
    session = engine.fork(parent.session, bytes(32))
    stream = Stream(engine, "goes on", policy=WholeTurns(2, 1), markup=CHAT, session=session)
    for turn in (8, 9):
        answered(engine, stream, Prompt([message(turn, 9)], PREFIX), 7, end=END)
        answered(engine, parent, Prompt([message(turn, 9)], PREFIX), 7, end=END)
    assert len(stream.session.turns) == len(parent.session.turns) == 2
    assert stream.rollout().filler_rows[: len(parent_filler)] == parent_filler
    assert_exact(engine, stream.rollout())


def test_a_successor_goes_on_with_the_draw_of_the_stream_before_it():
    engine = engine_of()
    moved, stays = begun(engine), begun(engine)
    for stream in (moved, stays):
        stream.uniform()
    assert moved.conversation is not None
    assert moved.successor("later", moved.conversation).uniform() == stays.uniform()


def test_what_was_filler_before_a_move_is_filler_behind_it():
    engine = engine_of()
    relay = Relay(engine, begun(engine), Reprefill(WholeTurns(1, 1)))
    told(relay, engine, [10])
    assert relay.move()
    rollout, conversation = relay.stream.rollout(), relay.stream.conversation
    assert conversation is not None
    assert rollout.filler_rows == tuple(conversation.filler_rows) != ()
