"""``CudaReader``: one-sided reads of a pool in GPU memory, for a process that wants the bytes on its own GPU.

The protocol is ``l2_rdma.reader``'s: probe the index, pin, compare the generation word, verify.  Header and
word are looked at in the region's file, so only payloads cross between GPUs:

* a :class:`DeviceBlock` is a view of the pool's memory, pinned for as long as it or an array made from it
  lives; a kernel of this process may read it where it is (``kvcomm.engines.kernels`` scatters it into a
  paged cache);
* :meth:`CudaReader.fetch` copies payloads into buffers of the caller's, from pinned slots.

Payloads are verified by digests computed on the GPU, all that a call needs in one go, once per process and
(offset, generation).  Without a pin to be had, a payload is copied out between two looks at the generation,
and the copy is verified each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES, BlockHeader, BlockKey, Generation
from kvcomm.errors import Corrupt, PayloadError, Unavailable
from l2_rdma.copying import address_of
from l2_rdma.fence import full_fence, register_for_barriers
from l2_rdma.index import Hint, IndexReader
from l2_rdma.layout import WORD_BYTES, suspect_word
from l2_rdma.pins import PinTable
from l2_rdma.reader import VERIFIED_MAX, ReaderCounters
from l2_rdma.transports.cuda.gpu import DeviceBuffer, Gpu, Marker, Stream
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.cuda.xxh3 import LONG_BYTES_MIN, POINTER_ALIGNMENT

_GENERATION_WORD = GENERATION_OFFSET // WORD_BYTES
_SPIN_S = 0.002
_NAP_S = 0.00005


class _Pin:
    """Held by a block's buffer; ends with it."""

    __slots__ = ("_number", "_pins")

    def __init__(self, pins: PinTable, number: int) -> None:
        self._pins = pins
        self._number = number

    def __del__(self) -> None:
        self._pins.unpin(self._number)


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A verified block in the pool's GPU memory, pinned; read-only by agreement.

    A kernel that reads it must be over before the last reference goes: GPUs know nothing of references.
    """

    header: BlockHeader
    payload: DeviceBuffer
    """``header.payload_bytes`` bytes, aligned to 256."""

    @property
    def key(self) -> BlockKey:
        return self.header.key


_AT_FIRST, _AT_ONCE = 2, 16
"""Known blocks that are pinned before one of them is copied: few, so that the GPU has something to do; then
more
and more, as pinning many costs less a block."""


class _Known(NamedTuple):
    """A verified slot.  Its generation is of this key alone, and never used again: while the slot's word is
    that
    one, the slot holds this block."""

    place: tuple[int, int]
    """Offset and length of the copy."""
    generation: Generation
    word: int
    """Index of the generation word in the file."""
    entry: int
    raw: bytes
    """The header's bytes up to the generation word."""
    header: BlockHeader
    address: int
    """Of the payload."""


@dataclass(slots=True)
class _Found:
    """A pinned slot on its way to being a block."""

    index: int
    hint: Hint
    header: BlockHeader
    raw: bytes
    payload: DeviceBuffer


class CudaReader:
    """Reads ``region`` through ``pins``.  Thread-safe."""

    def __init__(
        self, region: CudaRegion, pins: PinTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.region = region
        self.pins = pins
        self.counters = ReaderCounters()
        self._clock = clock
        self._gpu: Gpu = region.gpu
        self._memory, self._words = region.file.memory, region.file.words
        layout = self._layout = region.header.layout
        self._index = IndexReader(self._memory, layout)
        self._stream: Stream = region.gpu.stream()
        self._known: dict[BlockKey, _Known] = {}
        self._base = region.slots.pointer - layout.slots_offset
        register_for_barriers()
        self._gpu.digests([])  # compiled now, while nobody waits

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which keys the index names.  Pins, renews and verifies nothing."""
        return [self._index.probe(key) is not None for key in keys]

    def view(self, keys: Sequence[BlockKey]) -> list[DeviceBlock | None]:
        """The blocks where they are, pinned and verified; ``None`` for a miss, and for what could not be
        pinned (:meth:`fetch` gets that, too)."""
        blocks: list[DeviceBlock | None] = [None] * len(keys)
        for index, known, number in self._pin_known(keys, 0, len(keys)):
            payload = DeviceBuffer(known.address, known.header.payload_bytes, _Pin(self.pins, number))
            blocks[index] = DeviceBlock(known.header, payload)
        new = [index for index, block in enumerate(blocks) if block is None]
        found = [each for index in new if (each := self._pinned(index, keys[index])) is not None]
        for each in self._intact(found):
            blocks[each.index] = DeviceBlock(each.header, each.payload)
            self._index.mark_referenced(each.hint.entry)
        missed = sum(block is None for block in blocks)
        self.counters.hits += len(keys) - missed
        self.counters.misses += missed
        return blocks

    def fetch(
        self, keys: Sequence[BlockKey], into: Sequence[DeviceBuffer], deadline: float
    ) -> list[BlockHeader | None]:
        """Copy payloads into buffers on this process's GPU; the header of each, ``None`` for a miss, whose
        buffer holds anything.

        All copies are enqueued before one is waited for, beside whatever other streams do: none may be using
        the buffers still.

        Raises:
            PayloadError: a buffer is not as long as its payload.
            Unavailable: the copies are not over by ``deadline`` (monotonic seconds); they are when this is
                raised, and worth nothing.
        """
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} keys and {len(into)} buffers")
        headers: list[BlockHeader | None] = [None] * len(keys)
        pins: list[int] = []
        copy = self._stream.copy
        try:
            for begin, end in _growing(len(keys)):
                pinned = self._pin_known(keys, begin, end)
                pins += [number for _, _, number in pinned]
                for index, known, _ in pinned:
                    buffer, header = into[index], known.header
                    check_length(header, buffer)
                    copy(buffer.pointer, known.address, buffer.nbytes)
                    headers[index] = header
            self.counters.hits += len(pins)
            new = [index for index, header in enumerate(headers) if header is None]
            blocks = self.view([keys[index] for index in new]) if new else []
            for index, block in zip(new, blocks, strict=True):
                if block is not None:
                    check_length(block.header, into[index])
                    copy(into[index].pointer, block.payload.pointer, block.payload.nbytes)
                    headers[index] = block.header
        finally:
            try:
                self._await(deadline)
            finally:
                for number in pins:
                    self.pins.unpin(number)
        for index in new:
            if headers[index] is None:
                headers[index] = self._copied(keys[index], into[index])
        return headers

    def begin_write(self, offset: int, generation: int, size_bytes: int) -> int | None:
        """Pin a reserved extent for writing; see ``Reader.begin_write``."""
        return self.pins.pin_reserved(offset, generation, size_bytes)

    def write(self, offset: int, header: bytes, payload: DeviceBuffer) -> None:
        """Fill an extent pinned by :meth:`begin_write`, all but its generation word; over when this
        returns."""
        summed = memoryview(header)[:GENERATION_OFFSET]
        self._stream.copy(self.region.address(offset), address_of(summed), summed.nbytes)
        self._stream.copy(self.region.address(offset + HEADER_BYTES), payload.pointer, payload.nbytes)
        self._stream.wait()

    def end_write(self, number: int) -> None:
        self.pins.unpin(number)

    def digest(self, payload: DeviceBuffer) -> int:
        """What a header says of this payload: xxh3-64."""
        return self._digests([payload])[0]

    def close(self) -> None:
        """Wait for what is under way.  Views stay valid for as long as the region is mapped."""
        self._stream.close()

    # -- finding and verifying

    def _pin_known(self, keys: Sequence[BlockKey], begin: int, end: int) -> list[tuple[int, _Known, int]]:
        """Of ``keys[begin:end]`` those that were verified before, are the same still, and could be pinned:
        (index, known, number of the pin)."""
        known = [
            (index, each)
            for index, key in enumerate(keys[begin:end], begin)
            if (each := self._known.get(key))
        ]
        numbers = self.pins.pin_all([each.place for _, each in known])
        words, memory = self._words, self._memory
        pinned = []
        for (index, each), number in zip(known, numbers, strict=False):
            offset = each.place[0]
            if words[each.word] == each.generation and (
                bytes(memory[offset : offset + GENERATION_OFFSET]) == each.raw
            ):
                self._index.mark_referenced(each.entry)
                pinned.append((index, each, number))
            else:
                self.pins.unpin(number)
        return pinned

    def _pinned(self, index: int, key: BlockKey) -> _Found | None:
        """Twice, if the slot moves on in between."""
        for attempt in range(2):
            hint = self._index.probe(key)
            if hint is None or not self._layout.holds_copy(hint.offset, hint.copy_bytes):
                return None
            self.counters.retries += attempt
            number = self.pins.pin(hint.offset, hint.copy_bytes)
            if number is None:
                return None
            pin = _Pin(self.pins, number)
            if self._word(hint.offset) != hint.generation:
                continue
            header, raw = self._header(hint, key)
            if header is None:
                self._report(hint.offset)
                return None
            payload = self._payload(hint, pin)
            return _Found(index, hint, header, raw, payload)
        return None

    def _header(self, hint: Hint, key: BlockKey) -> tuple[BlockHeader | None, bytes]:
        raw = bytes(self._memory[hint.offset : hint.offset + HEADER_BYTES])
        try:
            header = BlockHeader.unpack(raw)
        except Corrupt:
            return None, raw
        fits = header.key == key and HEADER_BYTES + header.payload_bytes == hint.copy_bytes
        return (header if fits else None), raw[:GENERATION_OFFSET]

    def _payload(self, hint: Hint, owner: object) -> DeviceBuffer:
        return DeviceBuffer(
            self.region.address(hint.offset + HEADER_BYTES), hint.copy_bytes - HEADER_BYTES, owner
        )

    def _intact(self, found: Sequence[_Found]) -> list[_Found]:
        """Those whose payload is what the header says; they are known from now on."""
        intact = []
        for each, digest in zip(found, self._digests([each.payload for each in found]), strict=True):
            hint = each.hint
            if digest != each.header.payload_checksum:
                self._report(hint.offset)
                continue
            self.counters.payloads_verified += 1
            if len(self._known) >= VERIFIED_MAX:
                self._known.clear()
            word = hint.offset // WORD_BYTES + _GENERATION_WORD
            self._known[each.header.key] = _Known(
                (hint.offset, hint.copy_bytes), hint.generation, word, hint.entry, each.raw, each.header,
                each.payload.pointer,
            )  # fmt: skip
            intact.append(each)
        return intact

    def _digests(self, payloads: Sequence[DeviceBuffer]) -> list[int]:
        usual = [each for each in payloads if _fits_kernels(each)]
        found = iter(self._gpu.digests([(each.pointer, each.nbytes) for each in usual]) if usual else [])
        return [next(found) if _fits_kernels(each) else self._host_digest(each) for each in payloads]

    def _host_digest(self, payload: DeviceBuffer) -> int:
        on_host = memoryview(bytearray(max(payload.nbytes, 1)))
        if payload.nbytes:
            self._stream.copy(address_of(on_host), payload.pointer, payload.nbytes)
            self._stream.wait()
        return xxh3_64_intdigest(on_host[: payload.nbytes])

    def _copied(self, key: BlockKey, into: DeviceBuffer) -> BlockHeader | None:
        """Without a pin: between two looks at the generation word (a sequence lock), then the copy itself is
        verified."""
        hint = self._index.probe(key)
        if hint is None or not self._layout.holds_copy(hint.offset, hint.copy_bytes):
            return None
        if self._word(hint.offset) != hint.generation:
            return None
        header, _ = self._header(hint, key)
        if header is None:
            return None
        check_length(header, into)
        self._stream.copy(into.pointer, self.region.address(hint.offset + HEADER_BYTES), into.nbytes)
        self._stream.wait()
        full_fence()
        if self._word(hint.offset) != hint.generation:
            return None
        if self._digests([into])[0] != header.payload_checksum:
            self._report(hint.offset)
            return None
        self.counters.unpinned_copies += 1
        self.counters.payloads_verified += 1
        self.counters.misses -= 1
        self.counters.hits += 1
        self._index.mark_referenced(hint.entry)
        return header

    def _await(self, deadline: float) -> None:
        """Until our copies are over.  An idle stream says so for less than an event does, but with other
        threads at work it may never be idle: then an event says it."""
        clock = self._clock
        over, begun = self._stream.idle, clock()
        marker: Marker | None = None
        try:
            while not over():
                now = clock()
                if now >= deadline:
                    raise Unavailable("the copies were not over in time")
                if now - begun > _SPIN_S:
                    if marker is None:
                        marker = self._stream.mark()
                        over = marker.done
                    time.sleep(_NAP_S)
        except BaseException:  # an interrupt, too: the buffers are the caller's again, and the pins go
            with suppress(Unavailable):  # then the GPU itself failed, and its copies with it
                self._stream.wait()
            raise
        finally:
            if marker is not None:
                marker.release()

    def _word(self, offset: int) -> int:
        return self._words[offset // WORD_BYTES + _GENERATION_WORD]

    def _report(self, offset: int) -> None:
        self.counters.corrupt += 1
        self._words[suspect_word(offset)] = offset


def _growing(count: int) -> Iterator[tuple[int, int]]:
    """Runs ``[begin, end)`` of so many blocks, each twice as long as the one before."""
    begin, length = 0, _AT_FIRST
    while begin < count:
        yield begin, min(begin + length, count)
        begin, length = begin + length, min(2 * length, _AT_ONCE)


def _fits_kernels(payload: DeviceBuffer) -> bool:
    return payload.nbytes >= LONG_BYTES_MIN and payload.pointer % POINTER_ALIGNMENT == 0


def check_length(header: BlockHeader, into: DeviceBuffer) -> None:
    """Raises ``PayloadError`` unless the buffer is as long as the payload."""
    if into.nbytes != header.payload_bytes:
        raise PayloadError(f"the payload is {header.payload_bytes} bytes, the buffer {into.nbytes}")
