"""``Ledger``: what a client's members have seen since the start, pools that are gone included."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import fields

from l2_rdma.reader import ReaderCounters

LATE_MAX = 64
"""So many of the attachments that ended last are looked at anew each time: reads that were under way then
still count."""
NONE = "none"
"""In place of a transport: the pool can be asked, and not be read one-sided."""


class Ledger:
    """Sums that never go back.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: dict[str, ReaderCounters] = {}
        self._live: list[tuple[str, ReaderCounters]] = []
        self._late: deque[tuple[str, ReaderCounters]] = deque()
        self._fallbacks: dict[tuple[str, str], int] = {}
        self.attach_count = 0
        self.lost_count = 0

    def attached(self, used: str, counters: ReaderCounters, passed_over: Iterable[str]) -> None:
        """A pool is read through ``used`` from now on, as ``counters`` tells, though the transports that were
        ``passed_over`` are preferred to it."""
        with self._lock:
            self.attach_count += 1
            self._live.append((used, counters))
            self._fall_back(used, passed_over)

    def unusable(self, passed_over: Iterable[str]) -> None:
        """A pool answers, and none of the transports reaches its memory."""
        with self._lock:
            self._fall_back(NONE, passed_over)

    def detached(self, counters: ReaderCounters, *, lost: bool) -> None:
        """Nothing new is read through it; ``lost``: the pool went, not we."""
        with self._lock:
            self.lost_count += lost
            for place, (_, live) in enumerate(self._live):
                if live is counters:
                    self._late.append(self._live.pop(place))
                    break
            if len(self._late) > LATE_MAX:
                used, final = self._late.popleft()
                _add(self._past.setdefault(used, ReaderCounters()), final)

    def reads(self) -> dict[str, ReaderCounters]:
        """By transport."""
        with self._lock:
            sums: dict[str, ReaderCounters] = {}
            for used, counters in [*self._past.items(), *self._late, *self._live]:
                _add(sums.setdefault(used, ReaderCounters()), counters)
            return sums

    def fallbacks(self) -> dict[tuple[str, str], int]:
        """How often a pool was attached through the second transport because the first could not be used."""
        with self._lock:
            return dict(self._fallbacks)

    def reset_after_fork(self) -> None:
        """A thread that the child does not have may hold the lock."""
        self._lock = threading.Lock()

    def _fall_back(self, used: str, passed_over: Iterable[str]) -> None:
        for wanted in passed_over:
            self._fallbacks[wanted, used] = self._fallbacks.get((wanted, used), 0) + 1


def total(reads: Iterable[ReaderCounters]) -> ReaderCounters:
    """All of them together."""
    whole = ReaderCounters()
    for counters in reads:
        _add(whole, counters)
    return whole


def _add(whole: ReaderCounters, more: ReaderCounters) -> None:
    for each in fields(ReaderCounters):
        setattr(whole, each.name, getattr(whole, each.name) + getattr(more, each.name))
