"""``DiskThreads``: threads for calls that may never return.

The standard library's executors are joined when the interpreter ends, so one thread in a disk that hangs
keeps the process for ever.  These are daemons: whoever ends does not wait for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class DiskThreads:
    """Calls begin in the order in which they were given; with one thread each ends before the next begins."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` made; the future's callbacks run in its thread."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Cancel what has not begun; does not wait for what has.  Idempotent."""
        try:
            while (given := self._calls.get_nowait()) is not None:
                given[1].cancel()
        except Empty:
            pass
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while (given := self._calls.get()) is not None:
            _make(*given)
            del given  # an idle thread keeps no copy alive


def _make(call: Callable[[], T], future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        made = call()
    except BaseException as error:  # the waiting side raises it
        future.set_exception(error)
    else:
        future.set_result(made)
