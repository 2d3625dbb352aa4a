"""The namespace of a model: equal exactly when its K/V are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from kvcomm.engines.transformers.identity import (
    Adapter,
    UnsupportedModel,
    namespace_of,
    tokenizer_digest,
    weights_digest,
)
from kvcomm.errors import NamespaceError
from tests.models import MODEL_KINDS, VOCAB_SIZE, ModelKind, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_geometry_is_what_the_cache_shows(kind: ModelKind) -> None:
    namespace = namespace_of(tiny_model(kind))
    assert namespace.block_shape == (4, 2, 2, 16, 16)
    assert (namespace.dtype, namespace.vocab_size, namespace.rope) == ("float32", VOCAB_SIZE, "default")
    assert namespace.attention["qk_norm"] == (kind != "llama")
    assert namespace.attention["windows"] == ((48, 0, 48, 0) if kind == "gemma3" else (0, 0, 0, 0))


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_loading_from_disk_changes_nothing(kind: ModelKind, tmp_path: Path) -> None:
    model, tokenizer = tiny_model(kind), tiny_tokenizer()
    model.save_pretrained(tmp_path / "here")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "here", dtype=torch.float32)
    assert namespace_of(loaded, tokenizer).id == namespace_of(model, tokenizer).id


def test_every_cause_of_other_bytes_is_another_namespace() -> None:
    tokenizer = tiny_tokenizer()
    nudged = tiny_model("llama")
    with torch.no_grad():
        nudged.lm_head.weight[3, 3] += 1e-6
    others = {
        "same": namespace_of(tiny_model("llama"), tokenizer),
        "again": namespace_of(tiny_model("llama"), tokenizer),
        "weights": namespace_of(tiny_model("llama", seed=1), tokenizer),
        "one weight": namespace_of(nudged, tokenizer),
        "dtype": namespace_of(tiny_model("llama", dtype=torch.bfloat16), tokenizer),
        "norm epsilon": namespace_of(tiny_model("llama", rms_norm_eps=1e-5), tokenizer),
        "rope": namespace_of(
            tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), tokenizer
        ),
        "no tokenizer": namespace_of(tiny_model("llama")),
        "block": namespace_of(tiny_model("llama"), tokenizer, block_tokens=32),
        "adapter": namespace_of(tiny_model("llama"), tokenizer, adapter=Adapter("lora", "7")),
        "revision": namespace_of(tiny_model("llama"), tokenizer, revision="main", name="m"),
    }
    assert others.pop("again").id == others["same"].id
    assert len({namespace.id for namespace in others.values()}) == len(others)


def test_window_is_part_of_the_identity() -> None:
    assert namespace_of(tiny_model("gemma3")).id != namespace_of(tiny_model("gemma3", sliding_window=64)).id


def test_shared_storage_is_hashed_under_both_names() -> None:
    tied, untied = (
        tiny_model("llama", tie_word_embeddings=True),
        tiny_model("llama", tie_word_embeddings=False),
    )
    with torch.no_grad():
        untied.load_state_dict(tied.state_dict())
    assert weights_digest(tied) == weights_digest(untied)


def test_tokenizer_digest_ignores_call_state_and_sees_the_vocabulary() -> None:
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer()
    other(["agent", "agent plan"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == tokenizer_digest(other)
    other.add_tokens(["kvcomm"])
    assert tokenizer_digest(tokenizer) != tokenizer_digest(other)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0,
            "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 2048,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_rope_that_depends_on_the_length_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=rope["rope_type"]):
        namespace_of(tiny_model("llama", rope_parameters=rope))


def test_fixed_rope_scaling_is_accepted() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    namespace = namespace_of(tiny_model("llama", rope_parameters=rope))
    assert namespace.rope == "yarn" and namespace.rope_parameters["factor"] == 4.0


def test_a_model_without_rope_says_none() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()
    namespace = namespace_of(model)
    assert (namespace.rope, namespace.block_shape) == ("none", (2, 2, 2, 16, 16))


def test_recurrent_models_are_refused() -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedModel, match="recurrent"):
        namespace_of(MambaForCausalLM(config).eval())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("is_encoder_decoder", True, "encoder-decoder"),
        ("kv_lora_rank", 64, "MLA"),
        ("layer_types", ["linear_attention", "full_attention"], "linear_attention"),
        ("use_bidirectional_attention", True, "bidirectional"),
    ],
)
def test_what_blocks_cannot_represent_is_refused(field: str, value: object, words: str) -> None:
    model = tiny_model("llama")
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedModel, match=words):
        namespace_of(model)


def test_layers_of_unequal_shape_are_refused() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.v_proj = torch.nn.Linear(64, 16, bias=False)  # one KV head where the others have two
    attention.k_proj = torch.nn.Linear(64, 16, bias=False)
    attention.num_key_value_groups = 4
    with pytest.raises(UnsupportedModel, match="unequal"):
        namespace_of(model.eval())


def test_a_trusted_revision_needs_the_adapter_named() -> None:
    model: PreTrainedModel = tiny_model("llama")
    model._hf_peft_config_loaded = True
    with pytest.raises(NamespaceError, match="adapter"):
        namespace_of(model, revision="main", name="m")
    assert namespace_of(model, revision="main", name="m", adapter=Adapter("lora", "7")).adapter == "lora"


def test_weights_that_are_not_in_memory_are_refused() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(NamespaceError, match="pass revision="):
        weights_digest(model)
