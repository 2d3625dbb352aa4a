"""Shards in one process get lost copies back over real sockets, and never one that does not verify."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcomm.block import BlockKey, verify_copy
from kvcomm.wire.messages import RingMap
from l3_shard import refilling
from l3_shard.ring import Ring
from tests.blockstores import DictStore
from tests.l3_shard.test_server import Cluster, make_copies
from tests.peers import until

COUNT = 24


class TwoCopies(Cluster):
    @property
    def map(self) -> RingMap:
        one = super().map
        return RingMap(one.epoch, one.replicas, one.write_quorum, one.read_quorum, 2, one.shards, one.pools)

    def owned(self, node: str, keys: list[BlockKey]) -> set[BlockKey]:
        ring = Ring.from_map(self.map)
        return {key for key in keys if node in ring.block_owners(key)}

    def held(self, node: str) -> set[BlockKey]:
        return set(self.on_loop(lambda: list(self.stores[node].copies)))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoCopies]:
    monkeypatch.setattr(refilling, "SETTLE_S", 0.01)
    monkeypatch.setattr(refilling, "RETRY_S", 0.05)
    running = TwoCopies()
    yield running
    running.close()


def filled(cluster: TwoCopies) -> list[BlockKey]:
    copies = make_copies(COUNT)
    assert cluster.run(cluster.tier().put(copies)) == ["stored"] * COUNT
    return [copy.key for copy in copies]


def lose(cluster: TwoCopies, node: str) -> None:
    """The shard ends and comes back with other memory."""
    cluster.stop(node)
    cluster.stores[node] = DictStore()
    cluster.start(node)


def test_an_empty_shard_gets_its_copies_back(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    lose(cluster, "a")
    assert cluster.held("a") == set()
    cluster.issue()
    until(lambda: cluster.held("a") == cluster.owned("a", keys))
    counts = cluster.running["a"].refill_counts()
    assert counts.blocks["stored"] == len(cluster.owned("a", keys)) > 0
    assert not any(cluster.on_loop(lambda: cluster.stores["b"].used(keys))), "copying is no use of a block"
    assert {node: cluster.running[node].refill_counts().blocks["stored"] for node in "bc"} == {"b": 0, "c": 0}


def test_damaged_copies_are_not_taken(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    bad = sorted(cluster.owned("a", keys))[0]
    for node in "bc":
        if bad in cluster.held(node):
            buffer = cluster.stores[node].copies[bad].buffer
            cluster.on_loop(lambda buffer=buffer: buffer.__setitem__(-1, buffer[-1] ^ 1))
    lose(cluster, "a")
    cluster.issue()
    until(lambda: cluster.held("a") == cluster.owned("a", keys) - {bad})
    until(lambda: cluster.running["a"].refill_counts().blocks["failed"] >= 1)
    assert cluster.held("a") == cluster.owned("a", keys) - {bad}
    for key in cluster.held("a"):
        verify_copy(cluster.stores["a"].copies[key].buffer, key)


def test_a_shard_whose_peer_is_away_tries_again_until_it_is_back(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    cluster.stop("b")
    lose(cluster, "a")
    cluster.issue()
    until(lambda: cluster.running["a"].refill_counts().rounds["failed"] > 0)
    cluster.start("b")  # with what it had
    cluster.issue()
    until(lambda: cluster.held("a") == cluster.owned("a", keys))


def test_a_shard_takes_no_more_than_there_is_free_room(cluster: TwoCopies) -> None:
    keys = filled(cluster)
    lose(cluster, "a")
    size = len(cluster.stores["b"].copies[sorted(cluster.held("b"))[0]].buffer)
    cluster.stores["a"].capacity_bytes = 3 * size
    cluster.issue()
    until(lambda: len(cluster.held("a")) == 3)
    assert cluster.running["a"].refill_counts().blocks["full"] > 0
    assert cluster.held("a") < cluster.owned("a", keys)
    assert cluster.stores["a"].evicting == {False}
