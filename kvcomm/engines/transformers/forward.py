"""One forward pass, whatever this version of transformers calls its cache argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

FULL, SLIDING = "full_attention", "sliding_attention"


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


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    masks: Mapping[str, Any],
    *,
    cache: Cache | None = None,
    last: int | torch.Tensor = 0,
) -> torch.Tensor:
    """A pass whose caller says what every row attends; gradients flow if they are on.

    Args:
        ids: int64 ``[batch, rows]``.
        positions: int64 ``[batch, rows]``, logical (RoPE) positions.
        masks: by layer type (:func:`layer_types`): bool ``[batch, 1, rows, cached + rows]``, true = attends,
            or a ``BlockMask`` for a model that attends through FlexAttention.
        cache: K/V before these rows; theirs is appended.
        last: logits of so many last rows (0 = of all), or of these rows, int64 ``[n]``.

    Returns logits of the model's dtype, ``[batch, last, n or rows, vocab_size]``.
    """
    kinds = set(layer_types(model))
    missing = kinds - masks.keys()
    if missing:
        raise ValueError(f"the model has layers of type {sorted(missing)}, and no mask says what they attend")
    config: Any = model.config
    if config._attn_implementation == "eager":
        masks = {kind: as_added(mask, model.dtype) for kind, mask in masks.items()}
    # One mask is understood by all; several only by models that name the type of each layer.
    mask = dict(masks) if len(kinds) > 1 else masks[kinds.pop()]
    cached = {} if cache is None else {_cache_argument(model): cache}
    output = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        use_cache=cache is not None,
        logits_to_keep=last,
        **cached,
    )
    logits = output.logits
    assert isinstance(logits, torch.Tensor)
    return logits


def layer_types(model: PreTrainedModel) -> list[str]:
    """Of each layer: :data:`FULL` or :data:`SLIDING`.  A window without types (Mistral, Phi-3) is every
    layer's."""
    config: Any = model.config.get_text_config(decoder=True)
    uniform = SLIDING if getattr(config, "sliding_window", None) else FULL
    return list(getattr(config, "layer_types", None) or [uniform] * config.num_hidden_layers)


def window_of(model: PreTrainedModel) -> int:
    """Rows that a sliding layer attends, its own included, by *logical* distance; 0 = no layer slides."""
    config: Any = model.config.get_text_config(decoder=True)
    return int(config.sliding_window) if SLIDING in layer_types(model) else 0


def as_added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as what eager attention adds to its scores; it would take "true" for a bonus of 1."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _cache_argument(model: PreTrainedModel) -> str:
    """``past_key_values`` until transformers 5.23, ``cache`` from 5.24 on."""
    return _cache_argument_of(type(getattr(model, "_orig_mod", model)).forward)  # what torch.compile wraps


@functools.cache
def _cache_argument_of(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
