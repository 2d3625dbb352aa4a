"""``Controller``: one of the controllers of a cluster, as a machine; off the data path.

All of them hear every node's heartbeats and answer them, so that each knows who is alive and which map is
the newest, and any may be asked how the cluster is.  The one that holds the leader's lease
(``controller.leading``) alone issues maps and takes orders.

::

      nodes ──Heartbeat──► roster ──► liveness                        shell (lease, metadata)
        ▲                     │                                         │ Led, Deposed, Follows
        └──HeartbeatAnswer────┤        ◄── Recalled, Noted ─────────────┤
           (newer map, plan,  │  Lead ──── Recall, Note, Publish ──────►│
            suspects)         └────►  ──── RingOffer to shards

The shell counts the lease from when it asked for it; after ``until`` the machine does nothing as a leader,
whatever has happened to the shell meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from controller.conductor import ORDERS, Conductor, ConductorOptions, Order
from controller.leading import Lead, Publish, Recall, Recalled
from controller.liveness import Patience
from controller.notebook import Note, Noted
from controller.placement import RingRules, nodes_of
from controller.roster import Roster
from kvcomm.errors import Refused
from kvcomm.machine import Answered, Closed, Effect, Event, Origin, Received, Reply, Resumed, Tick
from kvcomm.wire.messages import (
    ClusterGet,
    ClusterView,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Message,
    NodePlan,
    NodeView,
    RingMap,
)

__all__ = [
    "Controller", "ControllerOptions", "Deposed", "Follows", "Led", "Note", "Noted", "Publish", "Recall",
    "Recalled", "RingRules",
]  # fmt: skip

FORGET_S = 60.0
"""Who is neither in the map nor planned, and has been dead for so long, is forgotten."""
LATE_S = 1.0
"""A tick that comes later than this says that we stood still."""
NOT_LEADER = "not_leader"


@dataclass(frozen=True, slots=True)
class Led(Event):
    """This process holds the lease of the epoch ``term``, and may act on it until then; again at each
    renewal."""

    term: int
    until: float


@dataclass(frozen=True, slots=True)
class Deposed(Event):
    """It does not hold it any more."""


@dataclass(frozen=True, slots=True)
class Follows(Event):
    """The lease's record says that ``leader`` holds it; "" = nobody."""

    leader: str
    term: int


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """See ``kvcomm.config`` for what an operator sets."""

    heartbeat_s: float = 2.0
    lease_s: float = 6.0
    """Of nodes: whoever is silent for so long, and for three heartbeats at least, is dead; two heartbeats
    and it is suspect."""

    replace_after_s: float = 600.0
    """A shard that has been dead for so long is gone on without; 0 = never."""
    give_up_after_s: float = 120.0
    """An operation is taken back when a shard that is to get keys has been dead for so long."""
    move_rate_bytes_s: float = 64e6
    """That a shard takes while keys are moved to it."""
    members: tuple[str, ...] = ()
    """All controllers of the cluster: one that is not there is missed."""
    policy: str = ""
    """That moves keys by itself (``controller.policies.table``); "" = none."""

    @property
    def conductor(self) -> ConductorOptions:
        return ConductorOptions(
            self.replace_after_s, self.give_up_after_s, self.move_rate_bytes_s, self.policy
        )

    @property
    def patience(self) -> Patience:
        return Patience(2 * self.heartbeat_s, max(self.lease_s, 3 * self.heartbeat_s))


class Controller:
    """See the module.

    Args:
        node: this process's name.
        initial: what to run in a cluster that never had a map.
    """

    def __init__(
        self, node: str, rules: RingRules, initial: Sequence[NodePlan], options: ControllerOptions
    ) -> None:
        self.node = node
        self._rules, self._initial, self._options = rules, list(initial), options
        self._roster = Roster(options.patience)
        self._tickets: Iterator[int] = count(1)
        self._lead: Lead | None = None
        self._term = 0
        self._leader = ""
        self._due: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._notice_lateness(event, now)
        effects = self._take(event, now)
        self._roster.liveness.judge(now)
        self._forget(now)
        lead = self._leading(now)
        if lead is not None:
            effects += lead.work(now)
        self._due = self._next(now)
        return effects

    def deadline(self) -> float | None:
        return self._due

    @property
    def ring(self) -> RingMap | None:
        """The newest map that this controller knows to be noted."""
        return self._roster.ring

    @property
    def epoch(self) -> int:
        """Of :attr:`ring`; 0 = none."""
        return self.ring.epoch if self.ring is not None else 0

    def beat(self, node: str) -> Heartbeat | None:
        """The newest of this node's present life; ``None`` = not heard, or forgotten."""
        return self._roster.beat(node)

    @property
    def racks(self) -> set[str]:
        """That the shards and pools are in that are heard of."""
        names = [*self._roster.of_role("pool"), *self._roster.of_role("shard")]
        return {beat.rack for name in names if (beat := self._roster.beat(name)) is not None}

    def check(self) -> None:
        self._roster.liveness.check()
        if self._lead is not None:
            self._lead.check()

    def story(self, key: bytes) -> str:
        """Of the node named so."""
        name = key.decode(errors="replace")
        liveness = self._roster.liveness
        beat = self._roster.beat(name)
        return f"{name} is {liveness.state(name)}, works by epoch {self._roster.epoch(name)}; last: {beat}"

    # -- events

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(message=message) if isinstance(message, ORDERS):
                return self._order(event.origin, message, now)
            case Received():
                return [Reply(event.origin, self._answer(event.message, now))]
            case Led():
                return self._led(event, now)
            case Deposed():
                return self._end()
            case Follows():
                self._leader = event.leader
                self._term = max(self._term, event.term)
            case Recalled() | Noted() | Answered():
                return self._told(event, now)
            case Tick() | Resumed() | Closed():
                pass
            case _:
                raise TypeError(f"a controller does not know {type(event).__name__}")
        return []

    def _told(self, event: Recalled | Noted | Answered, now: float) -> list[Effect]:
        lead = self._leading(now)
        if lead is None:
            return []
        match event:
            case Recalled():
                lead.recalled(event, now)
            case Noted():
                return lead.noted(event, now)
            case Answered():
                lead.answered(event.ticket, event.message, now)
        return []

    def _notice_lateness(self, event: Event, now: float) -> None:
        """Whoever was late itself has no right to call others late."""
        late = self._due is not None and now > self._due + LATE_S
        if late or isinstance(event, Resumed):
            self._roster.liveness.forgive(now)

    def _led(self, event: Led, now: float) -> list[Effect]:
        effects: list[Effect] = []
        lead = self._lead
        if lead is None or event.term > lead.term:
            effects = self._end()
            conductor = Conductor(self._roster, self._options.conductor, now)
            lead = self._lead = Lead(
                self._rules, self._initial, self._roster, conductor, self._tickets, event.term, now
            )
            self._roster.liveness.forgive(now)
        if event.term == lead.term:
            lead.until = max(lead.until, event.until)
        self._leader, self._term = self.node, max(self._term, event.term)
        return effects

    def _end(self) -> list[Effect]:
        lead, self._lead = self._lead, None
        return [] if lead is None else lead.end()

    def _leading(self, now: float) -> Lead | None:
        """While the lease lasts."""
        lead = self._lead
        return lead if lead is not None and now < lead.until and not lead.over else None

    def _leader_known(self, now: float) -> str:
        if self._leader == self.node and self._leading(now) is None:
            return ""
        return self._leader

    def _next(self, now: float) -> float:
        times = [now + self._options.heartbeat_s, self._roster.liveness.deadline(now)]
        lead = self._leading(now)
        if lead is not None:
            times.append(lead.deadline(now))
        return min(time for time in times if time is not None)

    # -- requests

    def _order(self, origin: Origin, message: Order, now: float) -> list[Effect]:
        lead = self._leading(now)
        if lead is not None:
            return lead.order(origin, message, now)
        leader = self._leader_known(now)
        text = f"{self.node} does not lead, " + (f"{leader} does" if leader else "and nobody does at present")
        return [Reply(origin, Failure(NOT_LEADER, text, leader.encode()))]

    def _answer(self, message: Message, now: float) -> Message:
        match message:
            case Heartbeat():
                lead = self._leading(now)
                if self._roster.heard(message, now) and lead is not None:
                    lead.saw(message, now)
                return self._heartbeat_answer(message, now)
            case ClusterGet():
                return self.view(now)
        return Failure(Refused.code, f"a controller does not answer {type(message).__name__}")

    def _heartbeat_answer(self, beat: Heartbeat, now: float) -> HeartbeatAnswer:
        ring, lead = self.ring, self._leading(now)
        newer = ring if ring is not None and ring.epoch > beat.epoch else None
        plan = lead.plan if beat.role == "launcher" and lead is not None else None
        return HeartbeatAnswer(
            leader=self._leader_known(now),
            epoch=self.epoch,
            ring=newer,
            wants_ring=beat.epoch > self.epoch,
            plan=plan,
            suspects=self._suspects() if lead is not None else [],
        )

    def _suspects(self) -> list[str]:
        liveness = self._roster.liveness
        return [name for name in liveness.names if liveness.state(name) in ("suspect", "dead")]

    # -- the view

    def view(self, now: float) -> ClusterView:
        """Everything that this controller knows; operations only while it leads."""
        leader = self._leader_known(now)
        nodes = [self._node_view(name, now) for name in sorted({*self._roster.names, *self._wanted()})]
        wanted = self._wanted()
        missing = any(view.state != "alive" for view in nodes if view.node in wanted)
        mode = "leaderless" if not leader else "partitioned" if missing else "whole"
        lead = self._leading(now)
        operations = [] if lead is None else lead.views(now)
        return ClusterView(self.node, leader, self._term, mode, self.ring, nodes, operations)

    def _wanted(self) -> set[str]:
        """Nodes that should be there, as far as this controller knows."""
        members = self._options.members
        journal = self._lead.noted_journal if self._lead is not None else None
        planned = {node.node for node in journal.nodes} if journal is not None else set()
        return planned | {*members} | set(nodes_of(self.ring) if self.ring is not None else ())

    def _forget(self, now: float) -> None:
        liveness = self._roster.liveness
        gone = [name for name in liveness.names if liveness.gone_s(name, now) > FORGET_S]
        if gone:
            for name in sorted({*gone} - self._wanted()):
                self._roster.forget(name)

    def _node_view(self, name: str, now: float) -> NodeView:
        roster, liveness = self._roster, self._roster.liveness
        beat = roster.beat(name)
        in_ring = self.ring is not None and name in nodes_of(self.ring)
        if beat is None:
            role = "controller" if name in self._options.members else ""
            return NodeView(name, role, "", "unknown", -1.0, 0, 0, liveness.silent_to(name, now), in_ring)
        return NodeView(
            node=name,
            role=beat.role,
            rack=beat.rack,
            state=liveness.state(name),
            silent_s=liveness.silent_s(name, now),
            epoch=roster.epoch(name),
            incarnation=beat.incarnation,
            silent_to=liveness.silent_to(name, now),
            in_ring=in_ring,
            load=beat.load,
            move=beat.move,
            split=beat.split,
            address=beat.address,
            control=beat.control,
        )
