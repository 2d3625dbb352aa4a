"""Three shard machines under a seeded network: nothing acknowledged is lost, replicas converge, siblings are
concurrent."""

import random
from functools import partial

import pytest

from kvcomm.wire.messages import (
    Failure,
    Message,
    RecordGet,
    RecordPut,
    RecordState,
    RecordStates,
    RecordVersions,
    RecordWrite,
)
from l3_shard import dvv
from l3_shard.desk import ShardLimits
from tests.l3_shard.cluster import TENANT, Cluster, Faults


class Client:
    """Writes unique values with the context it has, and remembers which values it had seen when it wrote
    each."""

    def __init__(self, cluster: Cluster, history: "History", seed: int, delete_share: float = 0.0) -> None:
        self.cluster, self.history, self.delete_share = cluster, history, delete_share
        self.draw = random.Random(seed)
        self.known: dict[bytes, tuple[dict[str, int], frozenset[bytes]]] = {}

    def act(self, keys: list[bytes], pace_s: float, count: int) -> None:
        if not count:
            return
        node, key = self.draw.choice(self.cluster.names), self.draw.choice(keys)
        if self.draw.random() < 0.4:
            self._get(node, key)
        else:
            self._put(node, key)
        self.cluster.after(self.draw.uniform(0, pace_s), lambda: self.act(keys, pace_s, count - 1))

    def _get(self, node: str, key: bytes) -> None:
        def got(answer: Message) -> None:
            if isinstance(answer, RecordStates):
                state = answer.states[0] or RecordState({}, [])
                values = [sibling.value for sibling in state.siblings if sibling.value is not None]
                self.known[key] = (state.context, self.history.closure(values))

        self.cluster.call(node, RecordGet(1, [key]), got)

    def _put(self, node: str, key: bytes) -> None:
        context, seen = self.known.get(key, ({}, frozenset()))
        if self.draw.random() < 0.1:
            context, seen = {}, frozenset()
        delete = self.delete_share > 0 and self.draw.random() < self.delete_share
        value = self.history.attempt(key, seen, delete)

        def stored(answer: Message) -> None:
            if isinstance(answer, RecordVersions):
                self.history.acknowledged.add(value)
                version = answer.versions[0]
                mine = version.context.get(version.replica, 0) >= version.counter
                self.known[key] = (version.context, seen | {value} if mine else seen)
            else:
                assert isinstance(answer, Failure)
                assert answer.code in ("unavailable", "outcome_unknown", "conflict"), answer
                if answer.code != "outcome_unknown":
                    self.history.denied.add((value, answer.text))

        self.cluster.call(node, RecordPut(1, [RecordWrite(key, None if delete else value, context)]), stored)


class History:
    def __init__(self) -> None:
        self.key: dict[bytes, bytes] = {}
        self.seen: dict[bytes, frozenset[bytes]] = {}
        self.acknowledged: set[bytes] = set()
        self.denied: set[tuple[bytes, str]] = set()
        self.deletes: set[bytes] = set()

    def attempt(self, key: bytes, seen: frozenset[bytes], delete: bool = False) -> bytes:
        """A value nobody wrote before; of a delete, the name by which it is known here."""
        value = b"v%d" % len(self.key)
        self.key[value], self.seen[value] = key, seen
        if delete:
            self.deletes.add(value)
        return value

    def closure(self, values: list[bytes]) -> frozenset[bytes]:
        return frozenset(values).union(*(self.seen[value] for value in values))

    def check(self, cluster: Cluster) -> None:
        """The states are equal on all nodes; every acknowledged write is there or was read by a later writer;
        nothing that a present writer had read is still there; what was refused outright is nowhere."""
        first, *rest = (cluster.disks[name].records for name in cluster.names)
        assert all(other == first for other in rest)
        for stored, state in first.items():
            key = stored.removeprefix(TENANT)
            values = {sibling.value for sibling in state.siblings if sibling.value is not None}
            for value in self.acknowledged - values:
                overwritten = any(
                    value in self.seen[later] for later, where in self.key.items() if where == key
                )
                assert overwritten or self.key[value] != key, f"acknowledged write {value!r} is lost"
            for value in values:
                assert not values & self.seen[value], "a sibling had been read by the writer of another"
        everything = {sibling.value for state in first.values() for sibling in state.siblings}
        refused = {value for value, text in self.denied if text != "no reply in time"}
        assert not refused & everything, "a write that was refused happened"


def play(seed: int, faults: Faults, trouble: bool, read: int = 1) -> tuple[Cluster, History]:
    cluster, history, draw = Cluster(seed, faults=faults, read=read), History(), random.Random(seed)
    keys = [b"key/%d" % index for index in range(draw.choice((1, 3)))]
    for client in range(3):
        Client(cluster, history, seed * 7 + client).act(keys, pace_s=0.15, count=15)
    if trouble:
        for _ in range(draw.randint(1, 4)):
            node = draw.choice(cluster.names)
            cluster.after(draw.uniform(0, 2), partial(cluster.crash, node))
    cluster.heal()
    return cluster, history


@pytest.mark.parametrize("seed", range(8))
def test_a_slow_network_loses_nothing(seed):
    cluster, history = play(seed, Faults(), trouble=False)
    assert history.acknowledged
    history.check(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_loss_reordering_and_crashes_lose_nothing(seed):
    draw = random.Random(seed)
    faults = Faults(
        loss=draw.choice((0, 0.1, 0.3)), delay_s=draw.choice((0.01, 0.3)), disk_s=draw.choice((0.001, 0.2))
    )
    cluster, history = play(seed, faults, trouble=True, read=draw.choice((1, 2)))
    history.check(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_one_lost_disk_loses_nothing_that_two_had(seed):
    """The node comes back empty under a new id; with its old id it would give out old dots again."""
    cluster, history = Cluster(seed), History()
    for client in range(3):
        Client(cluster, history, seed * 7 + client).act([b"key"], pace_s=0.15, count=15)
    cluster.after(1.0, lambda: cluster.lose("b"))
    cluster.heal()
    history.check(cluster)


@pytest.mark.slow
def test_the_checker_notices_a_replica_that_lost_its_state_and_kept_its_id():
    """The reason for new ids, and proof that the check above can fail."""
    noticed = 0
    for seed in range(20):
        cluster, history = Cluster(seed), History()
        for client in range(3):
            Client(cluster, history, seed * 7 + client).act([b"key"], pace_s=0.15, count=15)

        def amnesia(cluster: Cluster = cluster) -> None:
            cluster.disks["b"].records.clear()
            cluster.crash("b")

        cluster.after(1.0, amnesia)
        try:
            cluster.heal()
            history.check(cluster)
        except AssertionError:
            noticed += 1
    assert noticed


@pytest.mark.slow
def test_a_damaged_record_is_replaced_from_its_peers_and_its_dots_are_not_reused():
    noticed = 0
    for seed in range(20):
        limits = ShardLimits(request_timeout_s=1.0, recent_bytes_max=0)  # so that disks are read
        cluster, history = Cluster(seed, limits=limits), History()
        for client in range(3):
            Client(cluster, history, seed * 7 + client).act([b"key"], pace_s=0.15, count=15)

        def damage(cluster: Cluster = cluster) -> None:
            cluster.disks["b"].damaged |= set(cluster.disks["b"].records)

        cluster.after(0.7, damage)
        cluster.heal()
        history.check(cluster)
        damaged_count = cluster.shards["b"].counts().damaged_count
        assert cluster.disks["b"].replica == f"replica001.{1 + damaged_count}"
        noticed += damaged_count
    assert noticed >= 10


def test_a_quorum_read_sees_an_acknowledged_write_on_any_node():
    for seed in range(10):
        cluster = Cluster(seed, read=2)
        found: list[Message] = []

        def stored(answer: Message, cluster: Cluster = cluster, found: list[Message] = found) -> None:
            assert isinstance(answer, RecordVersions)
            for node in cluster.names:
                cluster.call(node, RecordGet(1, [b"k"]), found.append)

        cluster.call("a", RecordPut(1, [RecordWrite(b"k", b"v", {})]), stored)
        cluster.run()
        states = [(answer.states, answer.degraded) for answer in found if isinstance(answer, RecordStates)]
        assert [(state[0].siblings[0].value, degraded) for state, degraded in states if state[0]] == [
            (b"v", False)
        ] * 3


def test_many_writers_of_one_record_lose_no_update_on_one_node():
    """Changes that arrive while the record is being loaded or written wait their turn: every blind write
    stays."""
    cluster = Cluster(3, "a", replicas=1, write=1)
    answers: list[Message] = []
    for index in range(dvv.SIBLINGS_MAX):
        cluster.call("a", RecordPut(1, [RecordWrite(b"k", b"%d" % index, {})]), answers.append)
    cluster.run()
    dots = {dot for answer in answers if isinstance(answer, RecordVersions) for dot in dots_of(answer)}
    (state,) = cluster.disks["a"].records.values()
    assert len(state.siblings) == len(dots) == dvv.SIBLINGS_MAX


def dots_of(answer: RecordVersions) -> list[tuple[str, int]]:
    return [(version.replica, version.counter) for version in answer.versions]
