"""The identity matrix: whatever could make two blocks of the same tokens differ makes their keys differ."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvcomm.block import BlockKey, block_keys
from kvcomm.namespace import Namespace, TenantDigest
from tests.namespaces import namespace

ROOT = Path(__file__).parents[2]
TOKENS = list(range(64))

FAMILY: dict[str, dict[str, Any]] = {
    "itself": {},
    "model": {"model": "acme/tiny-2"},
    "revision": {"revision": "weights-2"},
    "tokenizer": {"tokenizer": "tokenizer-2"},
    "vocab_size": {"vocab_size": 1_001},
    "dtype of another size": {"dtype": "float16"},
    "dtype of the same size": {"dtype": "bfloat16"},
    "layers": {"layers": 3},
    "kv_heads": {"kv_heads": 2},
    "head_dim": {"head_dim": 8},
    "axes exchanged": {"kv_heads": 4, "head_dim": 1},
    "block_tokens": {"block_tokens": 32},
    "rope": {"rope": "yarn"},
    "rope parameter": {"rope_parameters": {"theta": 10_001.0}},
    "rope parameter of another type": {"rope_parameters": {"theta": 10_000}},
    "rope parameter more": {"rope_parameters": {"theta": 10_000.0, "factor": 1.0}},
    "adapter": {"adapter": "lora", "adapter_revision": "1"},
    "another adapter": {"adapter": "lora-2", "adapter_revision": "1"},
    "adapter revision": {"adapter": "lora", "adapter_revision": "2"},
    "adapter cut elsewhere": {"adapter": "lor", "adapter_revision": "a1"},
    "tp_size": {"tp_size": 2},
    "tp_rank": {"tp_size": 2, "tp_rank": 1},
    "pp_size": {"pp_size": 2},
    "pp_rank": {"pp_size": 2, "pp_rank": 1},
    "approximate": {"approximate": True},
    "attention": {"attention": {"windows": [512]}},
    "attention nested": {"attention": {"windows": [[512]]}},
    "tenant": {"tenant": TenantDigest(b"a" * 16)},
    "another tenant": {"tenant": TenantDigest(b"b" * 16)},
}
NAMES = dict(zip(FAMILY, (namespace(**changes) for changes in FAMILY.values()), strict=True))


def keys(ns: Namespace, tokens: Sequence[int] = TOKENS, **how: Any) -> set[BlockKey]:
    return set(block_keys(ns, tokens, **how))


@pytest.mark.parametrize("pair", list(combinations(FAMILY, 2)), ids=" / ".join)
def test_two_namespaces_share_no_key(pair: tuple[str, str]):
    one, other = (NAMES[name] for name in pair)
    assert one.id != other.id and one != other
    assert keys(one).isdisjoint(keys(other))


def test_the_matrix_changes_every_field_that_can_change():
    changed = {name for changes in FAMILY.values() for name in changes}
    fields = {spec.name for spec in dataclasses.fields(Namespace) if spec.init}
    # There is one layout and one codec yet, so nothing to change them to: their tests come with the second.
    assert fields - changed == {"layout", "codec"}


def test_layout_and_codec_are_hashed_though_there_is_only_one_of_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvcomm.namespace.LAYOUTS", ("LKHTD", "KLHTD"))
    monkeypatch.setattr("kvcomm.namespace.CODECS", ("raw", "zstd"))
    ids = {namespace(layout=lay, codec=cod).id for lay in ("LKHTD", "KLHTD") for cod in ("raw", "zstd")}
    assert len(ids) == 4


@pytest.mark.parametrize("name", FAMILY)
def test_the_same_facts_give_the_same_identity(name: str):
    again = namespace(**FAMILY[name])
    assert again.id == NAMES[name].id
    assert block_keys(again, TOKENS) == block_keys(NAMES[name], TOKENS)


def test_the_order_in_which_parameters_are_given_does_not_matter():
    one = namespace(rope_parameters={"theta": 1.0, "factor": 2.0})
    assert one == namespace(rope_parameters={"factor": 2.0, "theta": 1.0})


@pytest.mark.parametrize(
    "how",
    [
        {"logical_start": 1},
        {"positions": [*range(63), 64]},
        {"positions": [0] * 64},
        {"lineage": b"\x01" * 32},
        {"parent": BlockKey(b"\x01" * 32)},
        {"extra": b"\x00"},
    ],
    ids="".join,
)
def test_what_a_block_was_computed_from_is_in_its_key(how: dict[str, Any]):
    last = block_keys(namespace(), TOKENS)[-1]
    assert last not in keys(namespace(), **how)


@pytest.mark.parametrize("at", range(64))
def test_a_changed_token_changes_its_block_and_all_after_it(at: int):
    before = block_keys(namespace(), TOKENS)
    after = block_keys(namespace(), [*TOKENS[:at], 999, *TOKENS[at + 1 :]])
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert same == [index < at // 16 for index in range(4)]


@pytest.mark.slow
@pytest.mark.processes
def test_identities_do_not_depend_on_the_hash_seed():
    program = (
        "from tests.golden.vectors import computed; import hashlib, json;"
        "print(hashlib.sha256(json.dumps(computed()).encode()).hexdigest())"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("0", "1", "31337", "random")
    }
    assert len(shown) == 1 and len(shown.pop().strip()) == 64
