"""Blocks on shards that die, stand still, restart or have a bad disk: verified bytes or a miss, and copies
come back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcomm import Namespace
from kvcomm.block import BlockKey, Incarnation, block_keys, verify_copy
from kvcomm.client import Client
from kvcomm.credentials import NODE_TENANT
from kvcomm.embedded import Embedded
from kvcomm.errors import KVCommError
from kvcomm.instance import Instance, NodeRecord
from kvcomm.rpc import Connection, Identity
from kvcomm.wire.messages import BlockLookup, BlockPresence
from l3_shard.ring import Ring
from tests.system.conftest import Cluster, eventually, make_namespace, payloads

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONFIG = """
cache:
  l1_size: 1KiB
  l1_negative_ttl: 0s
  l3_size: {memory}
network:
  request_timeout: 1s
cluster:
  shards: 3
  pools: 0
  block_copies: {copies}
  repair_interval: 2s
storage:
  fsync: interval
  directory: {directory}/records
shard:
  disk_path: "{disk}"
  disk_bytes: {disk_bytes}
"""
BLOCKS = 48
TOKENS = [t % 1000 for t in range(BLOCKS * 16)]


@contextmanager
def cluster_with(
    directory: Path,
    *,
    copies: int = 2,
    memory: str = "64MiB",
    disk: Path | None = None,
    disk_bytes: str = "1GiB",
) -> Iterator[Cluster]:
    config = directory / "kvcomm.yaml"
    config.write_text(
        CONFIG.format(
            copies=copies, memory=memory, directory=directory, disk=disk or "", disk_bytes=disk_bytes
        )
    )
    name = f"b{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(name), config)
    finally:
        embedded.stop()


def shards_of(cluster: Cluster) -> list[NodeRecord]:
    return [node for node in cluster.instance.nodes() if node.role == "shard"]


def keys_of(cluster: Cluster, namespace: Namespace) -> list[BlockKey]:
    tenant = cluster.instance.credentials().tenant_digest("default")
    return block_keys(namespace.for_tenant(tenant), TOKENS)


def present(cluster: Cluster, node: NodeRecord, keys: Sequence[BlockKey]) -> list[bool]:
    """What one shard says that it has, itself."""
    ring = cluster.instance.ring()
    assert ring is not None
    identity = Identity(cluster.instance.credentials().token(NODE_TENANT), Incarnation(5))
    deadline = time.monotonic() + 5.0
    try:
        connection = Connection.open(node.addresses[0], identity, deadline)
        try:
            answer = connection.call(BlockLookup(ring.epoch, [*keys]), deadline=deadline).message
        finally:
            connection.close()
    except KVCommError:  # it has just started, or has not heard of the newest ring
        return [False] * len(keys)
    assert isinstance(answer, BlockPresence)
    return [bool(there) for there in answer.present]


def has_its_own(cluster: Cluster, node: NodeRecord, keys: Sequence[BlockKey]) -> bool:
    ring = cluster.instance.ring()
    assert ring is not None
    own = [key for key in keys if node.node in Ring.from_map(ring).block_owners(key)]
    return all(present(cluster, node, own))


def metric(node: NodeRecord, series: str) -> float:
    with urllib.request.urlopen(f"http://{node.metrics}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series)


def offer(kv: Client, namespace: Namespace, salt: int = 0) -> int:
    """How many were not taken.  A few at a time: more than memory holds could not be reserved at once."""
    blocks = payloads(namespace, BLOCKS, salt)
    counts = range(8, BLOCKS + 1, 8)
    return sum(kv.publish(namespace, TOKENS[: 16 * count], blocks[:count]).failed for count in counts)


def publish(kv: Client, namespace: Namespace, salt: int = 0) -> None:
    assert offer(kv, namespace, salt) == 0


def outlive_memory(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    """Publish until all is had and written: what is evicted before its turn to be written is lost."""

    def have() -> bool:
        offer(kv, namespace)
        eventually(lambda: all(written(node) for node in shards_of(cluster)))
        return fetched(kv, namespace) == BLOCKS and all(written(node) for node in shards_of(cluster))

    eventually(have)


def fetched(kv: Client, namespace: Namespace, salt: int = 0) -> int:
    """How many leading blocks are had; every byte is compared."""
    hit = kv.fetch(namespace, TOKENS)
    got = [bytes(block.payload) for block in hit.blocks]
    assert got == payloads(namespace, BLOCKS, salt)[: len(got)], "served bytes that nobody published"
    return len(got)


# -- copies


def test_a_shard_that_was_killed_has_its_copies_again(tmp_path: Path) -> None:
    """Fault 15, blocks: every block that had two copies has two again, and all the while each is served."""
    namespace = make_namespace("refill")
    with cluster_with(tmp_path) as cluster, cluster.client() as kv:
        publish(kv, namespace)
        keys = keys_of(cluster, namespace)
        assert all(has_its_own(cluster, node, keys) for node in shards_of(cluster))
        quiet_s = min(timed(lambda: fetched(kv, namespace)) for _ in range(5))
        before = cluster.kill(shards_of(cluster)[0].node, signal.SIGKILL)
        after = cluster.restarted(before)
        loud_s: list[float] = []

        def whole() -> bool:
            loud_s.append(timed(lambda: fetched(kv, namespace)))
            return has_its_own(cluster, after, keys)

        eventually(whole)
        assert metric(after, 'kvcomm_refilled_blocks_total{outcome="stored"}') > 0
        assert metric(after, "kvcomm_store_evictions_total") == 0
        assert fetched(kv, namespace) == BLOCKS
        loud_s.sort()
        assert loud_s[len(loud_s) // 2] < 20 * quiet_s, "readers stood still while copies were got back"


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def stopped(node: NodeRecord) -> Iterator[None]:
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def test_a_shard_that_stands_still_is_passed_over_and_gets_its_copies_later(tmp_path: Path) -> None:
    """Fault 22, blocks: readers and writers go on with the other copies; nothing waits for the paused one's
    time limit."""
    before, during = make_namespace("before"), make_namespace("during")
    with cluster_with(tmp_path) as cluster, cluster.client() as kv:
        publish(kv, before)
        for _ in range(5):
            assert fetched(kv, before) == BLOCKS
        request_timeout_s = 1.0
        for node in shards_of(cluster):  # one that was slower before is asked for nothing, but not all are
            with stopped(node):
                first_s = timed(lambda: fetched(kv, before))
                taken_s = sorted(timed(lambda: fetched(kv, before)) for _ in range(9))
            assert first_s < request_timeout_s and taken_s[4] < request_timeout_s / 4
        with stopped(node):
            publish(kv, during, salt=3)
            assert fetched(kv, during, salt=3) == BLOCKS
            assert fetched(kv, before) == BLOCKS
        counted = kv.metrics()
        assert counted["kvcomm_hedged_requests_total"] > 0 and counted["kvcomm_lagging_copies_total"] > 0
        keys = keys_of(cluster, during)
        eventually(lambda: has_its_own(cluster, node, keys))


def test_a_shard_that_stops_again_and_again_does_not_slow_readers_down(tmp_path: Path) -> None:
    namespace = make_namespace("bursts")
    with cluster_with(tmp_path) as cluster, cluster.client() as kv:
        publish(kv, namespace)
        for _ in range(5):
            assert fetched(kv, namespace) == BLOCKS
        node, slow = shards_of(cluster)[0], 0
        for _ in range(8):
            with stopped(node):
                slow += timed(lambda: fetched(kv, namespace)) > 0.5
                assert fetched(kv, namespace) == BLOCKS
            assert fetched(kv, namespace) == BLOCKS
        assert slow <= 2, "each pause was waited for"


# -- the disk


def test_blocks_outlive_the_memory_of_their_shard_and_its_process(tmp_path: Path) -> None:
    namespace = make_namespace("disk", block_kib=256)
    with (
        cluster_with(tmp_path, copies=1, memory="4MiB", disk=tmp_path / "disk") as cluster,
        cluster.client() as kv,
    ):
        publish(kv, namespace)
        eventually(lambda: all(written(node) for node in shards_of(cluster)))
        assert sum(metric(node, "kvcomm_store_evictions_total") for node in shards_of(cluster)) > 0
        dropped = sum(events(node, "dropped") for node in shards_of(cluster))
        kept = fetched(kv, namespace)
        assert kept == BLOCKS or dropped
        before = cluster.kill(shards_of(cluster)[0].node, signal.SIGKILL)
        after = cluster.restarted(before)
        eventually(lambda: state(after) == "on")
        eventually(lambda: fetched(kv, namespace) == kept)  # what was on the disk is there after a kill


def test_a_kill_in_the_middle_of_writing_leaves_nothing_half(tmp_path: Path) -> None:
    """Fault 15, disk: every file that is there afterwards is a whole copy, and what is served is verified."""
    disk = tmp_path / "disk"
    with cluster_with(tmp_path, copies=1, disk=disk) as cluster, cluster.client() as kv:
        for life in range(3):
            namespace = make_namespace(f"kill {life}", block_kib=256)
            publish(kv, namespace, salt=life)
            befores = [cluster.kill(node.node, signal.SIGKILL) for node in shards_of(cluster)]
            for before in befores:
                cluster.restarted(before)
            eventually(lambda: all(state(node) == "on" for node in shards_of(cluster)))
            assert not list(disk.rglob("*.part")), "what was cut short is removed at the start"
            files = [path for path in disk.rglob("*") if len(path.name) == 64]
            for path in files:
                verify_copy(path.read_bytes(), BlockKey(bytes.fromhex(path.name)))
            usage = sum(metric(node, "kvcomm_disk_blocks") for node in shards_of(cluster))
            assert usage == len(files)
            fetched(kv, namespace, salt=life)


def written(node: NodeRecord) -> bool:
    return metric(node, "kvcomm_disk_waiting_blocks") == 0


def events(node: NodeRecord, event: str) -> float:
    return metric(node, f'kvcomm_disk_blocks_total{{event="{event}"}}')


def state(node: NodeRecord) -> str:
    states = ("opening", "on", "full", "stalled", "off")
    return next((each for each in states if metric(node, f'kvcomm_disk_state{{state="{each}"}}')), "none")


def test_33_damaged_block_files_are_never_served(tmp_path: Path) -> None:
    """Fault 33: flipped bits and truncated files, found while serving and at the next start."""
    namespace = make_namespace("damage", block_kib=64)
    disk = tmp_path / "disk"
    with cluster_with(tmp_path, copies=1, memory="8MiB", disk=disk) as cluster, cluster.client() as kv:
        publish(kv, namespace)
        eventually(lambda: all(written(node) for node in shards_of(cluster)))
        for node in shards_of(cluster):
            before = cluster.kill(node.node, signal.SIGKILL)  # else memory would answer
            cluster.restarted(before)
        keys = keys_of(cluster, namespace)
        flipped, truncated = (next(disk.rglob(keys[at].hex())) for at in (30, 20))
        content = bytearray(flipped.read_bytes())
        content[len(content) // 2] ^= 0x10
        flipped.write_bytes(content)
        os.truncate(truncated, 1000)
        eventually(lambda: all(state(node) == "on" for node in shards_of(cluster)))
        eventually(lambda: fetched(kv, namespace) == 20)
        eventually(lambda: sum(events(node, "damaged") for node in shards_of(cluster)) == 2)
        eventually(lambda: not flipped.exists() and not truncated.exists())
        assert kv.publish(namespace, TOKENS, payloads(namespace, BLOCKS)).stored == 2
        eventually(lambda: fetched(kv, namespace) == BLOCKS)


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("a file system that can be filled needs root and mount")
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def test_28_a_full_disk_stops_taking_serves_on_and_recovers(tmp_path: Path) -> None:
    """Fault 28."""
    namespace = make_namespace("full", block_kib=256)
    with (
        small_disk(tmp_path / "disk", "6m") as disk,
        cluster_with(tmp_path, copies=1, disk=disk) as cluster,
        cluster.client() as kv,
    ):
        publish(kv, namespace)
        eventually(lambda: any(state(node) == "full" for node in shards_of(cluster)))
        assert fetched(kv, namespace) == BLOCKS, "memory serves on"
        assert not list(disk.rglob("*.part"))
        for path in disk.rglob("*"):
            if len(path.name) == 64:
                path.unlink()
        again = make_namespace("full again", block_kib=4)
        publish(kv, again, salt=1)
        eventually(lambda: all(state(node) == "on" and written(node) for node in shards_of(cluster)), 60.0)
        assert fetched(kv, again, salt=1) == BLOCKS


def test_a_shard_whose_disk_hangs_serves_on_and_comes_to_its_end(tmp_path: Path) -> None:
    """Opening a pipe that nobody reads from lasts as long as a disk that does not answer."""
    namespace = make_namespace("hangs")
    disk = tmp_path / "disk"
    with cluster_with(tmp_path, copies=1, disk=disk) as cluster, cluster.client() as kv:
        eventually(lambda: all(state(node) == "on" for node in shards_of(cluster)))
        for key in keys_of(cluster, namespace):
            for node in shards_of(cluster):
                os.mkfifo(disk / node.node / key.hex()[:2] / f"{key.hex()}.part")
        publish(kv, namespace)
        assert fetched(kv, namespace) == BLOCKS
        assert not any(written(node) for node in shards_of(cluster))
        before = cluster.kill(shards_of(cluster)[0].node, signal.SIGTERM)
        after = cluster.restarted(before)
        eventually(lambda: state(after) == "on")


def test_status_tells_of_the_disk(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from kvcomm.cli.app import app

    with cluster_with(tmp_path, disk=tmp_path / "disk") as cluster, cluster.client() as kv:
        publish(kv, make_namespace("status"))
        eventually(lambda: all(state(node) == "on" and written(node) for node in shards_of(cluster)))
        shown = CliRunner().invoke(app, ["status", "--instance", cluster.instance.name])
        assert shown.exit_code == 0 and shown.output.count(" disk on: ") == 3, shown.output


# -- the ring changes


def order(cluster: Cluster, *arguments: str) -> None:
    """An operator's, carried out to its end."""
    command = [sys.executable, "-m", "kvcomm.cli", *arguments, "--instance", cluster.instance.name]
    done = subprocess.run(
        [*command, "--deadline", "60"], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_move_with_the_ring_also_those_that_only_a_disk_has(
    tmp_path: Path,
) -> None:
    """A shard comes, then one goes that had more on its disk than the others have memory; every block is had
    after both, and nobody keeps what it does not own."""
    namespace = make_namespace("moves", block_kib=256)
    with cluster_with(tmp_path, copies=1, memory="4MiB", disk=tmp_path / "disk") as cluster:
        keys = keys_of(cluster, namespace)
        with cluster.client() as kv:
            outlive_memory(cluster, kv, namespace)
            order(cluster, "scale", "--shards", "4")
            assert fetched(kv, namespace) == BLOCKS
            check_owners(cluster, keys, 4)
            order(cluster, "drain", "shard-0")
            eventually(lambda: fetched(kv, namespace) == BLOCKS)  # the first may ask who is gone
            check_owners(cluster, keys, 3)


def check_owners(cluster: Cluster, keys: Sequence[BlockKey], count: int) -> None:
    eventually(lambda: len(shards_of(cluster)) == count)
    ring = cluster.instance.ring()
    assert ring is not None and ring.transition is None
    owners = {key: set(Ring.from_map(ring).block_owners(key)) for key in keys}
    for node in shards_of(cluster):
        there = {key for key, here in zip(keys, present(cluster, node, keys), strict=True) if here}
        assert there == {key for key in keys if node.node in owners[key]}, node.node
