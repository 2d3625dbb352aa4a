"""Operators' commands against a cluster of real processes, and its numbers against the truth."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from kvcomm.cli.following import follow
from kvcomm.cli.operators import operators
from kvcomm.embedded import Embedded
from kvcomm.errors import Refused
from kvcomm.instance import Instance, NodeRecord
from kvcomm.wire.messages import CancelOrder, DrainOrder, ScaleOrder
from tests.system.conftest import Cluster, eventually, make_namespace, payloads

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONFIG = """
cache: {l1_size: 1KiB, l1_negative_ttl: 0s, l3_size: 64MiB}
network: {request_timeout: 1s}
cluster: {shards: 3, pools: 0, controllers: 1, replicas: 2, write_quorum: 2, heartbeat: 500ms}
storage: {fsync: interval}
"""
RECORDS, BLOCKS = 240, 24


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("operating") / "kvcomm.yaml"
    config.write_text(CONFIG)
    name = f"o{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(name), config)
    finally:
        embedded.stop()


def kvcomm(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcomm.cli", *arguments, "--instance", cluster.instance.name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def told(cluster: Cluster, *arguments: str) -> dict:
    """The document that a command prints; it must succeed."""
    done = kvcomm(cluster, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shards_of(cluster: Cluster) -> list[NodeRecord]:
    return [node for node in cluster.instance.nodes() if node.role == "shard"]


def metric(node: NodeRecord, name: str) -> float:
    text = urllib.request.urlopen(f"http://{node.metrics}/metrics", timeout=5).read().decode()
    return sum(
        float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
    )


def test_scale_move_drain_and_cancel_with_everything_still_there(running: Cluster):
    namespace = make_namespace("operating")
    tokens = list(range(16 * BLOCKS))
    with running.client() as kv:
        state = kv.state("robot")
        for index in range(RECORDS):
            state.put(f"k{index}", f"v{index}".encode())
        assert not kv.publish(namespace, tokens, payloads(namespace, BLOCKS)).failed

        dry = told(running, "scale", "--shards", "4", "--dry-run")
        assert dry["operation"] == 0 and dry["moves"][0]["what"] == "shard-3 joins"
        assert len(shards_of(running)) == 3

        scaled = told(running, "scale", "--shards", "4")
        assert scaled["step"] == "done" and scaled["operation"] == 1
        shards = shards_of(running)
        assert [node.node for node in shards] == [f"shard-{index}" for index in range(4)]
        # What the new shard has, others have dropped: two copies of each record, before and after.
        held = _records(running)
        assert sum(metric(node, "kvcomm_records_purged_total") for node in shards) == held["shard-3"] > 0

        assert told(running, "move", "0%-50%", "--to", "shard-3")["step"] == "done"
        assert kvcomm(running, "scale", "--shards", "4").stdout.startswith("nothing is to be done")
        _cancelled_at_once(running)
        assert told(running, "drain", "shard-3")["step"] == "done"

        assert [state.get(f"k{index}").value for index in range(RECORDS)] == [
            f"v{index}".encode() for index in range(RECORDS)
        ]
        assert len(kv.fetch(namespace, tokens).blocks) == BLOCKS
    assert sum(_records(running).values()) == 2 * RECORDS
    (controller,) = [node for node in running.instance.nodes() if node.role == "controller"]
    assert metric(controller, "kvcomm_operations_total") == 4
    assert metric(controller, "kvcomm_controller_leads") == 1
    top = json.loads(kvcomm(running, "top", "--once", "--json").stdout)
    assert [each["step"] for each in top["operations"][:4]] == ["done", "cancelled", "done", "done"]


def _cancelled_at_once(cluster: Cluster) -> None:
    """Before the new shard's process is there; in this process, for a command takes a second to start."""
    with operators(cluster.instance.name) as asked:
        number = asked.order(ScaleOrder(5)).operation
        with pytest.raises(Refused, match=f"operation {number} .* is under way"):
            asked.order(DrainOrder("shard-0"))
        asked.order(CancelOrder(number))
        ended = follow(asked, number, 60.0, quiet=True)
    assert ended is not None and ended.step == "cancelled"


def _records(cluster: Cluster) -> dict[str, int]:
    """Records at each shard of the ring, as their heartbeats say, once two of each are kept and no more."""
    with operators(cluster.instance.name) as asked:

        def settled() -> dict[str, int]:
            nodes = [node for node in asked.view().nodes if node.role == "shard" and node.in_ring]
            held = {node.node: node.load.record_count for node in nodes if node.load is not None}
            return held if sum(held.values()) == 2 * RECORDS else {}

        return eventually(settled)


def test_hit_rates_are_what_was_hit(running: Cluster):
    """Not always 1: a third of what is asked for is there."""
    namespace = make_namespace("operating")
    tokens = [7 + index % 900 for index in range(16 * BLOCKS)]
    with running.client() as kv:
        assert not kv.publish(namespace, tokens, payloads(namespace, BLOCKS)).failed
        before = kv.metrics()
        for _ in range(3):
            assert len(kv.fetch(namespace, tokens).blocks) == BLOCKS
            for absent in range(2):
                strangers = [900 + absent for _ in tokens]
                assert not kv.fetch(namespace, strangers).blocks
        after = kv.metrics()
    hits = sum(
        after[name] - before.get(name, 0) for name in after if name.startswith("kvcomm_fetch_blocks_total")
    )
    missed = after["kvcomm_fetch_missed_blocks_total"] - before["kvcomm_fetch_missed_blocks_total"]
    assert (hits, missed) == (3 * BLOCKS, 6 * BLOCKS)


def test_mistakes_have_their_exit_codes(running: Cluster):
    assert kvcomm(running, "move", "5", "--to", "shard-1").returncode == 2
    assert kvcomm(running, "scale", "--shards", "1").returncode == 1
    nobody = kvcomm(running, "drain", "nobody")
    assert nobody.returncode == 1 and "is no node of this cluster" in nobody.stderr
    assert kvcomm(running, "cancel").returncode == 1


def test_status_says_when_a_shard_is_gone(running: Cluster):
    """A stopped shard: the cluster is not whole, and what is still served is told."""
    record = running.node("shard-1")
    os.kill(record.pid, signal.SIGSTOP)
    try:
        _until(running, "partitioned")
        done = kvcomm(running, "status")
    finally:
        os.kill(record.pid, signal.SIGCONT)
    assert done.returncode == 1
    assert "cluster partitioned" in done.stdout and "shard-1 is" in done.stdout
    assert "strong records: " in done.stdout
    _until(running, "whole")
    assert kvcomm(running, "status").returncode == 0


def _until(cluster: Cluster, mode: str) -> None:
    with operators(cluster.instance.name) as asked:
        eventually(lambda: asked.view().mode == mode)
