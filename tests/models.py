"""Tiny random models and a byte-level tokenizer trained on the spot; nothing is downloaded.

Their weights are drawn wide (standard deviation 0.2 on a hidden size of 64), so that logits differ by several
nats, attention is not uniform and a wrong K or V changes the text: with the usual 0.02 every test of equality
would pass on noise.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ModelKind = Literal["llama", "qwen3", "gemma3"]
MODEL_KINDS: tuple[ModelKind, ...] = ("llama", "qwen3", "gemma3")

VOCAB_SIZE = 512
SLIDING_WINDOW = 48
"""Of every other Gemma layer: three blocks, so that tests reach past it."""

_CORPUS = """the planner asks an agent to plan; the agent calls a tool, the tool reads a block of a shard
under its lease, and the critic reviews the patch: which epoch, prefix, token, layer, head, key and value
does the test state"""


def tiny_model(
    kind: ModelKind, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """4 layers, 2 KV heads for 4 query heads, head dim 16; ``changes`` go into the configuration."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**settings | changes))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**settings | changes))
    else:
        sliding = {
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
        }
        model = Gemma3ForCausalLM(Gemma3TextConfig(**settings | sliding | changes))
    return model.to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ``VOCAB_SIZE`` tokens: any text encodes, and decodes to itself."""
    draw, words = random.Random(0), _CORPUS.split()
    corpus = [" ".join(draw.choice(words) for _ in range(30)) for _ in range(100)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


StreamModelKind = Literal["llama gqa", "llama mha", "qwen3", "qwen3 sliding"]
STREAM_MODEL_KINDS: tuple[StreamModelKind, ...] = ("llama gqa", "llama mha", "qwen3", "qwen3 sliding")


def stream_model(
    kind: StreamModelKind, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A :func:`tiny_model` of each kind that tells compacted contexts apart: grouped and full heads, qk-norm,
    and every other layer sliding over :data:`SLIDING_WINDOW` rows."""
    family: ModelKind = "llama" if kind.startswith("llama") else "qwen3"
    settings: dict[str, Any] = {}
    if kind == "llama mha":
        settings = {"num_key_value_heads": 4}
    elif kind == "qwen3 sliding":
        settings = {
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    return tiny_model(family, seed=seed, dtype=dtype, **settings | changes)
