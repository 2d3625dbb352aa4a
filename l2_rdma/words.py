"""``Words``: read-modify-write on 64-bit words of a region, atomic among all who do it this way.

CPython has no atomic instructions on shared memory.  The kernel has locks on byte ranges that belong to an
open file description and end with it: whoever changes a word holds the lock on its bytes (moved past the end
of the region, where nothing else is locked) while it loads and stores.  A holder that is stopped in between
costs the others their deadline, never their memory.

Plain loads see every store whole.  Plain stores, and the atomics of a NIC, know nothing of these locks: a
word that is counted belongs to one kind of transport.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from kvcomm.errors import Unavailable
from l2_rdma.layout import WORD_BYTES, WORD_MASK
from l2_rdma.rangelocks import try_lock, unlock

_PAUSE_S = 0.0001


class Words:
    """The words of one mapped region, for one process.  Thread-safe.

    Args:
        words: the region as unsigned 64-bit words.
        descriptor: of its file; locks belong to this open file description, and threads share it.
        clock, sleep: monotonic seconds.
    """

    def __init__(
        self,
        words: memoryview,
        descriptor: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._words = words
        self._descriptor = descriptor
        self._clock = clock
        self._sleep = sleep
        self._process = os.getpid()
        self._mine = threading.Lock()  # the kernel does not tell our threads apart
        self._closed = False

    def fetch_add(self, offset: int, amount: int, deadline: float) -> int:
        """What was there before.  Raises ``Unavailable``: somebody holds the word past ``deadline``, or the
        region is closed."""
        return self._exchange(offset, lambda old: (old + amount) & WORD_MASK, deadline)

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> int:
        """What was there before; ``desired`` was stored if that is ``expected``.  Raises ``Unavailable``."""
        return self._exchange(offset, lambda old: desired if old == expected else old, deadline)

    def close(self) -> None:
        """The descriptor is about to be closed, and its number may be another file's then.  Idempotent."""
        self._closed = True  # whoever is waiting for a word sees it
        if os.getpid() == self._process:  # in a forked child whoever held it is not there to let go
            with self._mine:
                pass

    def _exchange(self, offset: int, change: Callable[[int], int], deadline: float) -> int:
        if not self._mine.acquire(timeout=max(0.0, deadline - self._clock())):
            raise Unavailable("the word is held by another thread")
        try:
            while self._closed or not self._hold(offset):
                if self._closed:
                    raise Unavailable("the region is closed")
                if self._clock() >= deadline:
                    raise Unavailable("the word is held by another process")
                self._sleep(_PAUSE_S)
            try:
                index = offset // WORD_BYTES
                old = self._words[index]
                new = change(old)
                if new != old:
                    self._words[index] = new
                return old
            finally:
                self._let_go(offset)
        finally:
            self._mine.release()

    def _hold(self, offset: int) -> bool:
        return try_lock(self._descriptor, self._words.nbytes + offset, WORD_BYTES)

    def _let_go(self, offset: int) -> None:
        unlock(self._descriptor, self._words.nbytes + offset, WORD_BYTES)
