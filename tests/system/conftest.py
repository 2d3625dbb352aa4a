"""A small cluster for the tests of a module, and clients of it."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kvcomm import Namespace, connect
from kvcomm.client import Client
from kvcomm.embedded import Embedded
from kvcomm.instance import Instance, NodeRecord

T = TypeVar("T")

CONFIG = """
cache:
  l1_size: 8MiB
  l1_negative_ttl: 200ms
  l2_size: 64MiB
  l3_size: 64MiB
network:
  request_timeout: 1s
cluster:
  shards: 3
  pools: 1
storage:
  fsync: interval
"""


class Cluster:
    """One running instance and the ways to hurt it."""

    def __init__(self, instance: Instance, config: Path) -> None:
        self.instance = instance
        self.config = config

    def client(self, token: str | None = None) -> Client:
        return connect(self.config, instance=self.instance.name, token=token)

    def node(self, name: str) -> NodeRecord:
        """The living process of a node; waits for its restart."""
        found = eventually(lambda: [each for each in self.instance.nodes() if each.node == name])
        return found[0]

    def kill(self, name: str, number: int) -> NodeRecord:
        """Send a signal to a node's process; the record it had."""
        record = self.node(name)
        os.kill(record.pid, number)
        return record

    def restarted(self, before: NodeRecord) -> NodeRecord:
        """Wait until another process serves under the same name and every shard knows where."""

        def other() -> list[NodeRecord]:
            nodes = self.instance.nodes()
            return [each for each in nodes if each.node == before.node and each.pid != before.pid]

        after = eventually(other)[0]

        def in_the_ring() -> bool:
            ring = self.instance.ring()
            assert ring is not None
            return any(node.control == after.control for node in [*ring.shards, *ring.pools])

        eventually(in_the_ring)
        return after


def eventually(look: Callable[[], T], within_s: float = 30.0) -> T:
    """The first true value; fails when there is none in time."""
    deadline = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def metric(node: NodeRecord, series: str) -> float:
    """What the node's exporter says now."""
    with urllib.request.urlopen(f"http://{node.metrics}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "kvcomm.yaml"
    config.write_text(CONFIG)
    name = f"t{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(name), config)
    finally:
        embedded.stop()


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    """One of the test's own: nobody else has published in it."""
    return make_namespace(revision=request.node.name)


def make_namespace(revision: str, block_kib: int = 64) -> Namespace:
    return Namespace(
        model="test",
        revision=revision,
        tokenizer="t",
        vocab_size=1000,
        dtype="float16",
        layout="LKHTD",
        layers=2,
        kv_heads=2,
        head_dim=block_kib * 4,
        block_tokens=16,
        rope="none",
        rope_parameters={},
    )


def payloads(namespace: Namespace, count: int, salt: int = 0) -> list[bytes]:
    """``count`` different blocks."""
    return [bytes([(salt + index) % 256]) * namespace.block_bytes for index in range(count)]
