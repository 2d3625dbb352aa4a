"""Deadlines that travel: until when a request may be begun, on the clock of the server that gets it.

A duration cannot say it: a request that lay in a buffer while its server stood still, or behind a partition,
looks fresh when it is read at last, and a change of which its sender has long said "nobody knows" is made
then.  So a server puts its clock on everything that it says, the client learns from that how the two clocks
stand to each other, and puts its deadline *on the server's clock* on everything that it asks.

::

    client   sent ─────────────────────── heard        server's clock when the client heard:
                 \\                      /                 at least the stamp,
    server        ─────── stamp ────────                  at most the stamp + (heard - sent)

A stamp is milliseconds modulo 2**30 (12 days, so that what is up to 6 days late is known to be late); 0 =
none.  Clocks are monotonic ones; a clock that stands still with its machine (some virtual machines) makes
deadlines late, and never wrong in the other direction.
"""

from __future__ import annotations

from math import floor, inf

STAMP_BITS = 30
SLACK_S = 0.1
"""A request is begun at most so much after its deadline, as far as the network lets us know: so that what
took a while to come back does not make a deadline early."""
DRIFT = 0.01
"""Part by which one clock may have run faster than the other since they were compared."""
AHEAD_S_MAX = 3_600.0
"""A deadline further away is not told."""

FRESH_S = 0.02
"""What was heard a moment ago is not worked out anew with each reply."""

_MODULUS = 1 << STAMP_BITS


def stamp_of(seconds: float) -> int:
    """A moment of this process's clock."""
    return floor(seconds * 1_000) % _MODULUS or 1


def overdue_s(stamp: int, now: float) -> float:
    """How long ago the moment was, by the same clock; negative = it is to come; 0 for no stamp."""
    if not stamp:
        return 0.0
    return _signed(floor(now * 1_000) - stamp) / 1_000


class ServerClock:
    """What a client knows of the clock of one server, over one connection."""

    def __init__(self) -> None:
        self._least = self._most = 0.0
        """The server's clock minus ours, milliseconds, from the least to the most that it may be."""
        self._heard_at = -inf

    def heard(self, stamp: int, sent_at: float, now: float) -> None:
        """The server said ``stamp`` between ``sent_at`` (``-inf``: nobody knows) and ``now``."""
        if not stamp or now - self._heard_at < FRESH_S:
            return
        known = self._heard_at > -inf
        least = stamp - now * 1_000
        if known:
            least = self._least + _signed(least - self._least)
        most = least + (now - sent_at) * 1_000 + 1.0  # of which the stamp does not tell the fraction
        if known:
            drift = max(0.0, now - self._heard_at) * 1_000 * DRIFT
            nearer, farther = max(least, self._least - drift), min(most, self._most + drift)
            if nearer <= farther:  # else a clock was changed: only the newest word counts
                least, most = nearer, farther
        self._least, self._most, self._heard_at = least, most, now

    def stamp(self, deadline: float, now: float) -> int:
        """``deadline``, of our clock, as the server will know it; 0 = we cannot say."""
        if self._heard_at == -inf or deadline - now > AHEAD_S_MAX:
            return 0
        ahead = min(self._most - self._least, SLACK_S * 1_000)
        return floor(deadline * 1_000 + self._least + ahead) % _MODULUS or 1


def _signed(milliseconds: float) -> float:
    """The number of that remainder that is nearest to 0."""
    return (milliseconds + _MODULUS / 2) % _MODULUS - _MODULUS / 2
