"""``Heart``: tells every controller, again and again, that this node is there and how it is.

Each controller is told every ``period_s``, and at once when something changed (:meth:`Heart.beat`); one that
did not answer is tried again soon, then less and less soon, up to the period, so that a cluster that is being
started waits for nobody's next beat.  What controllers answer is handed on: a newer map, for a launcher what
to run, whom the leader does not count on.

A beat knows by how much it came late: a node that was paused, or has no processor time, should not be
believed when it calls others silent.

The controllers are off the data path: a node that no controller hears, or that hears of none, goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvcomm.block import Incarnation
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.steps import Answer, Ask
from kvcomm.wire.messages import (
    Heartbeat,
    HeartbeatAnswer,
    Message,
    NodePlan,
    RingMap,
    ShardLoad,
    ShardMove,
    SplitReport,
)

PERIOD_S = 2.0
RETRY_FIRST_S = 0.05
GAP_S = 0.01
"""Between two beats: many changes of one moment are told once."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Face:
    """Who a node is, for its whole life."""

    node: str
    role: str
    rack: str
    incarnation: Incarnation
    address: str = ""
    local_address: str = ""
    control: str = ""


@dataclass(frozen=True, slots=True)
class Vitals:
    """How it is at present; see ``Heartbeat``."""

    silent: Sequence[str] = ()
    load: ShardLoad | None = None
    move: ShardMove | None = None
    split: SplitReport | None = None
    running: Sequence[str] = ()


@dataclass(eq=False, slots=True)
class _Listener:
    """One controller."""

    node: str
    due_at: float
    retry_s: float = RETRY_FIRST_S
    wants_ring: bool = False
    ring_sent_at: float = field(default=float("-inf"))
    heard: bool = False
    """Whether it answered last time."""


class Heart:
    """Made and run in one event loop.

    Args:
        controllers: their names.
        locate: where a controller is to be called, now.
        ring: the map that this node works by, if it is one that works by maps; else the newest that was heard
            of here counts.
        vitals: asked before each beat.
        took_ring: hears of a map newer than ours.
        took_plan: hears what is to run, where the leader says so.
        reports: asked once a period for what all controllers are to be told beside the beat; nobody waits for
            an answer, and what does not arrive is lost.
    """

    def __init__(
        self,
        face: Face,
        controllers: Sequence[str],
        locate: Callable[[str], str],
        peers: AsyncPeers,
        *,
        period_s: float = PERIOD_S,
        ring: Callable[[], RingMap | None] | None = None,
        vitals: Callable[[], Vitals] = Vitals,
        took_ring: Callable[[RingMap], object] = lambda ring: None,
        took_plan: Callable[[Sequence[NodePlan]], None] = lambda plan: None,
        reports: Callable[[float], Sequence[Message]] = lambda now: (),
    ) -> None:
        self.leader = ""
        """Node name of the controller that leads, as far as it was heard here; "" = none is known."""
        self.suspects: Sequence[str] = ()
        """Nodes that it does not count on."""
        self.newest: RingMap | None = None
        """The newest map that a controller told us."""
        self.late_s = 0.0
        """By how much the last beat came late."""
        self._face, self._locate, self._peers, self._period_s = face, locate, peers, period_s
        self._ring = ring or (lambda: self.newest)
        self._vitals, self._took_ring, self._took_plan = vitals, took_ring, took_plan
        self._reports, self._report_at = reports, float("-inf")
        self._number = 0
        self._woken = asyncio.Event()
        now = peers.clock()
        self._listeners = [_Listener(node, now) for node in controllers]

    def beat(self) -> None:
        """Something changed: tell everybody at once."""
        now = self._peers.clock()
        for listener in self._listeners:
            listener.due_at = min(listener.due_at, now)
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        while self._listeners:
            now = self._peers.clock()
            due_at = min(listener.due_at for listener in self._listeners)
            if due_at > now:
                with suppress(TimeoutError):
                    async with asyncio.timeout(due_at - now):
                        await self._woken.wait()
            self._woken.clear()
            now = self._peers.clock()
            due = [listener for listener in self._listeners if listener.due_at <= now]
            if due:
                self._tell(due, now)
                await asyncio.sleep(GAP_S)

    def _tell(self, due: Sequence[_Listener], now: float) -> None:
        self.late_s = max(0.0, now - min(listener.due_at for listener in due))
        vitals, ring = self._vitals(), self._ring()
        for listener in due:
            listener.due_at = now + self._period_s
            self._number += 1
            message = self._message(vitals, ring, listener.wants_ring)
            if listener.wants_ring:
                listener.wants_ring, listener.ring_sent_at = False, now

            def answered(answer: Answer, listener: _Listener = listener) -> None:
                self._answered(listener, answer)

            self._peers.start([Ask(self._locate(listener.node), message)], now + self._period_s, answered)

        self._report(now)

    def _report(self, now: float) -> None:
        if now < self._report_at:
            return
        self._report_at = now + self._period_s
        for message in self._reports(now):
            asks = [Ask(self._locate(listener.node), message) for listener in self._listeners]
            self._peers.start(asks, now + self._period_s)

    def _message(self, vitals: Vitals, ring: RingMap | None, with_ring: bool) -> Heartbeat:
        face = self._face
        return Heartbeat(
            node=face.node,
            role=face.role,
            rack=face.rack,
            incarnation=face.incarnation,
            number=self._number,
            address=face.address,
            local_address=face.local_address,
            control=face.control,
            epoch=ring.epoch if ring is not None else 0,
            late_s=self.late_s,
            silent=list(vitals.silent),
            load=vitals.load,
            move=vitals.move,
            split=vitals.split,
            ring=ring if with_ring else None,
            running=list(vitals.running),
        )

    def _answered(self, listener: _Listener, answer: Answer) -> None:
        now, message = self._peers.clock(), answer.message
        if not isinstance(message, HeartbeatAnswer):
            if listener.heard:
                _log.warning("%s does not answer heartbeats: %s", listener.node, message)
            listener.heard = False
            self._again(listener, now + listener.retry_s)
            listener.retry_s = min(2 * listener.retry_s, self._period_s)
            return
        listener.heard, listener.retry_s = True, RETRY_FIRST_S
        if message.leader == listener.node:
            self.leader, self.suspects = message.leader, message.suspects
        elif self.leader in ("", listener.node):
            self.leader = message.leader
        if message.wants_ring:
            listener.wants_ring = True
            self._again(listener, max(now, listener.ring_sent_at + self._period_s))
        if message.ring is not None:
            self._hear_of(message.ring)
        if message.plan is not None:
            self._took_plan(message.plan)

    def _hear_of(self, ring: RingMap) -> None:
        ours = self._ring()
        if self.newest is None or ring.epoch > self.newest.epoch:
            self.newest = ring
        if ours is None or ours.epoch < ring.epoch:
            self._took_ring(ring)

    def _again(self, listener: _Listener, at: float) -> None:
        if at < listener.due_at:
            listener.due_at = at
            self._woken.set()
