"""One forward pass, whatever this version of transformers calls its cache argument."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


def advance(model: PreTrainedModel, cache: Cache, tokens: Sequence[int]) -> torch.Tensor:
    """Feed ``tokens`` after what ``cache`` holds; their K/V is appended to it.

    Returns the logits after the last token, float32 ``[vocab_size]``.
    """
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    with torch.inference_mode():
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{_cache_argument(model): cache})
        logits = output.logits[0, -1].float()
    assert isinstance(logits, torch.Tensor)
    return logits


def _cache_argument(model: PreTrainedModel) -> str:
    """``past_key_values`` until transformers 5.23, ``cache`` from 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
