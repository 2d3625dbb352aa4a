"""The engine of KV-streams: every feed equals one masked pass over all rows, whatever was cut before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from kvcomm.engines.transformers import namespace_of
from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, window_of
from kvcomm.engines.transformers.replaying import replay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import PoolFull, Refused
from kvcomm.metrics import Metrics
from kvcomm.streams.counts import StreamCounts
from kvcomm.streams.model_rules import NotCompactable
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Sampling
from kvcomm.streams.session import Session
from kvcomm.streams.view import visibility
from tests.kvcomm.engines.transformers.test_families import SHARED
from tests.models import STREAM_MODEL_KINDS, VOCAB_SIZE, StreamModelKind, stream_model

CLOSE = 1e-4
"""Of logits of several nats, in float32."""


def drawn(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, VOCAB_SIZE) for _ in range(count)]


def replayed(model: PreTrainedModel, session: Session) -> torch.Tensor:
    """Logits ``[row, vocab]`` of one pass over all rows, masked by what the events say; a dumb oracle."""
    count = session.next_row
    seen = visibility(count, session.events)
    allow = torch.tensor([[seen.sees(q, k) for k in range(count)] for q in range(count)])
    at = torch.arange(count)
    near = at[:, None] - at[None] < (window_of(model) or count)
    with torch.inference_mode():
        masks = {FULL: allow[None, None], SLIDING: (allow & near)[None, None]}
        return forward(model, torch.tensor([session.tokens]), at[None], masks)[0].float()


def engine_of(kind: StreamModelKind, block_count: int = 64, **settings: Any) -> StreamEngine:
    return StreamEngine(stream_model(kind), block_count, **settings)


def fed_with_cuts(engine: StreamEngine, session: Session, seed: int) -> list[tuple[int, torch.Tensor]]:
    """A prompt, single tokens and chunks with cuts and a restore between; (row, logits after it)."""
    found = []
    for step, count in enumerate([70, 1, 1, 20, 1, 33, 1, 1, 1]):
        (logits,) = engine.feed([(session, drawn(seed + step, count))])
        found.append((session.next_row - 1, logits))
        if step == 1:
            session.evict([(16, 48)], archive=True)
        elif step == 3:
            session.evict([(16, 32)])
        elif step == 6:
            session.restore(next(iter(session.archive)))
        session.check()
    return found


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_every_feed_equals_a_masked_pass_over_all_rows(kind):
    engine = engine_of(kind)
    session = engine.session()
    found = fed_with_cuts(engine, session, 1)
    expected = replayed(engine.model, session)
    for row, logits in found:
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected[row], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_without_the_events_it_would_not(kind):
    engine = engine_of(kind)
    session = engine.session()
    found = fed_with_cuts(engine, session, 1)
    session.events.clear()
    expected = replayed(engine.model, session)
    row, logits = found[-1]
    assert (logits - expected[row]).abs().max() > 1000 * CLOSE


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_sessions_in_one_pass_equal_each_alone(kind):
    engine = engine_of(kind)
    pairs = [(engine.session(), engine.session()) for _ in range(3)]
    for number, (together, alone) in enumerate(pairs):
        for session in (together, alone):
            engine.feed([(session, drawn(number, 40 + 30 * number))])
            if number:
                session.evict([(16, 48)])
    for step, counts in enumerate([(1, 1, 1), (5, 1, 20), (1, 17, 1)]):
        tokens = [drawn(100 * step + number, count) for number, count in enumerate(counts)]
        batch = engine.feed([(pair[0], part) for pair, part in zip(pairs, tokens, strict=True)])
        for pair, part, logits in zip(pairs, tokens, batch, strict=True):
            (expected,) = engine.feed([(pair[1], part)])
            torch.testing.assert_close(logits, expected, atol=CLOSE, rtol=0)
    for together, alone in pairs:
        for mine, its in zip(together.table, alone.table, strict=True):
            assert mine != its
            torch.testing.assert_close(
                engine.paged.states[:, :, mine], engine.paged.states[:, :, its], atol=CLOSE, rtol=0
            )


def test_a_long_feed_is_computed_in_chunks():
    engines = [engine_of("qwen3 sliding"), engine_of("qwen3 sliding", chunk_rows=32)]
    results = []
    for engine in engines:
        first, second = engine.session(), engine.session()
        engine.feed([(first, drawn(1, 30))])
        results.append(engine.feed([(first, drawn(2, 100)), (second, drawn(3, 70))]))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, atol=CLOSE, rtol=0)


def test_a_fork_goes_on_as_its_parent_would_and_leaves_it_alone():
    engine = engine_of("qwen3")
    parent, twin = engine.session(), engine.session()
    for session in (parent, twin):
        engine.feed([(session, drawn(1, 70))])
        session.evict([(16, 48)])
    child = engine.fork(parent, bytes(32))
    engine.feed([(child, drawn(7, 20))])
    results = [engine.feed([(session, drawn(2, 9))])[0] for session in (parent, twin)]
    torch.testing.assert_close(*results, atol=CLOSE, rtol=0)
    (logits,) = engine.feed([(child, [5])])
    expected = replayed(engine.model, child)
    torch.testing.assert_close(logits, expected[-1], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_payload_loaded_into_another_memory_is_the_same_block(dtype):
    model = stream_model("llama gqa", dtype=dtype)
    source, target = StreamEngine(model, 8), StreamEngine(model, 8)
    session = source.session()
    source.feed([(session, drawn(1, 40))])
    block = session.table[1]
    payload = source.payload(block)
    assert payload.nbytes == source.namespace.block_bytes
    (place,) = target.pool.take(1)
    target.load(place, payload)
    assert torch.equal(source.paged.states[:, :, block], target.paged.states[:, :, place])
    with pytest.raises(ValueError, match="contiguous bytes"):
        target.load(place, bytes(payload)[:-1])


def failing(model: PreTrainedModel, layer: int) -> Callable[[], None]:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.model.layers[layer].register_forward_pre_hook(fail)
    return hook.remove


def test_a_pass_that_fails_feeds_nothing_and_the_next_works():
    engine = engine_of("llama gqa")
    twins = [engine.session(), engine.session()]
    for session in twins:
        engine.feed([(session, drawn(1, 30))])
    free, other = engine.pool.free_count, engine.session()
    before = engine.paged.states.clone()
    remove = failing(engine.model, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.feed([(twins[0], drawn(2, 20)), (other, drawn(3, 5))])
    remove()
    assert engine.pool.free_count == free and other.next_row == 0 and twins[0].next_row == 30
    assert torch.equal(engine.paged.states, before)
    results = [engine.feed([(session, drawn(4, 20))])[0] for session in twins]
    torch.testing.assert_close(*results, atol=CLOSE, rtol=0)


def test_no_memory_for_one_means_no_rows_for_any():
    engine = engine_of("llama gqa", block_count=4)
    small, large = engine.session(), engine.session()
    with pytest.raises(PoolFull):
        engine.feed([(small, drawn(1, 16)), (large, drawn(2, 100))])
    assert engine.pool.free_count == 4
    engine.feed([(small, drawn(1, 16))])


def test_what_an_engine_refuses():
    engine = engine_of("llama gqa")
    other = StreamEngine(engine.model, 4, engine.namespace)
    with pytest.raises(ValueError, match="another engine"):
        engine.feed([(other.session(), [5])])
    session = engine.session()
    with pytest.raises(ValueError, match="commit or abandon"):
        engine.feed([(session, [5]), (session, [6])])
    assert session.next_row == 0
    engine.model.train()
    with pytest.raises(ValueError, match=r"eval\(\)"):
        engine.feed([(session, [5])])


def test_decoding_copies_nothing_and_a_cut_gathers_once():
    engine = engine_of("llama gqa")
    sessions = [engine.session() for _ in range(3)]
    engine.feed([(session, drawn(number, 70)) for number, session in enumerate(sessions)])
    for step in range(20):
        engine.feed([(session, [step + 4]) for session in sessions])
    assert engine.lanes.gathered_count == 0
    sessions[1].evict([(16, 32)])
    for step in range(5):
        engine.feed([(session, [step + 4]) for session in sessions])
    assert engine.lanes.gathered_count == 1


def test_sessions_that_lose_their_lanes_go_on_as_before():
    engines = [engine_of("qwen3 sliding", lanes_max=2), engine_of("qwen3 sliding")]
    draw, sessions = random.Random(3), [[engine.session() for _ in range(5)] for engine in engines]
    for step in range(40):
        chosen = draw.sample(range(5), draw.randint(1, 4))
        tokens = [drawn(10 * step + number, draw.randint(1, 12)) for number in chosen]
        results = [
            engine.feed([(mine[number], part) for number, part in zip(chosen, tokens, strict=True)])
            for engine, mine in zip(engines, sessions, strict=True)
        ]
        for logits, expected in zip(*results, strict=True):
            torch.testing.assert_close(logits, expected, atol=CLOSE, rtol=0)
        if step % 7 == 6:
            number = draw.choice([number for number in range(5) if sessions[0][number].full_slots > 16])
            for mine in sessions:
                mine[number].evict([(0, 16)])
        if step == 25:
            for mine in sessions:
                mine[2].close()
                mine[2] = engines[sessions.index(mine)].session()
    for mine in sessions:
        for session in mine:
            session.check()
    for session in sessions[0]:
        (logits,) = engines[0].feed([(session, [9])])
        torch.testing.assert_close(logits, replayed(engines[0].model, session)[-1], atol=CLOSE, rtol=0)


def test_events_and_rows_are_counted_in_a_clients_metrics():
    metrics = Metrics("client")
    engine = engine_of("llama gqa", counts=StreamCounts(metrics))
    one, two = engine.session(), engine.session()
    engine.feed([(one, drawn(1, 50)), (two, drawn(2, 20))])
    one.evict([(16, 32)])
    child = engine.fork(one, bytes(32))
    child.evict([(0, 16)])
    engine.feed_guess(two, drawn(3, 4), lambda logits: 1)
    seen = metrics.snapshot()
    assert seen['kvcomm_streams_rows_total{what="fed"}'] == 71
    assert seen['kvcomm_streams_rows_total{what="evicted"}'] == 32
    assert seen['kvcomm_streams_events_total{kind="evict"}'] == 2
    assert seen['kvcomm_streams_events_total{kind="fork"}'] == 1
    assert seen["kvcomm_streams_live_slots"] == 21


def checksums(engine: StreamEngine, session: Session) -> dict[int, bytes]:
    """By block of the table that is full."""
    full = session.full_slots // session.block_tokens
    return {block: hashlib.sha256(engine.payload(block)).digest() for block in session.table[:full]}


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_gate_g03_what_survives_an_event_keeps_every_byte(kind):
    engine = engine_of(kind)
    session, other = engine.session(), engine.session()
    engine.feed([(session, drawn(1, 170)), (other, drawn(2, 40))])
    before = checksums(engine, session)
    session.evict([(16, 48), (80, 96)], archive=True)
    engine.feed([(session, drawn(3, 30)), (other, drawn(4, 100))])
    session.evict([(32, 48)])
    engine.feed([(other, drawn(5, 60))])
    session.restore(next(iter(session.archive)))
    engine.feed([(session, [7])])
    after = checksums(engine, session)
    assert len(before.keys() & after.keys()) == len(before) - 1
    assert all(after[block] == before[block] for block in before.keys() & after.keys())


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_the_order_of_slots_means_nothing(kind):
    engine = engine_of(kind)
    sessions = [engine.session() for _ in range(2)]
    results = []
    for session, insert_at in zip(sessions, (0, 64), strict=True):
        engine.feed([(session, drawn(1, 130))])
        session.evict([(16, 80)], archive=True)
        session.restore(next(iter(session.archive)), insert_at)
        results.append(engine.feed([(session, drawn(2, 3))])[0].double().log_softmax(-1))
    assert list(sessions[0].view.rows) != list(sessions[1].view.rows)
    ours, its = results
    assert 0 <= float((ours.exp() * (ours - its)).sum()) < 1e-11


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_fault_b08_the_block_that_filler_ends_is_that_of_a_fresh_prefill(kind):
    engine = engine_of(kind)
    slow, fresh = engine.session(), engine.session()
    engine.feed([(slow, drawn(1, 20))])
    for token in drawn(2, 7):
        engine.feed([(slow, [token])])
    engine.feed([(slow, [5, 3, 3, 3, 3])])
    engine.feed([(fresh, slow.tokens)])
    for mine, its in zip(slow.table, fresh.table, strict=True):
        assert mine != its
        states = engine.paged.states
        torch.testing.assert_close(states[:, :, mine], states[:, :, its], atol=CLOSE, rtol=0)


WINDOWS: dict[str, dict[str, Any]] = {
    "window smaller than a block": {"sliding_window": 5},
    "window of one row": {"sliding_window": 1},
    "every layer slides": {"layer_types": ["sliding_attention"] * 4},
}


@pytest.mark.parametrize("changes", WINDOWS.values(), ids=WINDOWS)
def test_edge_10_sliding_layers_go_by_logical_distance(changes):
    engine = StreamEngine(stream_model("qwen3 sliding", **changes), 64)
    session = engine.session()
    found = fed_with_cuts(engine, session, 1)
    expected = replayed(engine.model, session)
    for row, logits in found:
        torch.testing.assert_close(logits, expected[row], atol=CLOSE, rtol=0)


def test_edge_10_a_window_without_layer_types_is_every_layers():
    torch.manual_seed(0)
    settings = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = MistralConfig(vocab_size=VOCAB_SIZE, sliding_window=20, **settings, **heads)
    engine = StreamEngine(MistralForCausalLM(config).eval(), 64)
    session = engine.session()
    found = fed_with_cuts(engine, session, 1)
    own = engine.model(torch.tensor([session.tokens[:70]])).logits[0, -1]
    torch.testing.assert_close(found[0][1], own, atol=CLOSE, rtol=0)
    expected = replayed(engine.model, session)
    for row, logits in found:
        torch.testing.assert_close(logits, expected[row], atol=CLOSE, rtol=0)


EXACT_FAMILIES = {name: make for name, make in SHARED.items() if name != "no rotation"}


@pytest.mark.parametrize("make", EXACT_FAMILIES.values(), ids=EXACT_FAMILIES)
def test_edge_10_other_families_are_cut_exactly(make):
    engine = StreamEngine(make(), 64)
    session, draw = engine.session(), random.Random(1)
    found = []
    for count in (70, 1, 20, 1):
        (logits,) = engine.feed([(session, [draw.randrange(4, 250) for _ in range(count)])])
        found.append((session.next_row - 1, logits))
        session.evict([(16, 32)])
    own = engine.model(torch.tensor([session.tokens[:70]])).logits[0, -1]
    torch.testing.assert_close(found[0][1], own, atol=CLOSE, rtol=0)
    expected = replayed(engine.model, session)
    for row, logits in found:
        torch.testing.assert_close(logits, expected[row], atol=CLOSE, rtol=0)


def test_distances_that_count_slots_are_refused():
    with pytest.raises(NotCompactable, match="count slots"):
        StreamEngine(SHARED["no rotation"](), 8)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_edge_11_rotations_that_change_with_the_length_are_refused(kind):
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope |= {"original_max_position_embeddings": 1024}
    with pytest.raises(NotCompactable, match="would mean something else"):
        StreamEngine(stream_model("llama gqa", rope_parameters=rope), 8)


def test_edge_26_memory_of_fewer_bits_is_read_as_a_replay_reads_it():
    model = stream_model("qwen3 sliding")
    small = replace(namespace_of(model), dtype="bfloat16")
    engine = StreamEngine(model, 64, small)
    session, whole = engine.session(), StreamEngine(model, 64)
    recorder, exact = Recorder(session, "rounded"), whole.session()
    for each, its in ((engine, session), (whole, exact)):
        each.feed([(its, drawn(1, 70))])
        its.evict([(16, 48)])
        each.feed([(its, drawn(2, 9))])
    (logits,) = engine.feed([(session, [5])])
    (unrounded,) = whole.feed([(exact, [5])])
    assert engine.paged.states.dtype == torch.bfloat16
    token = int(logits.argmax())
    recorder.sampled(token, float(logits.log_softmax(-1)[token]), Sampling())
    (replayed_as_kept,) = replay(model, [recorder.rollout()], kv_dtype=torch.bfloat16)
    torch.testing.assert_close(replayed_as_kept.logits[0], logits, atol=CLOSE, rtol=0)
    assert (unrounded - logits).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_edge_27_every_row_of_a_mask_sees_itself(kind, monkeypatch):
    seen: list[torch.Tensor] = []

    def spying(model: PreTrainedModel, ids: Any, positions: Any, masks: Any, **rest: Any) -> torch.Tensor:
        seen.extend(masks.values())
        return forward(model, ids, positions, masks, **rest)

    monkeypatch.setattr("kvcomm.engines.transformers.streaming.forward", spying)
    engine = engine_of(kind, chunk_rows=24)
    one, two = engine.session(), engine.session()
    engine.feed([(one, drawn(1, 60)), (two, drawn(2, 3))])
    one.evict([(0, 48)])
    engine.feed([(two, [4]), (one, drawn(3, 11))])
    assert seen and all(bool(mask.any(-1).all()) for mask in seen)


def test_what_a_lane_held_before_is_not_attended():
    engine = engine_of("llama gqa", lanes_max=1)
    first, second = engine.session(), engine.session()
    engine.feed([(first, drawn(1, 100))])
    engine.lanes.states.fill_(torch.nan)  # as of a model that computed no numbers
    first.close()
    (logits,) = engine.feed([(second, drawn(2, 20))])
    torch.testing.assert_close(logits, replayed(engine.model, second)[-1], atol=CLOSE, rtol=0)


def test_edge_17_new_weights_are_an_event_and_no_block_is_shared_with_old_ones():
    engine = engine_of("llama gqa")
    session = engine.session()
    engine.feed([(session, drawn(1, 40))])
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(1.1)
    engine.set_weights(1, [session])
    (logits,) = engine.feed([(session, [5])])
    assert [(event.kind, event.at_row) for event in session.events] == [("weights", 40)]
    torch.testing.assert_close(logits, replayed(engine.model, session)[-1], atol=CLOSE, rtol=0)
    new, sibling = engine.session(), engine.session()
    assert new.adopt_prefix(drawn(1, 40)) == 0
    engine.feed([(new, drawn(1, 40))])
    assert sibling.adopt_prefix(drawn(1, 40)) == 32
    with pytest.raises(ValueError, match="no change"):
        engine.set_weights(1)


def test_edge_17_two_trainings_that_count_alike_share_no_block():
    """They began with one model, so in one namespace."""
    one = engine_of("llama gqa")
    other = StreamEngine(stream_model("llama gqa"), 16, one.namespace)
    same = StreamEngine(stream_model("llama gqa"), 16, one.namespace)
    with torch.no_grad():
        for engine, factor in ((one, 1.1), (other, 1.2), (same, 1.1)):
            engine.model.lm_head.weight.mul_(factor)
    keys, session = [], same.session()
    for engine in (one, other, same):
        engine.set_weights(1)
        session = engine.session()
        engine.feed([(session, drawn(1, 20))])
        keys.append(engine.pool.key_of(session.table[0]))
    assert keys[0] != keys[1] and keys[0] == keys[2]
    with pytest.raises(Refused, match="another digest"):
        other.recovered(session.tokens, session.events)
    assert one.recovered(session.tokens, session.events).next_row == 20


def test_edge_17_who_knows_the_digest_of_new_weights_says_it():
    engine = engine_of("llama gqa")
    with pytest.raises(ValueError, match="32 bytes, not 4"):
        engine.set_weights(1, digest=b"four")
    engine.set_weights(1, digest=b"w" * 32)
    assert engine.session().events[0].span == b"w" * 32


def test_edge_17_a_session_that_was_not_told_of_new_weights_is_not_fed():
    engine = engine_of("llama gqa")
    told, forgotten, away = (engine.session() for _ in range(3))
    engine.feed([(session, drawn(1, 20)) for session in (told, forgotten, away)])
    engine.swap_out(away)
    with pytest.raises(Refused, match="swap it in"):
        engine.set_weights(1, [told, away])
    engine.swap_in(away)
    engine.set_weights(1, [told, away])
    with pytest.raises(Refused, match="weights 0, and these are 1"):
        engine.feed([(told, [5]), (forgotten, [5])])
    engine.feed([(told, [5]), (away, [5])])
    assert [len(each.events) for each in (told, forgotten, away)] == [1, 0, 1]
    assert forgotten.next_row == 20


def test_bytes_of_a_session_that_was_closed_elsewhere_are_not_kept():
    engine = engine_of("llama gqa")
    gone, next_one = engine.session(), engine.session()
    engine.feed([(gone, drawn(1, 20)), (next_one, drawn(2, 20))])
    engine.swap_out(gone)
    assert engine.keeps(gone)
    gone.close()
    engine.swap_out(next_one)
    assert engine.keeps(next_one) and not engine.keeps(gone)


def test_adopted_rows_are_those_that_would_have_been_computed():
    engine = engine_of("qwen3 sliding")
    first, second = engine.session(), engine.session()
    (expected,) = engine.feed([(first, drawn(1, 60))])
    assert second.adopt_prefix(drawn(1, 60)) == 48
    (logits,) = engine.feed([(second, drawn(1, 60)[48:])])
    torch.testing.assert_close(logits, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("decode", ["lanes", "pages"])
def test_a_view_of_the_same_size_is_not_the_same_view(decode):
    engine = engine_of("qwen3", decode=decode)
    session = engine.session()
    engine.feed([(session, drawn(1, 80))])
    session.evict([(16, 32)], archive=True)
    engine.feed([(session, drawn(2, 15))])
    engine.feed([(session, [5])])
    session.restore(next(iter(session.archive)), 16)
    session.evict([(48, 64)])
    (logits,) = engine.feed([(session, [6])])
    torch.testing.assert_close(logits, replayed(engine.model, session)[-1], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("decode", ["lanes", "pages"])
def test_blocks_that_are_taken_up_between_feeds_are_attended(decode):
    engine = engine_of("qwen3", decode=decode)
    first, second = engine.session(), engine.session()
    engine.feed([(first, drawn(1, 80))])
    engine.feed([(second, drawn(1, 80)[:31])])
    engine.feed([(second, drawn(1, 80)[31:32])])
    assert second.adopt_prefix(drawn(1, 80)[32:]) == 32
    (logits,) = engine.feed([(second, [6])])
    torch.testing.assert_close(logits, replayed(engine.model, second)[-1], atol=CLOSE, rtol=0)
