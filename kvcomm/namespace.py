"""``Namespace``: everything that decides whether two KV blocks of the same tokens are the same bytes.

Most silent wrong answers of shared KV caches come from a field missing in the key (weights revision, adapter,
layout, tensor-parallel rank, tenant).  So a namespace is complete or it is refused: there are no defaults for
facts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NewType

from kvcomm.canonical import Canonical, canonical_bytes
from kvcomm.errors import NamespaceError

NamespaceId = NewType("NamespaceId", bytes)
"""SHA-256 (32 bytes) over a namespace's canonical bytes, tenant included."""

TenantDigest = NewType("TenantDigest", bytes)
"""16 bytes a server derives from the caller's credential; never taken from a request."""

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
    }
)
"""Element sizes, by torch's dtype names.  A header stores the *place* in this mapping: append, never
reorder."""

LAYOUTS = ("LKHTD",)
"""Axis orders of a block's payload.  ``LKHTD`` = [layer, K or V, kv head, token, head dim], C-contiguous."""

CODECS = ("raw",)
"""Payload codecs.  ``raw`` = the elements themselves, little-endian.  A header stores the place: append
only."""

BLOCK_TOKENS_MAX = 1 << 16
BLOCK_BYTES_MAX = 1 << 31
"""Sizes above are mistakes (a context length for a block length), and would not fit the header's and the
wire's fields."""

_DOMAIN = b"kvcomm.namespace/1\x00"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Namespace:
    """The identity of a family of KV blocks.

    Every field is mandatory except the adapter pair (empty = no adapter), the parallel slices (a whole
    model), the codec and the tenant.  Two namespaces that differ in any field never answer each other's
    lookups.  They compare and hash by :attr:`id`, so they work as dictionary keys, and they travel to child
    processes (``multiprocessing``) whole.

    Raises:
        NamespaceError: a field is empty, of the wrong type or out of range, or contradicts another one; it is
            named.
        TypeError: a mandatory field is not given at all (Python's own error, which names it; type checkers
            see it too).
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
    id: NamespaceId = field(init=False, repr=False)
    """SHA-256 over the versioned canonical bytes of every field above."""

    def __post_init__(self) -> None:
        self._check_texts()
        self._check_numbers()
        _require(isinstance(self.approximate, bool), "approximate", "a bool")
        _require(_is_tenant_digest(self.tenant), "tenant", "derived by the server (16 bytes); leave it empty")
        for name in ("rope_parameters", "attention"):
            object.__setattr__(self, name, _frozen_parameters(name, getattr(self, name)))
        digest = hashlib.sha256(_DOMAIN + canonical_bytes(self._identity())).digest()
        object.__setattr__(self, "id", NamespaceId(digest))

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        """Through the constructor, so that a copy in another process is checked and hashed anew there."""
        return _from_fields, (_thawed(self._identity()),)

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

    def _check_texts(self) -> None:
        for name in ("model", "revision", "tokenizer", "dtype", "layout", "rope", "codec"):
            value = getattr(self, name)
            _require(isinstance(value, str) and bool(value), name, "a non-empty string")
        for name in ("adapter", "adapter_revision"):
            _require(isinstance(getattr(self, name), str), name, "a string")
        for name in ("model", "revision", "tokenizer", "rope", "adapter", "adapter_revision"):
            _require(_is_utf8(getattr(self, name)), name, "text that UTF-8 can hold")
        for name, known in (("dtype", tuple(DTYPE_BYTES)), ("layout", LAYOUTS), ("codec", CODECS)):
            _require(getattr(self, name) in known, name, f"one of {', '.join(known)}")
        both = bool(self.adapter) == bool(self.adapter_revision)
        _require(both, "adapter_revision", "set exactly when adapter is")

    def _check_numbers(self) -> None:
        for name in ("vocab_size", "layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size"):
            _require(_is_count(getattr(self, name), 1), name, "an integer >= 1")
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            inside = _is_count(getattr(self, rank), 0) and getattr(self, rank) < getattr(self, size)
            _require(inside, rank, f"an integer in [0, {size})")
        _require(self.vocab_size <= 1 << 32, "vocab_size", "at most 2**32")
        _require(self.block_tokens <= BLOCK_TOKENS_MAX, "block_tokens", f"at most {BLOCK_TOKENS_MAX}")
        fits = self.block_bytes <= BLOCK_BYTES_MAX
        _require(fits, "block_tokens", f"so small that a block is at most {BLOCK_BYTES_MAX} bytes")


def _from_fields(values: dict[str, Any]) -> Namespace:
    return Namespace(**values)


def _frozen_parameters(name: str, value: object) -> Canonical:
    """A deep read-only copy, so that the identity cannot drift away from ``id`` afterwards."""
    _require(isinstance(value, Mapping), name, "a mapping")
    try:
        canonical_bytes([value])  # type: ignore[list-item]  # refusing what does not fit is the point
    except (TypeError, ValueError) as error:
        raise NamespaceError(f"namespace field {name!r} cannot be encoded: {error}") from error
    return _frozen(value)


def _frozen(value: Any) -> Canonical:
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(item) for key, item in value.items()}
    return tuple(map(_thawed, value)) if isinstance(value, tuple) else value


def _is_utf8(text: str) -> bool:
    """False for lone surrogates."""
    return text.encode(errors="replace").decode() == text


def _is_tenant_digest(value: object) -> bool:
    return isinstance(value, bytes) and len(value) in (0, 16)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise NamespaceError(f"namespace field {name!r} must be {what}")
