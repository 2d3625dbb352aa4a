"""``Reader``: one-sided reads of a region, in the client's process.  Nobody is asked and nobody is told.

A read: probe the key's buckets, pin the slot the entry names (``l2_rdma.pins``), then look at the slot
itself.

* generation word other than the entry's → the slot moved on while we looked: probe once more, then a miss;
* header not intact or of another key → the same;
* payload checksum: once per process and (offset, generation), remembered with the verified header bytes,
  which every later read compares in full.  A published slot never changes before its generation does, so what
  was verified stays so.

A *stable* slot (same entry twice, pinned) that fails is damaged: a miss, counted, and its offset is left in
the region's suspect words for the owner to inspect.

Without a free hazard word or within no budget the bytes are copied out between two looks at the generation
word, and the copy is verified each time: slower, never weaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES, BlockHeader, BlockKey, Generation
from kvcomm.errors import Corrupt, PayloadError
from kvcomm.tier import Block
from l2_rdma.copying import copy_bytes
from l2_rdma.fence import full_fence, register_for_barriers
from l2_rdma.index import Hint, IndexReader
from l2_rdma.layout import WORD_BYTES, suspect_word
from l2_rdma.pins import PinTable
from l2_rdma.region import Region

VERIFIED_MAX = 65_536
"""Slots whose verification is remembered; at the bound all is forgotten and verified again."""
_GENERATION_WORD = GENERATION_OFFSET // WORD_BYTES


@dataclass(slots=True)
class ReaderCounters:
    """Since the reader was made.  ``hits + misses`` = reads."""

    hits: int = 0
    misses: int = 0
    retries: int = 0
    """Slots that moved on between index and slot."""
    payloads_verified: int = 0
    corrupt: int = 0
    """Stable slots that failed verification: reported to the owner, not served."""
    unpinned_copies: int = 0
    """Reads that had to copy because nothing more could be pinned."""
    unavailable: int = 0
    """Misses because the pool could not be reached, or not in time."""
    hit_bytes: int = 0
    """Of the copies that were hits, headers included."""


class Verification:
    """What a reader insists on.  A seam for tests, which show that wrong bytes do get through without it."""

    def current(self, word: int, generation: Generation) -> bool:
        """Whether the slot's generation word is the one that led here."""
        return word == generation

    def header(self, copy: memoryview, key: BlockKey) -> BlockHeader | None:
        """The header at the start of ``copy``, if it is intact, of ``key`` and as long as the copy."""
        try:
            header = BlockHeader.unpack(copy)
        except Corrupt:
            return None
        return header if header.key == key and HEADER_BYTES + header.payload_bytes == len(copy) else None

    def payload(self, header: BlockHeader, copy: memoryview) -> bool:
        return xxh3_64_intdigest(copy[HEADER_BYTES:]) == header.payload_checksum


class _Verified(NamedTuple):
    generation: Generation
    raw: bytes
    """The header's bytes up to the generation word."""
    header: BlockHeader


_Outcome = Block | Literal["moved", "damaged"]


class Reader:
    """Reads ``region`` through ``pins``.  Thread-safe.

    Args:
        pins: this process's hazard words; a table without words makes every read a verified copy.
        view_bytes_min: smaller copies are copied out instead of pinned.
        verify: leave it alone outside tests.
    """

    def __init__(
        self, region: Region, pins: PinTable, *, view_bytes_min: int = 0, verify: Verification | None = None
    ) -> None:
        self.region = region
        self.pins = pins
        self.counters = ReaderCounters()
        self._view_bytes_min = view_bytes_min
        self._verify = verify or Verification()
        self._index = IndexReader(region.memory, region.header.layout)
        self._memory = region.memory
        self._words = region.words
        self._layout = region.header.layout
        self._verified: dict[int, _Verified] = {}
        register_for_barriers()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys the index names.  Pins, renews and verifies nothing."""
        return [self._index.probe(key) is not None for key in keys]

    def view(self, key: BlockKey) -> Block | None:
        """The block, as a read-only view of the pool's memory, pinned for as long as anything made from it
        lives (``pinned=False``: a verified copy of its own, because nothing more could be pinned).

        A view does not survive ``fork``: the child must read again.
        """
        hint = self._index.probe(key)
        outcome: _Outcome = "moved" if hint is None else self._read(hint, key)
        if hint is not None and not isinstance(outcome, Block):
            outcome = self._settle(hint, key, outcome)
        if isinstance(outcome, Block):
            self.counters.hits += 1
            self.counters.hit_bytes += len(outcome.copy)
            return outcome
        self.counters.misses += 1
        return None

    def copy_into(self, key: BlockKey, destination: memoryview) -> BlockHeader | None:
        """Copy a block's payload into ``destination``; its header, or ``None`` for a miss (``destination`` is
        untouched then).

        The source is pinned and verified while it is copied, so the copy needs no second look.

        Raises:
            PayloadError: ``destination`` is not as many contiguous writable bytes as the payload has.
        """
        block = self.view(key)
        if block is None:
            return None
        usable = destination.c_contiguous and not destination.readonly
        if destination.nbytes != block.header.payload_bytes or not usable:
            raise PayloadError(
                f"the destination must be {block.header.payload_bytes} contiguous writable bytes; got "
                f"{destination.nbytes} (contiguous: {destination.c_contiguous}, writable: "
                f"{not destination.readonly})"
            )
        copy_bytes(destination, block.payload)
        return block.header

    def begin_write(self, offset: int, generation: int, size_bytes: int) -> int | None:
        """Pin a reserved extent for writing (``generation`` from the grant); the pin's number, or ``None``:
        the reservation is gone, is not of this region's owner, or nothing can be pinned: send the bytes over
        the wire instead.

        While the pin lasts the owner does not hand the slot on, even if the reservation expires; end it with
        :meth:`end_write`.
        """
        return self.pins.pin_reserved(offset, generation, size_bytes)

    def write(self, offset: int, header: bytes, payload: memoryview) -> None:
        """Fill an extent pinned by :meth:`begin_write`; ``header`` is ``BlockHeader.pack()``.  The generation
        word is the owner's."""
        self._memory[offset : offset + GENERATION_OFFSET] = header[:GENERATION_OFFSET]
        begin = offset + HEADER_BYTES
        copy_bytes(self._memory[begin : begin + payload.nbytes], payload)

    def end_write(self, number: int) -> None:
        self.pins.unpin(number)

    def _settle(self, hint: Hint, key: BlockKey, outcome: _Outcome) -> _Outcome:
        """After a first try that failed: once more if the slot had moved on; report a slot that is
        damaged."""
        if outcome == "moved":
            self.counters.retries += 1
            again = self._index.probe(key)
            if again is None:
                return "moved"
            outcome = self._read(again, key)
            if outcome == "moved" and again[:3] == hint[:3]:
                outcome = "damaged"  # an entry that leads nowhere, twice
            hint = again
        if outcome == "damaged":
            self._report(hint.offset)
        return outcome

    def _read(self, hint: Hint, key: BlockKey) -> _Outcome:
        generation, offset, size, entry = hint
        if not self._layout.holds_copy(offset, size):
            return "moved"
        if size < self._view_bytes_min:
            return self._copied(hint, key)
        number = self.pins.pin(offset, size)
        if number is None:
            self.counters.unpinned_copies += 1
            return self._copied(hint, key)
        if not self._verify.current(self._words[offset // WORD_BYTES + _GENERATION_WORD], generation):
            self.pins.unpin(number)
            return "moved"
        copy = self.pins.view(number, offset, size)  # the pin is the view's now
        header = self._verified_header(copy, key, offset, generation)
        if header is None:
            return "damaged"
        self._index.mark_referenced(entry)
        return Block(header, copy, "l2", pinned=True)

    def _verified_header(
        self, copy: memoryview, key: BlockKey, offset: int, generation: Generation
    ) -> BlockHeader | None:
        known = self._verified.get(offset)
        raw = bytes(copy[:GENERATION_OFFSET])
        if (
            known is not None
            and known.generation == generation
            and known.raw == raw
            and known.header.key == key
        ):
            return known.header
        header = self._verify.header(copy, key)
        if header is None or not self._verify.payload(header, copy):
            return None
        self.counters.payloads_verified += 1
        if len(self._verified) >= VERIFIED_MAX:
            self._verified.clear()
        self._verified[offset] = _Verified(generation, raw, header)
        return header

    def _copied(self, hint: Hint, key: BlockKey) -> _Outcome:
        """Without a pin: copy between two looks at the generation word (a sequence lock), then verify the
        copy."""
        generation, offset, size, entry = hint
        word = offset // WORD_BYTES + _GENERATION_WORD
        if not self._verify.current(self._words[word], generation):
            return "moved"
        copy = memoryview(bytearray(size))
        copy_bytes(copy, self._memory[offset : offset + size])
        full_fence()
        if not self._verify.current(self._words[word], generation):
            return "moved"
        header = self._verify.header(copy, key)
        if header is None or not self._verify.payload(header, copy):
            return "damaged"
        self.counters.payloads_verified += 1
        self._index.mark_referenced(entry)
        return Block(header, copy.toreadonly(), "l2", pinned=False)

    def _report(self, offset: int) -> None:
        self.counters.corrupt += 1
        self._words[suspect_word(offset)] = offset
