"""More model families: shared KV gives the same text, or the model is refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from kvcomm.engines.transformers import Session, UnsupportedModel, namespace_of
from tests.kvcomm.engines.memory_kv import MemoryKV

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


def build(family: str, config: str, **settings: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        made = getattr(transformers, family)(getattr(transformers, config)(**settings))
        model: PreTrainedModel = made.to(torch.float32).eval()
        return model

    return make


SHARED: dict[str, Callable[[], PreTrainedModel]] = {
    "every layer sliding": build(
        "MistralForCausalLM", "MistralConfig", **COMMON, head_dim=16, sliding_window=48
    ),
    "attention sinks, yarn, experts": build(
        "GptOssForCausalLM", "GptOssConfig", **COMMON, head_dim=16, sliding_window=48, num_local_experts=4
    ),
    "soft-capped logits": build(
        "Gemma2ForCausalLM", "Gemma2Config", **COMMON, head_dim=16, sliding_window=48
    ),
    "layers that share KV": build(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        **COMMON | {"intermediate_size": [128] * 4},
        head_dim=16,
        sliding_window=48,
        layer_types=ALTERNATING,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
    ),
    "partial rotation": build("GPTNeoXForCausalLM", "GPTNeoXConfig", **COMMON),
    "one KV head": build(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "no rotation": build(
        "BloomForCausalLM", "BloomConfig", vocab_size=256, hidden_size=64, n_layer=2, n_head=4
    ),
}

REFUSED: dict[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "latent attention": (
        "MLA",
        build(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **COMMON,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=4,
        ),
    ),
    "chunked attention": (
        "chunked_attention",
        build(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            **COMMON,
            head_dim=16,
            intermediate_size_mlp=128,
            num_local_experts=2,
        ),
    ),
    "linear attention": (
        "recurrent",
        build("Qwen3NextForCausalLM", "Qwen3NextConfig", **COMMON, head_dim=16, num_experts=4),
    ),
    "encoder and decoder": (
        "encoder-decoder",
        build(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=256,
            d_model=64,
            d_kv=16,
            num_layers=2,
            num_heads=4,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARED)
def test_shared_kv_gives_the_same_text(family: str) -> None:
    model = SHARED[family]()
    draw = random.Random(1)
    tokens = [draw.randrange(3, 256) for _ in range(150)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the attention mask we do not pass
        expected = model.generate(
            torch.tensor([tokens]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[0, len(tokens) :].tolist()
    kv, namespace = MemoryKV(), namespace_of(model)
    writer, reader = (Session(model, None, kv, namespace) for _ in range(2))
    writer.read(tokens)
    assert writer.generate(12, stop_tokens=()).tokens == expected
    assert reader.read(tokens).fetched_tokens == 144
    assert reader.generate(12, stop_tokens=()).tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_what_has_no_blocks_is_refused(family: str) -> None:
    words, make = REFUSED[family]
    with pytest.raises(UnsupportedModel, match=words):
        namespace_of(make())
