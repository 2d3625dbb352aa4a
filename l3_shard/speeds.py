"""``Speeds``: how fast each shard answers this client: which of several to ask first, when to ask another.

Times are compared per *unit of work*, a request and each ``UNIT_BYTES`` of what it brings, so that a short
answer of a slow shard does not look faster than a long one of a fast shard.

* **Estimate**: a moving average a shard.  A sample far below it replaces it: that is no noise, whatever
  slowed the shard down is over.
* **Order**: shards whose estimates are within a factor of two of each other keep the ring's order.  An
  estimate that nothing confirms halves every ``HALF_LIFE_S``, so a shard that was slow is tried again: that
  is the exploration, without a die.
* **Patience**: after twice the 95th percentile of recent times the next owner is asked too (Dean, Barroso,
  "The Tail at Scale", CACM 2013).  Asking twice costs the cluster work when it may have least of it, so
  hedges are a tenth of all requests at most, after a small burst.

Plain numbers and single dictionary writes: threads may share it, and a lost update costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

UNIT_BYTES = 256 << 10
FLOOR_S = 100e-6
"""Differences below this are noise."""
NEWS = 0.25
"""Weight of a new sample, and the share of the estimate below which a sample replaces it."""
HALF_LIFE_S = 5.0
SAMPLES_MAX = 128
SAMPLES_MIN = 16
PERCENTILE, TIMES = 0.95, 2.0
PATIENCE_FIRST_S = 0.1
"""Until there are samples enough, whatever the size."""
PATIENCE_MIN_S = 0.01
HEDGE_SHARE, HEDGE_BURST = 0.1, 4.0


@dataclass(frozen=True, slots=True)
class _Estimate:
    unit_s: float
    at: float


class Speeds:
    """``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._estimates: dict[str, _Estimate] = {}
        self._recent: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._patience_unit_s: float | None = None
        self._hedges_left = HEDGE_BURST

    def took(self, node: str, seconds: float, size_bytes: int, now: float) -> None:
        """``node`` answered a request with so many bytes after ``seconds``."""
        unit_s = max(0.0, seconds) / _work(size_bytes)
        self._recent.append(unit_s)
        self._patience_unit_s = None
        self._hedges_left = min(HEDGE_BURST, self._hedges_left + HEDGE_SHARE)
        before = self._estimates.get(node)
        if before is not None and unit_s >= NEWS * before.unit_s:
            unit_s = before.unit_s + NEWS * (unit_s - before.unit_s)
        self._estimates[node] = _Estimate(unit_s, now)

    def outlasted(self, node: str, seconds: float, size_bytes: int, now: float) -> None:
        """``node`` has not answered after ``seconds``."""
        unit_s = seconds / _work(size_bytes)
        before = self._estimates.get(node)
        self._estimates[node] = _Estimate(max(unit_s, before.unit_s if before is not None else 0.0), now)

    def ordered(self, nodes: Iterable[str], now: float) -> list[str]:
        """The fastest first; among about equals the order given."""
        return sorted(nodes, key=lambda node: self._level(node, now))

    def patience_s(self, size_bytes: int) -> float:
        """How long an answer of so many bytes may take until somebody else is asked."""
        unit_s = self._patience_unit_s
        if unit_s is None:
            recent = sorted(self._recent)
            if len(recent) < SAMPLES_MIN:
                return PATIENCE_FIRST_S
            unit_s = self._patience_unit_s = TIMES * recent[int(PERCENTILE * (len(recent) - 1))]
        return max(PATIENCE_MIN_S, unit_s * _work(size_bytes))

    def may_hedge(self) -> bool:
        """Take one hedge from the budget, if it has one."""
        if self._hedges_left < 1.0:
            return False
        self._hedges_left -= 1.0
        return True

    def _level(self, node: str, now: float) -> int:
        estimate = self._estimates.get(node)
        if estimate is None:
            return 0
        aged_s = estimate.unit_s * 0.5 ** (max(0.0, now - estimate.at) / HALF_LIFE_S)
        return max(0, int(log2(max(aged_s, FLOOR_S) / FLOOR_S)))


def _work(size_bytes: int) -> float:
    return 1.0 + size_bytes / UNIT_BYTES
