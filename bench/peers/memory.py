"""The floor under everything: copying the bytes."""

from __future__ import annotations

import ctypes
import random
from itertools import cycle

from bench.timing import Call

MEMCPY = "memcpy"


class Buffers:
    """``count`` distinct buffers of ``size_bytes`` random bytes."""

    def __init__(self, count: int, size_bytes: int, seed: int = 1) -> None:
        draw = random.Random(seed)
        self.all = [bytearray(draw.randbytes(size_bytes)) for _ in range(count)]
        self.size_bytes = size_bytes

    def addresses(self) -> list[int]:
        """Where they are; valid while this object lives."""
        return [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in self.all]


def memcpy(working_set: int, size_bytes: int) -> Call:
    """Copy each buffer of a working set in turn into one destination, whose pages are there already."""
    sources, destination = Buffers(working_set, size_bytes), Buffers(1, size_bytes, seed=2)
    to, turn = destination.addresses()[0], cycle(sources.addresses())

    def copy(_keep: tuple[Buffers, Buffers] = (sources, destination)) -> None:
        ctypes.memmove(to, next(turn), size_bytes)

    return Call(MEMCPY, copy)


def memcpy_run(working_set: int, size_bytes: int, items: int) -> Call:
    """Copy ``items`` buffers, each into a destination of its own; the time is for one."""
    sources, destinations = Buffers(working_set, size_bytes), Buffers(items, size_bytes, seed=2)
    turn, to = cycle(sources.addresses()), destinations.addresses()

    def copy(_keep: tuple[Buffers, Buffers] = (sources, destinations)) -> None:
        for destination in to:
            ctypes.memmove(destination, next(turn), size_bytes)

    return Call(f"{MEMCPY} of a run", copy, items=items)
