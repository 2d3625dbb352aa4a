"""``PinTable``: a client's hazard words, and the zero-copy views that they protect.

The owner's side and the proof are in ``l2_rdma.hazards``.

A view is a ``ctypes`` array over the mapping.  Everything made from it (memoryviews and their slices, numpy
arrays, torch tensors) keeps the array alive, and its destructor clears the hazard: the pin lasts exactly as
long as anybody can read through it.  The array refers to this table, and the table to the region, so the
mapping and the lock on the hazard words outlive the connection and the tier that made them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvcomm.block import GENERATION_OFFSET
from l2_rdma.fence import full_fence
from l2_rdma.layout import PIN_SHARE_WORD, RESERVED_FLAG, WORD_BYTES
from l2_rdma.region import Region

_TYPES_MAX = 64


class PinTable:
    """Hazard words ``[first, first + count)`` of ``region``; thread-safe.

    Args:
        first, count: as granted by the owner.  If they are not in the table, another process holds their
            lock, or ``count`` is 0, nothing can be pinned and every :meth:`pin` answers ``None``.
        budget_bytes: never pin more than this, whatever the owner's share says.
    """

    def __init__(self, region: Region, first: int, count: int, budget_bytes: int | None = None) -> None:
        self.region = region
        self._words = region.words
        self._first = region.header.layout.hazard_offset // WORD_BYTES + first
        self._budget_bytes = budget_bytes
        in_table = first >= 0 and 0 < count <= region.header.layout.hazard_count - first
        usable = in_table and region.lock_hazards(first, count)
        self._free = list(range(count if usable else 0))[::-1]
        self._count = len(self._free)
        self._sizes = [0] * self._count
        self._returned: deque[int] = deque()
        self._pinned_bytes = 0
        self._lock = threading.Lock()
        self._mine = True
        _tables.add(self)

    @property
    def count(self) -> int:
        """Words there are."""
        return self._count

    @property
    def pinned_bytes(self) -> int:
        """Bytes under a pin now."""
        with self._lock:
            self._drain()
            return self._pinned_bytes

    @property
    def pinned_count(self) -> int:
        with self._lock:
            self._drain()
            return self._count - len(self._free)

    def pin(self, offset: int, size_bytes: int) -> int | None:
        """Store a hazard for the slot at ``offset`` and fence; its number, or ``None``: no word or no budget
        left.

        Only after this may the slot's generation be looked at.
        """
        share = self._words[PIN_SHARE_WORD]
        limit = share if self._budget_bytes is None else min(share, self._budget_bytes)
        with self._lock:
            self._drain()
            if not self._free or not self._mine or self._pinned_bytes + size_bytes > limit:
                return None
            number = self._free.pop()
            self._sizes[number] = size_bytes
            self._pinned_bytes += size_bytes
        self._words[self._first + number] = offset
        full_fence()
        return number

    def pin_all(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """Like :meth:`pin` for each (offset, size), with one fence for all; as many as can be pinned, in
        order."""
        share = self._words[PIN_SHARE_WORD]
        limit = share if self._budget_bytes is None else min(share, self._budget_bytes)
        numbers: list[int] = []
        with self._lock:
            self._drain()
            for _, size_bytes in places:
                if not self._free or not self._mine or self._pinned_bytes + size_bytes > limit:
                    break
                number = self._free.pop()
                self._sizes[number] = size_bytes
                self._pinned_bytes += size_bytes
                numbers.append(number)
        for number, (offset, _) in zip(numbers, places, strict=False):
            self._words[self._first + number] = offset
        full_fence()
        return numbers

    def unpin(self, number: int) -> None:
        """Clear a hazard.  Runs in destructors, so anywhere, even inside :meth:`pin`: two atomic steps and no
        lock."""
        if self._mine:
            self._words[self._first + number] = 0
            self._returned.append(number)

    def pin_reserved(self, offset: int, generation: int, size_bytes: int) -> int | None:
        """:meth:`pin` an extent that was granted with ``generation``, to write to it; ``None``, too: it is
        not of this region's owner, or the reservation is gone."""
        header = self.region.header
        if not header.owns_generation(generation) or not header.layout.holds_copy(offset, size_bytes):
            return None
        number = self.pin(offset, size_bytes)
        if number is not None and not self.reserved(offset, generation):
            self.unpin(number)
            return None
        return number

    def reserved(self, offset: int, generation: int) -> bool:
        """Whether the slot, pinned for writing, is still the one that was granted with ``generation``."""
        return self._words[(offset + GENERATION_OFFSET) // WORD_BYTES] == generation | RESERVED_FLAG

    def view(self, number: int, offset: int, size_bytes: int) -> memoryview:
        """The pinned bytes, read-only; the pin is the view's from now on.

        ``view(...).obj`` is the array itself, writable: ``torch.frombuffer(view.obj, ...)`` makes a tensor
        without the warning that torch gives for read-only memory.
        """
        array = _extent_type(size_bytes).from_buffer(self.region.mapping, offset)
        array.pins, array.number = self, number
        return memoryview(array).cast("B").toreadonly()

    def _drain(self) -> None:
        while self._returned:
            number = self._returned.popleft()
            self._pinned_bytes -= self._sizes[number]
            self._free.append(number)

    def _forked(self) -> None:
        """In a forked child: these words are the parent's.  Nothing is pinned or cleared from here any
        more."""
        self._mine = False
        self._lock = threading.Lock()


_extent_types: dict[int, Any] = {}


def _extent_type(size_bytes: int) -> Any:
    """``ctypes`` array of ``size_bytes`` that unpins itself; blocks come in few sizes, so the types are
    kept."""
    found = _extent_types.get(size_bytes)
    if found is None:
        if len(_extent_types) >= _TYPES_MAX:
            _extent_types.clear()  # views in use keep their own type alive
        found = type(
            "PinnedExtent",
            (ctypes.c_ubyte * size_bytes,),
            {"__slots__": ("number", "pins"), "__del__": _unpin_extent},
        )
        _extent_types[size_bytes] = found
    return found


def _unpin_extent(array: Any) -> None:
    pins = getattr(array, "pins", None)
    if pins is not None:
        pins.unpin(array.number)


_tables: weakref.WeakSet[PinTable] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for table in list(_tables):
        table._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
