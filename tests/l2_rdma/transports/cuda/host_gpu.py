"""A GPU of plain shared memory, for everything above the port ``l2_rdma.transports.cuda.gpu``.

Its memory is files, so other processes can map it.  Its stream can be held: copies then wait, as they do on a
busy GPU, until it is let go or waited for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvcomm.errors import ConfigError, Refused, Unavailable
from l2_rdma.transports.cuda.gpu import HANDLE_BYTES


class HostGpu:
    """Allocations in ``directory``, at most ``memory_bytes`` of them."""

    def __init__(
        self, directory: Path | None = None, *, memory_bytes: int = 1 << 30, number: int = 0
    ) -> None:
        self.uuid = bytes([number]) * 16
        self._directory = directory or Path(tempfile.gettempdir())
        self._left = memory_bytes
        self._maps: dict[int, tuple[Path, mmap.mmap]] = {}
        self.registered: dict[int, int] = {}
        self.streams: list[HostStream] = []
        self.failed = ""
        self.fails_after_copies: int | None = None
        """Then one copy is refused, and no other."""
        self.digested: list[int] = []
        """Lengths of the payloads of each digest."""

    def allocate(self, nbytes: int) -> int:
        self.check()
        if nbytes > self._left:
            raise ConfigError(f"{nbytes} bytes are asked for, {self._left} are free")
        self._left -= nbytes
        descriptor, name = tempfile.mkstemp(prefix="gpu-", dir=self._directory)
        os.ftruncate(descriptor, max(nbytes, mmap.PAGESIZE))
        os.close(descriptor)
        return self._map(Path(name))

    def free(self, pointer: int) -> None:
        path, _ = self._maps.pop(pointer)
        path.unlink()

    def export(self, pointer: int) -> bytes:
        name = os.fsencode(self._maps[pointer][0])
        assert len(name) <= HANDLE_BYTES, f"{name!r} does not fit a handle"
        return name.ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        path = Path(os.fsdecode(handle.rstrip(b"\0")))
        if not path.exists():
            raise Refused("no such memory")
        return self._map(path)

    def close(self, pointer: int) -> None:
        del self._maps[pointer]

    def register(self, address: int, nbytes: int) -> None:
        if address in self.registered:
            raise Refused("registered already")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def check_registered(self, address: int, nbytes: int) -> None:
        """As CUDA: memory is registered as a whole or not at all, page by page."""
        for begin, length in self.registered.items():
            first, last = begin - begin % mmap.PAGESIZE, -(-(begin + length) // mmap.PAGESIZE) * mmap.PAGESIZE
            inside = first <= address and address + nbytes <= last
            if not inside and address < last and first < address + nbytes:
                raise Unavailable("a copy half in registered memory")

    def stream(self) -> HostStream:
        self.streams.append(HostStream(self))
        return self.streams[-1]

    def digests(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        self.check()
        self.digested += [length for _, length in extents]
        return [xxh3_64_intdigest(ctypes.string_at(address, length)) for address, length in extents]

    def memory(self, pointer: int, nbytes: int) -> memoryview:
        """Writable, for tests."""
        return memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")

    def check(self) -> None:
        if self.failed:
            raise Unavailable(self.failed)

    def count_copy(self) -> None:
        if self.fails_after_copies is None:
            return
        self.fails_after_copies -= 1
        if self.fails_after_copies < 0:
            self.fails_after_copies = None
            raise Unavailable("a copy failed")

    def _map(self, path: Path) -> int:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        pointer = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        self._maps[pointer] = path, memory
        return pointer


class HostStream:
    """Copies at once, or, while ``held``, when somebody waits for them."""

    def __init__(self, gpu: HostGpu) -> None:
        self._gpu = gpu
        self._copies: list[tuple[int, int, int]] = []
        self._passed = 0
        self._marked = 0
        self._lock = threading.Lock()
        self.held = False
        self.closed = False

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        assert not self.closed
        self._gpu.check()
        self._gpu.count_copy()
        for address in (destination, source):
            self._gpu.check_registered(address, nbytes)
        with self._lock:
            self._copies.append((destination, source, nbytes))
            self._marked += 1
        if not self.held:
            self.run()

    def mark(self) -> HostMarker:
        return HostMarker(self, self._marked)

    def idle(self) -> bool:
        return self.passed(self._marked)

    def wait(self) -> None:
        self._gpu.check()
        self.run()

    def close(self) -> None:
        if not self.closed:
            self.wait()
            self.closed = True

    def run(self) -> None:
        with self._lock:
            copies, self._copies = self._copies, []
            for destination, source, nbytes in copies:
                ctypes.memmove(destination, source, nbytes)
            self._passed += len(copies)

    def passed(self, place: int) -> bool:
        self._gpu.check()
        return self._passed >= place


class HostMarker:
    def __init__(self, stream: HostStream, place: int) -> None:
        self._stream = stream
        self._place = place

    def done(self) -> bool:
        return self._stream.passed(self._place)

    def release(self) -> None:
        pass
