"""``Timers``: what a machine wants to do later, by the time that is handed in."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator


class Timers:
    """``numbers`` put what is due at the same time in the order in which it was asked for."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` at the first :meth:`run` that is not before ``when``."""
        heapq.heappush(self._due, (when, next(self._numbers), action))

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    def deadline(self) -> float | None:
        """When the next is due."""
        return self._due[0][0] if self._due else None
