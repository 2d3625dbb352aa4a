"""Streams that an engine writes, one or many at a time: a replay of their records says what they said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcomm.engines.transformers.generating import Answer, Prompt, Stream, generate, prefill
from kvcomm.engines.transformers.replaying import replay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import ConfigError, PoolFull
from kvcomm.streams.conversation import Markup
from kvcomm.streams.mismatch import EXACT, ROUNDED, mismatch
from kvcomm.streams.policies.heavy_hitter import HeavyHitter
from kvcomm.streams.policies.port import Policy
from kvcomm.streams.policies.snap import Snap
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.policies.window import WindowFifo
from kvcomm.streams.rollout import Rollout, Sampling
from kvcomm.streams.session import Session
from tests.kvcomm.engines.transformers.test_streaming import drawn
from tests.models import STREAM_MODEL_KINDS, StreamModelKind, stream_model

END, NEWLINE, FILLER = 2, 5, 3
pytestmark = pytest.mark.slow

CHAT = Markup(frozenset({END}), (NEWLINE,), FILLER)
WINDOW = WindowFifo(64, 32)


def engine_of(kind: StreamModelKind = "llama gqa", block_count: int = 128, **settings: Any) -> StreamEngine:
    return StreamEngine(stream_model(kind), block_count, **settings)


def message(seed: int, count: int) -> list[int]:
    return [*drawn(seed, count - 2), END, NEWLINE]


def plain(seed: int, count: int) -> Prompt:
    return Prompt([drawn(seed, count)])


def answered(engine: StreamEngine, stream: Stream, prompt: Prompt, count: int, **settings: Any) -> Answer:
    prefill(engine, [(stream, prompt)])
    (answer,) = generate(engine, [stream], count, **settings)
    return answer


def assert_exact(engine: StreamEngine, *rollouts: Rollout) -> None:
    found = mismatch(replay(engine.model, rollouts))
    assert not found.beyond(EXACT), str(found)


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_a_window_over_a_long_answer_is_replayed_exactly(kind):
    engine = engine_of(kind)
    stream = Stream(engine, "one", policy=WINDOW, seed=1)
    answer = answered(engine, stream, plain(1, 45), 90, stop=())
    assert len(answer.tokens) == 90 and answer.stop == "length"
    assert [event.kind for event in stream.session.events] == ["evict"] * 3
    rollout = stream.rollout()
    assert [sample.token for sample in rollout.samples] == answer.tokens
    assert [sample.logprob for sample in rollout.samples] == answer.logprobs
    assert list(rollout.tokens[45:]) == answer.tokens  # the last one has its K/V, too
    assert_exact(engine, rollout)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=20),
    Sampling(temperature=0.0),
    Sampling(1.3, 0, 0.8),
]


def test_edge_20_a_batch_of_different_samplings_writes_what_each_stream_writes_alone():
    engine = engine_of("qwen3 sliding")

    def streams() -> list[Stream]:
        return [
            Stream(engine, f"{n}", policy=WindowFifo(48 + 16 * n, 16 + 16 * (n % 2)), sampling=each, seed=n)
            for n, each in enumerate(SAMPLINGS)
        ]

    together, alone = streams(), streams()
    prefill(engine, [(stream, plain(n, 20 + 25 * n)) for n, stream in enumerate(together)], chunk_rows=32)
    answers = generate(engine, together, 60, stop=())
    for n, stream in enumerate(alone):
        prefill(engine, [(stream, plain(n, 20 + 25 * n))], chunk_rows=32)
        (answer,) = generate(engine, [stream], 60, stop=())
        assert answer.tokens == answers[n].tokens
        assert answer.logprobs == pytest.approx(answers[n].logprobs, abs=1e-4)
        assert stream.session.events == together[n].session.events
    rows = {tuple(event.at_row for event in stream.session.events) for stream in together}
    assert len(rows) == len(together)  # each was cut when its own policy said so
    assert_exact(engine, *(stream.rollout() for stream in together))


def test_the_seed_decides_and_nothing_else():
    engine = engine_of()
    answers = [
        answered(engine, Stream(engine, "x", policy=WINDOW, seed=seed), plain(1, 30), 12)
        for seed in (3, 3, 4)
    ]
    assert answers[0].tokens == answers[1].tokens != answers[2].tokens


def chat(engine: StreamEngine, stream: Stream, turn_count: int) -> list[Answer]:
    answers = []
    for turn in range(turn_count):
        messages = [message(90, 21)] if not turn else []
        prompt = Prompt([*messages, message(turn, 12 + 5 * turn)], [7, 8])
        prefill(engine, [(stream, prompt)])
        answers += generate(engine, [stream], 14 + turn, end=END)
    return answers


@pytest.mark.parametrize("kind", ["llama gqa", "qwen3 sliding"])
def test_whole_turns_are_cut_at_admission_and_replayed_exactly(kind):
    engine = engine_of(kind)
    stream = Stream(engine, "chat", policy=WholeTurns(3, 2), markup=CHAT, seed=2)
    answers = chat(engine, stream, 7)
    events = stream.session.events
    assert len(events) >= 2 and {event.kind for event in events} == {"evict"}
    rollout = stream.rollout()
    sampled = {sample.query_row for sample in rollout.samples}
    assert all(event.at_row not in sampled for event in events)
    assert all(rollout.tokens[row] == FILLER for row in rollout.filler_rows)
    assert sum(answer.filler_count for answer in answers) < len(rollout.filler_rows)
    assert stream.session.slot_count % 16 == 0
    assert_exact(engine, rollout)


@pytest.mark.parametrize(
    "policy", [HeavyHitter(64, 32, recent=16), Snap(64, 16, observed=16)], ids=["heavy hitter", "snap"]
)
def test_policies_that_go_by_attention_get_it_and_replay_exactly(policy: Policy):
    engine = engine_of("qwen3")
    streams = [Stream(engine, f"{n}", policy=policy, seed=n) for n in range(2)]
    prefill(engine, [(stream, plain(n, 90 + 20 * n)) for n, stream in enumerate(streams)], chunk_rows=64)
    generate(engine, streams, 40, stop=())
    for stream in streams:
        cuts = [each for event in stream.session.events for each in event.ranges]
        assert cuts
    assert_exact(engine, *(stream.rollout() for stream in streams))


def test_edge_05_a_long_prompt_is_cut_between_its_chunks():
    engine = engine_of()
    stream = Stream(engine, "long", policy=WINDOW, seed=1)
    stream.session.protect(16)
    prefill(engine, [(stream, plain(1, 300))], chunk_rows=48)
    rows = [event.at_row for event in stream.session.events]
    assert rows and all(row % 48 == 0 for row in rows) and len(set(rows)) < len(rows) + 1
    generate(engine, [stream], 20, stop=())
    assert_exact(engine, stream.rollout())


def test_edge_08_a_stop_token_in_the_step_that_would_cut_makes_no_event():
    engine = engine_of()
    probe = Stream(engine, "probe", policy=WINDOW, seed=1)
    answer = answered(engine, probe, plain(1, 45), 40, stop=())
    cut = probe.session.events[0].at_row
    token = answer.tokens[cut - 45]  # drawn from the last row before the cut
    first = answer.tokens.index(token)
    assert first == cut - 45
    stream = Stream(engine, "stopped", policy=WINDOW, seed=1)
    stopped = answered(engine, stream, plain(1, 45), 40, stop={token})
    assert stopped.tokens == answer.tokens[: first + 1] and stopped.stop == "token"
    assert not stream.session.events and stream.session.pending is None
    prefill(engine, [(stream, plain(2, 5))])
    assert [event.at_row for event in stream.session.events] == [cut + 1]
    assert_exact(engine, stream.rollout())


def test_edge_09_the_token_that_was_sampled_before_a_cut_is_the_first_row_behind_it():
    engine = engine_of()
    stream = Stream(engine, "one", policy=WINDOW, seed=1)
    answer = answered(engine, stream, plain(1, 45), 40, stop=())
    cut = stream.session.events[0].at_row
    rollout = stream.rollout()
    assert rollout.samples[cut - 45].query_row == cut - 1
    assert rollout.tokens[cut] == answer.tokens[cut - 45]


def test_edge_19_an_answer_of_no_tokens_is_finished_and_replays():
    engine = engine_of()
    stream = Stream(engine, "silent", markup=CHAT)
    prefill(engine, [(stream, Prompt([message(1, 20), message(2, 9)], [7, 8]))])
    (answer,) = generate(engine, [stream], 0, end=END)
    assert answer.tokens == [] and answer.stop == "length"
    assert stream.session.slot_count % 16 == 0 and not stream.rollout().samples
    prefill(engine, [(stream, Prompt([message(3, 9)], [7, 8]))])
    (answer,) = generate(engine, [stream], 5, end=END)
    assert len(answer.tokens) <= 5
    assert_exact(engine, stream.rollout())


def test_edge_12_rows_run_out_although_few_are_in_view():
    engine = engine_of(rows_max=100)
    stream = Stream(engine, "long", policy=WINDOW, seed=1)
    answer = answered(engine, stream, plain(1, 45), 500, stop=())
    assert answer.stop == "rows" and stream.session.next_row == 100 and len(answer.tokens) == 55
    assert stream.session.slot_count < 70


def test_edge_13_a_stream_that_gives_way_goes_on_as_if_it_had_not(monkeypatch: pytest.MonkeyPatch):
    gone: list[Session] = []
    swap_out = StreamEngine.swap_out

    def spied(engine: StreamEngine, session: Session) -> None:
        gone.append(session)
        swap_out(engine, session)

    monkeypatch.setattr(StreamEngine, "swap_out", spied)

    def written(block_count: int) -> tuple[list[Answer], list[Stream], StreamEngine]:
        engine = engine_of("qwen3", block_count)
        streams = [Stream(engine, f"{n}", policy=WINDOW, seed=n) for n in range(4)]
        prefill(engine, [(stream, plain(n, 40 + n)) for n, stream in enumerate(streams)])
        return generate(engine, streams, 60, stop=()), streams, engine

    answers, streams, _ = written(128)
    assert not gone
    squeezed, given_way, engine = written(11)  # of the 5 blocks that each of 4 wants
    for mine, its, one, other in zip(answers, squeezed, streams, given_way, strict=True):
        assert mine.tokens == its.tokens
        assert mine.logprobs == pytest.approx(its.logprobs, abs=1e-4)
        assert one.session.events == other.session.events
        assert one.session.tokens == other.session.tokens  # and no row was fed twice
    engine.pool.check()
    assert 2 <= len(gone) <= 12, "it waits until there is room, and does not come and go at every step"


@pytest.mark.parametrize("decode", ["lanes", "pages"])
def test_edge_13_swapping_keeps_every_byte(decode):
    engine = engine_of("llama gqa", 16, decode=decode)
    session, undisturbed = engine.session(), StreamEngine(engine.model, 16, engine.namespace)
    expected = undisturbed.session()
    for each, its in ((engine, session), (undisturbed, expected)):
        each.feed([(its, drawn(1, 90))])
        its.evict([(16, 48)])
        each.feed([(its, [7])])
    before = [bytes(engine.payload(block)) for block in session.table]
    twin = engine.fork(session, bytes(32))
    engine.swap_out(session)
    twin.close()
    other = engine.session()
    engine.feed([(other, drawn(2, 16 * 16))])  # every block is written over
    with pytest.raises(PoolFull):
        engine.swap_in(session)
    other.close()
    engine.swap_in(session)
    assert [bytes(engine.payload(block)) for block in session.table] == before
    with pytest.raises(ValueError, match="no bytes of that session"):
        engine.swap_in(session)
    results = [each.feed([(its, [5])])[0] for each, its in ((engine, session), (undisturbed, expected))]
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)
    session.check()


def test_edge_13_prompts_to_streams_that_do_not_fit_together_wait_for_each_other():
    def written(block_count: int) -> list[list[int]]:
        engine = engine_of("llama gqa", block_count)
        streams = [Stream(engine, f"{n}", markup=CHAT, seed=n) for n in range(3)]
        answers: list[list[int]] = []
        for turn in range(2):
            prompts = [Prompt([message(10 * turn + n, 40)], [7, 8]) for n in range(3)]
            prefill(engine, list(zip(streams, prompts, strict=True)))
            answers += [answer.tokens for answer in generate(engine, streams, 6, end=END)]
        assert_exact(engine, *(stream.rollout() for stream in streams))
        engine.pool.check()
        return answers

    assert written(9) == written(32)  # a stream has 4 blocks after a turn, and 8 after two


def test_edge_15_a_stream_that_gave_way_comes_back_to_be_forked():
    engine = engine_of("llama gqa", 6)
    first, last = streams = [Stream(engine, f"{n}", seed=n) for n in range(2)]
    prefill(engine, [(stream, plain(n, 36)) for n, stream in enumerate(streams)])
    generate(engine, streams, 20, stop=())
    away = last if last.session.swapped is not None else first
    assert away.session.swapped is not None, "four blocks each do not fit into six"
    (first if away is last else last).close()
    child = away.fork("child", seed=3)
    generate(engine, [child], 5, stop=())
    assert child.session.tokens[:56] == away.session.tokens
    assert_exact(engine, child.rollout())


def test_blocks_that_were_taken_up_count_for_the_next_cut():
    engine = engine_of("qwen3")
    prompt = plain(1, 150)
    leader, sibling = (Stream(engine, name, policy=WINDOW) for name in "ab")
    for stream in (leader, sibling):
        prefill(engine, [(stream, prompt)], chunk_rows=96)
    assert [event.at_row for event in leader.session.events] == [96]
    assert sibling.session.events == leader.session.events
    assert sibling.session.view.rows == leader.session.view.rows


def test_memory_for_none_is_an_error_and_the_stream_goes_on_later():
    engine = engine_of("llama gqa", 8)
    other = engine.session()
    engine.feed([(other, drawn(9, 60))])
    stream = Stream(engine, "squeezed", seed=1, markup=CHAT)
    prefill(engine, [(stream, Prompt([message(1, 30), message(2, 10)], [7]))])
    with pytest.raises(PoolFull):
        generate(engine, [stream], 60, stop=())
    written = len(stream.session.tokens)
    other.close()
    (answer,) = generate(engine, [stream], 60, stop=())
    assert len(answer.tokens) == 60 and stream.session.next_row > written
    free = engine_of()
    unhindered = Stream(free, "free", seed=1, markup=CHAT)
    prefill(free, [(unhindered, Prompt([message(1, 30), message(2, 10)], [7]))])
    assert generate(free, [unhindered], 60, stop=())[0].tokens == answer.tokens
    assert_exact(engine, stream.rollout())


def test_edge_21_guessed_rows_that_were_wrong_were_never_fed():
    engine = engine_of("qwen3 sliding")
    session, twin = engine.session(), engine.session()
    for each in (session, twin):
        engine.feed([(each, drawn(1, 60))])
    guess = drawn(2, 8)
    seen: list[torch.Tensor] = []

    def judge(logits: torch.Tensor) -> int:
        seen.append(logits)
        return 3

    after = engine.feed_guess(session, guess, judge)
    assert session.next_row == 63 and session.tokens[60:] == guess[:3]
    session.evict([(16, 32)])
    twins = engine.feed([(twin, guess[:3])])[0]
    twin.evict([(16, 32)])
    torch.testing.assert_close(after, twins, atol=1e-4, rtol=0)
    assert seen[0].shape == (8, engine.namespace.vocab_size)
    assert engine.feed_guess(session, guess, lambda logits: 0).shape == (0, engine.namespace.vocab_size)[:1]
    results = [engine.feed([(each, drawn(3, 20))])[0] for each in (session, twin)]
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="9 of 8"):
        engine.feed_guess(session, guess, lambda logits: 9)
    session.check()
    engine.pool.check()


def test_fault_b09_the_first_token_of_an_answer_sees_what_the_rest_of_it_sees():
    """Cut at admission, not behind the prefill: as if the cut had been made by hand before."""
    engine = engine_of()
    stream, manual = (Stream(engine, name, policy=WholeTurns(3, 2), markup=CHAT) for name in "ab")
    chat(engine, stream, 3)
    chat(engine, manual, 3)
    ranges = [tuple(turn) for turn in manual.session.turns[:2]]
    manual.session.evict([(ranges[0][0], ranges[1][1])])
    prompt = Prompt([message(50, 20)], [7, 8])
    for each in (stream, manual):
        prefill(engine, [(each, prompt)])
    assert len(stream.session.events) == 1
    assert stream.logits is not None and manual.logits is not None
    torch.testing.assert_close(stream.logits, manual.logits, atol=1e-5, rtol=0)


def test_edge_15_forks_answer_one_prompt_each_in_its_own_way():
    engine = engine_of("qwen3")
    first = Stream(engine, "first", policy=WholeTurns(3, 2), markup=CHAT, seed=0)
    chat(engine, first, 4)
    prefill(engine, [(first, Prompt([message(60, 20)], [7, 8]))])
    free = engine.pool.free_count
    forks = [first.fork(f"fork {n}", seed=n) for n in range(3)]
    assert free - engine.pool.free_count == 3  # the partial block of each
    streams = [first, *forks]
    answers = generate(engine, streams, 20, end=END)
    assert len({tuple(answer.tokens) for answer in answers}) == 4
    for stream in streams:
        prefill(engine, [(stream, Prompt([message(61, 9)], [7, 8]))])
    generate(engine, streams, 6, end=END)
    rollouts = [stream.rollout() for stream in streams]
    assert [event.kind for event in rollouts[1].events].count("fork") == 1
    assert sum(sample.loss for sample in rollouts[1].samples) < sum(s.loss for s in rollouts[0].samples)
    assert_exact(engine, *rollouts)
    for stream in streams:
        stream.close()
    assert engine.pool.free_count == engine.pool.block_count


def test_edge_15_a_fork_before_a_mistake_does_not_have_it():
    engine = engine_of()
    stream = Stream(engine, "with a mistake", seed=1)
    answered(engine, stream, plain(1, 40), 12)
    child = stream.fork("repaired", seed=2, loss=True, at_row=45)
    assert child.logits is None and len(child.rollout().samples) == 5
    with pytest.raises(ValueError, match="prefill a stream"):
        generate(engine, [child], 5)
    prefill(engine, [(child, plain(2, 10))])
    generate(engine, [child], 5)
    assert child.session.tokens[:45] == stream.session.tokens[:45]
    assert_exact(engine, child.rollout())


def test_a_session_with_a_past_is_taken_up_in_the_middle_of_an_answer():
    engine = engine_of()
    writer = Stream(engine, "writer", markup=CHAT, seed=1)
    chat(engine, writer, 3)
    prefill(engine, [(writer, Prompt([message(60, 20)], [7, 8]))])
    session = engine.fork(writer.session, bytes(32))
    assert writer.logits is not None and writer.conversation is not None
    session.sampled(int(writer.logits.argmax()))
    taken = Stream(engine, "taken up", markup=CHAT, session=session, policy=WholeTurns(3, 2))
    (answer,) = generate(engine, [taken], 6, end=END)
    assert answer.tokens and taken.conversation is not None
    assert taken.conversation.message_count == writer.conversation.message_count + 1
    assert taken.rollout().filler_rows[: len(writer.recorder.filler_rows)] == tuple(
        writer.recorder.filler_rows
    )
    prefill(engine, [(taken, Prompt([message(62, 9)], [7, 8]))])
    generate(engine, [taken], 6, end=END)
    assert_exact(engine, taken.rollout())


def test_siblings_take_up_the_blocks_of_a_prompt_that_is_computed_already():
    engine = engine_of("qwen3 sliding")
    one, two = (Stream(engine, name, policy=WINDOW, seed=n) for n, name in enumerate("ab"))
    prefill(engine, [(one, plain(1, 60))])
    free = engine.pool.free_count
    prefill(engine, [(two, plain(1, 60))])
    assert free - engine.pool.free_count == 1
    torch.testing.assert_close(one.logits, two.logits, atol=1e-4, rtol=0)
    generate(engine, [one, two], 40, stop=())
    assert_exact(engine, one.rollout(), two.rollout())


@pytest.mark.parametrize("policy", [WINDOW, HeavyHitter(64, 32, recent=16)], ids=["window", "attention"])
def test_of_siblings_in_one_batch_the_first_computes_what_all_have_in_common(policy: Policy):
    engine = engine_of("qwen3")
    streams = [Stream(engine, f"{n}", policy=policy, seed=n) for n in range(4)]
    own = [drawn(9, 40 + n) if n < 3 else drawn(8, 40) for n in range(4)]
    fed = rows_fed(engine)
    prefill(engine, [(stream, Prompt([mine])) for stream, mine in zip(streams, own, strict=True)])
    computed = rows_fed(engine) - fed
    assert computed == (40 + 9 + 10 + 40 if policy is WINDOW else 40 + 41 + 42 + 40)
    generate(engine, streams, 40, stop=())
    assert_exact(engine, *(stream.rollout() for stream in streams))


def rows_fed(engine: StreamEngine) -> int:
    return int(engine.counts.metrics.snapshot()['kvcomm_streams_rows_total{what="fed"}'])


def test_a_pass_that_fails_in_the_middle_of_answers_costs_no_token():
    def written(fails_at: int) -> list[list[int]]:
        engine = engine_of("llama gqa")
        streams = [Stream(engine, f"{n}", policy=WINDOW, markup=CHAT, seed=n) for n in range(2)]
        passes = iter(range(10_000))

        def fail(*_: object) -> None:
            if next(passes) == fails_at:
                raise RuntimeError("out of memory")

        hook = engine.model.model.layers[1].register_forward_pre_hook(fail)
        prompts = [(stream, Prompt([message(n, 30)], [7, 8])) for n, stream in enumerate(streams)]
        try:
            prefill(engine, prompts)
            answers = generate(engine, streams, 45, stop=())
        except RuntimeError:
            answers = generate(engine, streams, 45, stop=())
        hook.remove()
        assert_exact(engine, *(stream.rollout() for stream in streams))
        return [answer.tokens for answer in answers]

    expected = written(-1)
    assert written(7) == written(45) == expected  # while they write, and while they finish


def test_a_prompt_that_was_fed_in_part_is_not_answered_and_a_fork_begins_it_again():
    engine = engine_of("llama gqa", 12)
    stream, other = Stream(engine, "talk", markup=CHAT, seed=1), engine.session()
    prompts = [Prompt([message(1, 30)], [7, 8]), Prompt([message(2, 90)], [7, 8])]
    answered(engine, stream, prompts[0], 5, end=END)
    row = stream.session.next_row
    engine.feed([(other, drawn(9, 5 * 16))])
    with pytest.raises(PoolFull):
        prefill(engine, [(stream, prompts[1])], chunk_rows=32)
    assert row < stream.session.next_row < row + 90
    with pytest.raises(ValueError, match="all of its prompt"):
        generate(engine, [stream], 5)
    other.close()
    again = stream.fork("again", seed=2, at_row=row)
    stream.close()
    answered(engine, again, prompts[1], 5, end=END)
    assert_exact(engine, again.rollout())


def test_steps_over_pages_write_what_steps_over_lanes_write():
    model, answers = stream_model("qwen3"), []
    for decode in ("lanes", "pages"):
        engine = StreamEngine(model, 64, decode=decode)
        streams = [Stream(engine, f"{n}", policy=WindowFifo(48 + 16 * n, 32), seed=n) for n in range(3)]
        prefill(engine, [(stream, plain(n, 20 + 9 * n)) for n, stream in enumerate(streams)])
        answers.append([answer.tokens for answer in generate(engine, streams, 50, stop=())])
    assert answers[0] == answers[1]


def test_a_short_prompt_is_not_computed_beside_a_long_one(monkeypatch: pytest.MonkeyPatch):
    engine = engine_of()
    streams = [Stream(engine, f"{n}") for n in range(3)]
    passes: list[list[int]] = []
    feed = engine.feed

    def spied(feeds: Any, **settings: Any) -> list[torch.Tensor]:
        passes.append([len(tokens) for _, tokens in feeds])
        return feed(feeds, **settings)

    monkeypatch.setattr(engine, "feed", spied)
    prompts = [
        (stream, plain(n, count)) for n, (stream, count) in enumerate(zip(streams, (40, 9, 25), strict=True))
    ]
    prefill(engine, prompts)
    assert passes == [[40, 25], [9]], "it would be padded to four times its length"


def test_siblings_take_up_filler_as_filler():
    engine = engine_of()
    prompt = Prompt([message(1, 21), message(2, 30)], [7, 8])
    one, two = (Stream(engine, name, policy=WholeTurns(3, 2), markup=CHAT, seed=3) for name in "ab")
    for stream in (one, two):
        prefill(engine, [(stream, prompt)])
    assert one.rollout().filler_rows == two.rollout().filler_rows != ()
    first, second = generate(engine, [one, two], 12, end=END)
    assert first.tokens == second.tokens
    assert one.session.turns == two.session.turns
    assert_exact(engine, two.rollout())


def test_gate_g06_in_bf16_a_rollout_stays_under_the_alarm():
    engine = StreamEngine(stream_model("qwen3", dtype=torch.bfloat16, initializer_range=0.1), 64)
    stream = Stream(engine, "rounded", policy=WINDOW, seed=1)
    answered(engine, stream, plain(1, 45), 100, stop=())
    found = mismatch(replay(engine.model, [stream.rollout()]))
    assert not found.beyond(ROUNDED), str(found)


def test_what_is_refused():
    engine = engine_of()
    stream = Stream(engine, "x")
    with pytest.raises(ValueError, match="prefill a stream"):
        generate(engine, [stream], 5)
    with pytest.raises(ValueError, match="at least one token"):
        prefill(engine, [(stream, Prompt([]))])
    with pytest.raises(ValueError, match="stands twice"):
        prefill(engine, [(stream, plain(1, 5)), (stream, plain(1, 5))])
    with pytest.raises(ValueError, match="chunk_rows"):
        prefill(engine, [(stream, plain(1, 5))], chunk_rows=0)
    with pytest.raises(ConfigError, match="whole blocks"):
        Stream(engine, "y", policy=WindowFifo(64, 20))
    with pytest.raises(ConfigError, match="give it a markup"):
        Stream(engine, "y", policy=WholeTurns(2, 1))
    speaker = Stream(engine, "z", markup=CHAT)
    with pytest.raises(ValueError, match="end-of-message"):
        prefill(engine, [(speaker, plain(1, 5))])
    prefill(engine, [(speaker, Prompt([message(1, 9)], [7]))])
    assert speaker.logits is not None
