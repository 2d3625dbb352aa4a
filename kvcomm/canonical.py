"""Canonical bytes: the one encoding that identities are hashed from.

Every value is ``tag | length | body`` with fixed-width little-endian lengths, so no two different values
share bytes and no value's bytes depend on the process (no ``repr``, no ``hash``, no set order, no pickle).
The encoding is part of the on-disk and on-wire format: a change needs a new version in the domain strings of
``namespace`` and ``block``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

Canonical = None | bool | int | float | str | bytes | Sequence["Canonical"] | Mapping[str, "Canonical"]


DEPTH_MAX = 32
"""Deepest nesting of lists and mappings; a value that contains itself is refused here, not by a stack
overflow."""


def canonical_bytes(value: Canonical) -> bytes:
    """Encode ``value``; equal values give equal bytes, different values give different bytes.

    ``1``, ``1.0`` and ``True`` are three values, a list and a tuple of the same items are one.  Raises
    ``ValueError`` for NaN (not equal to itself), for text that UTF-8 cannot hold and for nesting deeper than
    :data:`DEPTH_MAX`, and ``TypeError`` for anything else: other sequences (``bytearray``, ``range``, arrays)
    compare by rules of their own, and numpy scalars other than ``float64`` are not Python numbers.
    """
    return _encode(value, DEPTH_MAX)


def _encode(value: Canonical, depth: int) -> bytes:
    if depth < 0:
        raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
    match value:
        case None:
            return _field(b"N", b"")
        case bool():
            return _field(b"B", b"\x01" if value else b"\x00")
        case int():
            return _field(b"I", value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True))
        case float():
            return _field(b"F", _float_bytes(value))
        case str():
            return _field(b"S", value.encode())
        case bytes():
            return _field(b"Y", value)
        case Mapping():
            return _field(b"M", b"".join(_mapping_items(value, depth - 1)))
        case list() | tuple():
            return _field(b"L", b"".join(_encode(item, depth - 1) for item in value))
    raise TypeError(f"no canonical bytes for {type(value).__name__}")


def _field(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(8, "little") + body


def _float_bytes(value: float) -> bytes:
    if math.isnan(value):
        raise ValueError("NaN has no canonical bytes")
    # + 0.0 folds -0.0 into 0.0: they compare equal, so they encode equal.
    return struct.pack("<d", value + 0.0)


def _mapping_items(value: Mapping[str, Canonical], depth: int) -> list[bytes]:
    if not all(isinstance(key, str) for key in value):
        raise TypeError("mapping keys must be str")
    return [_encode(key, depth) + _encode(value[key], depth) for key in sorted(value)]
