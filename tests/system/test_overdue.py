"""A shard that stood still with requests in its sockets does none of those whose senders have given up."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from kvcomm import connect_async
from kvcomm.block import Incarnation
from kvcomm.client import Client
from kvcomm.errors import KVCommError, OutcomeUnknown
from kvcomm.pulse import BEAT_S, STILL_S
from kvcomm.rpc import AsyncPeers, Identity
from kvcomm.steps import Ask
from kvcomm.wire.messages import Failure, Message, RecordGet, RingGet, RingMap
from tests.system.conftest import Cluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAUSE_S = 2.0


def seen(kv: Client, key: str) -> tuple[bytes, ...]:
    def read() -> list[tuple[bytes, ...]]:
        try:
            value = kv.state("late").get(key)
        except KVCommError:
            return []
        return [] if value.degraded else [value.values]

    return eventually(read)[0]


async def _put_while_it_stands(cluster: Cluster, stopped: str) -> dict[str, str]:
    """What became of puts that were sent to ``stopped``, and to others, meanwhile."""
    kv = await connect_async(cluster.config, instance=cluster.instance.name)
    ends: dict[str, str] = {}

    async def put(key: str) -> None:
        try:
            await kv.state("late").put(key, b"late", deadline_s=2.0)
        except OutcomeUnknown:
            ends[key] = "unknown"
        except KVCommError as error:
            ends[key] = error.code
        else:
            ends[key] = "done"

    try:
        for number in range(20):
            await kv.state("late").put(f"before/{number}", b"v")  # connections to all shards stand
        cluster.kill(stopped, signal.SIGSTOP)
        await asyncio.gather(*[put(f"k{number}") for number in range(60)])
        await asyncio.sleep(PAUSE_S)
    finally:
        cluster.kill(stopped, signal.SIGCONT)
        await kv.close()
    return ends


def test_nothing_is_executed_late_after_a_pause(cluster: Cluster, kv: Client) -> None:
    """Fault 14 and 21: what was given up while the shard stood still is not done when it goes on."""
    shard = next(each.node for each in cluster.instance.nodes() if each.role == "shard")
    ends = asyncio.run(_put_while_it_stands(cluster, shard))
    unknown = [key for key, end in ends.items() if end == "unknown"]
    assert unknown, f"some puts went to the shard that stood still: {ends}"
    for key in unknown:
        assert seen(kv, key) == (), "executed late"
    for key, end in ends.items():
        if end == "done":
            assert seen(kv, key) == (b"late",)


async def _epoch(peers: AsyncPeers, address: str) -> int:
    answer = await peers.start([Ask(address, RingGet())], time.monotonic() + 5.0)[0].answer()
    return answer.message.epoch if isinstance(answer.message, RingMap) else 0


async def _ask_while_it_stands(cluster: Cluster, stopped: str, other: str) -> list[Message]:
    """Answers to gets under the epoch of then, sent to ``stopped`` while ``other`` makes a new one."""
    ring = cluster.instance.ring()
    assert ring is not None
    peers = AsyncPeers(Identity(cluster.instance.credentials().token("default"), Incarnation(5)))
    address, deadline = cluster.node(stopped).addresses[0], time.monotonic() + 90.0
    try:
        await peers.welcome(address, deadline)
        cluster.kill(stopped, signal.SIGSTOP)
        noticed = time.monotonic() + 2 * (BEAT_S + STILL_S)
        asks = [Ask(address, RecordGet(ring.epoch, [b"state/late/k%d" % number])) for number in range(50)]
        requests = peers.start(asks, deadline)
        await asyncio.to_thread(cluster.restarted, cluster.kill(other, signal.SIGKILL))
        for node in [each for each in cluster.instance.nodes() if each.role == "shard"]:
            while node.node != stopped and await _epoch(peers, node.addresses[0]) <= ring.epoch:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)  # it has not been handed the new map yet
        await asyncio.sleep(max(0.0, noticed - time.monotonic()))  # a shorter stop is a busy moment
        cluster.kill(stopped, signal.SIGCONT)
        return [(await request.answer()).message for request in requests]
    finally:
        cluster.kill(stopped, signal.SIGCONT)
        await peers.close()


def test_nothing_is_answered_under_the_ring_of_then(cluster: Cluster, kv: Client) -> None:
    """It asks the others before it answers: accepted stale epochs 0."""
    stopped, other = [each.node for each in cluster.instance.nodes() if each.role == "shard"][:2]
    answers = asyncio.run(_ask_while_it_stands(cluster, stopped, other))
    codes = {answer.code if isinstance(answer, Failure) else type(answer).__name__ for answer in answers}
    assert codes == {"stale_epoch"}
