"""``BlockKey`` and ``BlockHeader``: the name of a KV block and the header that every copy of it carries.

A key is a SHA-256 over what the block was computed *from*: namespace, parent key, token ids, logical
positions, lineage, extra.  It is chained through the parent, so one key names a whole prefix.

A copy is ``header (256 bytes) | payload``.  The header describes itself and is verified by every reader after
the bytes arrived::

    0    magic 8s            160  logical_start u64
    8    version u16         168  token_count u32, dtype u8, codec u8, reserved u16
    10   header_bytes u16    176  payload_bytes u64
    12   flags u32           184  producer u64           incarnation of the process that computed it
    16   key 32s             192  payload_checksum u64   xxh3-64 of the payload
    48   parent 32s          200  reserved (zero)
    80   namespace 32s       240  header_checksum u64    xxh3-64 of [0, 240): covers payload_checksum too
    112  lineage 32s         248  generation u64         of the slot that holds this copy
    144  tenant 16s

The generation is a property of the *slot*, not of the block, and is rewritten in place when a slot is
retired.  So it stands outside the checksum, 8-byte aligned, and is compared with the generation in the
reference that led the reader here.
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

POSITION_MAX = (1 << 63) - 1
"""Largest logical position."""

MAGIC = b"KVCBLOCK"
VERSION = 1
HEADER_BYTES = 256
GENERATION_OFFSET = 248
FLAG_APPROXIMATE = 1

_DOMAIN = b"kvcomm.block/1\x00"
_FIELDS = struct.Struct("<8sHHI32s32s32s32s16sQIBBHQQQ40x")
_SUMMED_BYTES = 240
_RESERVED_OFFSET = 200
_TAIL = struct.Struct("<QQ")
_DTYPES = tuple(DTYPE_BYTES)
_PREFIX = struct.pack("<8sHH", MAGIC, VERSION, HEADER_BYTES)
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
        positions: explicit logical positions, one a token, where they are not contiguous (after a
            compaction); instead of ``logical_start``.
        lineage: 32-byte digest of the compaction events so far.
        extra: anything else that changed the computation (an image's digest, a cache salt).

    Raises:
        TokenError: an id or a position is out of range, the lengths differ, or ``parent`` or ``lineage`` is
            no digest.
    """
    ids = token_array(tokens, namespace.vocab_size)
    rows = _position_array(positions, len(ids), logical_start)
    # Everything hashed below is of fixed width or length-prefixed; these two are fixed only if checked.
    if len(parent) != 32 or len(lineage) != 32:
        raise TokenError("parent and lineage must be 32 bytes each")
    count, size = len(ids) // namespace.block_tokens, namespace.block_tokens
    head = hashlib.sha256(_DOMAIN + namespace.id)
    tail = lineage + len(extra).to_bytes(8, "little") + extra
    width, id_bytes = size.to_bytes(4, "little"), little_endian(ids)
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
    if isinstance(tokens, bytes | bytearray | str):
        # array() would take bytes for its raw memory, four to an id: wrong keys without an error.
        raise TokenError(f"token ids must be integers, not {type(tokens).__name__}; decode or tokenize first")
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be integers in [0, {vocab_size}): {error}") from error
    if ids and max(ids) >= vocab_size:
        at = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise TokenError(f"token {ids[at]} at index {at} is not in [0, {vocab_size})")
    return ids


def _position_array(
    positions: Sequence[int] | None, token_count: int, logical_start: int
) -> array[int] | None:
    if positions is None:
        if not 0 <= logical_start <= POSITION_MAX - token_count:
            raise TokenError("logical_start must not be negative, and positions end at 2**63 - 1")
        return None
    if logical_start:
        raise TokenError("give logical_start or positions, not both")
    if len(positions) != token_count:
        raise TokenError(f"{len(positions)} positions for {token_count} tokens")
    try:
        rows = array("q", positions)
    except (OverflowError, TypeError) as error:
        raise TokenError(f"positions must be integers in [0, 2**63): {error}") from error
    if rows and min(rows) < 0:
        raise TokenError("positions must be integers in [0, 2**63)")
    return rows


def _positions_bytes(rows: array[int] | None, begin: int, size: int, logical_start: int) -> bytes:
    """One encoding per meaning: explicit positions that happen to be contiguous encode as contiguous."""
    if rows is None:
        return _CONTIGUOUS + (logical_start + begin).to_bytes(8, "little")
    mine = rows[begin : begin + size]
    if mine[-1] == mine[0] + size - 1 and mine == array("q", range(mine[0], mine[0] + size)):
        return _CONTIGUOUS + mine[0].to_bytes(8, "little")
    return _EXPLICIT + little_endian(mine)


def little_endian(values: array[int]) -> bytes:
    """The bytes of ``values`` as every machine writes them."""
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
        """The 256 header bytes, checksum included.

        Raises:
            PayloadError: a digest has the wrong length (``struct`` would cut or pad it in silence), or the
                dtype or codec is unknown.
        """
        digests = (self.key, self.parent, self.namespace, self.lineage)
        if any(len(digest) != 32 for digest in digests) or len(self.tenant) != 16:
            raise PayloadError("key, parent, namespace and lineage are 32 bytes each, tenant is 16")
        if self.dtype not in DTYPE_BYTES or self.codec not in CODECS:
            raise PayloadError(f"a block header cannot name dtype {self.dtype!r} with codec {self.codec!r}")
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
            Corrupt: too short, not a header of this version, the checksum does not match, or it holds what
                this version never writes.
        """
        if len(buffer) < HEADER_BYTES:
            raise Corrupt(f"block header needs {HEADER_BYTES} bytes, got {len(buffer)}")
        summed = bytes(buffer[:_SUMMED_BYTES])
        # Before the checksum, whose place another version may have changed: "wrong version" beats "damaged".
        if summed[: len(_PREFIX)] != _PREFIX:
            magic, version = summed[: len(MAGIC)], int.from_bytes(summed[8:10], "little")
            raise Corrupt(f"not a version {VERSION} block header (magic {magic!r}, version {version})")
        checksum, generation = _TAIL.unpack_from(buffer, _SUMMED_BYTES)
        if xxh3_64_intdigest(summed) != checksum:
            raise Corrupt("block header checksum does not match")
        (_, _, _, flags, key, parent, namespace, lineage, tenant, start, count, dtype, codec, spare,
         payload_bytes, producer, payload_checksum) = _FIELDS.unpack(summed)  # fmt: skip
        if dtype >= len(_DTYPES) or codec >= len(CODECS):
            raise Corrupt(f"block header names an unknown dtype {dtype} or codec {codec}")
        if flags & ~FLAG_APPROXIMATE or spare or any(summed[_RESERVED_OFFSET:]):
            raise Corrupt("block header uses flags or fields that this version does not know")
        return BlockHeader(
            BlockKey(key), BlockKey(parent), NamespaceId(namespace), lineage, TenantDigest(tenant), start,
            count, _DTYPES[dtype], CODECS[codec], payload_bytes, Incarnation(producer), payload_checksum,
            bool(flags & FLAG_APPROXIMATE), Generation(generation),
        )  # fmt: skip


def header_names(buffer: Buffer, key: BlockKey) -> bool:
    """Whether an intact header for ``key`` stands at the start of ``buffer``: every read's cheap check."""
    summed = bytes(buffer[:_SUMMED_BYTES])
    if summed[16:48] != key or len(buffer) < HEADER_BYTES:
        return False
    checksum: int = _TAIL.unpack_from(buffer, _SUMMED_BYTES)[0]
    return checksum == xxh3_64_intdigest(summed) and summed[: len(_PREFIX)] == _PREFIX


def verify_copy(buffer: Buffer, key: BlockKey) -> BlockHeader:
    """Verify a whole copy, ``header | payload``; ``buffer`` may be longer than the copy.

    Raises:
        Corrupt: the header is damaged, names another key, or the payload's checksum does not match.
    """
    header = BlockHeader.unpack(buffer)
    if header.key != key:
        raise Corrupt("copy holds another block than the one asked for")
    if len(buffer) < HEADER_BYTES + header.payload_bytes:
        have_bytes = len(buffer) - HEADER_BYTES
        raise Corrupt(f"copy is truncated: {have_bytes} of {header.payload_bytes} payload bytes")
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
        PayloadError: ``payload`` is not exactly ``namespace.block_bytes`` C-contiguous bytes.
    """
    if not payload.c_contiguous or payload.nbytes != namespace.block_bytes:
        raise PayloadError(
            f"a block of this namespace is {namespace.block_bytes} contiguous bytes "
            f"{namespace.block_shape} {namespace.dtype}; got {payload.nbytes}"
            + ("" if payload.c_contiguous else " that are not contiguous")
        )
    return BlockHeader(
        key, parent, namespace.id, lineage,
        namespace.tenant or NO_TENANT, logical_start, namespace.block_tokens,
        namespace.dtype, namespace.codec, payload.nbytes, producer, xxh3_64_intdigest(payload),
        namespace.approximate,
    )  # fmt: skip
