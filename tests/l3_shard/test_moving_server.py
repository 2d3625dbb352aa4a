"""A move over real sockets and disks, under a client that knows the first map only."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from msgspec import structs

from kvcomm.errors import KVCommError
from kvcomm.rpc import Peers, run_blocking
from kvcomm.wire.messages import RecordWrite, RingMap, RingNode, RingTransition, StrongOrder
from l3_shard.ring import Ring
from l3_shard.tier import L3Tier
from tests.l3_shard.test_server import Cluster
from tests.peers import IDENTITY, soon, until

NAMES = [b"n/%03d" % number for number in range(150)]


class MovingCluster(Cluster):
    """Four shards, of which three are in the map."""

    members = "abc"
    coming: RingTransition | None = None

    def __init__(self) -> None:
        super().__init__("always", "abcd")

    def nodes(self, names: str) -> list[RingNode]:
        return [RingNode(name, f"unix://{self.directory}/{name}.sock", "", "", name, 1) for name in names]

    @property
    def map(self) -> RingMap:
        return RingMap(self.epoch, 3, 2, 1, 1, self.nodes(self.members), [], [], self.coming)

    def said(self, what: str) -> bool:
        moves = [self.on_loop(shard.move_status) for shard in self.running.values()]
        return all(structs.asdict(move)[what] >= self.epoch for move in moves)

    def taken(self) -> bool:
        return all(self.on_loop(shard.ring).epoch == self.epoch for shard in self.running.values())

    def step(self, stage: str, said: str) -> None:
        self.coming = RingTransition(stage, self.nodes("abcd"), [])  # type: ignore[arg-type]
        self.issue()
        until(lambda: self.taken() and self.said(said))


class Client:
    """Writes and reads as fast as it can; knows what it was told of the ring."""

    def __init__(self, cluster: Cluster) -> None:
        self.tier, self._peers = cluster.tier(), Peers(IDENTITY)
        self.done: dict[bytes, bytes] = {}
        self.problems: list[KVCommError] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        contexts: dict[bytes, dict[str, int]] = {}
        number = 0
        while not self._over.is_set():
            key, value = b"moving/%02d" % (number % 40), b"%d" % number
            number += 1
            try:
                write = RecordWrite(key, value, contexts.get(key, {}))
                (version,) = run_blocking(self.tier.record_put([write]), self._peers, soon())
                contexts[key] = version.context
                self.done[key] = value
                (strong,) = run_blocking(
                    self.tier.strong_change([StrongOrder(key, "put", b"", value)]), self._peers, soon()
                )
                assert strong.code in ("", "unavailable", "outcome_unknown"), strong
            except KVCommError as error:
                self.problems.append(error)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(20)
        self._peers.close()


@pytest.fixture
def cluster() -> Iterator[MovingCluster]:
    running = MovingCluster()
    yield running
    running.close()


@pytest.mark.slow
def test_a_shard_is_added_while_a_client_writes(cluster: MovingCluster) -> None:
    until(lambda: cluster.said("clean_epoch"))
    cluster.run(cluster.tier().record_put([RecordWrite(name, name, {}) for name in NAMES]))
    first = cluster.tier()
    client = Client(cluster)
    try:
        for stage, said in (("copy", "ready_epoch"), ("serve", "strong_epoch")):
            cluster.step(stage, said)
            assert cluster.run(first.record_scan(b"n/")) == NAMES
            answers = cluster.run(first.record_get(NAMES))
            assert [answer.values for answer in answers] == [(name,) for name in NAMES]
        cluster.members, cluster.coming = "abcd", None
        cluster.issue()
        until(lambda: cluster.taken() and cluster.said("clean_epoch"))
    finally:
        client.stop()
    assert not client.problems, "one retry suffices"
    ring = Ring(cluster.map)
    kept = {name: sum(name in ring.replicas(key) for key in (*NAMES, *client.done)) for name in "abcd"}
    until(lambda: {name: shard.record_count() for name, shard in cluster.running.items()} == kept)
    for key, value in client.done.items():
        (answer,) = cluster.run(L3Tier(cluster.map, timeout_s=3.0).record_get([key]))
        assert answer.values == (value,)
    assert cluster.run(first.record_scan(b"")) == sorted([*NAMES, *client.done])
