"""``MovingWorld``: shard machines whose records are moved between two placements while clients write.

A *mover* stands in for the controller: it hands out the maps of one transition, each to every node at another
moment, and goes on when the nodes say that it may.  Clients write unique values and know the newest map that
they were told.  What they were acknowledged is checked against the disks, and against what they read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from kvcomm.machine import Effect
from kvcomm.wire.messages import (
    Failure,
    Message,
    RecordGet,
    RecordPut,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordVersions,
    RecordWrite,
    RingMap,
    RingTransition,
)
from l3_shard import dvv
from l3_shard.desk import ShardLimits
from l3_shard.repair import RepairOptions
from l3_shard.ring import Ring, decode_map
from l3_shard.shard import Shard
from l3_shard.storage import Persist
from tests.l3_shard.cluster import TENANT, Cluster, Faults, ring_map

OPTIONS = RepairOptions(interval_s=4.0, hint_age_s=20.0, tombstone_age_s=40.0)
LOOK_S = 0.1


def transition(before: str, after: str, stage: str, epoch: int, **quorums: int) -> RingMap:
    """A map in which records move from the shards of ``before`` to those of ``after``."""
    step = RingTransition(stage, ring_map(after).shards, [])  # type: ignore[arg-type]
    return structs.replace(ring_map(before, epoch=epoch, **quorums), transition=step)


class MovingWorld(Cluster):
    """``names`` are all shards, ``members`` those that have the records at first."""

    def __init__(
        self, seed: int, names: str, members: str, faults: Faults | None = None, **quorums: int
    ) -> None:
        self.quorums = quorums
        self.slow: dict[str, float] = {}
        """How long the next writes of records take on a node's disk."""
        limits = ShardLimits(request_timeout_s=1.0, recent_bytes_max=0)
        super().__init__(seed, names, faults or Faults(), limits, Shard, OPTIONS, members, **quorums)
        self.epoch = 1

    def _perform(self, node: str, effect: Effect) -> None:
        if isinstance(effect, Persist) and effect.writes and node in self.slow:
            life = self._lives[node]
            self._writing[node].append(effect)
            self.after(self.slow[node], lambda: self._persist(node, life, effect))
        else:
            super()._perform(node, effect)

    def stable(self, members: str) -> RingMap:
        self.epoch += 1
        return ring_map(members, epoch=self.epoch, **self.quorums)

    def moving(self, before: str, after: str, stage: str) -> RingMap:
        self.epoch += 1
        return transition(before, after, stage, self.epoch, **self.quorums)

    def hand_out(self, newest: RingMap, spread_s: float = 0.3) -> None:
        """Whoever starts from now on is told this map, and the others hear of it one by one."""
        self.map = newest
        for node in self.names:
            delay_s = self.draw.uniform(0.0, spread_s)
            self.after(delay_s, lambda node=node: self._hear(node, newest))  # type: ignore[misc]

    def _hear(self, node: str, newest: RingMap) -> None:
        if node not in self.away:
            self.offer(newest, [node])

    def until(self, said: Callable[[], bool], within_s: float = 60.0) -> None:
        """Run until something is so."""
        end = self.now + within_s
        while not said():
            assert self.now < end, {node: self.shards[node].move_status() for node in self.names}
            self.run(until=self.now + LOOK_S)
            for node in self.names:  # as heartbeats do
                if self.shards[node].ring.epoch < self.map.epoch:
                    self._hear(node, self.map)

    def living(self, *members: str) -> list[str]:
        return [node for node in self.names if node not in self.away and node in "".join(members)]

    def ready(self, *members: str) -> bool:
        return all(
            self.shards[node].move_status().ready_epoch >= self.epoch for node in self.living(*members)
        )

    def heard(self, *members: str) -> bool:
        return all(self.shards[node].ring.epoch >= self.epoch for node in self.living(*members))

    def clean(self, *members: str) -> bool:
        return all(
            self.shards[node].move_status().clean_epoch >= self.epoch for node in self.living(*members)
        )

    def steps(self, before: str, after: str) -> Iterator[str]:
        """The steps of a move; each is done when the next is asked for."""
        self.until(partial(self.clean, before, after))
        yield "clean"
        self.hand_out(self.moving(before, after, "copy"))
        yield "copying"
        self.until(lambda: self.heard(before, after) and self.ready(before, after))
        yield "ready"
        self.hand_out(self.moving(before, after, "serve"))
        yield "serving"
        self.until(partial(self.heard, before, after))
        yield "served"
        self.hand_out(self.stable(after))
        yield "flipped"
        self.until(partial(self.clean, before, after))
        yield "over"

    def move(self, before: str, after: str) -> None:
        for _ in self.steps(before, after):
            pass

    def roll_back(self, before: str, after: str, *, serving: bool) -> None:
        """Give up a move that has come as far as copying, or serving."""
        if serving:
            self.hand_out(self.moving(before, after, "copy"))
            self.until(partial(self.heard, before, after))
        self.hand_out(self.stable(before))
        self.until(partial(self.clean, before, after))

    def put(self, node: str, key: bytes, value: bytes | None, context: dict[str, int]) -> RecordVersion:
        """A write that is done."""
        answers: list[Message] = []
        write = RecordWrite(key, value, context)
        self.call(node, RecordPut(self.map.epoch, [write]), answers.append)
        self.run(until=self.now + 1.0)
        (answer,) = answers
        assert isinstance(answer, RecordVersions), answer
        return answer.versions[0]

    # -- what must be so

    def copies(self, key: bytes) -> dict[str, RecordState]:
        stored = TENANT + key
        return {node: disk.records[stored] for node, disk in self.disks.items() if stored in disk.records}

    def check_clean(self, members: str) -> None:
        """Nobody has what is not its own."""
        ring = Ring(self.map)
        for node, disk in self.disks.items():
            if node in self.away:
                continue
            foreign = [key for key in disk.records if node not in ring.replicas(key[len(TENANT) :])]
            assert not foreign, f"{node} still has {len(foreign)} records of others"


@dataclass
class Writer:
    """Writes records of its own names, each a few times, and reads back what it was acknowledged."""

    world: MovingWorld
    name: str
    pace_s: float = 0.02
    epoch: int = 1
    over: bool = False
    acknowledged: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """Key -> dot of its last write that was acknowledged."""
    unknown: set[bytes] = field(default_factory=set)
    deleted: set[bytes] = field(default_factory=set)
    dots: set[tuple[bytes, str, int]] = field(default_factory=set)
    refused_count: int = 0
    failures: list[str] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.name)
        self._maps = {self.world.map.epoch: self.world.map}
        self._contexts: dict[bytes, dict[str, int]] = {}

    def begin(self) -> Writer:
        self._next()
        return self

    def _next(self) -> None:
        if self.over:
            return
        key = b"%s/%d" % (self.name.encode(), self.draw.randrange(1 + self.number))
        self._put(key, b"v%d" % self.number, tries=3)
        self.number += 1

    def _put(self, key: bytes, value: bytes | None, tries: int) -> None:
        ring = Ring.from_map(self._maps[self.epoch])
        living = [node for node in ring.keepers(key) if node not in self.world.away]
        node = self.draw.choice(living)
        write = RecordWrite(key, value, self._contexts.get(key, {}))
        done = partial(self._done, key, value, tries)
        self.world.call(node, RecordPut(self.epoch, [write]), done)

    def _done(self, key: bytes, value: bytes | None, tries: int, answer: Message) -> None:
        if isinstance(answer, RecordVersions):
            (version,) = answer.versions
            dot = (key, version.replica, version.counter)
            assert dot not in self.dots, f"a dot is given out twice: {dot}"
            self.dots.add(dot)
            self.acknowledged[key] = (version.replica, version.counter)
            self._contexts[key] = version.context
            (self.deleted.add if value is None else self.deleted.discard)(key)
        else:
            assert isinstance(answer, Failure), answer
            if answer.code == "stale_epoch":
                newest = decode_map(answer.detail)
                self._maps[newest.epoch] = newest
                self.epoch = max(self.epoch, newest.epoch)
            if answer.code in ("stale_epoch", "unavailable") and answer.text != "no reply in time" and tries:
                self.world.after(0.0, lambda: self._put(key, value, tries - 1))
                return
            self.failures.append(answer.text)
            self.unknown.add(key)
            self._contexts.pop(key, None)
        self.world.after(self.draw.uniform(0.0, self.pace_s), self._next)

    def check(self, members: str) -> None:
        """Everything that was acknowledged is on a write quorum of its owners, and they all agree after a
        while."""
        world = self.world
        ring = Ring(world.map)
        for key, (replica, counter) in self.acknowledged.items():
            copies = world.copies(key)
            has = [node for node, state in copies.items() if state.context.get(replica, 0) >= counter]
            owners = [node for node in ring.replicas(key) if node not in world.away]
            assert set(owners) <= set(has), f"{key!r} {replica}:{counter} is on {has}, not on {owners}"
            if key in self.deleted and key not in self.unknown:
                assert not any(dvv.alive(copies[node]) for node in owners), f"{key!r} is back"

    def read_all(self) -> None:
        """By clients, from the first owner of each."""
        world = self.world
        ring = Ring(world.map)
        for key, (replica, counter) in self.acknowledged.items():
            answers: list[Message] = []
            world.call(ring.replicas(key)[0], RecordGet(world.map.epoch, [key]), answers.append)
            world.run(until=world.now + 0.3)
            (answer,) = answers
            assert isinstance(answer, RecordStates) and not answer.degraded, answer
            state = answer.states[0]
            assert state is not None and state.context.get(replica, 0) >= counter
