"""``RegisteredMemory``: a caller's memory as the device knows it; ``MemoryTable`` finds it by address.

The device reads and writes registered memory without asking anybody, so a registration keeps its memory
alive, and outlives its ``close`` for as long as an operation under way uses it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any


class RegisteredMemory:
    """One ``MR`` and the memory that it is of; a ``port.Registration``.

    Args:
        owner: what keeps the memory alive.
        address: as work requests name the first byte.
        table: where it is found, and whose lock it uses.
    """

    def __init__(
        self, region: Any, owner: Any, address: int, length: int, table: MemoryTable, *, writable: bool = True
    ) -> None:
        self.key: int = region.lkey
        self.address = address
        self.length = length
        self.writable = writable
        self._region = region
        self._owner = owner
        self._table = table
        self._use_count = 0
        self._closed = False

    def use(self) -> None:
        """An operation begins; with the table's lock held."""
        self._use_count += 1

    def release(self) -> None:
        """It is over; with the table's lock held."""
        self._use_count -= 1
        assert self._use_count >= 0, "released more often than used"
        if self._closed and not self._use_count:
            self._deregister()

    def close(self) -> None:
        """New operations go through a copy; those under way end first.  Idempotent."""
        with self._table.lock:
            self.close_locked()

    def close_locked(self) -> None:
        """:meth:`close`, with the table's lock held."""
        if not self._closed and not self._table.abandoned:
            self._closed = True
            self._table.forget(self)
            if not self._use_count:
                self._deregister()

    def _deregister(self) -> None:
        self._region.close()
        self._owner = None


class MemoryTable:
    """Registrations by address.  Few of them, so overlapping ones are looked at one by one.

    Args:
        lock: of the transport.
    """

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self._abandoned = False
        self._starts: list[tuple[int, int]] = []
        self._by_start: dict[tuple[int, int], RegisteredMemory] = {}
        self._number = 0
        self._all: dict[RegisteredMemory, tuple[int, int]] = {}

    def add(self, memory: RegisteredMemory, *, by_address: bool = True) -> None:
        """With the lock held.

        Args:
            by_address: whether :meth:`find` may find it (device memory has no address of ours).
        """
        self._number += 1
        start = (memory.address, self._number)
        self._all[memory] = start
        if by_address:
            self._by_start[start] = memory
            insort(self._starts, start)

    def find(self, address: int, length: int, *, writable: bool) -> RegisteredMemory | None:
        """What covers all of it, and may be written to if need be; with the lock held."""
        for start in reversed(self._starts[: bisect_right(self._starts, (address, self._number))]):
            memory = self._by_start[start]
            if address + length <= memory.address + memory.length and memory.writable >= writable:
                return memory
        return None

    def forget(self, memory: RegisteredMemory) -> None:
        start = self._all.pop(memory)
        if self._by_start.pop(start, None) is not None:
            self._starts.remove(start)

    def abandon(self, lock: Any) -> None:
        """In a forked child: the registrations are the parent's, and stay."""
        self.lock = lock
        self._all.clear()
        self._by_start.clear()
        self._starts.clear()
        self._abandoned = True

    @property
    def abandoned(self) -> bool:
        return self._abandoned

    def close_all(self) -> None:
        """With the lock held."""
        for memory in list(self._all):
            memory.close_locked()

    @property
    def empty(self) -> bool:
        return not self._starts
