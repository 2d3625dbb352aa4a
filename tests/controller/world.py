"""A cluster around one or more controllers, without a network: shards that obey their maps, metadata records
with a fence, and a clock that the test turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from controller.controller import (
    Controller,
    ControllerOptions,
    Deposed,
    Follows,
    Led,
    Note,
    Noted,
    Publish,
    Recall,
    Recalled,
    RingRules,
)
from kvcomm.machine import Answered, AskPeer, ConnectionId, Effect, Event, Origin, Received, Reply, Tick
from kvcomm.wire.messages import (
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Message,
    NodePlan,
    RingMap,
    RingOffer,
    RingTaken,
    ShardLoad,
    ShardMove,
)
from l3_shard.ring import NO_RING, Ring, decode_map

RULES = RingRules(replicas=2, write_quorum=2, read_quorum=1, block_copies=1)
LEASE_S = 6.0
TENANT = b"node"
Outcome = Literal["done", "fenced", "unknown"]
KEYS = [b"key/%d" % index for index in range(24)]


def plans(shards: int, pools: int = 0, racks: int = 1) -> list[NodePlan]:
    return [
        *(NodePlan(f"pool-{index}", "pool", "rack-0") for index in range(pools)),
        *(NodePlan(f"shard-{index}", "shard", f"rack-{index % racks}") for index in range(shards)),
    ]


class NoAnswer(Exception):
    """Not at once, or never: the controller died."""


@dataclass
class FakeNode:
    """A node of the cluster.  A shard keeps versions of records, and moves them by the rules that the
    controller counts on: what it gains it compares with a read quorum's worth of the old owners that have
    heard of the map; it drops only under a stable map; it answers nobody who works by another epoch."""

    plan: NodePlan
    life: int = 1
    number: int = 0
    ring: RingMap | None = None
    """Kept over a restart, like the records."""
    placed: Ring = field(default_factory=lambda: Ring.from_map(NO_RING))
    store: dict[bytes, int] = field(default_factory=dict)
    ready: int = 0
    clean: int = 0
    strong: int = 0
    left: int = 0
    load: ShardLoad | None = None
    silent: tuple[str, ...] = ()
    late_s: float = 0.0
    running: tuple[str, ...] = ()
    wants_ring: bool = False

    @property
    def epoch(self) -> int:
        return self.ring.epoch if self.ring is not None else 0

    def take(self, ring: RingMap) -> int:
        """Work by this map, if it is newer.  What was ready or clean stays so where nothing moves."""
        before = self.ring
        if before is not None and ring.epoch <= before.epoch:
            return before.epoch
        was = self.epoch
        placed = Ring.from_map(ring)
        same = before is not None and self.placed.placement == placed.placement
        self.ring, self.placed = ring, placed
        self.ready = ring.epoch if same and was and self.ready == was else 0
        self.clean = ring.epoch if same and was and self.clean == was else 0
        self.strong = 0
        if not same:
            self.left = 200 if placed.gains(self.plan.node) else 100  # so that some wait for others
        return ring.epoch

    def work(self, nodes: Mapping[str, FakeNode]) -> None:
        """One step: copy, settle or drop a part of what is left."""
        if self.ring is None or self.plan.role != "shard":
            return
        self.left = max(0, self.left - 50)
        if self.left:
            return
        self.strong = self.epoch
        if self.ring.transition is not None:
            if self.ready != self.epoch and self.copy(nodes):
                self.ready = self.epoch
        elif self.clean != self.epoch:
            self.store = {
                key: version
                for key, version in self.store.items()
                if self.plan.node in self.placed.keepers(key)
            }
            self.clean = self.epoch

    def copy(self, nodes: Mapping[str, FakeNode]) -> bool:
        """Whether it has all that it gains now."""
        assert self.ring is not None and self.ring.transition is not None
        ring, name = self.placed, self.plan.node
        for key in KEYS:
            groups = ring.write_groups(key)
            old = groups[0] if self.ring.transition.stage == "copy" else groups[-1]
            if name not in ring.keepers(key) or name in old:
                continue
            there = [nodes[each] for each in old if each in nodes and nodes[each].epoch == self.epoch]
            if len(there) < len(old) - min(self.ring.write_quorum, len(old)) + 1:
                return False
            self.merge(key, max(each.store.get(key, 0) for each in there))
        return True

    def merge(self, key: bytes, version: int) -> None:
        if version > self.store.get(key, 0):
            self.store[key] = version

    def beat(self) -> Heartbeat:
        self.number += 1
        port = 1000 + self.life
        return Heartbeat(
            node=self.plan.node,
            role=self.plan.role,
            rack=self.plan.rack,
            incarnation=self.life,
            number=self.number,
            address=f"tcp://127.0.0.1:{port}",
            local_address=f"unix:///{self.plan.node}-{self.life}",
            control=f"127.0.0.1:{port + 1}",
            epoch=self.epoch,
            late_s=self.late_s,
            silent=list(self.silent),
            load=self.load,
            move=ShardMove(self.ready, self.strong, self.clean, self.left, 0, self.left * 1000)
            if self.plan.role == "shard"
            else None,
            ring=self.ring if self.wants_ring else None,
            running=list(self.running),
        )


class World:
    """Controllers ``controller-0`` .. and the nodes of a plan; a launcher runs what the plan says."""

    def __init__(
        self,
        initial: Sequence[NodePlan],
        *,
        controllers: int = 1,
        rules: RingRules = RULES,
        options: ControllerOptions | None = None,
    ) -> None:
        self.now = 100.0
        self.rules, self.initial = rules, list(initial)
        self.options = options or ControllerOptions()
        self.records: dict[str, bytes] = {}
        self.fences: dict[str, int] = {}
        self.term = 0
        self.leader = ""
        self.controllers: dict[str, Controller] = {}
        self.nodes: dict[str, FakeNode] = {}
        self.dead: dict[str, FakeNode] = {}
        """Killed; their disks are kept."""
        self.cut: set[str] = set()
        """On the other side of a split: the controllers and the other nodes are on this one, clients on
        both."""
        self.launcher = FakeNode(NodePlan("launcher", "launcher", "rack-0"))
        self.maps: dict[int, RingMap] = {}
        """Epoch -> the map that was handed out under it."""
        self.published: list[RingMap] = []
        self.replies: list[Message] = []
        """To the last request."""
        self.late_replies: list[Message] = []
        """That came after the request had been left."""
        self.note_outcome: Callable[[Note], Outcome] = lambda _: "done"
        self.on_note: Callable[[Note], None] = lambda _: None
        self.asked = self.waiting = 0
        self.version = 0
        self.acknowledged: dict[bytes, int] = {}
        for index in range(controllers):
            self.start_controller(f"controller-{index}")
        for plan in initial:
            self.start(plan)

    # -- what happens to processes

    def start_controller(self, name: str) -> None:
        self.controllers[name] = Controller(name, self.rules, self.initial, self.options)

    def kill_controller(self, name: str) -> None:
        del self.controllers[name]
        if self.leader == name:
            self.leader = ""

    def start(self, plan: NodePlan) -> FakeNode:
        node = self.dead.pop(plan.node, None) or FakeNode(plan, life=0)
        node.life, node.number = node.life + 1, 0
        self.nodes[plan.node] = node
        return node

    def kill(self, name: str) -> FakeNode:
        node = self.dead[name] = self.nodes.pop(name)
        return node

    def elect(self, name: str = "controller-0") -> None:
        """The lease goes to this controller."""
        if self.leader and self.leader != name:
            self.deliver(self.leader, Deposed())
        self.term += 1
        self.leader = name
        for each in list(self.controllers):
            if each != name:
                self.deliver(each, Follows(name, self.term))
        self.deliver(name, Led(self.term, self.now + LEASE_S))

    # -- time

    def beat(self, name: str) -> None:
        """One heartbeat of this node, to every controller."""
        node = self.launcher if name == "launcher" else self.nodes[name]
        if name in self.cut:
            return
        if node.plan.role == "shard":
            node.silent = tuple(sorted({*self.dead, *self.cut}))
        message = node.beat()
        node.wants_ring = False
        for each in list(self.controllers):
            answer = self.ask(each, message)
            if not isinstance(answer, HeartbeatAnswer):
                continue
            node.wants_ring = node.wants_ring or answer.wants_ring
            if answer.ring is not None:
                self.handed(answer.ring)
                node.take(answer.ring)
            if answer.plan is not None and node is self.launcher:
                self.follow(answer.plan)

    def follow(self, plan: Sequence[NodePlan]) -> None:
        """The launcher runs what is planned, and nothing else."""
        names = {each.node for each in plan}
        for name in sorted(set(self.nodes) - names):
            del self.nodes[name]
        for name in sorted(set(self.dead) - names):
            del self.dead[name]
        for each in plan:
            if each.node not in self.nodes and each.node not in self.dead:
                self.start(each)
        self.launcher.running = tuple(sorted(self.nodes))

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        """Everybody beats and works a little, the lease is renewed, ticks come."""
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            if self.leader:
                self.deliver(self.leader, Led(self.term, self.now + LEASE_S))
            for name in list(self.controllers):
                self.tick(name)
            for name in sorted(self.nodes):
                if name in self.nodes:
                    self.nodes[name].work(self.side(name))
                    self.beat(name)
            self.beat("launcher")

    # -- records

    def write(self, coordinator: str, key: bytes, *, missed: bool = False) -> bool:
        """One more version; whether it was acknowledged.  ``missed``: one of those who should have it does
        not get it, where a quorum has it all the same."""
        node = self.nodes[coordinator]
        if node.ring is None:
            return False
        self.version += 1
        ring = node.placed
        there = self._alike(node, ring.keepers(key))
        groups = ring.write_groups(key)
        fewer = [each for index, each in enumerate(there) if index != self.version % len(there)]
        if missed and self._quorums(groups, fewer):
            there = fewer
        for each in there:
            self.nodes[each].merge(key, self.version)
        if not self._quorums(groups, there):
            return False
        self.acknowledged[key] = self.version
        return True

    def _quorums(self, groups: Sequence[Sequence[str]], there: Sequence[str]) -> bool:
        """Whether these are a write quorum of each group."""
        return all(len({*group} & {*there}) >= min(self.rules.write_quorum, len(group)) for group in groups)

    def read(self, coordinator: str, key: bytes) -> int | None:
        """``None``: not enough of those who have it answer."""
        node = self.nodes[coordinator]
        if node.ring is None:
            return None
        replicas = node.placed.replicas(key)
        there = self._alike(node, replicas)
        if len(there) < min(self.rules.read_quorum, len(replicas)):
            return None
        return max(self.nodes[each].store.get(key, 0) for each in there[: self.rules.read_quorum])

    def check_records(self) -> None:
        """Nobody reads anything older than what was acknowledged.  Those of one epoch and side ask the same
        shards."""
        coordinators = {
            (node.epoch, name in self.cut): name
            for name, node in self.nodes.items()
            if node.plan.role == "shard"
        }
        for (epoch, _), name in coordinators.items():
            for key, version in self.acknowledged.items():
                read = self.read(name, key)
                assert read is None or read >= version, f"{name} (epoch {epoch}) misses {key!r}"

    def _alike(self, node: FakeNode, names: Sequence[str]) -> list[str]:
        """Of these, who runs, can be reached and works by the same map."""
        side = self.side(node.plan.node)
        return [each for each in names if each in side and side[each].epoch == node.epoch]

    def side(self, name: str) -> dict[str, FakeNode]:
        """Whom a node can reach."""
        return {each: node for each, node in self.nodes.items() if (each in self.cut) == (name in self.cut)}

    def tick(self, name: str) -> None:
        due = self.controllers[name].deadline()
        if due is not None and due <= self.now:
            self.deliver(name, Tick())

    # -- messages

    def order(self, message: Message, controller: str = "") -> Message:
        return self.ask(controller or self.leader, message)

    def ask(self, controller: str, message: Message) -> Message:
        self.asked += 1
        self.replies = []
        origin = Origin(ConnectionId(1), self.asked, TENANT, 1)
        self.waiting = self.asked
        self.deliver(controller, Received(origin, message))
        self.waiting = 0
        assert len(self.replies) <= 1, "every request is answered once"
        if not self.replies:
            raise NoAnswer
        return self.replies.pop()

    def deliver(self, name: str, event: Event) -> None:
        events: list[Event] = [event]
        while events and name in self.controllers:
            machine = self.controllers[name]
            effects = machine.handle(events.pop(0), self.now)
            machine.check()
            due = machine.deadline()
            assert due is not None and due > self.now, "it would be called without end"
            for effect in effects:
                events += self.perform(name, effect)

    def perform(self, name: str, effect: Effect) -> list[Event]:
        match effect:
            case Reply():
                waited = effect.origin.request == self.waiting
                (self.replies if waited else self.late_replies).append(effect.message)
            case Recall():
                ring = self.records.get("ring")
                return [
                    Recalled(
                        effect.ticket, None if ring is None else decode_map(ring), self.records.get("plan")
                    )
                ]
            case Note():
                return [Noted(effect.ticket, self.note(name, effect))]
            case AskPeer(message=RingOffer()):
                return [Answered(effect.ticket, self.offer(effect.node, effect.message))]
            case Publish():
                self.published.append(effect.ring)
            case _:
                raise AssertionError(f"unexpected {effect}")
        return []

    def note(self, name: str, note: Note) -> Outcome:
        term = self.term if name == self.leader else self.term - 1
        if term < self.fences.get(note.name, 0):
            return "fenced"
        self.on_note(note)
        if name not in self.controllers:
            return "unknown"
        outcome = self.note_outcome(note)
        if outcome == "done":
            self.fences[note.name] = term
            self.records[note.name] = note.value
        return outcome

    def offer(self, node: str, message: Message) -> Message:
        assert isinstance(message, RingOffer)
        self.handed(message.ring)
        if node not in self.nodes or node in self.cut:
            return Failure("unavailable", "nobody there")
        return RingTaken(self.nodes[node].take(message.ring))

    def handed(self, ring: RingMap) -> None:
        """No two maps of one epoch, and none that was not noted before."""
        assert self.maps.setdefault(ring.epoch, ring) == ring, f"two maps of epoch {ring.epoch}"

    # -- what is there

    @property
    def ring(self) -> RingMap:
        return decode_map(self.records["ring"])
