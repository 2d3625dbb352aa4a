"""``HybridClock``: timestamps that follow causality and stay near the wall clock (Kulkarni et al., OPODIS
2014).

A stamp is one 64-bit number, ``milliseconds << 16 | counter``, so stamps compare as integers.  The counter
tells apart stamps of one millisecond; when its 16 bits are used up the increment carries into the
milliseconds, which keeps the order and costs 1 ms of drift.

The wall clock is an argument.  Stamps order concurrent values for a person or for a last-writer-wins
resolver; nothing that must be right (ownership, leases, what replaced what) is decided by them.
"""

from __future__ import annotations

from typing import NewType

from kvcomm.errors import Refused

Stamp = NewType("Stamp", int)
"""A packed hybrid time; 0 is before everything."""

COUNTER_BITS = 16
MILLISECONDS_MAX = 2**48 - 1
DRIFT_MS_MAX = 60_000
"""How far ahead of the own wall clock a foreign stamp may be."""


class ClockDrift(Refused):
    """A foreign stamp is too far ahead of our wall clock to be followed: one of the two clocks is wrong."""

    code = "refused"


def pack(milliseconds: int, counter: int = 0) -> Stamp:
    """The stamp of a wall time (ms since 1970) and a counter.  Raises ``ValueError`` when either does not
    fit.
    """
    if not 0 <= milliseconds <= MILLISECONDS_MAX or not 0 <= counter < 1 << COUNTER_BITS:
        raise ValueError(
            f"a hybrid time has 48 bits of milliseconds and 16 of counter, got {milliseconds}, {counter}"
        )
    return Stamp(milliseconds << COUNTER_BITS | counter)


def unpack(stamp: Stamp) -> tuple[int, int]:
    """(milliseconds, counter): the inverse of :func:`pack`."""
    return stamp >> COUNTER_BITS, stamp & ((1 << COUNTER_BITS) - 1)


class HybridClock:
    """One process's clock.  ``last`` is the largest stamp made or followed so far.

    ``tick`` never refuses: a wall clock that was set back only makes stamps run ahead of it until it catches
    up.
    """

    def __init__(self, last: Stamp = Stamp(0), *, drift_ms_max: int = DRIFT_MS_MAX) -> None:
        self.last = last
        self._drift_ms_max = drift_ms_max

    def tick(self, wall_ms: int) -> Stamp:
        """A stamp for a new write: larger than every stamp made or followed before, not before the wall
        clock.

        Raises:
            ValueError: the wall clock is outside 48 bits.
        """
        self.last = max(Stamp(self.last + 1), pack(wall_ms))
        return self.last

    def observe(self, stamp: Stamp, wall_ms: int) -> None:
        """Follow a stamp that came from elsewhere, so that later ticks are larger.

        Raises:
            ClockDrift: it is more than ``drift_ms_max`` ahead of ``wall_ms``.  The clock stays as it was: one
                wrong clock must not drag a cluster's along.
        """
        ahead_ms = unpack(stamp)[0] - wall_ms
        if ahead_ms > self._drift_ms_max:
            raise ClockDrift(
                f"a stamp is {ahead_ms} ms ahead of this clock (limit {self._drift_ms_max}); set the clocks"
            )
        self.last = max(self.last, stamp)
