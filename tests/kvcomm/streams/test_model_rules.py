"""Which configurations are refused, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm.errors import NamespaceError
from kvcomm.streams.model_rules import NotCompactable, require_compactable

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "attention_chunk_size": None,
    "is_encoder_decoder": False,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 10_000.0},
        {"rope_parameters": {"rope_theta": 10_000.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            },
        },
    ],
)
def test_edge_11_rotary_kinds_of_fixed_frequencies_pass(rope: dict[str, Any]):
    require_compactable(LLAMA | rope)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [], "long_factor": []}},
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "invented"}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic"},
                "sliding_attention": {"rope_type": "default"},
            },
        },
    ],
)
def test_edge_11_rotary_kinds_that_change_with_the_length_are_refused(rope: dict[str, Any]):
    with pytest.raises(NotCompactable, match=r"llama: rotary kind .* may change with the length") as caught:
        require_compactable(LLAMA | rope)
    assert isinstance(caught.value, NamespaceError)


def test_edge_11_the_text_model_of_several_counts():
    with pytest.raises(NotCompactable, match="'dynamic'"):
        require_compactable({"text_config": LLAMA | {"rope_parameters": {"rope_type": "dynamic"}}})


def test_edge_10_full_and_sliding_layers_share_one_block_table():
    require_compactable(LLAMA | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8})


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of kind linear_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of kind chunked_attention"),
        ({"layer_types": ["mamba", "conv", "full_attention"]}, "layers of kind conv, mamba: one block table"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"attention_chunk_size": 8192}, "chunked attention"),
        ({"alibi": True}, "ALiBi"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"rope_parameters": None}, "no rotary positions"),
        ({"mamba_d_state": 16, "mamba_expand": 2}, r"recurrent layers \(mamba_d_state, mamba_expand\)"),
        ({"block_types": ["recurrent"], "lru_width": 256}, "recurrent layers"),
    ],
)
def test_edge_10_layers_that_one_block_table_cannot_express_are_refused(facts: dict[str, Any], why: str):
    with pytest.raises(NotCompactable, match=why):
        require_compactable(LLAMA | facts)
