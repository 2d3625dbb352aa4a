"""``namespace_of``: everything that decides a loaded transformers model's K/V bytes, or a refusal that says
why.

Nothing is taken on trust that can be looked at: the weights are hashed as they lie in memory (not the files
they came from, which a fine-tune, a merge or a quantisation has left behind), and the geometry is read off a
cache that the model has filled, not out of the configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from kvcomm.canonical import Canonical, canonical_bytes
from kvcomm.engines.transformers.forward import advance
from kvcomm.errors import NamespaceError
from kvcomm.namespace import DTYPE_BYTES, Namespace
from kvcomm.streams.model_rules import FIXED_ROPE_KINDS, LAYER_KINDS

_NOT_COMPUTATION = frozenset({
    "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype",
    "transformers_version", "use_cache",
})  # fmt: skip
"""Configuration keys that change no K/V.  A missing one costs sharing; a wrong one, correctness."""

_HASH_CHUNK_BYTES = 64 << 20
_HASH_THREADS_MAX = 8


class UnsupportedModel(NamespaceError):
    """This model's cache cannot be cut into blocks that mean the same to every reader, and why."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA or another delta on the weights."""

    id: str
    revision: str


def namespace_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    block_tokens: int = 16,
    adapter: Adapter | None = None,
    revision: str | None = None,
    name: str | None = None,
) -> Namespace:
    """The namespace of the KV that ``model`` computes.  Runs the model on one token to see its cache.

    Args:
        model: a decoder-only language model; an adapter loaded into it is part of the hashed weights.
        tokenizer: part of the identity where given; agents that pass none share among themselves only.
        block_tokens: tokens a block.
        adapter: names an adapter; required when ``revision`` is given and the model has one loaded.
        revision: trusted instead of hashing the weights (SHA-256, about 1.8 GB/s a core).
        name: model id; defaults to the architecture when the weights are hashed (a path or a hub id would
            keep two copies of the same weights apart), else to the model's hub id.

    Raises:
        UnsupportedModel: MLA, recurrent or chunked layers, encoder-decoders, bidirectional attention,
            tensor-parallel shards, rotary kinds that depend on the length, layers of unequal shape.
        NamespaceError: an identity is missing.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    config = model.config.get_text_config(decoder=True)
    _refuse_unsupported(model, config)
    if revision is not None and adapter is None and getattr(model, "_hf_peft_config_loaded", False):
        raise NamespaceError(
            "the model has an adapter loaded: pass adapter=, or no revision= so that it is hashed too"
        )
    layers, kv_heads, head_dim, dtype = _geometry(model)
    rope, rope_parameters = _rope(config)
    return Namespace(
        model=name or (type(model).__name__ if revision is None else str(model.config.name_or_path)),
        revision=revision or weights_digest(model),
        tokenizer="none" if tokenizer is None else tokenizer_digest(tokenizer),
        vocab_size=config.vocab_size,
        dtype=dtype,
        layout="LKHTD",
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        rope=rope,
        rope_parameters=rope_parameters,
        adapter="" if adapter is None else adapter.id,
        adapter_revision="" if adapter is None else adapter.revision,
        attention=_attention(model, config),
    )


def weights_digest(model: PreTrainedModel) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes of all weights, as they are in memory.

    Each tensor is hashed on its own, several at a time (hashlib releases the GIL), and the digest is over the
    sorted list of those; storage that several names share is read once.

    Raises:
        NamespaceError: a weight is not in memory (offloaded to disk, on the meta device).
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    by_place = {_place(tensor): tensor for tensor in state.values()}
    for name, tensor in state.items():
        if tensor.is_meta:
            raise NamespaceError(f"weight {name!r} is not in memory: pass revision=")
    with ThreadPoolExecutor(min(_HASH_THREADS_MAX, os.cpu_count() or 1)) as pool:
        largest_first = sorted(by_place.items(), key=lambda item: -item[1].nbytes)
        digests = dict(pool.map(lambda item: (item[0], _tensor_digest(item[1])), largest_first))
    listing: list[Canonical] = [
        [name, str(tensor.dtype), list(tensor.shape), digests[_place(tensor)]]
        for name, tensor in sorted(state.items())
    ]
    return hashlib.sha256(b"kvcomm.weights/1\x00" + canonical_bytes(listing)).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) of what turns text into ids: a fast tokenizer, or a slow one's class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        rules = json.loads(backend.to_str())
        for call_state in ("padding", "truncation"):  # left behind by the last call
            rules.pop(call_state, None)
    text = json.dumps(rules, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(b"kvcomm.tokenizer/1\x00" + text.encode()).hexdigest()


def _refuse_unsupported(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_KINDS))
    bidirectional = getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_causal", True
    )
    reasons = [
        (
            model.config.is_encoder_decoder,
            "an encoder-decoder: cross-attention K/V belong to an input, not to a prefix",
        ),
        (getattr(model, "_is_stateful", False), "recurrent: its state sums up all tokens and has no blocks"),
        (
            kinds,
            f"built of {', '.join(kinds)} layers; only {' and '.join(LAYER_KINDS)} have K and V rows",
        ),
        (
            getattr(config, "kv_lora_rank", None),
            "of latent attention (MLA): it caches one latent a token, not K and V",
        ),
        (bidirectional, "bidirectional: the K/V of a token depend on the tokens after it"),
        (
            (getattr(model, "tp_size", None) or 1) > 1,
            "sharded (tensor parallel): a rank holds some of the heads only",
        ),
    ]
    for holds, reason in reasons:
        if holds:
            raise UnsupportedModel(f"{type(model).__name__} is {reason}")


def _geometry(model: PreTrainedModel) -> tuple[int, int, int, str]:
    """(layers that own K/V, kv heads, head dim, dtype) of a stock cache after one token."""
    cache = DynamicCache()
    advance(model, cache, [0])
    shapes = set()
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[2] != 1:
            raise UnsupportedModel(f"layer {index} of {type(model).__name__} keeps no K and V row a token")
        shapes |= {
            (states.shape[1], states.shape[3], str(states.dtype).removeprefix("torch."))
            for states in (keys, values)
        }
    if len(shapes) != 1:
        raise UnsupportedModel(
            f"the layers of {type(model).__name__} have unequal K/V shapes: {sorted(shapes)}"
        )
    kv_heads, head_dim, dtype = shapes.pop()
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"K/V of dtype {dtype}; known are {', '.join(DTYPE_BYTES)}")
    return len(cache.layers), kv_heads, head_dim, dtype


def _rope(config: PreTrainedConfig) -> tuple[str, Mapping[str, Canonical]]:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        if getattr(config, "rope_scaling", None):
            raise UnsupportedModel(
                "its configuration scales rotary frequencies in a form this adapter does not know"
            )
        return "none", {}
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    groups = nested or {"": parameters}
    kinds = sorted({str(group.get("rope_type", "default")) for group in groups.values()})
    for kind in kinds:
        if kind not in FIXED_ROPE_KINDS:
            raise UnsupportedModel(
                f"rotary kind {kind!r}: only {', '.join(FIXED_ROPE_KINDS)} keep their frequencies "
                "(dynamic NTK and longrope change them with the length: a stored key would change meaning)"
            )
    plain = _plain(parameters)
    assert isinstance(plain, Mapping)
    return "+".join(kinds), plain


def _attention(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, Canonical]:
    """What else shapes K/V: readable facts, and a digest of the whole configuration lest one be forgotten."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    sliding = (
        [kind == "sliding_attention" for kind in layer_types]
        if layer_types
        else [True] * config.num_hidden_layers
    )
    computation = _plain(
        {key: value for key, value in config.to_dict().items() if key not in _NOT_COMPUTATION}
    )
    return {
        "architecture": type(model).__name__,
        "config": hashlib.sha256(b"kvcomm.config/1\x00" + canonical_bytes(computation)).hexdigest(),
        "windows": tuple(int(window) if is_sliding and window else 0 for is_sliding in sliding),
        "qk_norm": any("q_norm" in name or "k_norm" in name for name, _ in model.named_parameters()),
        "kv_shared_layers": int(getattr(config, "num_kv_shared_layers", 0) or 0),
    }


def _plain(value: Any) -> Canonical:
    """``value`` without what JSON writers disagree about: 10000 or 10000.0, null or absent, private keys."""
    if isinstance(value, Mapping):
        kept = {
            str(key): item for key, item in value.items() if item is not None and not str(key).startswith("_")
        }
        return {key: _plain(item) for key, item in kept.items()}
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, (Sequence, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return str(value)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256()
    flat = tensor.detach().contiguous().flatten()
    step = _HASH_CHUNK_BYTES // flat.element_size()
    for begin in range(0, flat.numel(), step):
        digest.update(flat[begin : begin + step].cpu().view(torch.uint8).numpy().data)
    return digest.digest()
