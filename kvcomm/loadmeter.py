"""``LoadMeter``: how busy a node is, from what it counts anyway.

Rates and shares are those of the time since the look before, which is at least ``window_s`` ago: who looks
more often gets the same numbers again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.metrics import Histogram

WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Counted:
    """What a node has counted since its start."""

    seconds: Histogram
    """Of clients' requests."""
    asked: int = 0
    """Blocks."""
    found: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    ops_s: float = 0.0
    hit_share: float = 0.0
    """In [0, 1]; 0 where nothing was asked for."""
    p99_s: float = 0.0
    """Upper bound of the histogram's bucket; 0 where there was no request."""


class LoadMeter:
    """Times are monotonic seconds."""

    def __init__(self, now: float, window_s: float = WINDOW_S) -> None:
        self._at, self._window_s = now, window_s
        self._asked = self._found = 0
        self._counts: list[int] = []
        self._rates = Rates()

    def look(self, counted: Counted, now: float) -> Rates:
        passed_s = now - self._at
        if passed_s < self._window_s:
            return self._rates
        counts = counted.seconds.counts
        before = self._counts or [0] * len(counts)
        new = [count - known for count, known in zip(counts, before, strict=True)]
        asked, found = counted.asked - self._asked, counted.found - self._found
        self._rates = Rates(
            sum(new) / passed_s,
            found / asked if asked else 0.0,
            quantile(counted.seconds.bounds, new, 0.99),
        )
        self._at, self._counts = now, list(counts)
        self._asked, self._found = counted.asked, counted.found
        return self._rates


def quantile(bounds: tuple[float, ...], counts: list[int], share: float) -> float:
    """Upper bound of the bucket with the observation that ``share`` of all do not exceed; 0 without any, the
    last bound for what is above all."""
    wanted, seen = share * sum(counts), 0
    for bound, count in zip(bounds, counts, strict=False):
        seen += count
        if count and seen >= wanted:
            return bound
    return bounds[-1] if any(counts) else 0.0
