"""``Namespace``: everything that decides whether two KV blocks of the same tokens are the same bytes.

Most silent wrong answers of shared KV caches come from a field missing in the key (weights revision, adapter, layout,
tensor-parallel rank, tenant).  So a namespace is complete or it is refused: there are no defaults for facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import NewType

from kvcomm.canonical import Canonical, canonical_bytes
from kvcomm.errors import NamespaceError

NamespaceId = NewType("NamespaceId", bytes)
"""SHA-256 (32 bytes) over a namespace's canonical bytes, tenant included."""

TenantDigest = NewType("TenantDigest", bytes)
"""16 bytes a server derives from the caller's credential; never taken from a request."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Element sizes, by torch's dtype names."""

LAYOUTS = ("LKHTD",)
"""Axis orders of a block's payload.  ``LKHTD`` = [layer, K or V, kv head, token, head dim], C-contiguous."""

CODECS = ("raw",)
"""Payload codecs.  ``raw`` = the elements themselves, little-endian."""

_DOMAIN = b"kvcomm.namespace/1\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The identity of a family of KV blocks.

    Every field is mandatory except the adapter pair (empty = no adapter), the parallel slices (a whole model), the codec
    and the tenant.  Two namespaces that differ in any field never answer each other's lookups.

    Raises:
        NamespaceError: a field is missing, of the wrong type, or contradicts another one.
    """

    model: str
    """Model id, for example ``"HuggingFaceTB/SmolLM2-135M-Instruct"``."""
    revision: str
    """Revision or content hash of the *weights*; a fine-tune under the same name is another revision."""
    tokenizer: str
    """Revision or content hash of the tokenizer."""
    vocab_size: int
    """Token ids are in ``[0, vocab_size)``."""
    dtype: str
    """Element type of K and V, a key of :data:`DTYPE_BYTES`."""
    layout: str
    """Axis order of the payload, one of :data:`LAYOUTS`."""
    layers: int
    """Layers in this pipeline slice."""
    kv_heads: int
    """KV heads in this tensor-parallel slice."""
    head_dim: int
    block_tokens: int
    """Tokens a block; 16 by default in the engines."""
    rope: str
    """Kind of rotary embedding (``"default"``, ``"yarn"``, ``"none"``, ...)."""
    rope_parameters: Mapping[str, Canonical]
    """Its parameters (theta, factors, ...); ``{}`` only if the kind has none."""
    adapter: str = ""
    adapter_revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    codec: str = "raw"
    approximate: bool = False
    """Lossy or re-rotated KV: lives in a namespace of its own and never answers an exact lookup."""
    attention: Mapping[str, Canonical] = field(default_factory=dict)
    """What else shapes K/V: sliding windows per layer, qk-norm kind, KV sharing, multimodal salt, ..."""
    tenant: TenantDigest = TenantDigest(b"")
    """Filled in by :meth:`for_tenant` from what the server derived; leave it empty."""
    id: NamespaceId = field(init=False, repr=False, compare=False)
    """SHA-256 over the versioned canonical bytes of every field above."""

    def __post_init__(self) -> None:
        for name in ("model", "revision", "tokenizer", "dtype", "layout", "rope", "codec"):
            _require(isinstance(getattr(self, name), str) and bool(getattr(self, name)), name, "a non-empty string")
        for name in ("vocab_size", "layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size"):
            _require(_is_count(getattr(self, name), 1), name, "an integer >= 1")
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            ok = _is_count(getattr(self, rank), 0) and getattr(self, rank) < getattr(self, size)
            _require(ok, rank, f"an integer in [0, {size})")
        _require(self.dtype in DTYPE_BYTES, "dtype", f"one of {', '.join(DTYPE_BYTES)}")
        _require(self.layout in LAYOUTS, "layout", f"one of {', '.join(LAYOUTS)}")
        _require(self.codec in CODECS, "codec", f"one of {', '.join(CODECS)}")
        _require(self.vocab_size <= 1 << 32, "vocab_size", "at most 2**32")
        _require(bool(self.adapter) == bool(self.adapter_revision), "adapter_revision", "set exactly when adapter is")
        _require(isinstance(self.approximate, bool), "approximate", "a bool")
        _require(len(self.tenant) in (0, 16), "tenant", "derived by the server; leave it empty")
        for name in ("rope_parameters", "attention"):
            _require(isinstance(getattr(self, name), Mapping), name, "a mapping")
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        try:
            digest = hashlib.sha256(_DOMAIN + canonical_bytes(self._identity())).digest()
        except (TypeError, ValueError) as error:
            raise NamespaceError(f"namespace parameters cannot be encoded: {error}") from error
        object.__setattr__(self, "id", NamespaceId(digest))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's payload."""
        return self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """(layers, 2, kv_heads, block_tokens, head_dim)."""
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    def for_tenant(self, tenant: TenantDigest) -> Namespace:
        """This namespace under the tenant that a server derived from the credential."""
        return replace(self, tenant=tenant)

    def _identity(self) -> dict[str, Canonical]:
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.init}


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise NamespaceError(f"namespace field {name!r} must be {what}")
