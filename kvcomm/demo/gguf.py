"""A llama-architecture GGUF file as a Hugging Face model folder: float32 safetensors, configuration,
tokenizer.

Both formats hold the same matrices under other names, with two differences that matter:

* weights are quantised in blocks; ``gguf.quants`` knows the formats and expands them;
* the rows of the query and key projections are interleaved (GGUF rotates neighbouring pairs, the Hugging Face
  model rotates halves), so each head's rows are put back in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcomm.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3
"""``tokenizer.ggml.token_type`` of special tokens."""


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in ``source`` into ``folder``, which must exist.

    Raises:
        ConfigError: the file is of another architecture or tokenizer kind.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    progress("reading the weights file", 0, 1)
    reader = GGUFReader(source)
    fields = _Fields(reader)
    if (fields["general.architecture"], fields["tokenizer.ggml.model"]) != ("llama", "gpt2"):
        raise ConfigError(f"{source.name} is not a llama-architecture model with a byte-level BPE tokenizer")
    weights = {}
    for done, (name, values) in enumerate(_weights(reader, fields)):
        weights[name] = values
        progress("expanding weights", done + 1, len(reader.tensors))
    progress("writing", 0, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _save_config(fields, folder, tied="lm_head.weight" not in weights)
    _save_tokenizer(fields, folder)
    progress("writing", 1, 1)


class _Fields:
    """The file's key-value pairs as Python values."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def __getitem__(self, name: str) -> Any:
        try:
            return self._fields[name].contents()
        except KeyError:
            raise ConfigError(f"the weights file does not say {name}") from None

    def get(self, name: str, default: Any) -> Any:
        return self[name] if name in self._fields else default


def _weights(reader: Any, fields: _Fields) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        name, part = _name_of(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if part in heads:
            values = _halves(values, heads[part])
        yield name, np.ascontiguousarray(values)


def _name_of(tensor: str) -> tuple[str, str]:
    """(name in the Hugging Face model, part of the GGUF name that says what it is)"""
    *where, part, kind = tensor.split(".")
    if kind == "weight" and not where and part in _TOP:
        return f"{_TOP[part]}.weight", part
    if kind == "weight" and len(where) == 2 and part in _LAYER:
        return f"model.layers.{int(where[1])}.{_LAYER[part]}.weight", part
    raise ConfigError(f"the weights file holds {tensor!r}, which a llama model does not have")


def _halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from (pair, member) order to (member, pair) order."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _save_config(fields: _Fields, folder: Path, tied: bool) -> None:
    head_count = fields["llama.attention.head_count"]
    head_dim = fields["llama.embedding_length"] // head_count
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("the weights file rotates a part of each head only; that is not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": head_count,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": head_dim,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 12),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", fields["tokenizer.ggml.eos_token_id"]),
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _save_tokenizer(fields: _Fields, folder: Path) -> None:
    """Byte-level BPE; digits stand alone, as the ``smollm`` pre-tokenizer has them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if fields["tokenizer.ggml.pre"] != "smollm":
        raise ConfigError(f"unknown pre-tokenizer {fields['tokenizer.ggml.pre']!r}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template", None)
    tokenizer.save_pretrained(folder)
