"""``PeerWatch``: which of the other shards answer this one, and on which side of a split it is.

Every shard finds out by itself, without a controller.  A peer that answers whatever it is asked
(replication, comparisons) costs nothing; one that was not talked with for a *heartbeat* is sent a ``Ping``.
A question that stays open is repeated every ``quick_s``, and who has not answered for ``silence_s`` is
**silent**::

              asked, no answer for silence_s                        answers, and has been steady
    answers ────────────────────────────────► silent ──────────────────────────────────────────► answers
       ▲  heard                        pinged every quick_s                            told: returned

Who answers is heard in both directions: a link that is dead in one counts as dead.

**It suspects itself first** (Dadgar et al., Lifeguard, 2018).  Its own beat tells when this process was not
there: while it is late it says nothing of others, and the time by which it was late counts against nobody.
After a longer stop everybody has the whole ``silence_s`` once more.

**It does not flutter.**  Silence lasts for ``silence_s`` before it is said; a peer that falls silent again
soon after it returned has to answer without a gap for a while, twice as long each time, before it counts as
returned.

The mode of the shard is ``whole`` when all answer, ``majority`` when those who answer and itself are more
than half of the ring, else ``minority``.  Nothing is decided by it: each call finds out for itself whether
its quorum answers, and says ``degraded`` or ``unavailable``.  It is what is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvcomm.wire.messages import Message, Ping
from l3_shard.desk import Desk
from l3_shard.ring import Ring
from l3_shard.timers import Timers

Mode = Literal["whole", "majority", "minority"]

QUICK_MAX_S = 0.3
LATE_S = 0.1
"""A beat that is later than this is no accident of scheduling."""
STOPPED_S = 0.5
"""One that is later than this found a process that stood still."""
HASTY_S = 0.5
PINGS_MAX = 8
"""Open at a time, to one peer."""
RELAPSE_S = 10.0
"""A peer that falls silent again so soon after it returned has not been steady."""
STEADY_MAX_S = 8.0


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How closely a shard watches the others."""

    heartbeat_s: float = 2.0
    """A peer that was not talked with for so long is asked."""

    @property
    def silence_s(self) -> float:
        """Together with the heartbeat, and a beat, less than two of them."""
        return 0.8 * self.heartbeat_s

    @property
    def quick_s(self) -> float:
        return min(QUICK_MAX_S, 0.15 * self.heartbeat_s)


@dataclass(eq=False, slots=True)
class _Peer:
    node: str
    heard_at: float
    open_since: float | None = None
    """Since when it has been asked and has not answered anything."""
    open_count: int = 0
    hasty: bool = False
    """Whether the last question had little patience."""
    silent_since: float | None = None
    """When its last sign of life was, if it is silent."""
    returned_at: float = -math.inf
    steady_since: float | None = None
    """Of a silent one: since when it has answered all the same."""
    steady_s: float = 0.0
    """How long it must do so."""


@dataclass(frozen=True, slots=True)
class WatchView:
    """What a shard knows of the others at present."""

    silent: tuple[str, ...] = ()
    """Those that do not answer it, sorted."""
    mode: Mode = "whole"
    late_s: float = 0.0
    """By how much its own beat was late lately; decays."""
    silenced_count: int = 0
    """Times that one fell silent, since start."""
    returned_count: int = 0
    split_s: float = 0.0
    """Time in another mode than ``whole``, since start."""


class PeerWatch:
    """Of one shard; begins with the first :meth:`ring_changed`.

    Args:
        silenced: hears who has fallen silent.
        gone: hears which silent peer is in the ring no more.
        returned: hears who answers again, and since when it had been silent.
    """

    def __init__(
        self,
        node: str,
        options: WatchOptions,
        desk: Desk,
        timers: Timers,
        *,
        ring: Callable[[], Ring],
        silenced: Callable[[str], None],
        gone: Callable[[str], None],
        returned: Callable[[str, float], None],
    ) -> None:
        self._node, self._options = node, options
        self._desk, self._timers, self._ring = desk, timers, ring
        self._silenced, self._gone, self._returned = silenced, gone, returned
        self._peers: dict[str, _Peer] = {}
        self._beat_at: float | None = None
        self._beat_number = 0
        self._late_s = 0.0
        self._silenced_count = self._returned_count = 0
        self._split_s = 0.0
        self._counted_at = 0.0
        desk.heard, desk.unheard = self._heard, self._unheard

    # -- what is seen

    @property
    def silent(self) -> tuple[str, ...]:
        """Peers that do not answer, sorted."""
        return tuple(sorted(peer.node for peer in self._peers.values() if peer.silent_since is not None))

    @property
    def mode(self) -> Mode:
        silent_count, count = len(self.silent), len(self._peers) + 1
        if not silent_count:
            return "whole"
        return "majority" if 2 * (count - silent_count) > count else "minority"

    def view(self) -> WatchView:
        return WatchView(
            self.silent, self.mode, self._late_s, self._silenced_count, self._returned_count, self._split_s
        )

    # -- what happens

    def ring_changed(self) -> None:
        """Whoever is new has just been heard, for all that we know."""
        ring, now = self._ring(), self._desk.now
        others = [name for name in ring.names if name != self._node] if self._node in ring else []
        was, self._peers = self._peers, {name: self._peers.get(name) or _Peer(name, now) for name in others}
        for name, peer in was.items():
            if name not in self._peers and peer.silent_since is not None:
                self._gone(name)
        if self._peers and self._beat_at is None:
            self._counted_at = now
            self._plan(now)

    def resumed(self) -> None:
        """This process stood still: whatever it believes of others is old."""
        self._absolve()

    def check(self) -> None:
        """Assert every invariant."""
        for peer in self._peers.values():
            assert peer.node != self._node and 0 <= peer.open_count <= PINGS_MAX
            assert peer.silent_since is not None or peer.steady_since is None

    def _plan(self, now: float) -> None:
        self._beat_at = now + self._options.quick_s
        self._beat_number += 1
        self._timers.at(self._beat_at, partial(self._beat, self._beat_number))

    def _beat(self, number: int) -> None:
        if number != self._beat_number:
            return
        assert self._beat_at is not None, "it was planned"
        now = self._desk.now
        self._count_time(now)
        self._note_late(now - self._beat_at)
        if not self._peers:
            self._beat_at = None
            return
        for peer in list(self._peers.values()):
            self._look_at(peer, now)
        self._plan(now)

    def _note_late(self, late_s: float) -> None:
        """The time by which we were late is nobody else's silence."""
        self._late_s = max(late_s, 0.9 * self._late_s)
        if late_s > STOPPED_S:
            self._absolve()
        elif late_s > LATE_S:
            for peer in self._peers.values():
                if peer.open_since is not None and peer.silent_since is None:
                    peer.open_since += late_s

    def _absolve(self) -> None:
        """A fresh chance for everybody who is not silent already."""
        for peer in self._peers.values():
            if peer.silent_since is None and peer.open_since is not None:
                peer.open_since = self._desk.now

    def _look_at(self, peer: _Peer, now: float) -> None:
        quick_s = self._options.quick_s
        if peer.silent_since is not None:
            if peer.open_since is not None and now - peer.open_since > 2.5 * quick_s:
                peer.steady_since = None
            self._ping(peer)
        elif peer.open_since is not None:
            if now - peer.open_since >= self._options.silence_s:
                self._silence(peer)
            self._ping(peer)
        elif now + quick_s >= peer.heard_at + self._options.heartbeat_s:
            self._ping(peer)

    def _ping(self, peer: _Peer) -> None:
        """A silent peer is asked with little patience every other time: a request that comes to nothing has
        the next one go over a new connection (``kvcomm.rpc.asynchronous``), and over the old one a network
        that is back may stay unnoticed for long."""
        if peer.open_since is None:
            peer.open_since = self._desk.now
        if peer.open_count == PINGS_MAX:
            return
        peer.open_count += 1
        peer.hasty = peer.silent_since is not None and not peer.hasty
        wait_s = HASTY_S if peer.hasty else max(1.0, self._options.silence_s)
        self._desk.ask(peer.node, Ping(), partial(self._ponged, peer), timeout_s=wait_s)

    def _ponged(self, peer: _Peer, _answer: Message) -> None:
        peer.open_count -= 1  # who answered was heard by the desk

    def _heard(self, node: str) -> None:
        peer, now = self._peers.get(node), self._desk.now
        if peer is None:
            return
        peer.heard_at, peer.open_since = now, None
        if peer.silent_since is None:
            return
        if peer.steady_since is None:
            peer.steady_since = now
        if now - peer.steady_since >= peer.steady_s:
            self._welcome(peer)

    def _unheard(self, node: str) -> None:
        """Something that was asked of it came to nothing: it is looked at now, not at the next heartbeat."""
        peer = self._peers.get(node)
        if peer is not None and peer.open_since is None and peer.silent_since is None:
            self._ping(peer)

    # -- silent and back

    def _silence(self, peer: _Peer) -> None:
        now = self._desk.now
        relapsed = now < peer.returned_at + RELAPSE_S + self._options.silence_s
        peer.steady_s = min(STEADY_MAX_S, max(1.0, 2.0 * peer.steady_s)) if relapsed else 0.0
        peer.silent_since, peer.steady_since = peer.heard_at, None
        self._silenced_count += 1
        self._silenced(peer.node)

    def _welcome(self, peer: _Peer) -> None:
        now = self._desk.now
        self._count_time(now)
        since, peer.silent_since, peer.steady_since = peer.silent_since, None, None
        peer.returned_at = now
        self._returned_count += 1
        assert since is not None, "it was silent"
        self._returned(peer.node, since)

    def _count_time(self, now: float) -> None:
        if self.mode != "whole":
            self._split_s += now - self._counted_at
        self._counted_at = now
