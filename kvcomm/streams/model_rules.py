"""Which models' contexts can be compacted, told from a configuration alone.

A cut leaves keys in view that were rotated when they were computed, and a hole in the positions.  That is
exact as long as a rotation means the same whatever the length of what is seen, and as long as one list of
rows tells what every layer holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcomm.errors import NamespaceError

FIXED_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Rotary kinds whose frequencies do not depend on the length of the sequence: a rotated key stays valid."""

LAYER_KINDS = ("full_attention", "sliding_attention")
"""Layers that hold a key and a value a row.  Which of these a sliding one attends is a mask by *positions*,
so one block table serves both."""

_RECURRENT = ("conv_kernel", "conv_L_cache", "lru_width", "mamba", "recurrent", "rwkv", "ssm", "state_size")
"""Parts of the names of settings that only models with recurrent layers have: not all list their layers."""


class NotCompactable(NamespaceError):
    """A model whose context cannot be cut exactly, and why."""


def require_compactable(config: Mapping[str, Any]) -> None:
    """Refuse a model by its configuration: that of a loaded model, ``config.to_dict()``, or ``config.json``.

    It tells what a configuration can tell, before anything is loaded.  What the cache of a loaded model
    really holds is looked at when its namespace is made.

    Raises:
        NotCompactable: rotary frequencies that change with the length (dynamic NTK, longrope), positions that
            are not rotary, layers without rows (recurrent, chunked, latent attention), an encoder-decoder.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    for reason in _reasons(config):
        raise NotCompactable(f"{config.get('model_type', 'the model')}: {reason}")


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    kinds = _rope_kinds(config)
    if not kinds:
        yield (
            "no rotary positions: models that tell distances in another way (ALiBi, learned) count slots, "
            "which a cut shifts. Use re-prefill; if its config.json only leaves them out, pass that of the "
            "loaded model"
        )
    for kind in kinds:
        if kind not in FIXED_ROPE_KINDS:
            yield (
                f"rotary kind {kind!r}: its frequencies may change with the length that is seen, and keys "
                f"that a cut keeps would mean something else; only {', '.join(FIXED_ROPE_KINDS)} stay. "
                "Configure one of those (yarn instead of dynamic), or re-prefill"
            )
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - {*LAYER_KINDS})
    if others:
        yield (
            f"layers of kind {', '.join(others)}: one block table cannot say what they hold; only "
            f"{' and '.join(LAYER_KINDS)} have a key and a value a row. Use re-prefill"
        )
    recurrent = sorted(
        key for key, value in config.items() if value and any(part in key for part in _RECURRENT)
    )
    if recurrent:
        yield f"recurrent layers ({', '.join(recurrent[:3])}): a state has no rows to cut. Use re-prefill"
    if config.get("kv_lora_rank"):
        yield "latent attention: it keeps one latent a row, not keys and values. Use re-prefill"
    if config.get("attention_chunk_size"):
        yield "chunked attention: chunks are counted in slots, which a cut shifts. Use re-prefill"
    if config.get("alibi"):
        yield "ALiBi: it counts distances in slots, which a cut shifts. Use re-prefill"
    if config.get("is_encoder_decoder"):
        yield "an encoder-decoder: its cross-attention belongs to an input, not to rows"


def _rope_kinds(config: Mapping[str, Any]) -> list[str]:
    """Of ``rope_parameters``, one for all layers or one a layer kind; and of the older ``rope_scaling``,
    beside which stands ``rope_theta``."""
    kinds: set[str] = set()
    if config.get("rope_theta"):
        kinds.add("default")
    for key in ("rope_parameters", "rope_scaling"):
        parameters = config.get(key)
        if not isinstance(parameters, Mapping):
            continue
        nested: Sequence[Any] = [value for value in parameters.values() if isinstance(value, Mapping)]
        for group in nested or [parameters]:
            kinds.add(str(group.get("rope_type", group.get("type", "default"))))
    return sorted(kinds)
