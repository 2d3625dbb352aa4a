"""Canonical bytes: the one encoding that identities are hashed from.

Every value is ``tag | length | body`` with fixed-width little-endian lengths, so no two different values share bytes and
no value's bytes depend on the process (no ``repr``, no ``hash``, no set order, no pickle).  The encoding is part of the
on-disk and on-wire format: a change needs a new version in the domain strings of ``namespace`` and ``block``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence


Canonical = None | bool | int | float | str | bytes | Sequence["Canonical"] | Mapping[str, "Canonical"]


def canonical_bytes(value: Canonical) -> bytes:
    """Encode ``value``; equal values give equal bytes, different values give different bytes.

    ``1``, ``1.0`` and ``True`` are three values.  Raises ``ValueError`` for NaN (not equal to itself) and ``TypeError``
    for anything outside the :data:`Canonical` types.
    """
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
            return _field(b"M", b"".join(_mapping_items(value)))
        case Sequence():
            return _field(b"L", b"".join(canonical_bytes(item) for item in value))
    raise TypeError(f"no canonical bytes for {type(value).__name__}")


def _field(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(8, "little") + body


def _float_bytes(value: float) -> bytes:
    if math.isnan(value):
        raise ValueError("NaN has no canonical bytes")
    return struct.pack("<d", value + 0.0)  # + 0.0 folds -0.0 into 0.0: they compare equal, so they encode equal


def _mapping_items(value: Mapping[str, Canonical]) -> list[bytes]:
    if not all(isinstance(key, str) for key in value):
        raise TypeError("mapping keys must be str")
    return [canonical_bytes(key) + canonical_bytes(value[key]) for key in sorted(value)]
