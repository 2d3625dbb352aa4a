"""The feed that completes an answer, on a real model: the block that it fills is what it should be."""

from __future__ import annotations

import pytest
import torch

from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.compactor import Compactor
from kvcomm.streams.conversation import Conversation, Markup
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.session import Session
from tests.models import stream_model

END, NEWLINE, FILLER = 2, 10, 3
MARKUP = Markup(frozenset({END}), (NEWLINE,), FILLER)
CLOSE = 1e-4


def text(seed: int, count: int) -> list[int]:
    return [100 + (seed * 37 + at * 11) % 400 for at in range(count)]


def states(engine: StreamEngine, session: Session) -> torch.Tensor:
    """Float32 ``[slot, layer * K/V * head * dim]`` of the full blocks."""
    space = engine.namespace
    shape = (space.layers, 2, space.kv_heads, space.block_tokens, space.head_dim)
    blocks = [
        torch.frombuffer(bytearray(engine.payload(block)), dtype=torch.float32)
        .view(shape)
        .permute(3, 0, 1, 2, 4)
        .flatten(1)
        for block in session.table[: session.full_slots // space.block_tokens]
    ]
    return torch.cat(blocks)


class Talk:
    """On an engine where another stream is busy all the time."""

    def __init__(self, engine: StreamEngine) -> None:
        self.engine, self.session, self.other = engine, engine.session(), engine.session()
        self.conversation = Conversation(self.session, MARKUP)
        self.compactor = Compactor(self.session, WholeTurns(1, 1))

    def feed(self, tokens: tuple[int, ...]) -> None:
        self.engine.feed([(self.other, text(self.other.next_row, 3)), (self.session, tokens)])
        self.conversation.scan()
        self.compactor.after_forward()

    def turn(self, seed: int, asked: int, answered: int) -> None:
        self.compactor.at_admission()
        messages = [[*text(seed, asked), END, NEWLINE]]
        if not self.session.next_row:
            messages.insert(0, [*text(seed + 1, 20), END, NEWLINE])
        self.feed(self.conversation.admit(messages, (90, 91)).tokens)
        for token in [*text(seed + 2, answered), END]:
            if self.session.pending is not None:
                self.feed((self.session.pending,))
            self.session.sampled(token)
        self.compactor.stop()
        self.feed(self.conversation.finish().tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama gqa", "qwen3 sliding"])
def test_fault_b08_a_filled_block_has_the_kv_of_a_fresh_prefill(kind):
    """Also behind a cut, and while the pass computes another stream's rows beside it."""
    model = stream_model(kind)
    engine = StreamEngine(model, 64)
    talk = Talk(engine)
    talk.turn(1, 9, 5)
    talk.turn(2, 14, 8)
    (event,) = talk.session.events
    assert talk.session.slot_count % 16 == 0
    assert talk.session.tokens[-1] == FILLER

    fresh = StreamEngine(model, 64)
    again = fresh.session()
    fresh.feed([(again, talk.session.tokens[: event.at_row])])
    again.protect(32)
    again.evict(event.ranges)
    fresh.feed([(again, talk.session.tokens[event.at_row :])])
    torch.testing.assert_close(states(engine, talk.session), states(fresh, again), atol=CLOSE, rtol=0)


@pytest.mark.slow
def test_fault_b08_the_comparison_sees_filler_behind_another_token():
    model = stream_model("llama gqa")
    engine = StreamEngine(model, 64)
    talk = Talk(engine)
    talk.turn(1, 9, 5)
    tokens = list(talk.session.tokens)
    last = max(at for at, token in enumerate(tokens) if token == END)
    fresh = StreamEngine(model, 64)
    again = fresh.session()
    fresh.feed([(again, [*tokens[:last], 50, *tokens[last + 1 :]])])
    difference = (states(engine, talk.session) - states(fresh, again)).abs().amax(1)
    assert difference[:last].max() < CLOSE
    assert difference[last + 1 :].min() > 100 * CLOSE
