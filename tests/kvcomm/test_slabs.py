"""Receive buffers against the only things that matter: nobody shares bytes, and what is free comes back."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import threading

import pytest

from kvcomm.errors import Unavailable
from kvcomm.slabs import IDLE_BYTES_MAX, SMALL_BYTES, Slabs


def test_live_buffers_never_overlap() -> None:
    """A model of what each buffer must hold; any overlap or early reuse overwrites somebody's bytes."""
    slabs, draw = Slabs(), random.Random(1)
    held: list[tuple[memoryview, int]] = []
    for turn in range(600):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        size = draw.choice([1, 500, SMALL_BYTES, 200_000, 737_536, 2_097_408, 5_000_001])
        buffer = slabs.take(size)
        assert buffer.nbytes == size and not buffer.readonly
        mark = turn % 251
        buffer[0] = buffer[size // 2] = buffer[-1] = mark
        held.append((buffer, mark))
        held = held[-40:]
        for other, expected in held:
            assert (other[0], other[len(other) // 2], other[-1]) == (expected,) * 3


def test_memory_comes_back_when_the_last_view_dies() -> None:
    slabs = Slabs()
    copies = [slabs.take(1 << 20) for _ in range(16)]
    tail = copies[3][100:]  # a view of a view keeps the memory as well
    del copies
    gc.collect()
    tail[:] = bytes(len(tail))
    while_one_lives = slabs.idle_bytes
    del tail
    assert slabs.idle_bytes > while_one_lives


def test_the_same_memory_is_used_again() -> None:
    slabs = Slabs()
    for _ in range(50):
        slabs.take(3 << 20)
    assert slabs.idle_bytes <= 32 << 20


def test_what_is_kept_is_bounded() -> None:
    slabs = Slabs(idle_bytes_max=16 << 20)
    copies = [slabs.take(4 << 20) for _ in range(40)]
    del copies
    assert slabs.idle_bytes <= 16 << 20
    assert IDLE_BYTES_MAX >= 16 << 20


@pytest.mark.parametrize("size", [SMALL_BYTES, 3 << 20])
def test_threads_get_buffers_of_their_own(size: int) -> None:
    slabs, wrong = Slabs(), list[int]()

    def work(mark: int) -> None:
        for _ in range(200):
            buffer = slabs.take(size)
            buffer[0] = buffer[-1] = mark
            if (buffer[0], buffer[-1]) != (mark, mark):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- registration --------------------------------------------------------------------------------------------


class Nic:
    """Knows memory by its address; can hold so many slabs."""

    def __init__(self, slabs_max: int = 1000) -> None:
        self.slabs_max = slabs_max
        self.known: list[memoryview] = []
        self.closed_count = 0

    def register(self, buffer: memoryview) -> Known:
        if len(self.known) >= self.slabs_max:
            raise Unavailable("too much locked memory")
        self.known.append(buffer)
        return Known(self, buffer)


class Known:
    def __init__(self, nic: Nic, buffer: memoryview) -> None:
        self._nic, self._buffer = nic, buffer

    def close(self) -> None:
        self._nic.closed_count += 1
        self._nic.known = [each for each in self._nic.known if each is not self._buffer]


def test_slabs_are_registered_from_their_first_copy_until_they_are_given_back() -> None:
    slabs, nic = Slabs(idle_bytes_max=16 << 20), Nic()
    before = slabs.take(4 << 20)
    slabs.register_with("nic", nic.register)
    slabs.register_with("nic", nic.register)
    assert len(nic.known) == 1, "the slab that there was, once"

    copies = [slabs.take(4 << 20) for _ in range(12)]
    assert len(nic.known) == 4
    assert all(any(_within(copy, slab) for slab in nic.known) for copy in [before, *copies])
    del copies
    gc.collect()
    assert slabs.idle_bytes == 16 << 20
    assert len(nic.known) == 3 and nic.closed_count == 1, "open, idle and in use; the rest went back"
    assert any(_within(before, slab) for slab in nic.known)


def test_all_registrations_end_with_whom_they_were_made_for() -> None:
    slabs, nic, other = Slabs(), Nic(), Nic()
    slabs.register_with("nic", nic.register)
    slabs.register_with("other", other.register)
    copies = [slabs.take(4 << 20) for _ in range(9)]
    slabs.unregister("nic")
    slabs.unregister("nic")

    assert nic.known == [] and len(other.known) == 3
    copies[0][:4] = b"here"
    slabs.take(4 << 20)
    assert nic.known == [], "new slabs are nothing to it either"


def test_memory_that_cannot_be_registered_is_used_without() -> None:
    slabs, nic = Slabs(), Nic(slabs_max=1)
    slabs.register_with("nic", nic.register)
    copies = [slabs.take(4 << 20) for _ in range(9)]

    assert len(nic.known) == 1 and len(copies) == 9


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_parent_and_forked_child_share_no_bytes_and_no_registrations() -> None:
    slabs, nic = Slabs(), Nic()
    slabs.register_with("nic", nic.register)
    kept = slabs.take(2 * SMALL_BYTES)
    kept[:4] = b"kept"
    free = slabs.take(2 * SMALL_BYTES)
    with slabs._lock:  # by a thread that the child does not have
        child = os.fork()
        if child == 0:
            status = 1
            try:
                mine, own = slabs.take(2 * SMALL_BYTES), Nic()
                mine[:4], free[:4] = b"mine", b"late"
                right = bytes(kept[:4]) == b"kept" and len(nic.known) == 1
                slabs.register_with("nic", own.register)
                kept[:4] = b"else"
                del free
                slabs.unregister("nic")
                status = 0 if right and nic.closed_count == 0 and own.closed_count == 1 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(kept[:4]) == b"kept"
    next_one = slabs.take(2 * SMALL_BYTES)
    assert bytes(next_one[:4]) == bytes(4) and bytes(free[:4]) == bytes(4)


def _within(copy: memoryview, slab: memoryview) -> bool:
    begin, at = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (slab, copy))
    return begin <= at < begin + slab.nbytes


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    buffer = Slabs().take(2 * SMALL_BYTES)
    buffer[-1] = 1
    assert buffer.nbytes == 2 * SMALL_BYTES
