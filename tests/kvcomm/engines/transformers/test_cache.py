"""Blocks and caches: the same bytes both ways, in every dtype, from our caches and from stock ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, StaticCache

from kvcomm.engines.transformers.cache import blocks_of, cache_from, token_count_of, truncate
from kvcomm.engines.transformers.forward import advance
from kvcomm.errors import PayloadError
from kvcomm.namespace import Namespace
from tests.models import tiny_model

LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4


def make_namespace(dtype: str = "float32", **changes: object) -> Namespace:
    settings = {
        "model": "m", "revision": "1", "tokenizer": "t", "vocab_size": 512, "dtype": dtype, "layout": "LKHTD",
        "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "block_tokens": BLOCK,
        "rope": "none", "rope_parameters": {},
    }  # fmt: skip
    return Namespace(**(settings | changes))  # type: ignore[arg-type]


def random_states(token_count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """[layer, K or V, 1, head, token, dim]"""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, 1, HEADS, token_count, DIM, generator=draw).to(dtype)


def stock_cache(states: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    for index, (keys, values) in enumerate(states):
        cache.update(keys, values, index)
    return cache


def oracle_payload(states: torch.Tensor, block: int) -> bytes:
    """One element after the other, in the order the layout's name says."""
    words = []
    for layer in range(LAYERS):
        for which in range(2):
            for head in range(HEADS):
                for token in range(block * BLOCK, (block + 1) * BLOCK):
                    words.append(
                        states[layer, which, 0, head, token].contiguous().view(torch.uint8).numpy().tobytes()
                    )
    return b"".join(words)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_payload_is_LKHTD(dtype: str) -> None:
    states = random_states(11, getattr(torch, dtype))
    namespace = make_namespace(dtype)
    payloads = blocks_of(stock_cache(states), namespace, 0, 2)
    assert [bytes(payload) for payload in payloads] == [oracle_payload(states, 0), oracle_payload(states, 1)]
    assert all(payload.readonly and payload.nbytes == namespace.block_bytes for payload in payloads)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_round_trip_is_bit_exact(dtype: str) -> None:
    states = random_states(12, getattr(torch, dtype))
    namespace = make_namespace(dtype)
    cache = cache_from(blocks_of(stock_cache(states), namespace, 0, 3), namespace)
    assert token_count_of(cache) == 12
    for index, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys.view(torch.uint8), states[index, 0].view(torch.uint8))
        assert torch.equal(layer.values.view(torch.uint8), states[index, 1].view(torch.uint8))
    assert [bytes(p) for p in blocks_of(cache, namespace, 1, 3)] == [
        oracle_payload(states, b) for b in (1, 2)
    ]


@settings(max_examples=25)
@given(blocks=st.integers(0, 3), steps=st.lists(st.integers(1, 7), max_size=6), capacity=st.integers(0, 20))
def test_appending_equals_the_stock_cache(blocks: int, steps: Sequence[int], capacity: int) -> None:
    namespace = make_namespace()
    states = random_states(blocks * BLOCK + sum(steps), torch.float32, seed=len(steps))
    stock = stock_cache(states[..., : blocks * BLOCK, :])
    ours = cache_from(
        [oracle_payload(states, block) for block in range(blocks)], namespace, capacity_tokens=capacity
    )
    at = blocks * BLOCK
    for step in steps:
        for index in range(LAYERS):
            new = states[index, :, :, :, at : at + step]
            expected, got = stock.update(new[0], new[1], index), ours.update(new[0], new[1], index)
            assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
        at += step
    whole = at // BLOCK
    assert blocks_of(ours, namespace, 0, whole) == [oracle_payload(states, block) for block in range(whole)]


def test_growing_keeps_layers_that_have_not_moved_yet() -> None:
    namespace = make_namespace()
    states = random_states(9, torch.float32)
    cache = cache_from([oracle_payload(states, 0)], namespace)
    new = states[..., 4:9, :]
    cache.update(new[0, 0], new[0, 1], 0)  # the slab grows; layers 1 and 2 still show the old one
    assert torch.equal(cache.layers[2].keys, states[2, 0, :, :, :4])
    for index in (1, 2):
        cache.update(new[index, 0], new[index, 1], index)
    assert all(torch.equal(layer.keys, states[index, 0]) for index, layer in enumerate(cache.layers))


def test_truncated_rows_are_overwritten() -> None:
    namespace = make_namespace()
    states = random_states(8, torch.float32)
    cache = cache_from([oracle_payload(states, block) for block in range(2)], namespace)
    truncate(cache, 5)
    other = random_states(3, torch.float32, seed=9)
    for index in range(LAYERS):
        cache.update(other[index, 0], other[index, 1], index)
    expected = torch.cat([states[..., :5, :], other], dim=-2)
    assert all(torch.equal(layer.values, expected[index, 1]) for index, layer in enumerate(cache.layers))


def test_beam_search_and_copies_fall_back_to_the_stock_layer() -> None:
    namespace = make_namespace()
    states = random_states(4, torch.float32)
    cache = cache_from([oracle_payload(states, 0)], namespace)
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    new = random_states(1, torch.float32, seed=3)[0].repeat(1, 2, 1, 1, 1)
    keys, _ = twin.update(new[0], new[1], 0)
    assert keys.shape == (2, HEADS, 5, DIM)
    assert token_count_of(cache) == 4 and torch.equal(cache.layers[0].keys, states[0, 0])


def test_appending_works_in_and_out_of_inference_mode() -> None:
    namespace = make_namespace()
    with torch.inference_mode():
        cache = cache_from([], namespace, capacity_tokens=2)
    new = random_states(1, torch.float32)[0]
    for index in range(LAYERS):
        cache.update(new[0], new[1], index)
    with torch.inference_mode():
        for index in range(LAYERS):
            cache.update(new[0], new[1], index)
    assert token_count_of(cache) == 2


def test_no_blocks() -> None:
    namespace = make_namespace()
    assert blocks_of(stock_cache(random_states(4, torch.float32)), namespace, 1, 1) == []
    assert token_count_of(cache_from([], namespace)) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "torch.float32, the namespace float16"),
        ({"layers": 4}, "3 layers, the namespace 4"),
        ({"kv_heads": 1}, "kv heads"),
        ({"head_dim": 16}, "head dim"),
        ({"block_tokens": 8}, "holds 4 tokens, the blocks end at 8"),
    ],
)
def test_a_cache_of_another_shape_is_refused(change: dict[str, object], words: str) -> None:
    cache = stock_cache(random_states(4, torch.float32))
    with pytest.raises(PayloadError, match=words):
        blocks_of(cache, make_namespace(**change), 0, 1)  # type: ignore[arg-type]


def test_a_batch_is_refused() -> None:
    cache = stock_cache(random_states(4, torch.float32).repeat(1, 1, 2, 1, 1, 1))
    with pytest.raises(PayloadError, match="batch"):
        blocks_of(cache, make_namespace(), 0, 1)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(PayloadError, match="not a range"):
        blocks_of(stock_cache(random_states(4, torch.float32)), make_namespace(), 1, 0)


def test_caches_that_do_not_keep_every_token_are_refused() -> None:
    model = tiny_model("gemma3")
    config = model.config
    namespace = make_namespace(layers=4, kv_heads=2, head_dim=16, block_tokens=16)
    for cache in (DynamicCache(config=config), StaticCache(config, max_cache_len=96)):
        advance(model, cache, range(4, 68))
        with pytest.raises(PayloadError, match="keeps every token"):
            blocks_of(cache, namespace, 0, 4)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (bytes(make_namespace().block_bytes - 4), "contiguous bytes"),
        (bytes(make_namespace("float16").block_bytes), "contiguous bytes"),
        (memoryview(bytes(2 * make_namespace().block_bytes))[::2], "not contiguous"),
        (np.zeros((LAYERS, 2, BLOCK, HEADS, DIM), np.float32).data, "shape"),
    ],
)
def test_payloads_that_do_not_fit_are_refused(payload: memoryview, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        cache_from([payload], make_namespace())


def test_a_payload_may_be_an_array_of_the_right_shape() -> None:
    namespace = make_namespace()
    array = np.arange(namespace.block_bytes // 4, dtype=np.float32).reshape(namespace.block_shape)
    cache = cache_from([array.data], namespace)
    assert float(cache.layers[2].values[0, 1, 3, 7]) == array[-1, 1, 1, 3, 7]
