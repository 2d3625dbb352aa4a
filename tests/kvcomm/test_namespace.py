"""A namespace is complete and free of contradiction, or it is refused with the field named."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from kvcomm.errors import NamespaceError
from kvcomm.namespace import DTYPE_BYTES, Namespace, TenantDigest
from tests.namespaces import FACTS, namespace

MANDATORY = [
    spec.name
    for spec in dataclasses.fields(Namespace)
    if spec.init and spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
]


def test_the_mandatory_fields_are_those_that_tests_give():
    assert list(FACTS) == MANDATORY


@pytest.mark.parametrize("name", MANDATORY)
def test_a_fact_that_is_not_given_has_no_default(name: str):
    given = {key: value for key, value in FACTS.items() if key != name}
    with pytest.raises(TypeError, match=f"'{name}'"):
        Namespace(**given)


BAD: list[tuple[str, Any]] = [
    *((name, "") for name in ("model", "revision", "tokenizer", "dtype", "layout", "rope", "codec")),
    *((name, None) for name in FACTS),
    *((name, 7) for name in ("model", "revision", "tokenizer", "rope", "adapter")),
    *((name, "\ud800") for name in ("model", "revision", "tokenizer", "rope")),
    *(
        (name, 0)
        for name in ("vocab_size", "layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size")
    ),
    *((name, -1) for name in ("vocab_size", "layers", "block_tokens", "tp_rank", "pp_rank")),
    *((name, 1.0) for name in ("vocab_size", "layers", "kv_heads", "head_dim", "block_tokens", "tp_rank")),
    *((name, True) for name in ("vocab_size", "layers", "block_tokens", "tp_rank")),
    *((name, "8") for name in ("vocab_size", "layers", "block_tokens")),
    ("tp_rank", 1),
    ("pp_rank", 1),
    ("vocab_size", 2**32 + 1),
    ("block_tokens", 2**16 + 1),
    ("dtype", "fp32"),
    ("dtype", "int8"),
    ("layout", "KLHTD"),
    ("codec", "zstd"),
    ("approximate", 1),
    ("approximate", None),
    ("rope_parameters", [("theta", 1.0)]),
    ("rope_parameters", {"theta": float("nan")}),
    ("rope_parameters", {1: 2}),
    ("rope_parameters", {"theta": object()}),
    ("attention", {"windows": {1, 2}}),
    ("attention", "sliding"),
    ("tenant", b"short"),
    ("tenant", "sixteen letters!"),
    ("tenant", None),
    ("adapter", None),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_what_does_not_fit_is_refused_and_named(name: str, value: Any):
    with pytest.raises(NamespaceError, match=f"'{name}'"):
        namespace(**{name: value})


@pytest.mark.parametrize("changes", [{"adapter": "lora"}, {"adapter_revision": "7"}])
def test_an_adapter_and_its_revision_come_together(changes: dict[str, Any]):
    with pytest.raises(NamespaceError, match="adapter_revision"):
        namespace(**changes)


def test_a_block_that_no_header_could_describe_is_refused():
    with pytest.raises(NamespaceError, match="block_tokens"):
        namespace(layers=1_000, kv_heads=1_000, head_dim=1_000)


def test_parameters_that_contain_themselves_are_refused():
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(NamespaceError, match="attention"):
        namespace(attention=endless)


@pytest.mark.parametrize(("dtype", "element_bytes"), DTYPE_BYTES.items())
def test_block_bytes_is_the_product_of_the_block_shape(dtype: str, element_bytes: int):
    ns = namespace(dtype=dtype, layers=30, kv_heads=3, head_dim=64, block_tokens=16)
    assert ns.block_shape == (30, 2, 3, 16, 64)
    assert ns.block_bytes == 30 * 2 * 3 * 16 * 64 * element_bytes


def test_parameters_cannot_be_changed_behind_the_id():
    windows: list[Any] = [None, 512]
    given: dict[str, Any] = {"windows": windows, "deep": {"er": [1]}}
    ns = namespace(attention=given)
    before = ns.id
    windows.append(1_024)
    given["deep"]["er"].append(2)
    given["new"] = 1
    assert dataclasses.replace(ns).id == before
    deep = ns.attention["deep"]
    assert isinstance(deep, Mapping)
    with pytest.raises(TypeError, match="assignment"):
        deep["er"] = 3  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ns.model = "other"  # type: ignore[misc]


def test_equality_and_hash_follow_the_id():
    one, same, other = namespace(), namespace(), namespace(revision="weights-2")
    assert one == same and hash(one) == hash(same) and one is not same
    assert one not in (other, one.id)
    assert {one: "found"}[same] == "found" and other not in {one}


def test_a_namespace_crosses_a_process_border_whole():
    ns = namespace(attention={"windows": [None, 512], "deep": {"a": [1]}}, tenant=TenantDigest(b"t" * 16))
    copy = pickle.loads(pickle.dumps(ns))
    assert copy == ns and copy.block_shape == ns.block_shape and copy.attention == ns.attention


def test_a_tenant_is_put_in_by_the_server():
    digest = TenantDigest(b"t" * 16)
    ns = namespace().for_tenant(digest)
    assert ns.tenant == digest and ns != namespace()
    assert dataclasses.replace(ns, tenant=TenantDigest(b"")) == namespace()
