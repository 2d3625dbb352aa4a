"""``LockedMemory``: which host memory of this process a GPU copies straight to and from.

CUDA refuses a copy that is partly in registered memory, so :meth:`LockedMemory.parts` cuts it where a
registration (or the last page that it touches) begins or ends.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
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

    def lock(self, address: int, nbytes: int) -> str:
        """Register ``nbytes`` bytes; why not, if the system refuses."""
        with self._lock:
            if not nbytes or address in self._ranges:
                return "nothing to lock" if not nbytes else "locked already"
            try:
                self._gpu.register(address, nbytes)
            except Refused as error:
                return error.message
            self._ranges[address] = nbytes
            self._cut()
            return ""

    def unlock(self, address: int) -> None:
        """What :meth:`lock` locked.  Idempotent."""
        with self._lock:
            if address not in self._ranges:
                return
            self._drain()
            del self._ranges[address]
            self._cut()
            self._gpu.unregister(address)

    def close(self) -> None:
        """Unlock everything."""
        for address in list(self._ranges):
            self.unlock(address)

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

    def _cut(self) -> None:
        cuts: set[int] = set()
        for begin, nbytes in self._ranges.items():
            end = begin + nbytes
            cuts |= {begin, end, begin - begin % PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES}
        self._cuts = sorted(cuts)
