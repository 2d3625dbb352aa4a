"""Shard machines under a drawn mix of faults, against causal histories.

The seed draws the whole world: nodes, keys, pace, and which faults there are and how bad.  The oracle knows
what the author of each write had been shown, what the authors of that had seen, and so on, and the dot that
the write got, which it is told as the machine gives it.  It knows nothing of contexts or merging.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from kvcomm import version
from kvcomm.version import VersionVector
from kvcomm.wire.messages import (
    Failure,
    Message,
    RecordGet,
    RecordPut,
    RecordState,
    RecordStates,
    RecordVersions,
    RecordWrite,
    Sibling,
)
from l3_shard import dvv
from l3_shard.desk import ShardLimits
from l3_shard.ring import decode_map
from l3_shard.shard import Shard
from l3_shard.writing import Draft
from tests.l3_shard.cluster import TENANT, Cluster, Disk, Faults, small_rings

Dot = tuple[bytes, str, int]
"""Key, replica, counter."""


@dataclass(eq=False)
class Attempt:
    """A write that somebody asked for."""

    key: bytes
    value: bytes | None
    past: frozenset[Attempt]
    dot: Dot | None = None
    """The last that it was given."""
    acknowledged: bool = False


@dataclass
class Oracle:
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """By the request's ``RecordWrite``."""
    by_value: dict[bytes, Attempt] = field(default_factory=dict)
    by_dot: dict[Dot, Attempt] = field(default_factory=dict)
    writes: list[RecordWrite] = field(default_factory=list)

    def ask(self, write: RecordWrite, past: frozenset[Attempt]) -> Attempt:
        self.writes.append(write)  # kept, so that no other gets its id
        attempt = self.attempts[id(write)] = Attempt(write.key, write.value, past)
        if write.value is not None:
            self.by_value[write.value] = attempt
        return attempt

    def given(self, attempt: Attempt, state: RecordState, own: version.Dot | None, dot: version.Dot) -> None:
        """The machine gave ``attempt`` a dot; it replaces its author's last write where that is held."""
        if own is not None and any(
            (held.replica, held.counter) == (own.replica, own.counter) for held in state.siblings
        ):
            attempt.past |= {self.by_dot[attempt.key, own.replica, own.counter]}
        attempt.dot = (attempt.key, dot.replica, dot.counter)
        self.by_dot[attempt.dot] = attempt

    def shown(self, siblings: list[Sibling]) -> frozenset[Attempt]:
        """Everything that is in the past of who is shown these values."""
        found = [self.by_value[sibling.value] for sibling in siblings if sibling.value is not None]
        return frozenset(found).union(*(attempt.past for attempt in found))

    def living(self, key: bytes, context: VersionVector) -> set[bytes]:
        """Values of the writes that ``context`` counts and none of its others had seen."""
        known = [
            attempt
            for (where, replica, counter), attempt in self.by_dot.items()
            if where == key and context.counter(replica) >= counter
        ]
        overwritten = frozenset().union(*(attempt.past for attempt in known))
        return {
            attempt.value for attempt in known if attempt not in overwritten and attempt.value is not None
        }


class Watched(Shard):
    """Tells the oracle which write got which dot."""

    def __init__(self, *args: Any, oracle: Oracle, **options: Any) -> None:
        super().__init__(*args, **options)
        self._oracle = oracle
        self._attempts: dict[int, tuple[Draft, Attempt]] = {}

    def _draft(self, tenant: bytes, write: RecordWrite) -> Draft:
        draft = super()._draft(tenant, write)
        self._attempts[id(draft)] = draft, self._oracle.attempts[id(write)]
        return draft

    def _accept(self, state: RecordState, draft: Draft) -> dvv.Written:
        written = super()._accept(state, draft)
        self._oracle.given(self._attempts[id(draft)][1], state, draft.own, written.dot)
        return written


@dataclass
class Known:
    """What a client remembers of a record."""

    context: dict[str, int]
    own: tuple[str, int] | None
    past: frozenset[Attempt]


class Client:
    def __init__(self, world: World, seed: int) -> None:
        self.world, self.cluster, self.oracle = world, world.cluster, world.oracle
        self.draw = random.Random(seed)
        self.known: dict[bytes, Known] = {}
        self.epoch = 1

    def act(self, count: int) -> None:
        if not count:
            return
        key = self.draw.choice(self.world.keys)
        node = self.draw.choice(self.cluster.owners(TENANT + key))
        (self._get if self.draw.random() < self.world.reads else self._put)(node, key)
        self.cluster.after(self.draw.uniform(0, self.world.pace_s), lambda: self.act(count - 1))

    def _get(self, node: str, key: bytes) -> None:
        before = [attempt for attempt in self.oracle.attempts.values() if attempt.acknowledged]

        def got(answer: Message) -> None:
            self._learn_epoch(answer)
            if not isinstance(answer, RecordStates):
                return
            state = answer.states[0] or dvv.EMPTY
            self.known[key] = Known(state.context, None, self.oracle.shown(state.siblings))
            if self.world.meets_every_write and not answer.degraded:
                context = VersionVector.from_wire(state.context)
                for attempt in before:
                    assert attempt.key != key or covers(context, attempt), "not degraded, and behind"

        self.cluster.call(node, RecordGet(self.epoch, [key]), got)

    def _put(self, node: str, key: bytes) -> None:
        known = self.known.get(key)
        if known is None or self.draw.random() < 0.1:
            known = Known({}, None, frozenset())
        value = None if self.draw.random() < self.world.deletes else b"v%d" % len(self.oracle.writes)
        write = RecordWrite(key, value, known.context, known.own)
        attempt = self.oracle.ask(write, known.past)

        def stored(answer: Message) -> None:
            self._learn_epoch(answer)
            if isinstance(answer, RecordVersions):
                version = answer.versions[0]
                attempt.acknowledged = True
                assert attempt.dot == (key, version.replica, version.counter)
                mine = version.context.get(version.replica, 0) >= version.counter
                own = (version.replica, version.counter) if version.own else None
                # Not ``attempt.past``: a write replaced by name is not in what the context tells of.
                self.known[key] = Known(version.context, own, known.past | ({attempt} if mine else set()))
            else:
                assert isinstance(answer, Failure) and answer.code in EXPECTED, answer

        self.cluster.call(node, RecordPut(self.epoch, [write]), stored)

    def _learn_epoch(self, answer: Message) -> None:
        if isinstance(answer, Failure) and answer.code == "stale_epoch":
            self.epoch = max(self.epoch, decode_map(answer.detail).epoch)


EXPECTED = ("unavailable", "outcome_unknown", "conflict", "stale_epoch")


def covers(context: VersionVector, attempt: Attempt) -> bool:
    assert attempt.dot is not None
    return context.counter(attempt.dot[1]) >= attempt.dot[2]


class World:
    """One seed's cluster, clients and faults."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.oracle = Oracle()
        self.keys = [b"key/%d" % index for index in range(draw.choice((1, 1, 3)))]
        self.reads, self.deletes = draw.choice((0.1, 0.4)), draw.choice((0, 0.2))
        self.pace_s = draw.choice((0.03, 0.2))
        read = draw.choice((1, 2))
        faults = Faults(
            loss=draw.choice((0, 0, 0.1, 0.3)),
            delay_s=draw.choice((0.01, 0.05, 0.3)),
            disk_s=draw.choice((0.001, 0.02, 0.2)),
            double=draw.choice((0, 0.2)),
            full=draw.choice((0, 0, 0.1)),
        )
        limits = ShardLimits(request_timeout_s=1.0, recent_bytes_max=draw.choice((0, 2_000, 1 << 20)))
        names = draw.choice(("abc", "abc", "abcde"))
        make = partial(Watched, oracle=self.oracle)
        self.cluster = Cluster(seed, names, faults, limits, make, read=read)
        self.lost = False
        self._trouble(draw)
        self.meets_every_write = read == 2 and not self.lost
        for client in range(draw.choice((2, 4))):
            Client(self, seed * 7 + client).act(20)

    def _trouble(self, draw: random.Random) -> None:
        """Any of these any number of times; of what takes a copy for good, one: W = 2 survives one."""
        cluster = self.cluster
        kinds: list[Callable[[str], None]] = [
            cluster.crash,
            partial(self._later, cluster.fail),
            partial(self._later, cluster.pause),
        ]
        for _ in range(draw.choice((0, 2, 6))):
            kind, node = draw.choice(kinds), draw.choice(cluster.names)
            cluster.after(draw.uniform(0, 2), partial(kind, node))
        for _ in range(draw.choice((0, 0, 2))):
            cluster.after(draw.uniform(0, 2), partial(cluster.change_ring, 0.5))
        blow = draw.choice(("none", "none", "lose", "damage"))
        if blow == "lose":
            self.lost = True
            cluster.after(draw.uniform(0.2, 2), partial(cluster.lose, draw.choice(cluster.names)))
        elif blow == "damage":
            cluster.after(draw.uniform(0.2, 2), partial(self._damage, draw.choice(cluster.names)))

    def _later(self, what: Any, node: str) -> None:
        what(node, self.cluster.draw.uniform(0.1, 1.5))

    def _damage(self, node: str) -> None:
        disk = self.cluster.disks[node]
        disk.damaged |= set(disk.records)

    def check(self) -> None:
        """Everything was delivered: owners agree, nothing acknowledged is forgotten, the values are the
        histories' last."""
        for key in self.keys:
            copies = [
                self.cluster.disks[node].records.get(TENANT + key, dvv.EMPTY)
                for node in self.cluster.owners(TENANT + key)
            ]
            assert all(copy == copies[0] for copy in copies), "replicas differ"
            context = VersionVector.from_wire(copies[0].context)
            for attempt in self.oracle.attempts.values():
                if attempt.acknowledged and attempt.key == key:
                    assert covers(context, attempt), "an acknowledged write is forgotten"
                    assert attempt.dot is not None and self.oracle.by_dot[attempt.dot] is attempt, (
                        "dot reused"
                    )
            found = {sibling.value for sibling in copies[0].siblings} - {None}
            assert found == self.oracle.living(key, context)


quick = pytest.fixture(autouse=True)(small_rings)


def play(seed: int, plant: Callable[[Cluster], None] = lambda cluster: None) -> World:
    world = World(seed)
    plant(world.cluster)
    world.cluster.heal()
    world.check()
    return world


@pytest.mark.parametrize("seed", range(3))
def test_a_few_worlds_lose_nothing(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_a_swarm_of_worlds_loses_nothing(block: int) -> None:
    acknowledged = sum(
        attempt.acknowledged
        for seed in range(100 + 20 * block, 120 + 20 * block)
        for attempt in play(seed).oracle.attempts.values()
    )
    assert acknowledged > 100


def noticed(plant: Callable[[Cluster], None]) -> int:
    """Of 40 worlds, in how many the check fires."""
    count = 0
    for seed in range(40):
        try:
            play(seed, plant)
        except AssertionError:
            count += 1
    return count


@pytest.mark.slow
def test_a_replica_that_lost_its_state_and_kept_its_id_is_noticed() -> None:
    def amnesia(cluster: Cluster) -> None:
        def forget() -> None:
            cluster.disks["b"].records.clear()
            cluster.crash("b")

        cluster.after(0.5, forget)

    assert noticed(amnesia)


@pytest.mark.slow
def test_an_acknowledgement_before_the_disk_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "write", lambda disk, persist: None)
    assert noticed(lambda cluster: None) > 30
