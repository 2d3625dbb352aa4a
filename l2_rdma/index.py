"""The bucketed index: ``IndexWriter`` (the owner, alone) and ``IndexReader`` (everybody, one-sided).

An entry is 64 bytes::

    0   tag 16s           key[0:16]                  32  copy_bytes u64
    16  generation u64    0 = empty                  40  checksum u64    xxh3-64 of [0, 40)
    24  offset u64        of the slot, in the region 48  referenced u64  1 = read since the owner last looked
                                                     56  reserved

Eight entries are a bucket, and a key has two candidate buckets, both taken from key bytes (SHA-256: already
uniform) that the tag does not use.  A key whose 16 candidate entries are all taken displaces one of them: it
is a cache.

Entries are **hints**.  The owner rewrites them in place while readers copy them out, so a copy may be torn
between two writes; the checksum tells.  Even a whole entry may be old by the time it is used: the slot's own
header (full key, and the generation word) decides, never the entry.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvcomm.block import BlockKey, Generation
from l2_rdma.layout import BUCKET_BYTES, BUCKET_ENTRIES, ENTRY_BYTES, WORD_BYTES, RegionLayout

_SUMMED = struct.Struct("<16sQQQ")
_ENTRY = struct.Struct("<16sQQQQQ8x")
_TAG_BYTES = 16
_REFERENCED_WORD = 48 // WORD_BYTES
_EMPTY = bytes(ENTRY_BYTES)

assert _ENTRY.size == ENTRY_BYTES


class Hint(NamedTuple):
    """Where a copy probably is."""

    generation: Generation
    offset: int
    copy_bytes: int
    entry: int
    """Number of the entry, for its mark."""


class IndexReader:
    """Probes the index in ``memory`` (a whole region)."""

    def __init__(self, memory: memoryview, layout: RegionLayout) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._offset = layout.index_offset
        self._bucket_count = layout.bucket_count

    def probe(self, key: BlockKey) -> Hint | None:
        """The entry for ``key``, or ``None``; a torn entry counts as absent."""
        for bucket in candidate_buckets(key, self._bucket_count):
            begin = self._offset + bucket * BUCKET_BYTES
            hint = find_hint(bytes(self._memory[begin : begin + BUCKET_BYTES]), bucket, key)
            if hint is not None:
                return hint
        return None

    def mark_referenced(self, entry: int) -> None:
        """A hit was read: the owner keeps this block longer.  Reads first, so that hot entries' lines stay
        shared."""
        word = self._offset // WORD_BYTES + entry * (ENTRY_BYTES // WORD_BYTES) + _REFERENCED_WORD
        if not self._words[word]:
            self._words[word] = 1


class IndexWriter:
    """The owner's side.  Which entries are taken is private knowledge, so a scribbled index cannot mislead
    it."""

    def __init__(self, memory: memoryview, layout: RegionLayout) -> None:
        self._memory = memory
        self._words = memory.cast("Q")
        self._offset = layout.index_offset
        self._bucket_count = layout.bucket_count
        self._taken = bytearray(layout.bucket_count * BUCKET_ENTRIES)

    def insert(self, key: BlockKey, generation: Generation, offset: int, copy_bytes: int) -> int | None:
        """Write an entry; its number, or ``None`` when both buckets are full (see :meth:`candidates`).

        The emptier bucket is taken: two choices keep the fullest bucket within a few entries of the mean
        (Azar, Broder, Karlin and Upfal, "Balanced allocations").
        """
        buckets = candidate_buckets(key, self._bucket_count)
        bucket = min(buckets, key=self._load)
        entry = self._taken.find(0, bucket * BUCKET_ENTRIES, (bucket + 1) * BUCKET_ENTRIES)
        if entry < 0:
            return None
        self._taken[entry] = 1
        self.rewrite(entry, key, generation, offset, copy_bytes)
        return entry

    def rewrite(
        self, entry: int, key: BlockKey, generation: Generation, offset: int, copy_bytes: int
    ) -> None:
        """Write a taken entry (again)."""
        begin = self._offset + entry * ENTRY_BYTES
        self._memory[begin : begin + ENTRY_BYTES] = _packed(key, generation, offset, copy_bytes)

    def intact(self, entry: int, key: BlockKey, generation: Generation, offset: int, copy_bytes: int) -> bool:
        """Whether the entry still says what :meth:`insert` wrote; the mark may differ."""
        begin = self._offset + entry * ENTRY_BYTES
        return bool(self._memory[begin : begin + 48] == _packed(key, generation, offset, copy_bytes)[:48])

    def remove(self, entry: int) -> None:
        begin = self._offset + entry * ENTRY_BYTES
        self._memory[begin : begin + ENTRY_BYTES] = _EMPTY
        self._taken[entry] = 0

    def candidates(self, key: BlockKey) -> list[int]:
        """Numbers of the 16 entries in which ``key`` could stand."""
        return [
            bucket * BUCKET_ENTRIES + place
            for bucket in candidate_buckets(key, self._bucket_count)
            for place in range(BUCKET_ENTRIES)
        ]

    def take_referenced(self, entry: int) -> bool:
        """Whether the entry was read since the last call; clears the mark."""
        word = self._offset // WORD_BYTES + entry * (ENTRY_BYTES // WORD_BYTES) + _REFERENCED_WORD
        seen = self._words[word] != 0
        if seen:
            self._words[word] = 0
        return seen

    def referenced(self, entry: int) -> bool:
        """The same, without clearing."""
        return (
            self._words[self._offset // WORD_BYTES + entry * (ENTRY_BYTES // WORD_BYTES) + _REFERENCED_WORD]
            != 0
        )

    def mark_referenced(self, entry: int) -> None:
        self._words[self._offset // WORD_BYTES + entry * (ENTRY_BYTES // WORD_BYTES) + _REFERENCED_WORD] = 1

    def _load(self, bucket: int) -> int:
        return self._taken.count(1, bucket * BUCKET_ENTRIES, (bucket + 1) * BUCKET_ENTRIES)


def candidate_buckets(key: BlockKey, bucket_count: int) -> tuple[int, int]:
    """The two buckets of ``key``; equal only if there is just one bucket."""
    first = int.from_bytes(key[16:24], "little") % bucket_count
    second = int.from_bytes(key[24:32], "little") % bucket_count
    if first == second:
        second = (first + 1) % bucket_count
    return first, second


def find_hint(snapshot: bytes, bucket: int, key: BlockKey) -> Hint | None:
    """The entry for ``key`` in a copy of a bucket, however it was read; a torn entry counts as absent."""
    tag = key[:_TAG_BYTES]
    at = snapshot.find(tag)
    while at >= 0:
        if at % ENTRY_BYTES == 0 and (hint := _parse(snapshot, at, bucket)):
            return hint
        at = snapshot.find(tag, at + 1)
    return None


def bucket_offset(layout: RegionLayout, bucket: int) -> int:
    """Of a bucket's first byte, in the region."""
    return layout.index_offset + bucket * BUCKET_BYTES


def is_marked(snapshot: bytes, entry: int) -> bool:
    """Whether ``entry`` was read since the owner last looked, by a copy of its bucket."""
    begin = entry % BUCKET_ENTRIES * ENTRY_BYTES + _REFERENCED_WORD * WORD_BYTES
    return any(snapshot[begin : begin + WORD_BYTES])


def mark_offset(layout: RegionLayout, entry: int) -> int:
    """Of an entry's mark, in the region: a word, 1 = read since the owner last looked."""
    return layout.index_offset + entry * ENTRY_BYTES + _REFERENCED_WORD * WORD_BYTES


def _packed(key: BlockKey, generation: Generation, offset: int, copy_bytes: int) -> bytes:
    fields = _SUMMED.pack(key[:_TAG_BYTES], generation, offset, copy_bytes)
    return _ENTRY.pack(key[:_TAG_BYTES], generation, offset, copy_bytes, xxh3_64_intdigest(fields), 0)


def _parse(snapshot: bytes, at: int, bucket: int) -> Hint | None:
    _, generation, offset, copy_bytes, checksum, _ = _ENTRY.unpack_from(snapshot, at)
    if not generation or checksum != xxh3_64_intdigest(snapshot[at : at + _SUMMED.size]):
        return None
    return Hint(Generation(generation), offset, copy_bytes, bucket * BUCKET_ENTRIES + at // ENTRY_BYTES)
