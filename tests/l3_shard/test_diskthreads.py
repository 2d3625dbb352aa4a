"""Threads that nobody waits for at the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from functools import partial

import pytest

from l3_shard.diskthreads import DiskThreads

DEADLINE_S = 10.0


def test_calls_are_made_in_order_and_what_they_raise_is_handed_on() -> None:
    threads = DiskThreads(1, "test")
    made: list[int] = []
    futures = [threads.submit(partial(made.append, number)) for number in range(5)]
    failing = threads.submit(lambda: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(DEADLINE_S)
    assert made == [0, 1, 2, 3, 4] and all(future.done() for future in futures)
    threads.close()


def test_closing_cancels_what_has_not_begun_and_lets_the_rest_end() -> None:
    threads, begun, gate = DiskThreads(1, "test"), threading.Event(), threading.Event()

    def stuck() -> str:
        begun.set()
        assert gate.wait(DEADLINE_S)
        return "made"

    first, second = threads.submit(stuck), threads.submit(lambda: "never")
    assert begun.wait(DEADLINE_S) and not first.cancel()
    threads.close()
    threads.close()
    with pytest.raises(CancelledError):
        second.result(DEADLINE_S)
    gate.set()
    assert first.result(DEADLINE_S) == "made"


def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    script = (
        "import threading; from l3_shard.diskthreads import DiskThreads\n"
        "threads, begun = DiskThreads(2, 'stuck'), threading.Event()\n"
        "threads.submit(lambda: begun.set() or threading.Event().wait())\n"
        "begun.wait(); threads.close()"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=DEADLINE_S, check=False).returncode == 0
