"""A language model small enough to be trained on one core in seconds."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

BLOCK_TOKENS = 4
"""Messages of the toys have few tokens, so blocks have."""


def toy_model(vocab_size: int, seed: int) -> PreTrainedModel:
    """Three layers, random weights, in evaluation mode: there is no dropout that training would need."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    return model


def step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Apply the gradients that were added up, at most of norm 1, and clear them."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
