"""``Slabs``: memory to receive blocks into.

Writing to fresh memory costs more than moving the bytes: a page fault every 4 KiB.  So received copies are
carved out of slabs of huge pages, and a slab whose copies have all gone is used again.  A copy's memory
lives exactly as long as any memoryview, array or tensor made from it; one copy that is kept keeps its slab,
at most :data:`COPIES_A_SLAB` copies' worth.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from kvcomm.errors import KVCommError

HUGE_PAGE_BYTES = 2 << 20
COPIES_A_SLAB = 4
SLAB_BYTES_MAX = 16 << 20
IDLE_BYTES_MAX = 64 << 20
"""Unused slabs kept for the next copies; what is over goes back to the system."""
SMALL_BYTES = 64 << 10
"""Copies below this are plain heap memory: the allocator has it at hand."""

_ALIGNMENT = 64


class Registration(Protocol):
    """A slab that something beside us (a NIC, a GPU) knows by its address, and may write to."""

    def close(self) -> None:
        """It does not any more.  Idempotent."""
        ...


Register = Callable[[memoryview], Registration]


@dataclass(eq=False, slots=True)
class _Slab:
    memory: mmap.mmap
    size: int
    filled: int = 0
    live: int = 0
    registrations: dict[str, Registration] = field(default_factory=dict)
    """By who asked for them."""


class Slabs:
    """Hands out writable buffers.  Thread-safe.  A forked child keeps the copies that it has inherited, as
    they were, and begins with new slabs: registrations are the parent's."""

    def __init__(self, idle_bytes_max: int = IDLE_BYTES_MAX) -> None:
        self._idle_bytes_max = idle_bytes_max
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, _Slab] = {}
        """By slab size: where the next copy is carved from."""
        self._idle: dict[int, list[_Slab]] = {}
        self._idle_bytes = 0
        self._gone: deque[_Slab] = deque()
        """A copy of each of these has died.  Finalizers only append here: they may run inside our own
        lock."""
        self._registers: dict[str, Register] = {}
        self._registered: set[_Slab] = set()
        """Slabs with registrations: they are ours until these are closed."""

    def register_with(self, name: str, register: Register) -> None:
        """Have every slab known to ``name`` from now on, those that copies are carved from now and those to
        come, until the slab goes back to the system.

        Where it cannot be (``register`` raises a ``KVCommError``: too much locked memory, say) the slab is
        used unregistered.  Has no effect for a name that is registered with.
        """
        with self._lock:
            if name not in self._registers:
                self._registers[name] = register
                self._collect()
                for slab in [*self._open.values(), *(each for idle in self._idle.values() for each in idle)]:
                    self._register(slab, name)

    def unregister(self, name: str) -> None:
        """Close all registrations made for ``name``: what they were made with is about to end.  Copies stay
        valid."""
        with self._lock:
            self._registers.pop(name, None)
            for slab in list(self._registered):
                self._deregister(slab, name)

    def take(self, size: int) -> memoryview:
        """``size`` writable bytes of arbitrary content."""
        if size < SMALL_BYTES:
            return memoryview(bytearray(size))
        with self._lock:
            self._collect()
            slab, offset = self._place(size)
        copy = (ctypes.c_char * size).from_buffer(slab.memory, offset)
        weakref.finalize(copy, self._gone.append, slab).atexit = False
        return memoryview(copy).cast("B")

    @property
    def idle_bytes(self) -> int:
        """Kept for the next copies."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def _place(self, size: int) -> tuple[_Slab, int]:
        slab_bytes = _slab_bytes(size)
        slab = self._open.get(slab_bytes)
        if slab is None or slab.filled + size > slab.size:
            if slab is not None and not slab.live:
                self._retire(slab)
            slab = self._open[slab_bytes] = self._reuse(slab_bytes) or self._new(slab_bytes)
        offset = slab.filled
        slab.filled += -(-size // _ALIGNMENT) * _ALIGNMENT
        slab.live += 1
        return slab, offset

    def _collect(self) -> None:
        while self._gone:
            slab = self._gone.popleft()
            slab.live -= 1
            if not slab.live:
                if self._open.get(slab.size) is slab:
                    slab.filled = 0
                else:
                    self._retire(slab)

    def _retire(self, slab: _Slab) -> None:
        if self._idle_bytes + slab.size <= self._idle_bytes_max:
            slab.filled = 0
            self._idle.setdefault(slab.size, []).append(slab)
            self._idle_bytes += slab.size
        else:
            for name in list(slab.registrations):
                self._deregister(slab, name)

    def _reuse(self, slab_bytes: int) -> _Slab | None:
        idle = self._idle.get(slab_bytes)
        if not idle:
            return None
        self._idle_bytes -= slab_bytes
        return idle.pop()

    def _new(self, slab_bytes: int) -> _Slab:
        slab = _new_slab(slab_bytes)
        for name in self._registers:
            self._register(slab, name)
        return slab

    def _register(self, slab: _Slab, name: str) -> None:
        try:
            slab.registrations[name] = self._registers[name](memoryview(slab.memory))
        except KVCommError:
            return
        self._registered.add(slab)

    def _deregister(self, slab: _Slab, name: str) -> None:
        registration = slab.registrations.pop(name, None)
        if registration is not None:
            registration.close()
        if not slab.registrations:
            self._registered.discard(slab)


def _slab_bytes(size: int) -> int:
    """A power of two of huge pages, so that near sizes share slabs."""
    wanted = max(size, min(COPIES_A_SLAB * size, SLAB_BYTES_MAX))
    pages = -(-wanted // HUGE_PAGE_BYTES)
    return HUGE_PAGE_BYTES * (pages if wanted > SLAB_BYTES_MAX else 1 << (pages - 1).bit_length())


def _new_slab(slab_bytes: int) -> _Slab:
    # Private: after a fork, what one process receives must not appear in the copies of the other.
    memory = mmap.mmap(-1, slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _Slab(memory, slab_bytes)


_all: weakref.WeakSet[Slabs] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for slabs in list(_all):
        slabs._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
