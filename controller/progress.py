"""``Progress``: how much of a move is done, and when it will be, from what is left of it over time."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
SAMPLES_MAX = 64


class Progress:
    """Of one phase (copying, or purging); records and bytes count alike, each as a share of the most that was
    left at any time.  Times are monotonic seconds."""

    def __init__(self) -> None:
        self._most = [0, 0]
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)
        """(when, share that was left)."""
        self._left = 1.0

    def saw(self, items_left: int, bytes_left: int, now: float) -> None:
        """So many records and blocks, and so many bytes are to go."""
        grown = False
        for index, left in enumerate((items_left, bytes_left)):
            if left > self._most[index]:
                self._most[index], grown = left, True
        if grown:
            self._samples.clear()  # what was learnt of the pace was learnt of another whole
        shares = [
            left / most for left, most in zip((items_left, bytes_left), self._most, strict=True) if most
        ]
        self._left = sum(shares) / len(shares) if shares else 1.0
        while self._samples and now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        if not self._samples or now - self._samples[-1][0] >= WINDOW_S / SAMPLES_MAX:
            self._samples.append((now, self._left))

    @property
    def done_share(self) -> float:
        """In [0, 1]; 0 while nothing is known."""
        return 1.0 - self._left

    def eta_s(self, now: float) -> float:
        """At the pace of the last half minute; -1 = not known."""
        if not self._samples:
            return -1.0
        at, left = self._samples[0]
        if now <= at or left <= self._left:
            return -1.0
        return self._left * (now - at) / (left - self._left)
