"""Strong records of real processes: many clients, a shard killed in the middle, a minority that refuses."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from functools import partial

import pytest

from kvcomm import connect_async
from kvcomm.client import Client
from kvcomm.errors import KVCommError, OutcomeUnknown, Unavailable
from kvcomm.strongplane import StrongConflict
from tests.system.conftest import Cluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_values_are_changed_under_their_versions(kv: Client) -> None:
    strong = kv.strong("ordinary")
    assert strong.read("k").value is None
    first = strong.put("k", b"1")
    assert strong.read("k") == first
    second = strong.compare_and_set("k", first.version, b"2")
    with pytest.raises(StrongConflict) as conflict:
        strong.compare_and_set("k", first.version, b"3")
    assert conflict.value.found == second
    strong.delete("k")
    assert strong.read("k").value is None
    assert strong.compare_and_set("k", b"", b"4").value == b"4"
    assert kv.state("ordinary").get("k").values == (), "another plane, another record"


async def _async_values(cluster: Cluster) -> None:
    kv = await connect_async(cluster.config, instance=cluster.instance.name)
    try:
        strong = kv.strong("async")
        version = (await strong.put("k", b"1")).version
        assert (await strong.compare_and_set("k", version, b"2")).value == b"2"
        assert (await strong.change("k", lambda value: (value or b"") + b"!")).value == b"2!"
        assert (await strong.read("k")).value == b"2!"
        await strong.delete("k")
        assert (await strong.read("k")).value is None
    finally:
        await kv.close()


def test_the_asyncio_face_does_the_same(cluster: Cluster) -> None:
    asyncio.run(_async_values(cluster))


def test_a_shard_killed_in_the_middle_loses_no_change_and_doubles_none(cluster: Cluster) -> None:
    """Each done increment counts once, each unknown one at most once."""
    done, unknown, enough = [0] * 3, [0] * 3, threading.Event()

    def count(mine: int) -> None:
        with cluster.client() as kv:
            strong = kv.strong("killed")
            while not enough.is_set():
                try:
                    strong.change("count", lambda value: b"%d" % (int(value or 0) + 1))
                    done[mine] += 1
                except OutcomeUnknown:
                    unknown[mine] += 1
                except Unavailable:
                    pass

    def more_than(total: int) -> bool:
        return sum(done) >= total

    threads = [threading.Thread(target=count, args=(mine,)) for mine in range(3)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: sum(done) >= 20)
        for name in [each.node for each in cluster.instance.nodes() if each.role == "shard"][:2]:
            before, so_far = cluster.kill(name, signal.SIGKILL), sum(done)
            eventually(partial(more_than, so_far + 20))
            cluster.restarted(before)
            so_far = sum(done)
            eventually(partial(more_than, so_far + 20))
    finally:
        enough.set()
        for thread in threads:
            thread.join(30)
    with cluster.client() as kv:
        counted = int(kv.strong("killed").read("count").value or 0)
    assert sum(done) <= counted <= sum(done) + sum(unknown)


def test_a_minority_refuses_within_the_deadline(cluster: Cluster, kv: Client) -> None:
    strong = kv.strong("split")
    strong.put("k", b"v")
    shards = [each.node for each in cluster.instance.nodes() if each.role == "shard"]
    for name in shards[:2]:
        cluster.kill(name, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises((Unavailable, OutcomeUnknown)):
            strong.put("k", b"w", deadline_s=4)
        with pytest.raises(Unavailable):
            strong.read("k", deadline_s=4)
        assert time.monotonic() - begin < 9
    finally:
        for name in shards[:2]:
            cluster.kill(name, signal.SIGCONT)

    def works() -> bool:
        try:
            return strong.read("k").value in (b"v", b"w")
        except KVCommError:
            return False

    eventually(works)
