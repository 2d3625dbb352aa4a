"""Receive buffers against the only things that matter: nobody shares bytes, and what is free comes back."""

from __future__ import annotations

import gc
import random
import threading

import pytest

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
