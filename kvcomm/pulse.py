"""``Pulse``: notices that this process stood still (SIGSTOP, a paused machine, a loop that was blocked).

Who beats regularly and looks at the clock before each piece of work finds the beat overdue when nothing ran
for a while: *before* the work that came meanwhile.
"""

from __future__ import annotations

from math import inf

BEAT_S = 0.25
STILL_S = 1.0
"""A beat that is later than this is no busy moment any more."""


class Pulse:
    """Times are monotonic seconds."""

    def __init__(self, beat_s: float = BEAT_S, still_s: float = STILL_S) -> None:
        self.beat_s, self._still_s = beat_s, still_s
        self._due = inf

    def beat(self, now: float) -> None:
        """Call it every ``beat_s``."""
        self._due = now + self.beat_s

    def stood_still_s(self, now: float) -> float:
        """For how long, at least; 0 = not, or it has been told already."""
        late_s = now - self._due
        if late_s <= self._still_s:
            return 0.0
        self.beat(now)
        return late_s
