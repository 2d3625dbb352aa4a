"""``BlockKey`` and ``BlockHeader``: the name of a KV block and the header that every copy of it carries.

A key is a SHA-256 over what the block was computed *from*: namespace, parent key, token ids, logical positions, lineage,
extra.  It is chained through the parent, so one key names a whole prefix.

A copy is ``header (256 bytes) | payload``.  The header describes itself and is verified by every reader after the bytes
arrived::

    0    magic 8s            176  payload_bytes u64
    8    version u16         184  producer u64       incarnation of the process that computed it
    10   header_bytes u16    192  payload_checksum u64   xxh3-64 of the payload
    12   flags u32           200  reserved (zero)
    16   key 32s             240  header_checksum u64    xxh3-64 of bytes [0, 240): covers payload_checksum too
    48   parent 32s          248  generation u64         of the slot that holds this copy
    80   namespace 32s
    112  lineage 32s         The generation is a property of the *slot*, not of the block, and is rewritten in place when
    144  tenant 16s          a slot is retired; so it stands outside the checksum, 8-byte aligned, and is compared with
    160  logical_start u64   the generation in the reference that led the reader here.
    168  token_count u32, dtype u8, codec u8, reserved u16
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from xxhash import xxh3_64_intdigest

from kvcomm.errors import Corrupt, PayloadError, TokenError
from kvcomm.namespace import CODECS, DTYPE_BYTES, Namespace, NamespaceId, TenantDigest

BlockKey = NewType("BlockKey", bytes)
"""32 bytes."""

Incarnation = NewType("Incarnation", int)
"""One life of one process: a random non-zero 64-bit number drawn at start."""

Generation = NewType("Generation", int)
"""Count of how often a slot was handed out; 0 = retired, never valid for a reader."""

Buffer = bytes | bytearray | memoryview

ROOT_LINEAGE = bytes(32)
"""Lineage of a context that was never compacted."""

NO_PARENT = BlockKey(bytes(32))

NO_TENANT = TenantDigest(bytes(16))

MAGIC = b"KVCBLOCK"
VERSION = 1
HEADER_BYTES = 256
GENERATION_OFFSET = 248
FLAG_APPROXIMATE = 1

_DOMAIN = b"kvcomm.block/1\x00"
_FIELDS = struct.Struct("<8sHHI32s32s32s32s16sQIBBHQQQ40x")
_SUMMED_BYTES = 240
_TAIL = struct.Struct("<QQ")
_DTYPES = tuple(DTYPE_BYTES)
_CONTIGUOUS, _EXPLICIT = b"\x00", b"\x01"

assert _FIELDS.size == _SUMMED_BYTES and _SUMMED_BYTES + _TAIL.size == HEADER_BYTES


def block_keys(
    namespace: Namespace,
    tokens: Sequence[int],
    *,
    parent: BlockKey = NO_PARENT,
    logical_start: int = 0,
    positions: Sequence[int] | None = None,
    lineage: bytes = ROOT_LINEAGE,
    extra: bytes = b"",
) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``, in order; a partial last block has no key.

    Args:
        tokens: ids in ``[0, namespace.vocab_size)``.
        parent: key of the block before ``tokens[0]``, or :data:`NO_PARENT`.
        logical_start: logical (RoPE) position of ``tokens[0]``; the rest follow one by one.
        positions: explicit logical positions, one a token, where they are not contiguous (after a compaction).
        lineage: 32-byte digest of the compaction events so far.
        extra: anything else that changed the computation (an image's digest, a cache salt).

    Raises:
        TokenError: an id or a position is out of range, or the lengths differ.
    """
    ids = token_array(tokens, namespace.vocab_size)
    rows = _position_array(positions, len(ids))
    if len(lineage) != 32:
        raise TokenError("lineage must be 32 bytes")
    if logical_start < 0:
        raise TokenError("logical_start must not be negative")
    count, size = len(ids) // namespace.block_tokens, namespace.block_tokens
    head = hashlib.sha256(_DOMAIN + namespace.id)
    tail = lineage + len(extra).to_bytes(8, "little") + extra
    width, id_bytes = size.to_bytes(4, "little"), _little_endian(ids)
    keys: list[BlockKey] = []
    for index in range(count):
        where = _positions_bytes(rows, index * size, size, logical_start)
        digest = head.copy()
        digest.update(parent + width + id_bytes[4 * index * size : 4 * (index + 1) * size] + where + tail)
        parent = BlockKey(digest.digest())
        keys.append(parent)
    return keys


def token_array(tokens: Sequence[int], vocab_size: int) -> array[int]:
    """``tokens`` as unsigned 32-bit integers.

    Raises:
        TokenError: an id is not an integer in ``[0, vocab_size)``.
    """
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise TokenError(f"token ids must be integers in [0, {vocab_size}): {error}") from error
    if ids and max(ids) >= vocab_size:
        at = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise TokenError(f"token {ids[at]} at index {at} is not in [0, {vocab_size})")
    return ids


def _position_array(positions: Sequence[int] | None, token_count: int) -> array[int] | None:
    if positions is None:
        return None
    if len(positions) != token_count:
        raise TokenError(f"{len(positions)} positions for {token_count} tokens")
    try:
        return array("Q", positions)
    except (OverflowError, TypeError) as error:
        raise TokenError(f"positions must be integers >= 0: {error}") from error


def _positions_bytes(rows: array[int] | None, begin: int, size: int, logical_start: int) -> bytes:
    """One encoding per meaning: explicit positions that happen to be contiguous encode as contiguous."""
    if rows is None:
        return _CONTIGUOUS + (logical_start + begin).to_bytes(8, "little")
    mine = rows[begin : begin + size]
    if all(row == mine[0] + step for step, row in enumerate(mine)):
        return _CONTIGUOUS + mine[0].to_bytes(8, "little")
    return _EXPLICIT + _little_endian(mine)


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a copy says of itself.  ``pack`` and ``unpack`` are exact inverses."""

    key: BlockKey
    parent: BlockKey
    namespace: NamespaceId
    lineage: bytes
    tenant: TenantDigest
    logical_start: int
    token_count: int
    dtype: str
    codec: str
    payload_bytes: int
    producer: Incarnation
    payload_checksum: int
    approximate: bool = False
    generation: Generation = Generation(0)

    def pack(self) -> bytes:
        """The 256 header bytes, checksum included."""
        summed = _FIELDS.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            FLAG_APPROXIMATE if self.approximate else 0,
            self.key,
            self.parent,
            self.namespace,
            self.lineage,
            self.tenant,
            self.logical_start,
            self.token_count,
            _DTYPES.index(self.dtype),
            CODECS.index(self.codec),
            0,
            self.payload_bytes,
            self.producer,
            self.payload_checksum,
        )
        return summed + _TAIL.pack(xxh3_64_intdigest(summed), self.generation)

    @staticmethod
    def unpack(buffer: Buffer) -> BlockHeader:
        """Parse and verify the header at the start of ``buffer`` (its own checksum, not the payload's).

        Raises:
            Corrupt: too short, wrong magic or version, or the checksum does not match.
        """
        if len(buffer) < HEADER_BYTES:
            raise Corrupt(f"block header needs {HEADER_BYTES} bytes, got {len(buffer)}")
        summed = bytes(buffer[:_SUMMED_BYTES])
        checksum, generation = _TAIL.unpack_from(buffer, _SUMMED_BYTES)
        if xxh3_64_intdigest(summed) != checksum:
            raise Corrupt("block header checksum does not match")
        (magic, version, header_bytes, flags, key, parent, namespace, lineage, tenant, start, count, dtype, codec, _,
         payload_bytes, producer, payload_checksum) = _FIELDS.unpack(summed)  # fmt: skip
        if magic != MAGIC or version != VERSION or header_bytes != HEADER_BYTES:
            raise Corrupt(f"not a version {VERSION} block header (magic {magic!r}, version {version})")
        if dtype >= len(_DTYPES) or codec >= len(CODECS):
            raise Corrupt(f"block header names an unknown dtype {dtype} or codec {codec}")
        return BlockHeader(
            BlockKey(key), BlockKey(parent), NamespaceId(namespace), lineage, TenantDigest(tenant), start, count,
            _DTYPES[dtype], CODECS[codec], payload_bytes, Incarnation(producer), payload_checksum,
            bool(flags & FLAG_APPROXIMATE), Generation(generation),
        )  # fmt: skip


def header_names(buffer: Buffer, key: BlockKey) -> bool:
    """Whether an intact header for ``key`` stands at the start of ``buffer``: the cheap check of every read."""
    summed = bytes(buffer[:_SUMMED_BYTES])
    if summed[16:48] != key or len(buffer) < HEADER_BYTES:
        return False
    return bool(_TAIL.unpack_from(buffer, _SUMMED_BYTES)[0] == xxh3_64_intdigest(summed)) and summed[:8] == MAGIC


def verify_copy(buffer: Buffer, key: BlockKey) -> BlockHeader:
    """Verify a whole copy, ``header | payload``; ``buffer`` may be longer than the copy.

    Raises:
        Corrupt: the header is damaged, names another key, or the payload's checksum does not match.
    """
    header = BlockHeader.unpack(buffer)
    if header.key != key:
        raise Corrupt("copy holds another block than the one asked for")
    if len(buffer) < HEADER_BYTES + header.payload_bytes:
        raise Corrupt(f"copy is truncated: {len(buffer) - HEADER_BYTES} of {header.payload_bytes} payload bytes")
    payload = memoryview(buffer)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    if xxh3_64_intdigest(payload) != header.payload_checksum:
        raise Corrupt("block payload checksum does not match")
    return header


def header_for(
    namespace: Namespace,
    key: BlockKey,
    parent: BlockKey,
    payload: memoryview,
    *,
    logical_start: int,
    producer: Incarnation,
    lineage: bytes = ROOT_LINEAGE,
) -> BlockHeader:
    """The header for a freshly computed block; hashes the payload once.

    Raises:
        PayloadError: ``payload`` is not exactly ``namespace.block_bytes`` contiguous bytes.
    """
    if not payload.contiguous or payload.nbytes != namespace.block_bytes:
        raise PayloadError(
            f"a block of this namespace is {namespace.block_bytes} contiguous bytes "
            f"{namespace.block_shape} {namespace.dtype}; got {payload.nbytes}"
        )
    return BlockHeader(
        key, parent, namespace.id, lineage,
        namespace.tenant or NO_TENANT, logical_start, namespace.block_tokens,
        namespace.dtype, namespace.codec, payload.nbytes, producer, xxh3_64_intdigest(payload),
        namespace.approximate,
    )  # fmt: skip
