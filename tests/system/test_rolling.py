"""Every node of a cluster is restarted, one after the other, while clients go on: no call fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.cli.operators import Operators, operators
from kvcomm.client import Client
from kvcomm.embedded import Embedded
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.instance import Instance, NodeRecord
from tests.system.conftest import Cluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONFIG = """
cache: {l1_size: 1KiB, l2_size: 16MiB, l3_size: 16MiB}
network: {request_timeout: 1s}
cluster: {shards: 3, pools: 1, controllers: 1, replicas: 3, write_quorum: 2, heartbeat: 500ms}
storage: {fsync: interval}
"""
KEYS = 40


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    config = tmp_path / "kvcomm.yaml"
    config.write_text(CONFIG)
    name = f"r{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(name), config)
    finally:
        embedded.stop()


class Traffic(threading.Thread):
    """Writes and reads back one record after the other until told to stop."""

    def __init__(self, kv: Client) -> None:
        super().__init__(daemon=True)
        self._kv = kv
        self.stop = threading.Event()
        self.written: dict[str, bytes] = {}
        self.problems: list[str] = []
        self.count = 0

    def run(self) -> None:
        state = self._kv.state("rolling")
        while not self.stop.wait(0.005):
            key, value = f"k{self.count % KEYS}", f"{self.count}".encode()
            try:
                state.put(key, value, deadline_s=5.0)
                self.written[key] = value
                if value not in state.get(key, deadline_s=5.0).values:
                    self.problems.append(f"{key} does not show what was just written")
            except KVCommError as error:
                self.problems.append(f"{key}: {error.code}: {error.message}")
            self.count += 1


def _restart(cluster: Cluster, record: NodeRecord, asked: Operators) -> None:
    """As an operator does: end it, wait for the next process, then until nothing is missing."""
    os.kill(record.pid, signal.SIGTERM)
    eventually(lambda: (now := cluster.instance.node(record.node)) is not None and now.pid != record.pid)

    def whole() -> bool:
        try:
            return asked.view().mode == "whole"
        except Unavailable:  # it is the controller that starts
            return False

    eventually(whole)


def _goes_on(traffic: Traffic) -> None:
    before = traffic.count
    eventually(lambda: traffic.count > before + 10)


def test_an_upgrade_one_by_one_fails_no_call(running: Cluster):
    with running.client() as kv, operators(running.instance.name) as asked:
        traffic = Traffic(kv)
        traffic.start()
        try:
            for record in running.instance.nodes():
                _restart(running, record, asked)
                _goes_on(traffic)
        finally:
            traffic.stop.set()
            traffic.join(30)
        assert traffic.problems == []
        state = kv.state("rolling")
        lost = [key for key, value in traffic.written.items() if value not in state.get(key).values]
        assert lost == [] and len(traffic.written) == KEYS
