"""``Pace``: keeps background copying below a rate, with a bounded burst (a token bucket that may owe)."""

from __future__ import annotations


class Pace:
    """``rate`` units a second; ``now`` is monotonic seconds.

    Spending is allowed as long as nothing is owed, however large the piece: the debt then delays the next.
    """

    def __init__(self, rate: float, burst: float) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError(f"a pace needs a rate and a burst above 0, got {rate} and {burst}")
        self._rate, self._burst = rate, burst
        self._left = burst
        self._at: float | None = None

    def spend(self, amount: float, now: float) -> None:
        self._fill(now)
        self._left -= amount

    def wait_s(self, now: float) -> float:
        """How long until nothing is owed; 0.0 = go on."""
        self._fill(now)
        return max(0.0, -self._left / self._rate)

    def _fill(self, now: float) -> None:
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
