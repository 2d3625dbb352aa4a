"""A GGUF file and the model that was written into it compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvcomm.demo.gguf import convert
from kvcomm.errors import ConfigError
from tests.models import tiny_model, tiny_tokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return f"{NAMES[stem]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row ``i`` and row ``i + half`` of each head become neighbours."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.stack([rows[:, 0], rows[:, 1]], axis=2).reshape(weight.shape)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    quantised: bool = False,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: str = "",
) -> None:
    config, tokenizer = model.config, tiny_tokenizer()
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    vocabulary += [f"<unused{index}>" for index in range(config.vocab_size - len(vocabulary))]
    merges = [" ".join(pair) for pair in _merges(tokenizer)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in ("<unk>", "<s>", "</s>", "<pad>") else 1 for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(3)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        part = name.split(".")[-2]
        if part in heads:
            values = interleaved(values, heads[part])
        if quantised and part in ("gate_proj", "up_proj", "q_proj"):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _merges(tokenizer: Any) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]


def gguf_model(**changes: Any) -> PreTrainedModel:
    """GGUF implies head_dim = hidden_size / heads, which the tiny Llama obeys."""
    return tiny_model("llama", **changes)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(input_ids=torch.arange(4, 60)[None]).logits
    return output


def ignore_progress(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("tied", [False, True])
def test_unquantised_weights_come_back_exactly(tied: bool, tmp_path: Path) -> None:
    model = gguf_model(tie_word_embeddings=tied)
    write_gguf(model, tmp_path / "m.gguf")
    (tmp_path / "hf").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "hf", ignore_progress)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert torch.equal(logits(loaded), logits(model))


def test_quantised_weights_are_expanded(tmp_path: Path) -> None:
    model = gguf_model()
    write_gguf(model, tmp_path / "m.gguf", quantised=True)
    (tmp_path / "hf").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "hf", ignore_progress)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    name = "model.layers.1.self_attn.q_proj.weight"
    error = (loaded.state_dict()[name] - model.state_dict()[name]).abs().max()
    assert 0 < error < 0.01  # 8 bits of weights up to about 0.8


def test_the_tokenizer_reads_and_writes_any_text(tmp_path: Path) -> None:
    write_gguf(gguf_model(), tmp_path / "m.gguf")
    (tmp_path / "hf").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "hf", ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the agent's plan, 2,048 tokens\n\n   über 17 §\t</s>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[-1] == 2  # a special token is one token
    digits = tokenizer("17").input_ids
    assert len(digits) == 2  # digits stand alone


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"architecture": "qwen2"}, "not a llama-architecture"),
        ({"pre": "qwen2"}, "pre-tokenizer"),
        ({"extra": "blk.0.attn_q.bias"}, "does not have"),
    ],
)
def test_other_files_are_refused(wrong: dict[str, str], words: str, tmp_path: Path) -> None:
    write_gguf(gguf_model(), tmp_path / "m.gguf", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        convert(tmp_path / "m.gguf", tmp_path, ignore_progress)
