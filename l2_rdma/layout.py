"""``RegionHeader`` and ``RegionLayout``: what stands where in a region of shared memory.

::

    0            region header, 4 KiB
    4 KiB        bucketed index        bucket_count * 512 bytes            see l2_rdma.index
    hazards      hazard (pin) table    hazard_count words of 8 bytes       see l2_rdma.hazards
    slots        slab_count slabs of slab_bytes, cut into slots of one size class each, see l2_rdma.allocator

The header page holds what never changes (checksummed, below ``WORDS_OFFSET``) and a few *shared words* that
do::

    0     magic 8s              176  incarnation u64      232  hazard_count u64
    8     version u32           184  generation_base u64  240  slots_offset u64
    12    header_bytes u32      192  region_bytes u64     248  slab_bytes u64
    16    byte_order u64        200  index_offset u64     256  slab_count u64
    24    tenant 16s            208  bucket_count u64     264  device_slots u64
    40    instance 64s, utf-8   216  reserved             ...
    104   node 64s, utf-8       224  hazard_offset u64    1016 checksum u64, xxh3-64 of [0, 1016)

    1024  state word            1032 backed_bytes word    1040 pin_share word    2048  64 suspect words

**Shared words are single moves.**  A word that one process writes while another reads it must be loaded and
stored whole. ``memoryview.cast("Q")[i]`` does that: CPython packs a native format with one 8-byte ``memcpy``,
which every compiler turns into one move, and the words are 8-byte aligned.  ``struct.pack_into("<Q")`` does
*not*: a standard-size format is written byte by byte, and a reader can see half of it.  Hence "native" here,
and hence big-endian hosts are refused (``byte_order``).
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvcomm.block import HEADER_BYTES, Buffer, Generation, Incarnation
from kvcomm.errors import ConfigError, Corrupt
from kvcomm.namespace import TenantDigest

MAGIC = b"KVCREGN\x01"
VERSION = 1
PAGE_BYTES = 4096
REGION_HEADER_BYTES = 4096
ENTRY_BYTES = 64
BUCKET_ENTRIES = 8
BUCKET_BYTES = ENTRY_BYTES * BUCKET_ENTRIES
WORD_BYTES = 8
WORD_MASK = (1 << 64) - 1

WORDS_OFFSET = 1024
STATE_WORD = WORDS_OFFSET // WORD_BYTES
"""Index of the state word in ``memory.cast("Q")``."""
BACKED_WORD = STATE_WORD + 1
"""Bytes from the start of the region that have memory behind them; grows while the owner prefaults."""
PIN_SHARE_WORD = STATE_WORD + 2
"""Bytes each client may keep pinned now: the pool's pin budget, shared evenly by the clients there are."""
SUSPECT_FIRST_WORD = 2048 // WORD_BYTES
SUSPECT_COUNT = 64
"""Readers leave the offset of a slot that failed verification here; the owner looks at it in its next
tick."""

STATE_OPEN = 1
STATE_CLOSING = 2

GENERATION_WINDOW = 1 << 40
"""Generations of one region life are in ``[generation_base, generation_base + GENERATION_WINDOW)``."""
GENERATION_BASE_MAX = 1 << 62
RESERVED_FLAG = 1 << 63
"""Set in a slot's generation word while it is reserved: equal to no reader's reference, known to its
writer."""

_FIELDS = struct.Struct("<8sIIQ16s64s64sQQQQQ8xQQQQQQ")
_CHECKSUM_OFFSET = 1016
_CHECKSUM = struct.Struct("<Q")
_BYTE_ORDER = 0x0102030405060708
_DEFAULT_BLOCK_BYTES = 32 << 10  # one index entry for so many bytes of slots, unless told otherwise

assert _FIELDS.size <= _CHECKSUM_OFFSET


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Offsets and counts; all offsets are bytes from the start of the region.

    Raises:
        ValueError: the parts overlap, are misaligned or do not fit into ``region_bytes``.
    """

    region_bytes: int
    index_offset: int
    bucket_count: int
    hazard_offset: int
    hazard_count: int
    slots_offset: int
    slab_bytes: int
    slab_count: int

    def __post_init__(self) -> None:
        ordered = (
            self.index_offset >= REGION_HEADER_BYTES
            and self.index_offset + self.bucket_count * BUCKET_BYTES <= self.hazard_offset
            and self.hazard_offset + self.hazard_count * WORD_BYTES <= self.slots_offset
            and self.slots_offset + self.slab_bytes * self.slab_count <= self.region_bytes
        )
        aligned = all(
            offset % PAGE_BYTES == 0
            for offset in (
                self.region_bytes,
                self.index_offset,
                self.hazard_offset,
                self.slots_offset,
                self.slab_bytes,
            )
        )
        counted = min(self.bucket_count, self.hazard_count, self.slab_count, self.slab_bytes) > 0
        if not (ordered and aligned and counted):
            raise ValueError("the parts of the region overlap, are misaligned or do not fit")

    @property
    def slots_end(self) -> int:
        return self.slots_offset + self.slab_bytes * self.slab_count

    def holds_copy(self, offset: int, copy_bytes: int) -> bool:
        """Whether a copy can be there: what an index or a peer says is only a hint, never to be followed out
        of the slots."""
        in_slots = self.slots_offset <= offset and offset + copy_bytes <= self.slots_end
        return in_slots and offset % HEADER_BYTES == 0 and HEADER_BYTES <= copy_bytes <= self.slab_bytes


def suspect_word(offset: int) -> int:
    """Index of the word in which to leave a suspected slot's offset."""
    return SUSPECT_FIRST_WORD + offset // HEADER_BYTES % SUSPECT_COUNT


def plan_layout(
    region_bytes: int,
    *,
    slab_bytes: int | None = None,
    index_entries: int | None = None,
    hazard_count: int = 16_384,
) -> RegionLayout:
    """Divide ``region_bytes`` (rounded down to pages).

    Args:
        slab_bytes: unit in which size classes get memory, also the largest copy; by default 1/64 of the
            region as a power of two in [1 MiB, 64 MiB].
        index_entries: by default one for each 32 KiB.
        hazard_count: pins there can be at once, of all clients.

    Raises:
        ConfigError: the region is too small to hold a single slab.
    """
    region_bytes -= region_bytes % PAGE_BYTES
    if slab_bytes is None:
        slab_bytes = min(max(1 << max((region_bytes // 64).bit_length() - 1, 0), 1 << 20), 64 << 20)
    slab_bytes = _pages(slab_bytes)
    entries = index_entries if index_entries is not None else max(1024, region_bytes // _DEFAULT_BLOCK_BYTES)
    buckets = -(-entries // BUCKET_ENTRIES)
    hazard_offset = REGION_HEADER_BYTES + _pages(buckets * BUCKET_BYTES)
    slots_offset = hazard_offset + _pages(hazard_count * WORD_BYTES)
    slab_count = (region_bytes - slots_offset) // slab_bytes
    if slab_count < 1:
        raise ConfigError(
            f"a pool of {region_bytes} bytes has no room for one slab of {slab_bytes} bytes; "
            "raise cache.l2_size (a pool's) or cache.l3_size (a shard's)"
        )
    return RegionLayout(
        region_bytes,
        REGION_HEADER_BYTES,
        buckets,
        hazard_offset,
        hazard_count,
        slots_offset,
        slab_bytes,
        slab_count,
    )


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """Who a region belongs to and how it is laid out; ``pack`` and ``unpack`` are exact inverses.

    Raises:
        ValueError: a name is longer than 64 bytes or holds a NUL, or a number is out of range.
    """

    instance: str
    node: str
    tenant: TenantDigest
    """16 bytes; all zero = a region of a node that serves many tenants and is not attached by clients."""
    incarnation: Incarnation
    """Of the owner process."""
    generation_base: Generation
    """First generation this owner hands out; random, so that no reference into an earlier life matches."""
    layout: RegionLayout
    device_slots: bool = False
    """Whether the slots are in a GPU's memory.  The file holds their headers then, each where its slot would
    be, and no payloads."""

    def __post_init__(self) -> None:
        for name in (self.instance, self.node):
            if len(name.encode()) > 64 or "\0" in name:
                raise ValueError(f"region name part {name!r} must be at most 64 bytes without NUL")
        if len(self.tenant) != 16 or not 0 < self.generation_base <= GENERATION_BASE_MAX:
            raise ValueError("tenant must be 16 bytes and generation_base in (0, 2**62]")
        if not 0 < self.incarnation < 1 << 64:
            raise ValueError("incarnation must be in (0, 2**64)")

    def owns_generation(self, generation: int) -> bool:
        """Whether this region's owner, in this life, can have handed ``generation`` out."""
        return self.generation_base <= generation < self.generation_base + GENERATION_WINDOW

    def pack(self) -> bytes:
        """The fixed part of the header page: ``WORDS_OFFSET`` bytes."""
        at = self.layout
        fields = _FIELDS.pack(
            MAGIC, VERSION, REGION_HEADER_BYTES, _BYTE_ORDER, self.tenant, self.instance.encode(),
            self.node.encode(), self.incarnation, self.generation_base, at.region_bytes, at.index_offset,
            at.bucket_count, at.hazard_offset, at.hazard_count, at.slots_offset, at.slab_bytes, at.slab_count,
            self.device_slots,
        )  # fmt: skip
        summed = fields.ljust(_CHECKSUM_OFFSET, b"\0")
        return summed + _CHECKSUM.pack(xxh3_64_intdigest(summed))

    @staticmethod
    def unpack(buffer: Buffer) -> RegionHeader:
        """Parse and verify the start of a region.

        Raises:
            Corrupt: not a region of this version and byte order, or damaged.
        """
        if sys.byteorder != "little":
            raise Corrupt("shared-memory regions need a little-endian host")
        if len(buffer) < WORDS_OFFSET:
            raise Corrupt(f"a region header needs {WORDS_OFFSET} bytes, got {len(buffer)}")
        summed = bytes(buffer[:_CHECKSUM_OFFSET])
        (magic, version, header_bytes, byte_order, tenant, instance, node, incarnation, generation_base,
         region_bytes, index_offset, bucket_count, hazard_offset, hazard_count, slots_offset, slab_bytes,
         slab_count, device_slots) = _FIELDS.unpack_from(summed)  # fmt: skip
        if (magic, version, header_bytes, byte_order) != (MAGIC, VERSION, REGION_HEADER_BYTES, _BYTE_ORDER):
            raise Corrupt(f"not a version {VERSION} region (magic {magic!r}, version {version})")
        if _CHECKSUM.unpack_from(buffer, _CHECKSUM_OFFSET)[0] != xxh3_64_intdigest(summed):
            raise Corrupt("region header checksum does not match")
        try:
            layout = RegionLayout(
                region_bytes,
                index_offset,
                bucket_count,
                hazard_offset,
                hazard_count,
                slots_offset,
                slab_bytes,
                slab_count,
            )
            return RegionHeader(
                _text(instance), _text(node), TenantDigest(tenant), Incarnation(incarnation),
                Generation(generation_base), layout, _truth(device_slots),
            )  # fmt: skip
        except ValueError as error:
            raise Corrupt(f"region header contradicts itself: {error}") from error


def _truth(field: int) -> bool:
    if field > 1:
        raise ValueError(f"a flag is 0 or 1, not {field}")
    return field == 1


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode()
