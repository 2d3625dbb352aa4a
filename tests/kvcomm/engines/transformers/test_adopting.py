"""A real model's streams in another engine: adopted, continued, restored, and refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcomm.engines.transformers.generating import Answer, Prompt, Stream, generate, prefill
from kvcomm.engines.transformers.identity import namespace_of
from kvcomm.engines.transformers.replaying import replay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import PoolFull, Refused
from kvcomm.streams.archive import Archive, SpanLost
from kvcomm.streams.conversation import Markup
from kvcomm.streams.events import Event
from kvcomm.streams.mismatch import EXACT, mismatch
from kvcomm.streams.policies.port import Policy
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.policies.window import WindowFifo
from kvcomm.streams.rollout import Sampling
from kvcomm.streams.session import Session
from tests.kvcomm.engines.transformers.test_streaming import drawn
from tests.kvcomm.streams.clusters import TENANT, Cluster
from tests.kvcomm.test_blockplane import run
from tests.models import StreamModelKind, stream_model

END, NEWLINE, FILLER = 2, 5, 3
CHAT = Markup(frozenset({END}), (NEWLINE,), FILLER)
GREEDY = Sampling(temperature=0.0)
CLOSE = 1e-4

pytestmark = pytest.mark.slow


def engine_of(kind: StreamModelKind = "llama gqa", block_count: int = 64) -> StreamEngine:
    model = stream_model(kind)
    namespace = namespace_of(model, block_tokens=16).for_tenant(TENANT)
    return StreamEngine(model, block_count, namespace)


def answered(engine: StreamEngine, stream: Stream, prompt: Prompt, count: int) -> Answer:
    prefill(engine, [(stream, prompt)])
    (answer,) = generate(engine, [stream], count, stop=(), end=END if stream.conversation else None)
    return answer


def adopted(cluster: Cluster, taker: StreamEngine, policy: Policy, markup: Markup | None) -> Stream:
    context = run(cluster.sharing().head("planner", "main"))
    session = run(cluster.sharing().adopt(taker, "planner", "main", context=context))
    assert isinstance(session, Session)
    return Stream(
        taker, "theirs", policy=policy, markup=markup, sampling=GREEDY, session=session, past=context
    )


def assert_same(mine: Answer, theirs: Answer) -> None:
    assert mine.tokens == theirs.tokens
    assert max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) < CLOSE


def test_edge_22_a_talk_goes_on_behind_the_text_of_a_lost_span_here_and_where_it_is_adopted() -> None:
    cluster, maker, taker = Cluster(), engine_of(), engine_of()
    stream = Stream(maker, "mine", policy=WholeTurns(4, 1), markup=CHAT, sampling=GREEDY)
    for turn in range(3):
        asked = [[*drawn(turn, 20), END, NEWLINE]] * (1 + (turn == 0))
        answered(maker, stream, Prompt(asked), 9)
    start, _ = stream.session.turns[0]
    span = stream.session.evict([(start, start + 32)], archive=True).span
    rows = stream.session.archive[span].rows
    text = [stream.session.tokens[row] for row in rows]
    assert text.count(END) == 1, "one end of a message: read as one, it would shift all turns"
    archive = Archive(cluster.sharing(), maker, bytes_max=0)
    stream.repeated(archive.repeat(stream.session, SpanLost(span, rows, rows, True), stream.recorder))
    assert run(
        cluster.sharing().publish(stream.session, maker, "planner", "main", recorder=stream.recorder)
    ).complete
    other = adopted(cluster, taker, WholeTurns(4, 1), CHAT)
    for turn in range(3):
        prompt = Prompt([[*drawn(50 + turn, 23), END, NEWLINE]])
        assert_same(answered(maker, stream, prompt, 9), answered(taker, other, prompt, 9))
        assert stream.session.turns == other.session.turns
    assert stream.session.events[:-1] and stream.session.events == other.session.events
    mine, theirs = stream.rollout(), other.rollout()
    assert mine.repeated_rows == theirs.repeated_rows != ()
    assert mine.filler_rows == theirs.filler_rows
    report = mismatch(replay(maker.model, [mine]))
    assert not report.beyond(EXACT), report


def test_a_prompt_is_taken_from_the_cluster_as_far_as_anybody_has_read_it() -> None:
    cluster, maker, taker = Cluster(), engine_of(), engine_of()
    system, question = [*drawn(1, 40), END, NEWLINE], [*drawn(2, 30), END, NEWLINE]
    stream = Stream(maker, "mine", markup=CHAT, sampling=GREEDY)
    mine = answered(maker, stream, Prompt([system, question]), 9)
    run(cluster.sharing().publish(stream.session, maker, "planner", "main"))
    other = Stream(taker, "theirs", markup=CHAT, sampling=GREEDY)
    gave: list[int] = []

    def adopt(session: Session, tokens: Sequence[int]) -> int:
        gave.append(run(cluster.sharing().adopt_prefix(session, taker, tokens)))
        return gave[-1]

    prefill(taker, [(other, Prompt([system, question], [7]))], adopt=adopt)
    assert gave == [48 + 32] and other.session.next_row == 81
    assert other.rollout().filler_rows == stream.rollout().filler_rows[:6]
    third = Stream(taker, "third", markup=CHAT, sampling=GREEDY)
    prefill(taker, [(third, Prompt([system, question]))], adopt=adopt)
    (theirs,) = generate(taker, [third], 9, stop=(), end=END)
    assert_same(theirs, mine)


def test_a_stream_that_is_taken_over_in_the_middle_of_an_answer_is_cut_where_its_maker_s_is() -> None:
    cluster, maker, taker = Cluster(), engine_of(), engine_of()
    policy = WindowFifo(64, 32)
    stream = Stream(maker, "mine", policy=policy, sampling=GREEDY)
    prefill(maker, [(stream, Prompt([drawn(1, 65)]))])
    (answer,) = generate(maker, [stream], 40, stop=())
    first = answer.tokens[0]
    begun = maker.session()
    maker.feed([(begun, drawn(1, 65))])
    begun.sampled(first)
    run(cluster.sharing().publish(begun, maker, "planner", "main"))
    other = adopted(cluster, taker, policy, None)
    (theirs,) = generate(taker, [other], 39, stop=())
    assert theirs.tokens == answer.tokens[1:]
    assert other.session.events == stream.session.events


def test_an_answer_whose_end_was_drawn_before_it_was_taken_over_is_finished_and_not_gone_on_with() -> None:
    cluster, maker, taker = Cluster(), engine_of(), engine_of()
    stream = Stream(maker, "mine", markup=CHAT, sampling=GREEDY)
    prefill(maker, [(stream, Prompt([[*drawn(n, 20), END, NEWLINE] for n in range(2)], [7]))])
    stream.session.sampled(END)
    run(cluster.sharing().publish(stream.session, maker, "planner", "main", recorder=stream.recorder))
    other = adopted(cluster, taker, WholeTurns(2, 1), CHAT)
    (answer,) = generate(taker, [other], 9)
    assert (answer.tokens, answer.stop) == ([], "token")
    assert other.session.turns == [(32, 80)] and other.session.tokens[65:67] == [END, NEWLINE]
    assert other.session.pending is None and answer.filler_count == 13


@pytest.mark.parametrize(("kind", "markup"), [("qwen3 sliding", None), ("llama gqa", CHAT)])
def test_an_adopted_stream_writes_and_cuts_what_its_maker_does(
    kind: StreamModelKind, markup: Markup | None
) -> None:
    policy: Policy = WholeTurns(2, 1) if markup else WindowFifo(64, 32)
    cluster, maker, taker = Cluster(), engine_of(kind), engine_of(kind)
    stream = Stream(maker, "mine", policy=policy, markup=markup, sampling=GREEDY)
    for turn in range(3):
        answered(maker, stream, Prompt([[*drawn(turn, 20), END, NEWLINE]] * 2), 9)
    assert stream.session.events
    shared = run(
        cluster.sharing().publish(stream.session, maker, "planner", "main", recorder=stream.recorder)
    )
    assert shared.complete
    other = adopted(cluster, taker, policy, markup)
    cuts = len(stream.session.events)
    for turn in range(2):
        prompt = Prompt([[*drawn(50 + turn, 23), END, NEWLINE]])
        assert_same(answered(maker, stream, prompt, 24), answered(taker, other, prompt, 24))
    mine, theirs = stream.session, other.session
    assert len(mine.events) > cuts, "it was cut again on both sides"
    assert (theirs.tokens, theirs.events, theirs.turns) == (mine.tokens, mine.events, mine.turns)
    assert other.recorder.text() == stream.recorder.text()
    rollout = other.rollout()
    assert len(rollout.samples) == 48, "who adopted it sampled these"
    found = mismatch(replay(taker.model, [rollout]))
    assert not found.beyond(EXACT), str(found)


def test_edge_17_a_stream_of_other_weights_is_not_adopted() -> None:
    cluster, maker, taker = Cluster(), engine_of(), engine_of()
    session = maker.session()
    maker.feed([(session, drawn(1, 40))])
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    taker.set_weights(3)
    with pytest.raises(Refused, match="weights 0, and these are 3"):
        run(cluster.sharing().adopt(taker, "planner", "main"))
    assert taker.pool.free_count == taker.pool.block_count


def test_fault_b14_an_engine_whose_sessions_all_want_spans_back_serves_them_all() -> None:
    """Memory for 12 sessions and two restores: those turned away hold nothing new, and come again."""
    cluster, engine = Cluster(), engine_of(block_count=12 * 3 + 2 * 3)
    away = Archive(cluster.sharing(), engine, bytes_max=0)
    waiting, served = [], 0
    for seed in range(12):
        session = engine.session()
        engine.feed([(session, drawn(seed, 70))])
        span = session.evict([(16, 48)], archive=True).span
        waiting.append((session, span))
        assert run(away.settle([session for session, _ in waiting]))[0].moved
    turned_away = 0
    for _ in range(12):
        again, running = [], []
        for session, span in waiting:
            try:
                back = run(away.bring_back(session, span))
            except PoolFull:
                again.append((session, span))
                continue
            assert isinstance(back, Event)
            running.append(session)
        turned_away += len(again)
        if running:
            served += len(engine.feed([(session, [7]) for session in running]))
        for session in running:
            session.close()
        waiting = again
    assert not waiting and turned_away and served == 12
    assert engine.pool.free_count == engine.pool.block_count


def test_edge_22_the_text_of_a_lost_span_is_read_again_and_replayed_as_it_was_read() -> None:
    cluster, engine = Cluster(), engine_of()
    stream = Stream(engine, "one", sampling=GREEDY)
    answered(engine, stream, Prompt([drawn(1, 60)]), 10)
    session, away = stream.session, Archive(cluster.sharing(), engine, bytes_max=0, counts=engine.counts)
    span = session.evict([(16, 48)], archive=True).span
    assert run(away.put_away(session, span)).moved
    cluster.tier.held.clear()
    engine.pool.release(engine.pool.take(engine.pool.free_count))
    lost = run(away.bring_back(session, span))
    assert isinstance(lost, SpanLost) and lost.gone
    repeated = away.repeat(session, lost, stream.recorder)
    assert (repeated.row_count, engine.counts.metrics.snapshot()[REPREFILLED]) == (32, 32)
    answered(engine, stream, Prompt([drawn(2, 5)]), 10)
    rollout = stream.rollout()
    assert rollout.repeated_rows == tuple(range(repeated.first_row, repeated.first_row + 32))
    found = mismatch(replay(engine.model, [rollout]))
    assert not found.beyond(EXACT), str(found)


REPREFILLED = 'kvcomm_streams_rows_total{what="reprefilled"}'
