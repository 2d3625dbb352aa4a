"""Fault 37: keys that everybody reads, while they are written and while who holds them comes and goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.hotload import HotLoad, hot_load
from kvcomm import connect
from kvcomm.block import BlockKey, Incarnation
from kvcomm.cli.app import app
from kvcomm.cli.warm_source import ShardSource
from kvcomm.client import Client
from kvcomm.credentials import NODE_TENANT
from kvcomm.embedded import Embedded
from kvcomm.instance import Instance
from kvcomm.rpc import AsyncPeers, Identity
from kvcomm.steps import Ask
from kvcomm.wire.messages import Done, WarmOrder
from l2_rdma.pool import PoolOptions, RunningPool, run_pool
from tests.system.conftest import Cluster, eventually, make_namespace, metric, payloads
from tests.system.racks import nodes_in_racks

pytestmark = [pytest.mark.slow, pytest.mark.processes]

CONFIG = """
cache: {l1_size: 1KiB, l1_negative_ttl: 0s, l2_size: 16MiB, l3_size: 32MiB}
network: {request_timeout: 1s}
cluster: {shards: 3, pools: 1, heartbeat: 250ms, lease: 2s, hot_record_rate: 20, hot_block_rate: 2}
storage: {fsync: interval}
"""
LOAD = HotLoad(readers=3, reads_s=100.0, writes_s=30.0)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose controllers look often."""
    config = tmp_path_factory.mktemp("hot") / "kvcomm.yaml"
    config.write_text(CONFIG)
    embedded = Embedded.start(f"hot{os.getpid()}", config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(f"hot{os.getpid()}"), config)
    finally:
        embedded.stop()


def test_fault_37_a_hot_record_costs_its_shard_little_and_is_a_second_old_at_most(busy: Cluster) -> None:
    with hot_load(busy.instance, busy.client, LOAD) as running:
        eventually(lambda: metric(busy.node("controller-0"), 'kvcomm_hot_keys{plane="record"}') > 0)
        eventually(lambda: running.watch(0.1).from_copies > 0)
        seen = running.watch(2.5)
        shown = CliRunner().invoke(app, ["hot", "--instance", busy.instance.name, "--json"])
        named = [row["key"] for row in json.loads(shown.output) if row["plane"] == "record"]
        assert any(name.startswith("state/hot/") for name in named)
    assert seen.read_share > 0.85 and seen.writes > 20
    assert seen.from_copies > 0.5 * seen.reads
    assert seen.asked_share < 0.2, "each reader asks once a second, instead of a hundred times"
    assert seen.stale_max_s <= 1.0
    assert seen.strong_stale_max_s == 0.0


def test_fault_37_a_writer_reads_its_own_writes_of_a_hot_record(busy: Cluster) -> None:
    with busy.client() as mine:
        state = mine.state("own")
        state.put("k", b"0")

        def from_a_copy() -> bool:
            before = mine.metrics()["kvcomm_hot_record_reads_total"]
            for _ in range(20):
                state.get("k")
            return mine.metrics()["kvcomm_hot_record_reads_total"] > before

        eventually(from_a_copy)
        for number in range(1, 20):
            state.put("k", b"%d" % number)
            assert state.get("k").value == b"%d" % number
        eventually(from_a_copy)
        assert state.get("k").value == state.get("k", fresh=True).value == b"19"


def test_fault_37_a_hot_block_comes_back_to_a_pool_that_lost_it(busy: Cluster) -> None:
    namespace = make_namespace(revision="hot-block")
    tokens, blocks = list(range(64)), payloads(namespace, 4)
    with busy.client() as kv:
        kv.publish(namespace, tokens, blocks)

        def fetched() -> bool:
            hit = kv.fetch(namespace, tokens)
            assert [bytes(block.payload) for block in hit.blocks] == blocks[: len(hit.blocks)]
            return len(hit.blocks) == 4

        def hot() -> bool:
            fetched()
            return metric(busy.node("controller-0"), 'kvcomm_hot_keys{plane="block"}') >= 4

        eventually(hot)
        before = busy.kill("pool-0", signal.SIGKILL)
        after = busy.restarted(before)
        keys = [bytes(key) for key in kv.fetch(namespace, tokens).keys]
        assert len(keys) == 4

        def warm() -> bool:
            """Somebody else goes on reading them, from the shards: promoting them is not what brings them."""
            with _poolless(busy) as reader:
                assert len(reader.fetch(namespace, tokens).blocks) == 4
            return metric(after, "kvcomm_warm_copies") + metric(after, "kvcomm_store_blocks") >= 4

        eventually(warm)
        assert fetched()
        assert kv.fetch(namespace, tokens).tiers["l2"] == 64


def _poolless(busy: Cluster) -> Client:
    """A client that cannot reach the pool."""
    config = busy.config.with_name("poolless.yaml")
    config.write_text(busy.config.read_text().replace("network: {", "network: {transports: [verbs], "))
    return connect(config, instance=busy.instance.name)


def test_fault_37_what_one_rack_reads_is_brought_to_the_others(tmp_path: Path) -> None:
    """Nobody of the other rack has asked for it when it is there."""
    config = tmp_path / "kvcomm.yaml"
    config.write_text(CONFIG.replace("shards: 3, pools: 1", "shards: 1, pools: 2"))
    nodes = [
        ("controller", "controller-0", "rack-a"), ("shard", "shard-0", "rack-a"),
        ("pool", "pool-0", "rack-a"), ("pool", "pool-1", "rack-b"),
    ]  # fmt: skip
    namespace = make_namespace(revision="racks")
    tokens, blocks = list(range(64)), payloads(namespace, 4, salt=50)
    with nodes_in_racks(f"rk{os.getpid()}", config, nodes) as instance:
        eventually(lambda: (ring := instance.ring()) is not None and len(ring.pools) == 2)
        cluster = Cluster(instance, config)
        with _in_rack(cluster, "rack-a") as near, _in_rack(cluster, "rack-b") as far:
            near.publish(namespace, tokens, blocks)

            def brought() -> bool:
                assert len(near.fetch(namespace, tokens).blocks) == 4
                return metric(cluster.node("pool-1"), "kvcomm_warm_copies") >= 4

            eventually(brought)
            assert metric(cluster.node("pool-0"), "kvcomm_store_blocks") == 4
            hit = far.fetch(namespace, tokens)
            assert hit.tiers["l2"] == 64 and [bytes(block.payload) for block in hit.blocks] == blocks


def _in_rack(cluster: Cluster, rack: str) -> Client:
    config = cluster.config.with_name(f"{rack}.yaml")
    config.write_text(cluster.config.read_text().replace("network: {", f"network: {{rack: {rack}, "))
    return connect(config, instance=cluster.instance.name)


def test_fault_37_a_pool_of_another_rack_gets_verified_copies_when_told(
    busy: Cluster, tmp_path: Path
) -> None:
    namespace = make_namespace(revision="other-rack")
    tokens, blocks = list(range(48)), payloads(namespace, 3, salt=9)
    with busy.client() as kv:
        kv.publish(namespace, tokens, blocks)
        keys = kv.fetch(namespace, tokens).keys
    asyncio.run(_warmed(busy.instance, tmp_path, keys, blocks))


async def _warmed(
    instance: Instance, directory: Path, keys: tuple[BlockKey, ...], blocks: list[bytes]
) -> None:
    credentials, stop = instance.credentials(), asyncio.Event()
    started: asyncio.Future[RunningPool] = asyncio.get_running_loop().create_future()
    source = ShardSource(
        instance.ring,
        Identity(credentials.token("default"), Incarnation(5)),
        dial=lambda shard: shard.local_address,
        timeout_s=1.0,
        connect_timeout_s=1.0,
    )
    pool = asyncio.create_task(
        run_pool(
            node="pool-far",
            instance="far",
            incarnation=Incarnation(6),
            credentials=credentials,
            tenant="default",
            addresses=[f"unix://{directory}/far.sock"],
            options=PoolOptions(8 << 20, directory=directory, ahead_bytes=1 << 20),
            stop=stop,
            ready=started.set_result,
            source=source,
        )
    )
    running = await asyncio.wait_for(started, 20)
    peers = AsyncPeers(Identity(credentials.token(NODE_TENANT), Incarnation(7)))
    tenant = credentials.tenant_digest("default")
    try:
        order = Ask(running.addresses[0], WarmOrder([bytes(key) for key in keys], 64 << 20))
        answer = await peers.start([order], time.monotonic() + 5)[0].answer()
        assert answer.message == Done()
        async with asyncio.timeout(20):
            while not all(running.store.present(keys, tenant)):
                await asyncio.sleep(0.01)
        for key, block in zip(keys, blocks, strict=True):
            lease = running.store.lease(key, tenant)
            assert lease is not None and bytes(lease.copy).endswith(block)
            lease.release()
        assert running.warming.counts.blocks["stored"] == 3
    finally:
        stop.set()
        await pool
        await source.close()
        await peers.close()
