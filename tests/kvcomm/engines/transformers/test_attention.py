"""What a watched feed says equals the weights of eager attention over all rows."""

from __future__ import annotations

import pytest
import torch

from kvcomm.engines.transformers.attention import Watch
from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, window_of
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.session import Session
from kvcomm.streams.view import visibility
from tests.kvcomm.engines.transformers.test_streaming import drawn
from tests.models import StreamModelKind, stream_model


def eager_mass(engine: StreamEngine, session: Session, rows: range) -> list[float]:
    """By slot: what ``rows`` attend, from the weights of one masked pass."""
    model, count = engine.model, session.next_row
    found: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, inputs, output: found.append(output[1]))
        for layer in model.model.layers
    ]
    seen = visibility(count, session.events)
    allow = torch.tensor([[seen.sees(q, k) for k in range(count)] for q in range(count)])
    at = torch.arange(count)
    near = at[:, None] - at[None] < (window_of(model) or count)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            masks = {FULL: allow[None, None], SLIDING: (allow & near)[None, None]}
            forward(model, torch.tensor([session.tokens]), at[None], masks)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    by_row = torch.stack([weights[0, :, rows.start : rows.stop].sum((0, 1)) for weights in found]).sum(0)
    return [float(by_row[row]) for row in session.view.rows]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama gqa", "llama mha", "qwen3 sliding"])
def test_mass_by_slot_is_that_of_eager_attention(kind: StreamModelKind, implementation: str):
    model = stream_model(kind)
    model.set_attn_implementation(implementation)
    engine = StreamEngine(model, 64, chunk_rows=40)
    one, two, other = engine.session(), engine.session(), engine.session()
    for number, session in enumerate((one, two)):
        engine.feed([(session, drawn(number, 70))])
        session.evict([(16, 48)])
    watch = Watch({one: 0, two: 50})
    engine.feed([(one, drawn(5, 9)), (other, drawn(6, 30)), (two, drawn(7, 90))], watch=watch)
    assert (watch.row_count(one), watch.row_count(two), watch.row_count(other)) == (9, 50, 0)
    assert watch.mass(one) == pytest.approx(eager_mass(engine, one, range(70, 79)), abs=1e-4)
    assert watch.mass(two) == pytest.approx(eager_mass(engine, two, range(110, 160)), abs=1e-4)
    assert watch.mass(other) == [0.0] * 30
    heads = model.config.num_attention_heads * model.config.num_hidden_layers
    assert sum(watch.mass(two)) == pytest.approx(50 * heads, rel=1e-4)


def test_watching_leaves_the_logits_and_the_model_as_they_were():
    engine = StreamEngine(stream_model("qwen3"), 16)
    twins = [engine.session(), engine.session()]
    (plain,) = engine.feed([(twins[0], drawn(1, 30))])
    (watched,) = engine.feed([(twins[1], drawn(1, 30))], watch=Watch({twins[1]: 0}))
    assert torch.equal(plain, watched)
    assert engine.model.config._attn_implementation == "sdpa"


def test_attention_that_takes_no_masks_is_not_watched():
    engine = StreamEngine(stream_model("qwen3"), 16)
    session = engine.session()
    engine.model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'sdpa' or 'eager'"):
        engine.feed([(session, drawn(1, 30))], watch=Watch({session: 4}))
    assert session.next_row == 0
    with pytest.raises(ValueError, match="0 for all"):
        Watch({session: -1})
