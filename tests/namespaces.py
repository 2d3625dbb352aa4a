"""Namespaces for tests: one that is complete, and changes of it."""

from __future__ import annotations

from typing import Any

from kvcomm.namespace import Namespace

FACTS: dict[str, Any] = {
    "model": "acme/tiny",
    "revision": "weights-1",
    "tokenizer": "tokenizer-1",
    "vocab_size": 1_000,
    "dtype": "float32",
    "layout": "LKHTD",
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "block_tokens": 16,
    "rope": "default",
    "rope_parameters": {"theta": 10_000.0},
}
"""Every mandatory field; a block is 1,024 bytes."""


def namespace(**changes: Any) -> Namespace:
    return Namespace(**(FACTS | changes))
