"""Decode steps over pages: the same as over lanes, whatever happened to the tables in between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.pool import BlockId
from kvcomm.streams.session import Session
from tests.kvcomm.engines.transformers.test_streaming import CLOSE, drawn, engine_of, fed_with_cuts, replayed
from tests.models import StreamModelKind

KINDS: tuple[StreamModelKind, ...] = ("llama gqa", "llama mha", "qwen3")


def steps(engine: StreamEngine, sessions: Sequence[Session], seed: int, count: int) -> list[torch.Tensor]:
    """``count`` tokens of all of them at once; the logits after the last one."""
    logits: list[torch.Tensor] = []
    for step in range(count):
        tokens = drawn(seed + step, len(sessions))
        logits = engine.feed([(session, [token]) for session, token in zip(sessions, tokens, strict=True)])
    return logits


def as_replayed(engine: StreamEngine, session: Session, logits: torch.Tensor) -> None:
    session.check()
    torch.testing.assert_close(logits, replayed(engine.model, session)[-1], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_between_prompts_cuts_and_restores_equal_one_masked_pass(kind: StreamModelKind):
    engine = engine_of(kind, decode="pages")
    session = engine.session()
    found = fed_with_cuts(engine, session, 1)
    expected = replayed(engine.model, session)
    for row, logits in found:
        assert logits.dtype == torch.float32 and not logits.is_inference()
        torch.testing.assert_close(logits, expected[row], atol=CLOSE, rtol=0)


def test_a_batch_of_sessions_cut_in_other_places():
    engine = engine_of("qwen3", decode="pages")
    sessions = [engine.session() for _ in range(3)]
    engine.feed([(session, drawn(at, 40 + 9 * at)) for at, session in enumerate(sessions)])
    steps(engine, sessions, 10, 5)
    sessions[0].evict([(0, 16)])
    sessions[2].evict([(16, 48)])
    logits = steps(engine, sessions, 20, 20)
    for session, mine in zip(sessions, logits, strict=True):
        as_replayed(engine, session, mine)


def test_sessions_change_their_places():
    engine = engine_of("llama gqa", decode="pages")
    first, second = engine.session(), engine.session()
    engine.feed([(first, drawn(1, 33)), (second, drawn(2, 20))])
    steps(engine, [first, second], 3, 2)
    steps(engine, [second, first], 5, 2)
    steps(engine, [second], 7, 3)
    logits = steps(engine, [first, second], 9, 2)
    for session, mine in zip((first, second), logits, strict=True):
        as_replayed(engine, session, mine)


def test_tables_are_kept_for_few_numbers_of_sessions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvcomm.engines.transformers.decoding._UNRECORDED_MAX", 2)
    engine = engine_of("llama gqa", decode="pages")
    sessions = [engine.session() for _ in range(4)]
    engine.feed([(session, drawn(at, 30 + at)) for at, session in enumerate(sessions)])
    for count in (4, 3, 2, 1, 4):
        steps(engine, sessions[:count], 10 * count, 2)
    logits = steps(engine, sessions[:3], 30, 2)
    assert engine._decode is not None and [*engine._decode._steps] == [4, 3]
    for session, mine in zip(sessions, logits, strict=False):
        as_replayed(engine, session, mine)


def test_a_fork_and_its_parent_write_their_own_blocks():
    engine = engine_of("llama gqa", decode="pages")
    parent = engine.session()
    engine.feed([(parent, drawn(1, 20))])
    steps(engine, [parent], 2, 2)
    child = engine.fork(parent, bytes(32))
    for session, seed in ((child, 5), (parent, 9)):
        (logits,) = steps(engine, [session], seed, 15)
        as_replayed(engine, session, logits)


def test_a_session_that_was_swapped_out_finds_its_blocks_where_they_are_now():
    engine = engine_of("llama gqa", block_count=8, decode="pages")
    session, other, another = (engine.session() for _ in range(3))
    engine.feed([(session, drawn(1, 47))])
    steps(engine, [session], 2, 1)
    before = session.table
    payloads = [bytes(engine.payload(block)) for block in before]
    session.swap_out()
    engine.feed([(other, drawn(3, 8 * 16))])  # every block is written over
    other.close()
    engine.feed([(another, drawn(4, 5))])

    def load(place: int, block: BlockId) -> None:
        engine.load(block, payloads[place])

    session.swap_in(load)
    assert session.table != before
    (logits,) = steps(engine, [session], 4, 3)
    as_replayed(engine, session, logits)


def test_a_step_of_another_that_failed_leaves_its_table_to_nobody(monkeypatch: pytest.MonkeyPatch):
    engine = engine_of("llama gqa", decode="pages")
    session, other = engine.session(), engine.session()
    engine.feed([(session, drawn(1, 30)), (other, drawn(2, 50))])
    steps(engine, [session], 2, 1)
    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "forward", failing)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.feed([(other, [5])])
    (logits,) = steps(engine, [session], 5, 2)
    as_replayed(engine, session, logits)


def test_a_step_that_failed_was_none(monkeypatch: pytest.MonkeyPatch):
    engine = engine_of("llama gqa", decode="pages")
    session, other = engine.session(), engine.session()
    engine.feed([(session, drawn(1, 31))])
    steps(engine, [session], 2, 1)
    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "forward", failing)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.feed([(session, [5])])
    engine.feed([(other, drawn(3, 16))])  # takes the block that the step had
    engine.feed([(session, drawn(4, 1))], watch=None)
    (logits,) = steps(engine, [session], 5, 2)
    as_replayed(engine, session, logits)


def test_other_weights_are_computed_with_from_the_next_step_on():
    engine = engine_of("llama gqa", decode="pages")
    session = engine.session()
    engine.feed([(session, drawn(1, 20))])
    (before,) = steps(engine, [session], 2, 1)
    assert engine._decode is not None and engine._decode._steps
    head = engine.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(-head.weight.detach())  # in another place
    engine.set_weights(1, [session])
    assert not engine._decode._steps, "what was recorded reads weights where they were"
    (after,) = steps(engine, [session], 3, 1)
    assert not torch.equal(before, after)


def test_a_model_that_slides_decodes_over_lanes():
    with pytest.raises(ValueError, match="cannot decode over pages"):
        engine_of("qwen3 sliding", decode="pages")


def failing(*args: object, **kwargs: object) -> None:
    raise RuntimeError("on purpose")
