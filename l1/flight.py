"""``Flights``: single flight.  Of all who miss a key at one time one loads it, for all.

Theory of operation
-------------------
A reader claims all keys that it misses, once, in one step.  Each key is then in a *flight* with one *leader*,
and any number of *followers* in the order of their claims.  Two readers whose runs overlap in part lead and
follow each other key by key::

    A claims  0 .. 99     leads   0 .. 99
    B claims 50 .. 149    follows A on 50 .. 99, leads 100 .. 149
    C claims  0 .. 149    follows A on  0 .. 99 and B on the rest

What happens to one key:

* Its leader (or anybody) lands a value: all other parties of the flight are handed it, and the flight ends.
* Its leader lands a miss: all followers are handed the miss, and the flight ends.
* Its leader hands it over, leaves, or stalls: the first follower with time left becomes leader; one without
  is handed a miss, and so is everybody once ``attempts_max`` leaders have failed.

A leader *stalls* when its own deadline passes, or when it lands nothing for ``stall_s``.  It may still land
values later: a verified block is welcome from anybody, only a miss needs the right to speak.

Nobody hangs.  A leader's order is always below its followers' orders: it claimed earlier, and only the first
follower inherits.  So "waits for" runs from later claims to earlier ones and has no cycle, provided that a
reader makes one claim at a time and closes it before the next.  Whoever waits also wakes at
:meth:`Flights.patience`, so every flight ends after at most ``attempts_max`` stalls.  Leaving in time is no
failure: a cancelled reader says nothing about the tiers.

Parties with news are returned from the call that made it; the caller wakes them after letting go of its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class News(Generic[V]):
    """What happened to the keys a party did not load itself, since it last asked."""

    landed: list[tuple[bytes, V | None]]
    """Values, and misses (``None``), in the order in which they arrived."""
    inherited: list[bytes]
    """Keys whose leader failed: now this party's to load."""


@dataclass(eq=False, slots=True)
class Party(Generic[V]):
    """One reader's stake in the flights.  Changed by :class:`Flights` only."""

    order: int
    """Of the claim; never reused."""
    deadline: float
    active_at: float
    """When it last claimed, landed or inherited something."""
    leads: dict[bytes, None] = field(default_factory=dict)
    """Keys to load, in claim order."""
    follows: dict[bytes, None] = field(default_factory=dict)
    """Keys that others load."""
    landed: list[tuple[bytes, V | None]] = field(default_factory=list)
    inherited: list[bytes] = field(default_factory=list)

    @property
    def untold(self) -> list[bytes]:
        """Keys of which :meth:`Flights.take` has yet to say what became of them."""
        return [*self.follows, *(key for key, _ in self.landed), *self.inherited]

    @property
    def has_news(self) -> bool:
        """Whether waiting makes no sense: there is something to take, or nothing to wait for."""
        return bool(self.landed or self.inherited or not self.follows)


@dataclass(eq=False, slots=True)
class _Flight(Generic[V]):
    leader: Party[V]
    followers: dict[int, Party[V]] = field(default_factory=dict)  # ascending orders, as claims come in order
    failures: int = 0


class Flights(Generic[V]):
    """All keys being loaded in this process.  Not thread-safe; ``now`` is monotonic seconds.

    Args:
        stall_s: a leader that landed nothing for so long loses its keys.  Longer than one request's timeout,
            or slow peers are asked twice.
        attempts_max: how many leaders may fail a key before its followers get a miss, so that a dead tier is
            not tried by fifty readers one after the other.
    """

    __slots__ = (
        "_expiry_floor",
        "_flights",
        "_leading",
        "_order",
        "attempts_max",
        "followed",
        "handed_over",
        "led",
        "stall_s",
        "stalled",
    )

    def __init__(self, *, stall_s: float = 3.0, attempts_max: int = 2) -> None:
        if stall_s <= 0 or attempts_max < 1:
            raise ValueError(f"stall_s {stall_s} must be > 0 and attempts_max {attempts_max} >= 1")
        self.stall_s = stall_s
        self.attempts_max = attempts_max
        self.led = 0
        """Keys whose claim began a flight, since start: loads."""
        self.followed = 0
        """Keys whose claim joined one: loads saved."""
        self.handed_over = 0
        """Keys that went from a failed leader to a follower."""
        self.stalled = 0
        """Leaders that lost their keys for want of progress."""
        self._order = 0
        self._flights: dict[bytes, _Flight[V]] = {}
        self._leading: dict[int, Party[V]] = {}  # parties that lead something
        self._expiry_floor = float("inf")  # no leader stalls before; raised lazily

    def claim(self, keys: Sequence[bytes], now: float, deadline: float) -> tuple[Party[V], list[Party[V]]]:
        """Lead what nobody loads, follow the rest; duplicate keys count once.

        Returns the new party (see ``leads`` and ``follows``) and the parties to wake.
        """
        woken = self.expire(now)
        self._order += 1
        party: Party[V] = Party(self._order, deadline, now)
        for key in keys:
            if key in party.leads or key in party.follows:
                continue
            flight = self._flights.get(key)
            if flight is None:
                self._flights[key] = _Flight(party)
                party.leads[key] = None
            else:
                flight.followers[party.order] = party
                party.follows[key] = None
        self.led += len(party.leads)
        self.followed += len(party.follows)
        if party.leads:
            self._watch(party, now)
        return party, woken

    def land(self, party: Party[V], key: bytes, value: V | None, now: float) -> list[Party[V]]:
        """``party`` has the value, or knows that there is none; the parties to wake.

        Ignored where the key's flight is over, and for a miss from a party that does not lead it.
        """
        party.active_at = now
        flight = self._flights.get(key)
        if flight is None or (value is None and flight.leader is not party):
            return []
        return self._end(key, flight, value, told=party)

    def hand_over(self, party: Party[V], keys: Iterable[bytes], now: float) -> list[Party[V]]:
        """``party`` could not load these keys (it saw a failure, not a miss); the parties to wake."""
        return self._pass_on(party, keys, now, failed=True)

    def leave(self, party: Party[V], now: float) -> list[Party[V]]:
        """``party`` is done: follow no more, pass on what it still leads; the parties to wake.

        Idempotent.  A failure only if it should have left before.
        """
        for key in party.follows:
            del self._flights[key].followers[party.order]
        party.follows.clear()
        return self._pass_on(party, party.leads, now, failed=now >= self._stalls_at(party))

    def take(self, party: Party[V], now: float) -> tuple[News[V], list[Party[V]]]:
        """The news, once; and the parties to wake.

        A key that was inherited and, before this call, lost again for want of progress is told as a miss.
        """
        woken = self.expire(now)
        known = {key for key, _ in party.landed}
        lost = [key for key in party.inherited if key not in party.leads and key not in known]
        inherited = [key for key in party.inherited if key in party.leads]
        news = News(party.landed + [(key, None) for key in lost], inherited)
        party.landed, party.inherited = [], []
        return news, [other for other in woken if other is not party]

    def expire(self, now: float) -> list[Party[V]]:
        """Take the keys from leaders that stalled; the parties to wake."""
        if now < self._expiry_floor:
            return []
        woken: dict[int, Party[V]] = {}
        for party in list(self._leading.values()):
            if party.leads and now >= self._stalls_at(party):
                self.stalled += 1
                for other in self.hand_over(party, party.leads, now):
                    woken[other.order] = other
        self._expiry_floor = min(map(self._stalls_at, self._leading.values()), default=float("inf"))
        return list(woken.values())

    def patience(self, party: Party[V]) -> float:
        """When ``party`` should :meth:`take` unwoken: its deadline, or the first time a leader may stall."""
        leaders = {self._flights[key].leader.order: self._flights[key].leader for key in party.follows}
        return min((party.deadline, *map(self._stalls_at, leaders.values())))

    def __len__(self) -> int:
        """Keys in flight."""
        return len(self._flights)

    def _end(self, key: bytes, flight: _Flight[V], value: V | None, told: Party[V]) -> list[Party[V]]:
        """The flight is over; hand ``value`` to every party but ``told``.  The parties to wake."""
        del self._flights[key]
        woken = []
        for other in (flight.leader, *flight.followers.values()):
            other.leads.pop(key, None)
            other.follows.pop(key, None)
            if other is not told:
                other.landed.append((key, value))
                woken.append(other)
        self._unwatch(flight.leader)
        return woken

    def _pass_on(self, party: Party[V], keys: Iterable[bytes], now: float, *, failed: bool) -> list[Party[V]]:
        woken: dict[int, Party[V]] = {}
        for key in [key for key in keys if key in party.leads]:
            flight = self._flights[key]
            flight.failures += failed
            over = flight.failures >= self.attempts_max
            news = self._end(key, flight, None, told=party) if over else self._to_heir(key, flight, now)
            woken.update((other.order, other) for other in news)
        return list(woken.values())

    def _to_heir(self, key: bytes, flight: _Flight[V], now: float) -> list[Party[V]]:
        del flight.leader.leads[key]
        self._unwatch(flight.leader)
        woken = []
        while flight.followers:
            heir = flight.followers.pop(next(iter(flight.followers)))
            del heir.follows[key]
            woken.append(heir)
            if now < heir.deadline:
                self._inherit(heir, key, flight, now)
                return woken
            heir.landed.append((key, None))  # out of time; left in line it would wait for a later claim
        del self._flights[key]
        return woken

    def _inherit(self, heir: Party[V], key: bytes, flight: _Flight[V], now: float) -> None:
        self.handed_over += 1
        flight.leader = heir
        heir.leads[key] = None
        heir.inherited.append(key)
        heir.active_at = now
        self._watch(heir, now)

    def _watch(self, party: Party[V], now: float) -> None:
        self._leading[party.order] = party
        self._expiry_floor = min(self._expiry_floor, now + self.stall_s, party.deadline)

    def _unwatch(self, party: Party[V]) -> None:
        if not party.leads:
            self._leading.pop(party.order, None)

    def _stalls_at(self, party: Party[V]) -> float:
        return min(party.deadline, party.active_at + self.stall_s)

    def check(self) -> None:
        """Assert the invariants."""
        led, followed = 0, 0
        for key, flight in self._flights.items():
            orders = list(flight.followers)
            assert key in flight.leader.leads
            assert flight.leader.order in self._leading
            assert orders == sorted(orders)
            assert all(flight.leader.order < order for order in orders), "a cycle of waiting is possible"
            assert all(key in follower.follows for follower in flight.followers.values())
            assert flight.failures < self.attempts_max
            followed += len(orders)
        for party in self._leading.values():
            assert party.leads
            assert self._expiry_floor <= self._stalls_at(party)
            led += len(party.leads)
        assert led == len(self._flights)

    def story(self, key: bytes) -> str:
        """Who loads ``key`` and who waits for it, for a person."""
        flight = self._flights.get(key)
        if flight is None:
            return "not in flight"
        line = ", ".join(map(str, flight.followers)) or "nobody"
        until = self._stalls_at(flight.leader)
        return (
            f"claim {flight.leader.order} loads it, until {until:.3f} s at the latest, followed by {line}; "
            f"{flight.failures} leaders failed"
        )
