"""``SlotMemory``: where the bytes of a region's slots are, as far as its owner must touch them.

``Owner`` decides about slots and never minds what they are made of.  :class:`FileSlots` is the region's own
file; ``l2_rdma.transports.cuda.slots`` is GPU memory beside it.
"""

from __future__ import annotations

from typing import Protocol

from xxhash import xxh3_64_intdigest

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES
from l2_rdma.layout import WORD_BYTES


class SlotMemory(Protocol):
    """Every ``offset`` is a slot's, in bytes from the start of the region."""

    def admit(self, offset: int) -> bool:
        """Whether a free slot can be used; asked before it is handed out."""
        ...

    def mark(self, offset: int, word: int) -> None:
        """Store a slot's generation word: whoever looks after this has returned sees it.  0 = the slot rests:
        forget what is kept for it."""
        ...

    def landing(self, offset: int, copy_bytes: int) -> memoryview:
        """Writable bytes into which a copy may be received, ``header | payload``."""
        ...

    def header(self, offset: int, copy_bytes: int) -> memoryview:
        """``HEADER_BYTES`` as the writer left them; what was received is in its place from now on."""
        ...

    def digest(self, offset: int, copy_bytes: int) -> int:
        """xxh3-64 of the payload as the writer left it."""
        ...

    def copy(self, offset: int, copy_bytes: int) -> memoryview:
        """``header | payload``, read-only, unchanged for as long as the slot is."""
        ...


class FileSlots:
    """Slots in the region's file: everything is just there.

    Args:
        memory: the whole region, writable.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory.cast("Q")

    def admit(self, offset: int) -> bool:
        return True

    def mark(self, offset: int, word: int) -> None:
        self._words[(offset + GENERATION_OFFSET) // WORD_BYTES] = word

    def landing(self, offset: int, copy_bytes: int) -> memoryview:
        return self._memory[offset : offset + copy_bytes]

    def header(self, offset: int, copy_bytes: int) -> memoryview:
        return self._memory[offset : offset + HEADER_BYTES]

    def digest(self, offset: int, copy_bytes: int) -> int:
        return xxh3_64_intdigest(self._memory[offset + HEADER_BYTES : offset + copy_bytes])

    def copy(self, offset: int, copy_bytes: int) -> memoryview:
        return self._memory[offset : offset + copy_bytes].toreadonly()
