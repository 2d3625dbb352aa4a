"""``NegativeCache``: keys that nobody had a moment ago, and that are not asked for again for a while.

It may be wrong for as long as ``ttl_s``: somebody else may have published the key since.  It must never be
wrong about this process's own puts, and there is a race in that::

    reader                       writer, same process
    asks L3 for k
                                 puts k, forget(k)
    L3's answer: miss
    mark(k)                      k is stored, and would now be called absent for ttl_s

So puts are numbered.  A reader notes :attr:`~NegativeCache.moment` before it asks and hands it to ``mark``,
which ignores a key that was put since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NewType

from kvcomm.errors import ConfigError

Moment = NewType("Moment", int)
"""How many keys had been put when a reader began to ask."""

ABSENT_ENTRIES = 65_536
RECENT_PUTS = 16_384
"""Puts remembered one by one.  The marks of a reader that asked before all of these are ignored."""

JITTER_RATIO = 0.1
"""At most this part of the TTL is taken off, so that keys marked together do not come back together."""


class NegativeCache:
    """Absent keys, at most ``entries_max`` of them; the ones marked longest ago make room.  Not thread-safe.

    Args:
        ttl_s: how long a key is believed absent, an upper bound; 0 turns the cache off.
        jitter: draws from ``[0, 1)``; ``None`` = every entry lives exactly ``ttl_s``.

    Raises:
        ConfigError: a negative TTL, or no room for a single entry.
    """

    __slots__ = ("_draw", "_expiries", "_moment", "_moment_floor", "_puts", "entries_max", "hits", "ttl_s")

    def __init__(
        self,
        ttl_s: float = 5.0,
        *,
        entries_max: int = ABSENT_ENTRIES,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        if ttl_s < 0 or entries_max < 1:
            raise ConfigError(f"negative cache: ttl {ttl_s} s must be >= 0 and entries {entries_max} >= 1")
        self.ttl_s = ttl_s
        self.entries_max = entries_max
        self.hits = 0
        """Keys answered as known absent, since start."""
        self._draw = jitter
        self._expiries: dict[bytes, float] = {}  # in the order of marking
        self._moment = Moment(0)
        self._puts: dict[bytes, Moment] = {}  # in the order of putting
        self._moment_floor = Moment(0)  # of the newest put that was dropped from _puts

    @property
    def moment(self) -> Moment:
        """To be read before asking, and handed to :meth:`mark` with the answer."""
        return self._moment

    def known_absent(self, key: bytes, now: float) -> bool:
        """Whether the key was marked less than a TTL ago."""
        expiry = self._expiries.get(key)
        if expiry is None:
            return False
        if now >= expiry:
            del self._expiries[key]
            return False
        self.hits += 1
        return True

    def mark(self, keys: Sequence[bytes], now: float, since: Moment) -> None:
        """These keys were absent everywhere, says an answer to a question asked at ``since``."""
        if self.ttl_s == 0 or since < self._moment_floor:
            return
        for key in keys:
            if self._puts.get(key, 0) <= since:
                self._expiries.pop(key, None)
                self._expiries[key] = now + self._ttl_drawn_s()
        while len(self._expiries) > self.entries_max:
            del self._expiries[next(iter(self._expiries))]

    def forget(self, keys: Sequence[bytes]) -> None:
        """These keys exist now: they were put here, or somebody told of them."""
        for key in keys:
            self._moment = Moment(self._moment + 1)
            self._expiries.pop(key, None)
            self._puts.pop(key, None)
            self._puts[key] = self._moment
        while len(self._puts) > RECENT_PUTS:
            self._moment_floor = self._puts.pop(next(iter(self._puts)))

    def __len__(self) -> int:
        """Entries held, expired ones that nobody asked for included."""
        return len(self._expiries)

    def _ttl_drawn_s(self) -> float:
        if self._draw is None:
            return self.ttl_s
        return self.ttl_s * (1.0 - JITTER_RATIO * self._draw())
