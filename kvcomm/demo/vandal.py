"""Damages block copies where they lie, to show that readers notice.

It needs no knowledge of a region's layout: every copy begins with a header that describes itself.  Bytes
are read and written with ``pread`` and ``pwrite`` and holes are skipped, so that a sparse region stays
sparse.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvcomm.block import HEADER_BYTES, MAGIC, BlockHeader
from kvcomm.errors import Corrupt

_REGIONS = "/dev/shm/kvcomm-"
_STEP_BYTES = 8 << 20


def regions_of(pid: int) -> list[Path]:
    """Shared-memory regions that a node has mapped, wherever it keeps its blocks."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    files = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return [Path(name) for name in sorted(files) if name.startswith(_REGIONS)]


def damage(path: Path) -> int:
    """Flip one payload byte of every block copy in the file; how many copies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        places = list(_payloads(descriptor))
        for place in places:
            (byte,) = os.pread(descriptor, 1, place)
            os.pwrite(descriptor, bytes([byte ^ 0xFF]), place)
        return len(places)
    finally:
        os.close(descriptor)


def _payloads(descriptor: int) -> Iterator[int]:
    """Offset of the middle byte of each copy's payload."""
    for begin, end in _data_ranges(descriptor):
        for at in range(begin, end, _STEP_BYTES):
            stop = min(_STEP_BYTES, end - at)  # what begins behind it belongs to the next window or range
            window = os.pread(descriptor, stop + HEADER_BYTES, at)
            found = window.find(MAGIC)
            while 0 <= found < stop:
                header = _header(window[found : found + HEADER_BYTES])
                if header is not None and header.payload_bytes:
                    yield at + found + HEADER_BYTES + header.payload_bytes // 2
                found = window.find(MAGIC, found + 1)


def _header(buffer: bytes) -> BlockHeader | None:
    try:
        return BlockHeader.unpack(buffer)
    except Corrupt:
        return None


def _data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    size, at = os.fstat(descriptor).st_size, 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data after this
                return
            raise
        at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, at
