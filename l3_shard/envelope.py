"""The stored form of a record, which describes itself::

    version u8 | flags u8 | zero (6) | xxh3-64 of head, key and body | body (msgpack)

The key is in the checksum, so a value that the database returns for another key is noticed too.  A value that
fails verification is reported as damaged and never served.  ``store`` writes it; a simulated disk needs it
without the database.
"""

from __future__ import annotations

import struct

import msgspec
from xxhash import xxh3_64

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import RecordState, StrongState
from l3_shard import dvv
from l3_shard.storage import Database, State

_HEAD = struct.Struct("<BB6xQ")
HEAD_BYTES = _HEAD.size
"""Before the body."""
_VERSION = 1
_ALIVE = 1
_decoders: dict[Database, msgspec.msgpack.Decoder[State]] = {
    "records": msgspec.msgpack.Decoder(RecordState),
    "strong": msgspec.msgpack.Decoder(StrongState),
}


def encode_value(key: bytes, state: State) -> bytes:
    """The stored form of a record."""
    return encode_body(key, state, msgspec.msgpack.encode(state))


def encode_body(key: bytes, state: State, body: bytes) -> bytes:
    """As :func:`encode_value`, for who has the ``state`` encoded already."""
    flags = _ALIVE if isinstance(state, StrongState) or dvv.alive(state) else 0
    return _HEAD.pack(_VERSION, flags, _checksum(flags, key, body)) + body


def decode_value(key: bytes, value: bytes, database: Database = "records") -> State:
    """The inverse of :func:`encode_value`.

    Raises:
        Corrupt: the bytes are not what was stored under ``key``.
    """
    if len(value) < _HEAD.size:
        raise Corrupt("a stored record is truncated")
    version, flags, checksum = _HEAD.unpack_from(value)
    body = value[_HEAD.size :]
    if version != _VERSION or checksum != _checksum(flags, key, body):
        raise Corrupt("a stored record does not match its checksum")
    return _decoders[database].decode(body)


def _checksum(flags: int, key: bytes, body: bytes) -> int:
    digest = xxh3_64(bytes((_VERSION, flags)) + len(key).to_bytes(4, "little") + key)
    digest.update(body)
    return digest.intdigest()
