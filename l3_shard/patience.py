"""``Patience``: how long a question that may be repeated waits for its answer before it is asked again.

A reply that is lost on the way to a process in the background holds nobody up but that process; but a shard
that enters needs the answers of nearly all others, and one that waits for the whole request time-out wherever
a frame was lost stays out for long.  So the first wait is short and grows with every silence, up to the
request time-out: who only answers slowly is heard in the end.
"""

from __future__ import annotations

FIRST_S, GROWTH = 0.5, 1.5


class Patience:
    """Of one peer.  ``limit_s`` is the most; ``now`` is monotonic seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._wait_s = min(FIRST_S, limit_s)
        self._asked_at = 0.0

    def asked(self, now: float) -> float:
        """A question goes out; how many seconds it waits."""
        self._asked_at = now
        return self._wait_s

    def heard(self, now: float, *, answered: bool) -> None:
        """It is over: there is an answer, or a failure.  A failure that came at once says nothing of time."""
        took_s = now - self._asked_at
        if answered:
            self._wait_s = min(max(FIRST_S, 2.0 * took_s), self._limit_s)
        elif took_s > 0.9 * self._wait_s:
            self._wait_s = min(GROWTH * self._wait_s, self._limit_s)
