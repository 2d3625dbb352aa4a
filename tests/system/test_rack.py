"""A rack of two pools as agents use it: which way the blocks come, and what a lost or stopped pool costs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm import Namespace, connect, connect_async
from kvcomm.client import Client
from kvcomm.config import TRANSPORTS
from kvcomm.embedded import Embedded
from kvcomm.instance import Instance
from kvcomm.operations import Hit
from tests.system.conftest import Cluster, eventually, make_namespace, payloads

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(180)]

CONFIG = """
cache:
  l1_size: 8MiB
  l1_negative_ttl: 100ms
  l2_size: 64MiB
  l3_size: 64MiB
network:
  request_timeout: 500ms
  transports: [{transports}]
cluster:
  shards: 2
  pools: 2
storage:
  fsync: interval
"""
BLOCKS = 24
POOLS = ("pool-0", "pool-1")


@pytest.fixture(scope="module", params=["shm, tcp", "tcp"])
def rack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "kvcomm.yaml"
    config.write_text(CONFIG.format(transports=request.param))
    name = f"r{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(name), config)
    finally:
        embedded.stop()


@pytest.fixture
def way(rack: Cluster) -> str:
    """The transport that should be used."""
    return "shm" if "shm" in rack.config.read_text() else "tcp"


def tokens(count: int = BLOCKS) -> list[int]:
    return [number % 1000 for number in range(16 * count)]


def publish(kv: Client, namespace: Namespace) -> None:
    published = kv.publish(namespace, tokens(), payloads(namespace, BLOCKS))
    assert published.stored == BLOCKS and published.failed == 0
    assert {status.l2 for status in published.statuses} == {"stored"}


def fetch(kv: Client, namespace: Namespace, deadline_s: float = 5.0) -> Hit:
    hit = kv.fetch(namespace, tokens(), deadline_s=deadline_s)
    expected = payloads(namespace, BLOCKS)
    for block, payload in zip(hit.blocks, expected, strict=False):
        assert block.payload == payload
    return hit


def reads(kv: Client) -> dict[str, float]:
    numbers = kv.metrics()
    found = {name: numbers[f'kvcomm_transport_reads_total{{transport="{name}"}}'] for name in TRANSPORTS}
    return {name: count for name, count in found.items() if count}


def test_blocks_come_from_both_pools_through_the_one_transport(rack: Cluster, way: str) -> None:
    namespace = make_namespace(f"both-{way}")
    with rack.client() as writer, rack.client() as reader:
        publish(writer, namespace)
        hit = fetch(reader, namespace)
        assert hit.tiers == {"l1": 0, "l2": 16 * BLOCKS, "l3": 0}
        assert reads(reader) == {way: BLOCKS}
        views = {view.node: view for view in reader.pools()}
        assert {view.transport for view in views.values()} == {way} and sorted(views) == list(POOLS)
        assert all(view.state == "alive" and not view.problem for view in views.values())
        numbers = reader.metrics()
        assert numbers[f'kvcomm_transport_bytes_total{{transport="{way}"}}'] >= BLOCKS * namespace.block_bytes
        if way == "shm":
            assert any(block.pinned for block in hit.blocks)
    usages = [record for record in rack.instance.nodes() if record.role == "pool"]
    assert all(way in record.transports for record in usages)


def dial(rack: Cluster) -> Client:
    """A client as one of another host would be: by the address of a shard."""
    shard = next(each for each in rack.node("shard-0").addresses if each.startswith("tcp:"))
    return connect(rack.config, address=shard, token=rack.instance.credentials().token("default"))


def test_a_client_of_an_address_has_the_pools_too(rack: Cluster, way: str) -> None:
    """It dials ports; memory of this host is this host's, whichever way the pool was found."""
    namespace = make_namespace(f"address-{way}")
    with rack.client() as writer, dial(rack) as reader:
        publish(writer, namespace)
        assert fetch(reader, namespace).tiers["l2"] == 16 * BLOCKS
        assert reads(reader) == {way: BLOCKS}
        assert all(view.address.startswith("tcp:") for view in reader.pools())


def test_coroutines_read_and_write_the_rack(rack: Cluster, way: str) -> None:
    namespace = make_namespace(f"async-{way}")

    async def main() -> None:
        async with await connect_async(rack.config, instance=rack.instance.name) as writer:
            blocks = payloads(namespace, BLOCKS)
            published = await writer.publish(namespace, tokens(), blocks)
            assert published.stored == BLOCKS
        async with await connect_async(rack.config, instance=rack.instance.name) as reader:
            hits = await asyncio.gather(*(reader.fetch(namespace, tokens()) for _ in range(3)))
            for hit in hits:
                assert [bytes(block.payload[:1]) for block in hit.blocks] == [each[:1] for each in blocks]
            assert hits[0].tiers["l2"] == 16 * BLOCKS
            assert reader.metrics()[f'kvcomm_transport_reads_total{{transport="{way}"}}'] >= BLOCKS
            assert {view.transport for view in reader.pools()} == {way}

    asyncio.run(main())


def test_a_killed_pool_costs_no_block_and_comes_back_as_another(rack: Cluster, way: str) -> None:
    namespace = make_namespace(f"killed-{way}")
    with rack.client() as kv, rack.client() as other:
        publish(kv, namespace)
        fetch(other, namespace)
        before = rack.kill("pool-1", signal.SIGKILL)
        begun = time.monotonic()
        with rack.client() as reader:
            hit = fetch(reader, namespace)  # what its pool had comes from the shards
        assert len(hit.blocks) == BLOCKS and hit.tiers["l3"] > 0 and hit.tiers["l2"] > 0
        assert time.monotonic() - begun < 5

        after = rack.restarted(before)
        assert after.incarnation != before.incarnation
        fresh = make_namespace(f"restarted-{way}")

        def attached_again() -> bool:
            fetch(other, fresh)  # a miss: asks everybody
            return all(view.transport == way for view in other.pools())

        eventually(attached_again)
        numbers = other.metrics()
        assert numbers["kvcomm_pool_losses_total"] == 1
        assert numbers['kvcomm_pools{state="alive"}'] == 2 and numbers['kvcomm_pools{state="away"}'] == 0
        publish(other, fresh)
        with rack.client() as reader:
            assert fetch(reader, fresh).tiers["l2"] == 16 * BLOCKS


def test_a_client_of_an_address_learns_where_a_pool_has_gone(rack: Cluster, way: str) -> None:
    """A restarted node has another port: the map that the shards send along says so."""
    fresh = make_namespace(f"moved-{way}")
    with dial(rack) as kv:
        fetch(kv, fresh)
        assert {view.transport for view in kv.pools()} == {way}
        after = rack.restarted(rack.kill("pool-0", signal.SIGKILL))

        def found_again() -> bool:
            fetch(kv, fresh)
            view = next(each for each in kv.pools() if each.node == "pool-0")
            return view.address in after.addresses and view.transport == way

        eventually(found_again)
        publish(kv, fresh)


def test_a_stopped_pool_is_a_miss_within_the_deadline_and_the_other_serves(rack: Cluster, way: str) -> None:
    namespace = make_namespace(f"stopped-{way}")
    with rack.client() as kv, rack.client() as reader:
        publish(kv, namespace)
        fetch(reader, make_namespace(f"nothing-{way}"))  # attached to both
        stopped = rack.kill("pool-1", signal.SIGSTOP)
        try:
            begun = time.monotonic()
            hit = fetch(reader, namespace)
            assert len(hit.blocks) == BLOCKS, "the shards have all of them"
            assert time.monotonic() - begun < 4
            assert hit.tiers["l2"] > 0
            assert (hit.tiers["l3"] > 0) == (way == "tcp"), "memory of this host is read on"
        finally:
            os.kill(stopped.pid, signal.SIGCONT)


def test_a_transport_that_no_pool_offers_is_a_fallback_with_a_reason(rack: Cluster, tmp_path: Path) -> None:
    records = [record for record in rack.instance.nodes() if record.role == "pool"]
    assert all(not record.refused_transports for record in records)
    wanting = tmp_path / "wanting.yaml"
    wanting.write_text(rack.config.read_text().replace("transports: [", "transports: [cuda, "))
    with connect(wanting, instance=rack.instance.name) as kv:
        publish(kv, make_namespace(f"wanting-{os.getpid()}-{time.monotonic_ns()}"))
        numbers = kv.metrics()
        assert sum(value for name, value in numbers.items() if 'wanted="cuda"' in name) == len(POOLS)
        assert all("cuda" in view.refused for view in kv.pools())
