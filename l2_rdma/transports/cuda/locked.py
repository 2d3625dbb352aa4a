"""``LockedMemory``: which host memory of this process a GPU copies straight to and from.

CUDA refuses a copy that is partly in registered memory, so :meth:`LockedMemory.parts` cuts it where a
registration (or the last page that it touches) begins or ends.  The cuts are there before the registration is
and go after it: a copy in more pieces than it needs is right, too.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

from kvcomm.errors import Refused
from l2_rdma.layout import PAGE_BYTES
from l2_rdma.transports.cuda.gpu import Gpu


class LockedMemory:
    """Thread-safe.

    Args:
        drain: returns when no copy is under way; asked before memory is unlocked.
    """

    def __init__(self, gpu: Gpu, drain: Callable[[], None]) -> None:
        self._gpu = gpu
        self._drain = drain
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}
        self._cuts: list[int] = []
        self._returned: deque[tuple[int, object]] = deque()

    def lock(self, address: int, nbytes: int) -> str:
        """Register ``nbytes`` bytes; why not, if the system refuses."""
        with self._lock:
            self._settle()
            if not nbytes or address in self._ranges:
                return "nothing to lock" if not nbytes else "locked already"
            self._ranges[address] = nbytes
            self._cut()
            try:
                self._gpu.register(address, nbytes)
            except BaseException as error:
                del self._ranges[address]
                self._cut()
                if isinstance(error, Refused):
                    return error.message
                raise
            return ""

    def unlock(self, address: int) -> None:
        """What :meth:`lock` locked.  Idempotent."""
        with self._lock:
            self._settle()
            self._unlock(address)

    def give_back(self, address: int, memory: object) -> None:
        """Unlock it with the next call of another method; until then ``memory`` is kept.  Runs in finalizers,
        so anywhere, even inside this class or with a channel's copies half posted: one atomic step and no
        lock."""
        self._returned.append((address, memory))

    def close(self) -> None:
        """Unlock everything."""
        with self._lock:
            self._settle()
            for address in list(self._ranges):
                self._unlock(address)

    def whole(self, address: int, nbytes: int) -> bool:
        """Whether one copy may do it."""
        cuts = self._cuts
        at = bisect_right(cuts, address)
        return at == len(cuts) or cuts[at] >= address + nbytes

    def parts(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(begin, length) of the copies instead, begin counted from ``address``."""
        cuts = self._cuts
        inside = [cut for cut in cuts if address < cut < address + nbytes]
        for begin, end in pairwise([address, *inside, address + nbytes]):
            yield begin - address, end - begin

    def _settle(self) -> None:
        while self._returned:
            address, memory = self._returned.popleft()
            self._unlock(address)
            del memory  # not before

    def _unlock(self, address: int) -> None:
        if address not in self._ranges:
            return
        self._drain()
        try:
            self._gpu.unregister(address)
        finally:
            del self._ranges[address]
            self._cut()

    def _cut(self) -> None:
        cuts: set[int] = set()
        for begin, nbytes in self._ranges.items():
            end = begin + nbytes
            cuts |= {begin, end, begin - begin % PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES}
        self._cuts = sorted(cuts)
