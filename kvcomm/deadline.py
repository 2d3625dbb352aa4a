"""How long a call may take: every call has a bound."""

from __future__ import annotations

import math
import time

DEADLINE_S = 5.0
"""Default bound of every call, seconds."""
DEADLINE_S_MAX = 86_400.0
"""No call may wait longer than a day: what is meant as "for ever" hangs an agent instead of telling it."""


def deadline_after(deadline_s: float) -> float:
    """Absolute monotonic seconds.  Raises ``ValueError`` for a wait that would have no end."""
    if not (math.isfinite(deadline_s) and 0 <= deadline_s <= DEADLINE_S_MAX):
        raise ValueError(f"deadline_s must be 0 to {DEADLINE_S_MAX:.0f} seconds, got {deadline_s}")
    return time.monotonic() + deadline_s
