"""``StrongWorld``: shard machines with strong records under a seeded network, and clients whose history is
checked.

On top of ``Cluster``: links can be cut one way, idempotent messages come twice, a restarted node has another
incarnation, and a second disk holds the strong records.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from msgspec.structs import replace

from kvcomm.machine import (
    Answered,
    AskPeer,
    ConnectionId,
    Effect,
    Origin,
    Received,
    Tick,
    Ticket,
)
from kvcomm.wire.messages import (
    Failure,
    Message,
    RingMap,
    StrongChange,
    StrongOrder,
    StrongOutcome,
    StrongOutcomes,
    StrongRead,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.desk import ShardLimits
from l3_shard.entering import MEMBERSHIP_KEY
from l3_shard.replica import first_replica
from l3_shard.ring import encode_map
from l3_shard.shard import RingChanged, Shard
from l3_shard.storage import Load, Loaded, Persist, Persisted, Scan, Scanned
from l3_shard.strong import StrongIdentity
from tests.l3_shard.cluster import NODE_TENANT, TENANT, Cluster, Faults
from tests.l3_shard.linearizable import Op, linearizable


@dataclass
class StrongDisk:
    member: str
    states: dict[bytes, StrongState] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)

    def write(self, persist: Persist) -> None:
        """As the store does it: what is written over is whole again, and an empty state is none."""
        for key, state in persist.writes:
            self.damaged.discard(key)
            if state == acceptor.EMPTY:
                self.states.pop(key, None)
            else:
                self.states[key] = state


class StrongWorld(Cluster):
    """Messages that are harmless twice come twice with probability ``twice``.

    ``forgets`` plants a bug: after a crash only the membership is left, so the node votes from nothing.
    ``began`` names nodes that ended when they had just kept the first map.
    """

    def __init__(
        self,
        seed: int,
        names: str = "abc",
        faults: Faults | None = None,
        *,
        twice: float = 0.0,
        forgets: bool = False,
        began: str = "",
        tombstone_age_s: float = math.inf,
        **quorums: int,
    ) -> None:
        self.twice, self.forgets, self.tombstone_age_s = twice, forgets, tombstone_age_s
        self.began = began
        self.page_keys = 2
        """Of a scan at most, so that few records make several pages."""
        self.cuts: set[tuple[str, str]] = set()
        """(from, to): nothing gets through."""
        self.incarnations = count(1)
        self.strong = {
            name: StrongDisk(first_replica(f"member{number:02}")) for number, name in enumerate(names)
        }
        self._strong_writing: dict[str, list[Persist]] = {name: [] for name in names}
        self._members = count(len(names))
        self._booting = True
        super().__init__(
            seed,
            names,
            faults,
            ShardLimits(request_timeout_s=1.0, strong_timeout_s=1.0),
            Shard,
            None,
            None,
            **quorums,
        )
        self._booting = False
        for name in names:
            self.after(0.0, partial(self._deliver, name, 0, Tick()))

    def settle(self) -> None:
        """Until every node votes."""
        while not all(shard.strong_counts().votes for shard in self.shards.values()):
            assert self._agenda and self.now < 60, [self.story(name) for name in self.names]
            self.run(self.now + 0.1)

    def story(self, name: str, key: bytes = b"k") -> str:
        return self.shards[name].story(TENANT + key)

    # -- what happens to nodes

    def crash(self, node: str) -> None:
        for persist in self._strong_writing[node]:
            if self.draw.random() < 0.5:
                self.strong[node].write(persist)
        self._strong_writing[node] = []
        if self.forgets:
            kept = {key: state for key, state in self.strong[node].states.items() if key == MEMBERSHIP_KEY}
            self.strong[node].states = kept
        super().crash(node)
        self._deliver(node, self._lives[node], Tick())

    def lose(self, node: str) -> None:
        """Both disks."""
        self.strong[node] = StrongDisk(first_replica(f"member{next(self._members):02}"))
        self._strong_writing[node] = []
        super().lose(node)

    def settled(self) -> bool:
        """Whether the owners by the newest map decide alone, and know."""
        maps = [self.shards[name].strong_maps() for name in self.map_names]
        return all(len(each) == 1 for each in maps) and len(set(maps)) == 1

    @property
    def map_names(self) -> list[str]:
        return [shard.node for shard in self.map.shards]

    def until(self, happened: Callable[[], bool], within_s: float = 60.0) -> None:
        """Play on until ``happened``."""
        give_up_at = self.now + within_s
        while not happened():
            assert self.now < give_up_at, [self.story(name) for name in self.names]
            self.run(self.now + 0.05)

    def adopt(self, ring_map: RingMap, names: str = "") -> None:
        """All hear of a map, or only some."""
        self.map = ring_map
        for name in names or self.names:
            if name in self.shards:
                self._deliver(name, self._lives[name], RingChanged(ring_map))

    def join(self, node: str, ring_map: RingMap) -> None:
        """A node that was never there."""
        self.names += node
        self.disks[node] = type(self.disks["a"])(self._new_replica())
        self.strong[node] = StrongDisk(first_replica(f"member{next(self._members):02}"))
        self._lives[node], self._writing[node], self._strong_writing[node] = 0, [], []
        self._paused_until[node] = 0.0
        self.adopt(ring_map)
        self._boot(node)
        self._deliver(node, 0, Tick())

    def cut(self, *pairs: tuple[str, str]) -> None:
        self.cuts.update(pairs)

    def isolate(self, node: str) -> None:
        for other in self.names:
            if other != node:
                self.cut((node, other), (other, node))

    # -- the world

    def _boot(self, name: str) -> None:
        self.shards[name] = self._make(
            name,
            self.disks[name].replica,
            self.map,
            node_tenant=NODE_TENANT,
            origin_ms=1_700_000_000_000,
            limits=self.limits,
            strong=StrongIdentity(
                self.strong[name].member,
                next(self.incarnations),
                self.draw.random,
                self.tombstone_age_s,
                {b"map": encode_map(replace(self.map, epoch=1))} if name in self.began else {},
            ),
        )

    def _perform(self, node: str, effect: Effect) -> None:
        life = self._lives[node]
        match effect:
            case AskPeer(ticket, peer, message, deadline):
                then = partial(self._answered, node, life, ticket)
                self._ask(node, peer, message, then, deadline - self.now)
            case Load(ticket, keys, "strong"):
                self.after(self._disk_s(), partial(self._strong_load, node, life, ticket, keys))
            case Persist(database="strong"):
                self._strong_writing[node].append(effect)
                self.after(self._disk_s(), partial(self._strong_persist, node, life, effect))
            case Scan(database="strong"):
                self.after(self._disk_s(), partial(self._strong_scan, node, life, effect))
            case _:
                super()._perform(node, effect)

    def _answered(self, node: str, life: int, ticket: Ticket, answer: Message) -> None:
        self._deliver(node, life, Answered(ticket, answer))

    def _ask(
        self, source: str, node: str, message: Message, then: Callable[[Message], None], timeout_s: float
    ) -> None:
        number, done = next(self._order), False

        def answer(reply: Message) -> None:
            nonlocal done
            if not done:
                done = True
                then(reply)

        def reply_arrives(reply: Message) -> None:
            if (node, source) not in self.cuts and self.draw.random() >= self.faults.loss:
                self.after(self._delay_s(), lambda: answer(reply))

        self.after(timeout_s, lambda: answer(Failure("unavailable", "no reply in time")))
        self._requests[node, number] = reply_arrives
        if (source, node) in self.cuts or self.draw.random() < self.faults.loss or node not in self.shards:
            return
        self._send(node, number, message)
        if message.idempotent and self.draw.random() < self.twice:
            self._send(node, next(self._order), message)

    def _send(self, node: str, number: int, message: Message) -> None:
        origin = Origin(ConnectionId(1), number, NODE_TENANT, 1)
        arrives = lambda: self._deliver(node, self._lives[node], Received(origin, message))  # noqa: E731
        self.after(self._delay_s(), arrives)

    def _strong_load(self, node: str, life: int, ticket: Ticket, keys: tuple[bytes, ...]) -> None:
        if life == self._lives[node]:
            disk = self.strong[node]
            damaged = tuple(key for key in keys if key in disk.damaged)
            states = tuple(None if key in damaged else disk.states.get(key) for key in keys)
            self._deliver(node, life, Loaded(ticket, states, damaged))

    def _strong_persist(self, node: str, life: int, persist: Persist) -> None:
        if life == self._lives[node]:
            self._strong_writing[node].remove(persist)
            self.strong[node].write(persist)
            self._deliver(node, life, Persisted(persist.ticket))

    def _strong_scan(self, node: str, life: int, scan: Scan) -> None:
        if life == self._lives[node]:
            keys = [key for key in sorted(self.strong[node].states) if key > scan.after]
            part = tuple(keys[: min(scan.limit, self.page_keys)])
            self._deliver(node, life, Scanned(scan.ticket, part, part[-1] if len(part) < len(keys) else None))


class Violation(AssertionError):
    """A promise was broken, as clients see it."""


@dataclass
class History:
    """What clients saw, by key."""

    ops: dict[bytes, list[Op]] = field(default_factory=dict)
    values: dict[bytes, bytes | None] = field(default_factory=dict)
    """Version -> value: there is one."""
    outcomes: dict[str, int] = field(default_factory=dict)
    written = 0
    under_way: dict[int, tuple[bytes, Op]] = field(default_factory=dict)
    """By a number of the client: what has not come back yet may have been seen by others."""

    def add(self, key: bytes, op: Op) -> None:
        self.ops.setdefault(key, []).append(op)

    def check(self) -> None:
        for key, ops in self.ops.items():
            begun = [op for name, op in self.under_way.values() if name == key]
            if not linearizable([*ops, *begun]):
                raise Violation(f"{key!r} is not linearizable: {ops}, and begun: {begun}")

    def version(self, version: bytes, value: bytes | None) -> None:
        if version and self.values.setdefault(version, value) != value:
            raise Violation(f"version {version!r} stands for {value!r} and for {self.values[version]!r}")


class StrongClient:
    """One operation after the other, of any node; never sends a change twice."""

    def __init__(self, world: StrongWorld, history: History, seed: int, *, nodes: str | None = None) -> None:
        self.world, self.history, self.draw = world, history, random.Random(seed)
        self.nodes = nodes or world.names
        self.last: dict[bytes, tuple[bytes, bytes | None]] = {}

    def act(self, keys: list[bytes], pace_s: float, count: int) -> None:
        if not count:
            return
        key, node = self.draw.choice(keys), self.draw.choice(self.nodes)
        epoch = self.world.shards[node].ring.epoch  # as a client that has asked this node before
        order, value = self._order(key)
        invoked, answered = self.world.now, False

        def then(answer: Message) -> None:
            nonlocal answered
            assert not answered
            answered = True
            self.history.under_way.pop(id(self), None)
            self._take(key, order, value, invoked, answer)
            self.world.after(self.draw.uniform(0, pace_s), partial(self.act, keys, pace_s, count - 1))

        kind = "put" if order.op == "delete" else order.op
        self.history.under_way[id(self)] = (key, Op(kind, invoked, value=order.value, expected=value))  # type: ignore[arg-type]
        message = StrongRead(epoch, [key]) if order.op == "read" else StrongChange(epoch, [order])
        self.world.call(node, message, then)

    def _order(self, key: bytes) -> tuple[StrongOrder, bytes | None]:
        """And the value that the version it names stands for."""
        self.history.written += 1
        value = b"v%d" % self.history.written
        version, known = self.last.get(key, (b"", None))
        if known is None:
            version = b""
        match self.draw.choice(("read", "read", "put", "cas", "cas", "delete")):
            case "read":
                return StrongOrder(key, "read"), None
            case "put":
                return StrongOrder(key, "put", b"", value), None
            case "delete":
                return StrongOrder(key, "delete"), None
        return StrongOrder(key, "cas", version, value), known

    def _take(
        self, key: bytes, order: StrongOrder, expected: bytes | None, invoked: float, answer: Message
    ) -> None:
        now, history = self.world.now, self.history
        if isinstance(answer, StrongOutcomes):
            (outcome,) = answer.outcomes
        else:
            assert isinstance(answer, Failure), answer
            outcome = StrongOutcome(answer.code, b"", None, answer.text)
        code = outcome.code or "done"
        if outcome.text == "no reply in time":
            code = "outcome_unknown"
        history.outcomes[code] = history.outcomes.get(code, 0) + 1
        kind = "put" if order.op == "delete" else order.op
        match code:
            case "done" | "conflict":
                wrote = code == "done" and order.op != "read"
                held = order.value if wrote else outcome.value
                history.version(outcome.version, held)
                self.last[key] = (outcome.version, held)
                succeeded = code == "done"
                op = Op(kind, invoked, now, order.value, expected, succeeded, outcome.value)  # type: ignore[arg-type]
                history.add(key, op)
            case "outcome_unknown":
                history.add(key, Op(kind, invoked, value=order.value, expected=expected))  # type: ignore[arg-type]
            case _:
                assert code in ("unavailable", "refused", "stale_epoch"), outcome
