"""``WorkRequests``: work requests that are used again.

To make a ``SendWR`` and its ``SGE`` takes as long as to post it, and its local memory is the one thing about
it that cannot be changed afterwards; so those that were posted are kept by their local memory.  (Posting
copies a request into the device's queue.)  That another one follows cannot be taken back either, so those
that end a chain are kept apart from those within.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from l2_rdma.transports.verbs.binding import Binding

KEPT_MAX = 4096


class Local(NamedTuple):
    """What cannot be changed of a work request."""

    address: int
    length: int
    key: int
    last: bool
    """Of its chain."""


class WorkRequests:
    """Lends work requests.  Not thread-safe."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._kept: dict[Local, list[Any]] = {}
        self._kept_count = 0

    def take(self, local: Local, following: Any) -> Any:
        """One with this local memory, to be posted before ``following`` (``None`` if it is the last)."""
        kept = self._kept.get(local)
        if kept:
            self._kept_count -= 1
            request = kept.pop()
            if not local.last:
                request.next_wr = following
            return request
        element = self._binding.SGE(local.address, local.length, local.key)
        return self._binding.SendWR(num_sge=1, sg=[element], next_wr=following)

    def give_back(self, lent: Sequence[tuple[Local, Any]]) -> None:
        """They were posted, or will never be."""
        if self._kept_count + len(lent) > KEPT_MAX:
            self.close()
        for local, request in lent:
            self._kept.setdefault(local, []).append(request)
        self._kept_count += len(lent)

    def close(self) -> None:
        """Free those that are kept: pyverbs frees what they hold when they are closed, once, and never
        else."""
        for kept in self._kept.values():
            for request in kept:
                request.close()
        self._kept.clear()
        self._kept_count = 0
