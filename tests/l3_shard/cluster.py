"""``Cluster``: shard machines in one thread, a message network and disks drawn from one seed.

Messages are delayed, overtake each other and get lost, in either direction, and those that may be are
doubled; disks take time and are full at times; nodes crash (keeping what was durable), stay down, stand still
(and then do all that has come meanwhile), lose their disk (coming back under a new replica id), find a record
damaged, or are away for a while; maps of the same nodes reach them one by one.  Every machine checks its
invariants after every event.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

import pytest

from kvcomm.machine import (
    Answered,
    AskPeer,
    ConnectionId,
    Effect,
    Event,
    Origin,
    Received,
    Reply,
    Stop,
    Tick,
    Ticket,
)
from kvcomm.wire.messages import Failure, Message, RecordGet, RecordReplicate, RecordState, RingMap, RingNode
from l3_shard import dvv
from l3_shard import ring as ring_module
from l3_shard.desk import ShardLimits
from l3_shard.merkle import leaf_of, state_digest
from l3_shard.repair import RepairOptions
from l3_shard.replica import first_replica, later
from l3_shard.ring import Ring
from l3_shard.shard import RingChanged, Shard
from l3_shard.storage import (
    Audit,
    Audited,
    Entry,
    Load,
    Loaded,
    Persist,
    Persisted,
    Scan,
    Scanned,
    Survey,
    Surveyed,
    Sweep,
    Swept,
)
from l3_shard.tombstones import dead_since

NODE_TENANT = b"N" * 16
TENANT = b"T" * 16


def ring_map(names: str, *, epoch: int = 1, replicas: int = 3, write: int = 2, read: int = 1) -> RingMap:
    shards = [RingNode(name, f"tcp://{name}", "", "", f"rack-{name}", 1) for name in names]
    return RingMap(epoch, replicas, write, read, 1, shards, [])


def small_rings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a fixture: making rings would take most of the time.  Those made so far, or here, are forgotten."""
    monkeypatch.setattr(ring_module, "POINTS_PER_WEIGHT", 8)
    for made in (ring_module._circle, ring_module._ring_of):
        made.cache_clear()
    yield
    for made in (ring_module._circle, ring_module._ring_of):
        made.cache_clear()


@dataclass
class Disk:
    """What is durable of one node."""

    replica: str
    records: dict[bytes, RecordState] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)
    lost: set[bytes] = field(default_factory=set)
    """Not to be read any more, while the index still has them."""
    notes: dict[bytes, bytes] = field(default_factory=dict)
    removed_count: int = 0

    def write(self, persist: Persist) -> None:
        _update(self.records, [(key, state if state.context else None) for key, state in persist.writes])
        _update(self.notes, persist.notes)
        self.removed_count += sum(not state.context for _, state in persist.writes)
        self.replica = later(self.replica, persist.replica)
        self.damaged.difference_update(key for key, _ in persist.writes)
        self.lost.difference_update(key for key, _ in persist.writes)


T = TypeVar("T")


def _update(held: dict[bytes, T], changes: Iterable[tuple[bytes, T | None]]) -> None:
    for key, value in changes:
        if value is None:
            held.pop(key, None)
        else:
            held[key] = value


@dataclass
class Faults:
    """What the network and the disks do; all drawn by the seed in tests."""

    loss: float = 0.0
    delay_s: float = 0.05
    disk_s: float = 0.02
    double: float = 0.0
    """Of messages that are harmless twice."""
    full: float = 0.0
    """Of writes to a disk."""


class Cluster:
    swept_leaves = 3
    """At once."""

    def __init__(
        self,
        seed: int,
        names: str = "abc",
        faults: Faults | None = None,
        limits: ShardLimits | None = None,
        make: Callable[..., Shard] = Shard,
        repair: RepairOptions | None = None,
        members: str | None = None,
        **quorums: int,
    ) -> None:
        """``members``: those of ``names`` that are in the first map; else all."""
        self.repair = repair
        self.away: set[str] = set()
        """Nodes that no message reaches or leaves."""
        self._make = make
        self._down: set[str] = set()
        self._paused_until = dict.fromkeys(names, 0.0)
        self.limits = limits or ShardLimits(request_timeout_s=1.0)
        self.draw = random.Random(seed)
        self.names = names
        self.faults = faults or Faults()
        self.map = ring_map(members or names, **quorums)
        self._ring = Ring.from_map(self.map)  # every epoch places alike
        self.now = 0.0
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._requests: dict[tuple[str, int], Callable[[Message], None]] = {}
        self._lives = dict.fromkeys(names, 0)
        self._ticks: dict[tuple[str, int], float] = {}  # (node, life) -> when its next tick comes
        self._writing: dict[str, list[Persist]] = {name: [] for name in names}
        self._drawn = count()
        self.disks = {name: Disk(self._new_replica()) for name in names}
        self.shards: dict[str, Shard] = {}
        for name in names:
            self._boot(name)

    # -- what tests do

    def call(
        self, node: str, message: Message, then: Callable[[Message], None], tenant: bytes = TENANT
    ) -> None:
        """A client asks ``node``; ``then`` gets the reply, or a failure after a while."""
        self._request(node, message, tenant, then, timeout_s=3.0, reliable=False)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._order), action))

    def run(self, until: float | None = None) -> None:
        """Play the agenda until it is empty or ``until`` has come."""
        while self._agenda and (until is None or self._agenda[0][0] <= until):
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        if until is not None:
            self.now = until

    def crash(self, node: str) -> None:
        """Kill and restart: what was durable stays, so does the replica id.  A write under way happens or
        does not, as a whole."""
        for persist in self._writing[node]:
            if self.draw.random() < 0.5:
                self.disks[node].write(persist)
        self._writing[node] = []
        self._lives[node] += 1
        self._boot(node)

    def fail(self, node: str, down_s: float) -> None:
        """Crash, and be back after a while."""
        self.crash(node)
        self._lives[node] += 1
        self._down.add(node)
        self.after(down_s, lambda: self._come_back(node))

    def pause(self, node: str, pause_s: float) -> None:
        """Stand still: nothing is handled, everything that comes waits."""
        self._paused_until[node] = max(self._paused_until[node], self.now + pause_s)

    def change_ring(self, spread_s: float) -> None:
        """A new epoch of the same nodes; each hears of it at another time."""
        self.map = ring_map(
            self.names,
            epoch=self.map.epoch + 1,
            replicas=self.map.replicas,
            write=self.map.write_quorum,
            read=self.map.read_quorum,
        )
        for node in self.names:
            event, life = RingChanged(self.map), self._lives[node]
            self.after(self.draw.uniform(0, spread_s), partial(self._deliver, node, life, event))

    def offer(self, ring_map: RingMap, nodes: Iterable[str] | None = None) -> None:
        """Every node, or each of ``nodes``, hears of a map now."""
        for node in self.shards if nodes is None else nodes:
            self._deliver(node, self._lives[node], RingChanged(ring_map))

    def lose(self, node: str) -> None:
        """Restart with an empty disk."""
        self._writing[node] = []
        self.disks[node] = Disk(self._new_replica())
        self.crash(node)

    def heal(self) -> None:
        """Deliver everybody's records to everybody, through the machines."""
        self.run()
        self.faults = Faults()
        for node in self.names:
            self._deliver(node, self._lives[node], RingChanged(self.map))
            if damaged := sorted(self.disks[node].damaged):
                self.crash(node)  # it may know from memory what it cannot read any more
                keys = [key[len(TENANT) :] for key in damaged]
                self.call(node, RecordGet(self.map.epoch, keys), lambda answer: None)
                self.run()
        for source in self.names:
            for target in self.names:
                records = [
                    (key, state)
                    for key, state in sorted(self.disks[source].records.items())
                    if target in self.owners(key) and key not in self.disks[source].damaged
                ]
                if source != target and records:
                    keys, states = [key for key, _ in records], [state for _, state in records]
                    message = RecordReplicate(self.map.epoch, keys, states)
                    self._request(
                        target, message, NODE_TENANT, lambda answer: None, timeout_s=3.0, reliable=True
                    )
            self.run()

    def owners(self, stored: bytes) -> tuple[str, ...]:
        """The replicas of a stored key."""
        return self._ring.replicas(stored[len(TENANT) :])

    # -- the world

    def _come_back(self, node: str) -> None:
        self._down.discard(node)
        self.crash(node)

    def _new_replica(self) -> str:
        return first_replica(f"replica{next(self._drawn):03}")

    def _boot(self, name: str) -> None:
        self.shards[name] = self._make(
            name,
            self.disks[name].replica,
            self.map,
            node_tenant=NODE_TENANT,
            origin_ms=1_700_000_000_000,
            limits=self.limits,
            repair=self.repair,
            notes=dict(self.disks[name].notes),
        )
        self.after(0.0, partial(self._deliver, name, self._lives[name], Tick()))

    def _deliver(self, node: str, life: int, event: Event) -> None:
        if life != self._lives[node] or node in self._down:
            return
        if self._paused_until[node] > self.now:
            self.after(self._paused_until[node] - self.now, lambda: self._deliver(node, life, event))
            return
        shard = self.shards[node]
        effects = shard.handle(event, self.now)
        shard.check()
        for effect in effects:
            self._perform(node, effect)
        self._arm(node, life, shard.deadline())

    def _arm(self, node: str, life: int, deadline: float | None) -> None:
        if deadline is None or self._ticks.get((node, life), math.inf) <= deadline:
            return
        self._ticks[node, life] = when = max(self.now, deadline)

        def tick() -> None:
            if self._ticks.get((node, life)) == when:
                del self._ticks[node, life]
                self._deliver(node, life, Tick())

        self.after(when - self.now, tick)

    def _perform(self, node: str, effect: Effect) -> None:
        life = self._lives[node]
        match effect:
            case Reply(origin, message):
                self._requests.pop((node, origin.request), lambda message: None)(message)
            case AskPeer(ticket, peer, message, deadline):

                def answered(answer: Message) -> None:
                    self._deliver(node, life, Answered(ticket, answer))

                self._request(
                    peer,
                    message,
                    NODE_TENANT,
                    answered,
                    timeout_s=deadline - self.now,
                    reliable=False,
                    asker=node,
                )
            case Load(ticket, keys):
                self.after(self._disk_s(), lambda: self._load(node, life, ticket, keys))
            case Persist():
                self._writing[node].append(effect)
                self.after(self._disk_s(), lambda: self._persist(node, life, effect))
            case Survey():
                self.after(self._disk_s(), lambda: self._survey(node, life, effect))
            case Sweep():
                self.after(self._disk_s(), lambda: self._sweep(node, life, effect))
            case Audit():
                self.after(self._disk_s(), lambda: self._audit(node, life, effect))
            case Scan(ticket, prefix, after, limit):
                self.after(self._disk_s(), lambda: self._scan(node, life, ticket, prefix, after, limit))
            case Stop(reason):
                raise AssertionError(reason)
            case _:
                raise AssertionError(effect)

    def _request(
        self,
        node: str,
        message: Message,
        tenant: bytes,
        then: Callable[[Message], None],
        timeout_s: float,
        reliable: bool,
        asker: str = "",
    ) -> None:
        """A request and its reply over the network: exactly one answer comes back, at the latest at the
        time-out."""
        number, done = next(self._order), False

        def answer(reply: Message) -> None:
            nonlocal done
            if not done:
                done = True
                then(reply)

        def reply_arrives(reply: Message) -> None:
            if self._passes(reliable, node, asker):
                self.after(self._delay_s(), lambda: answer(reply))

        self._requests[node, number] = reply_arrives
        self.after(timeout_s, lambda: answer(Failure("unavailable", "no reply in time")))
        if self._passes(reliable, node, asker):
            origin = Origin(ConnectionId(1), number, tenant, 1)
            for _ in range(2 if message.idempotent and self.draw.random() < self.faults.double else 1):
                self.after(
                    self._delay_s(), lambda: self._deliver(node, self._lives[node], Received(origin, message))
                )

    def _load(self, node: str, life: int, ticket: Ticket, keys: tuple[bytes, ...]) -> None:
        if life != self._lives[node]:
            return
        disk = self.disks[node]
        damaged = tuple(key for key in keys if key in disk.damaged)
        unread = {*damaged, *disk.lost}
        states = tuple(None if key in unread else disk.records.get(key) for key in keys)
        self._deliver(node, life, Loaded(ticket, states, damaged))

    def _persist(self, node: str, life: int, persist: Persist) -> None:
        if life == self._lives[node]:
            self._writing[node].remove(persist)
            if self.draw.random() < self.faults.full:
                self._deliver(node, life, Persisted(persist.ticket, "full", "no room"))
                return
            self.disks[node].write(persist)
            self._deliver(node, life, Persisted(persist.ticket))

    def _passes(self, reliable: bool, *ends: str) -> bool:
        return self.away.isdisjoint(ends) and (reliable or self.draw.random() >= self.faults.loss)

    def _sweep(self, node: str, life: int, sweep: Sweep) -> None:
        leaves = [(leaf, tuple(entries)) for leaf, entries in sorted(self._index(node).items())]
        left = [leaf for leaf in leaves if leaf[0] >= sweep.first]
        part, rest = left[: self.swept_leaves], left[self.swept_leaves :]
        self._deliver(node, life, Swept(sweep.ticket, tuple(part), rest[0][0] if rest else None))

    def _audit(self, node: str, life: int, audit: Audit) -> None:
        disk = self.disks[node]
        left = [key for key in sorted(disk.records) if key > audit.resume]
        part = left[: min(3, audit.records)]
        damaged = tuple(key for key in part if key in disk.damaged)
        lost = tuple(key for key in part if key in disk.lost)
        resume = part[-1] if len(part) < len(left) else None
        total = len(disk.records)
        self._deliver(
            node, life, Audited(audit.ticket, len(part), len(part), total, damaged, lost, (), resume)
        )

    def _index(self, node: str) -> dict[int, list[Entry]]:
        by_leaf: dict[int, list[Entry]] = {}
        for key, state in sorted(self.disks[node].records.items()):
            entry = Entry(key, state_digest(key, state), dead_since(state))
            by_leaf.setdefault(leaf_of(key), []).append(entry)
        return by_leaf

    def _survey(self, node: str, life: int, survey: Survey) -> None:
        by_leaf = self._index(node)
        leaves = tuple(tuple(by_leaf.get(leaf, ())) for leaf in survey.leaves)
        self._deliver(node, life, Surveyed(survey.ticket, leaves))

    def _scan(self, node: str, life: int, ticket: Ticket, prefix: bytes, after: bytes, limit: int) -> None:
        records = self.disks[node].records
        keys = [
            key
            for key in sorted(records)
            if key.startswith(prefix) and key > after and dvv.alive(records[key])
        ]
        part = keys[: min(limit, 3)]
        self._deliver(node, life, Scanned(ticket, tuple(part), part[-1] if len(part) < len(keys) else None))

    def _delay_s(self) -> float:
        return self.draw.uniform(0.001, self.faults.delay_s)

    def _disk_s(self) -> float:
        return self.draw.uniform(0.0005, self.faults.disk_s)
