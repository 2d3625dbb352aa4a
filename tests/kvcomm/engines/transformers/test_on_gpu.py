"""The same rollouts on a GPU: batches, cuts, both ways to decode, bytes out and in, and their replay."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from kvcomm.engines.transformers.generating import Prompt, Stream, generate, prefill
from kvcomm.engines.transformers.replaying import replay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.mismatch import Limits, mismatch
from kvcomm.streams.policies.heavy_hitter import HeavyHitter
from kvcomm.streams.policies.window import WindowFifo
from tests.kvcomm.engines.transformers.test_streaming import drawn
from tests.models import STREAM_MODEL_KINDS, StreamModelKind, stream_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

CLOSE = Limits(mean=1e-6, worst=1e-5, log_prob=5e-3)
"""float32 on both sides, in other kernels: an event one row late is 1e-5 and more in the mean."""


@pytest.mark.parametrize("decode", ["lanes", "pages"])
@pytest.mark.parametrize("kind", STREAM_MODEL_KINDS)
def test_a_batch_on_a_gpu_replays(kind: StreamModelKind, decode: Literal["lanes", "pages"]):
    if kind == "qwen3 sliding" and decode == "pages":
        pytest.skip("sliding layers are decoded over lanes")
    engine = StreamEngine(stream_model(kind).to("cuda"), 256, decode=decode)
    streams = [Stream(engine, f"{n}", policy=WindowFifo(64 + 16 * n, 32), seed=n) for n in range(4)]
    prefill(
        engine, [(stream, Prompt([drawn(n, 30 + 40 * n)])) for n, stream in enumerate(streams)], chunk_rows=48
    )
    answers = generate(engine, streams, 80, stop=())
    assert all(len(stream.session.events) >= 2 for stream in streams)
    assert all(len(answer.tokens) == 80 for answer in answers)
    found = mismatch(replay(engine.model, [stream.rollout() for stream in streams]))
    assert not found.beyond(CLOSE), str(found)


def test_bytes_leave_a_gpu_and_come_back():
    engine = StreamEngine(stream_model("llama gqa", dtype=torch.bfloat16).to("cuda"), 32)
    session = engine.session()
    engine.feed([(session, drawn(1, 90))])
    session.evict([(16, 48)])
    before = [bytes(engine.payload(block)) for block in session.table]
    engine.swap_out(session)
    other = engine.session()
    engine.feed([(other, drawn(2, 32 * 16))])
    other.close()
    engine.swap_in(session)
    assert [bytes(engine.payload(block)) for block in session.table] == before
    engine.feed([(session, [7])])


def test_attention_is_watched_on_a_gpu():
    engine = StreamEngine(stream_model("qwen3").to("cuda"), 64)
    stream = Stream(engine, "watched", policy=HeavyHitter(64, 32, recent=16), seed=1)
    prefill(engine, [(stream, Prompt([drawn(1, 90)]))], chunk_rows=40)
    generate(engine, [stream], 40, stop=())
    assert stream.session.events
    found = mismatch(replay(engine.model, [stream.rollout()]))
    assert not found.beyond(CLOSE), str(found)
