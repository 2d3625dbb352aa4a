"""``DeviceSlots``: the owner's hand in slots that are in GPU memory; implements ``SlotMemory``.

A slot's generation word is kept twice: in the file, where readers of this host pin and compare, and in the
slot itself, for those who read it like any other region.  Both are stored before :meth:`DeviceSlots.mark`
returns, and the owner looks at the hazards only after that.

The owner is the only one who writes headers into the file: it takes them from the GPU when it publishes, and
again when it inspects a suspect.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES
from l2_rdma.copying import address_of
from l2_rdma.layout import WORD_BYTES
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.cuda.xxh3 import LONG_BYTES_MIN


class DeviceSlots:
    """Of ``region``, in its owner's process.  Not thread-safe.  Every method waits for the GPU, some 10
    us."""

    def __init__(self, region: CudaRegion) -> None:
        self._region = region
        self._memory = region.file.memory
        self._words = region.file.words
        self._stream = region.gpu.stream()
        region.gpu.digests([])  # compiled now, while nobody waits
        self._word = memoryview(bytearray(WORD_BYTES)).cast("Q")
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._landed: dict[int, memoryview] = {}
        self._backed: set[int] = set()

    def admit(self, offset: int) -> bool:
        if offset not in self._backed:
            if not self._region.file.back_header(offset):
                return False
            self._backed.add(offset)
        return True

    def mark(self, offset: int, word: int) -> None:
        self._words[(offset + GENERATION_OFFSET) // WORD_BYTES] = word
        self._word[0] = word
        self._put(offset + GENERATION_OFFSET, self._word)
        if not word:
            self._landed.pop(offset, None)

    def landing(self, offset: int, copy_bytes: int) -> memoryview:
        landing = memoryview(bytearray(copy_bytes))
        self._landed[offset] = landing
        return landing

    def header(self, offset: int, copy_bytes: int) -> memoryview:
        landed = self._landed.pop(offset, None)
        if landed is not None:
            self._put(offset, landed[:GENERATION_OFFSET])
            self._put(offset + HEADER_BYTES, landed[HEADER_BYTES:])
        self._get(offset, self._header)
        self._memory[offset : offset + GENERATION_OFFSET] = self._header[:GENERATION_OFFSET]
        return self._header

    def digest(self, offset: int, copy_bytes: int) -> int:
        length = copy_bytes - HEADER_BYTES
        begin = offset + HEADER_BYTES
        if length >= LONG_BYTES_MIN:
            return self._region.gpu.digests([(self._region.address(begin), length)])[0]
        payload = memoryview(bytearray(length))
        self._get(begin, payload)
        return xxh3_64_intdigest(payload)

    def copy(self, offset: int, copy_bytes: int) -> memoryview:
        copy = memoryview(bytearray(copy_bytes))
        copy[:HEADER_BYTES] = self._memory[offset : offset + HEADER_BYTES]
        self._get(offset + HEADER_BYTES, copy[HEADER_BYTES:])
        return copy.toreadonly()

    def close(self) -> None:
        self._stream.close()

    def _put(self, offset: int, source: memoryview) -> None:
        if source.nbytes:
            self._stream.copy(self._region.address(offset), address_of(source), source.nbytes)
            self._stream.wait()

    def _get(self, offset: int, destination: memoryview) -> None:
        if destination.nbytes:
            self._stream.copy(address_of(destination), self._region.address(offset), destination.nbytes)
            self._stream.wait()
