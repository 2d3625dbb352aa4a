"""Leases of real processes: a holder that stands still, is followed, and wakes up with writes to send."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcomm import connect_async
from kvcomm.client import Client
from kvcomm.errors import Fenced
from kvcomm.lease import LeaseHeld
from tests.system.conftest import Cluster, eventually
from tests.system.lab import WallClock, faketime_library

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TTL_S = 3.0
HOLDER = """
import sys, threading, time
from kvcomm import connect
from kvcomm.errors import Fenced, KVCommError
from kvcomm.lease import LeaseLost

config, instance, name = sys.argv[1:]
with connect(config, instance=instance) as kv:
    told = threading.Event()
    try:
        with kv.lease(name, ttl_s=3.0).held(lost=lambda error: told.set()) as lease:
            print("held", lease.epoch, flush=True)
            epoch, strong = lease.epoch, kv.strong(name)
            while not told.wait(0.01):
                try:
                    strong.put("k", b"old", fence=epoch)  # the bare number: as a message that is under way
                    print("wrote", flush=True)
                except KVCommError as error:
                    print(error.code, flush=True)
    except LeaseLost:
        print("lost", flush=True)
    for _ in range(3):
        try:
            strong.put("k", b"late", fence=epoch)
            print("wrote late", flush=True)
        except Fenced:
            print("refused", flush=True)
"""


@contextmanager
def holder(
    cluster: Cluster, name: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(cluster.config), cluster.instance.name, name]
    environment = {**os.environ, **(variables or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate(timeout=30)


def stop_and_succeed(cluster: Cluster, kv: Client, name: str, variables: Mapping[str, str]) -> None:
    """A holder stands still, is followed, and goes on."""
    with holder(cluster, name, variables) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == "held 1\n"
        while old.stdout.readline() != "wrote\n":
            pass
        with pytest.raises(LeaseHeld):
            kv.lease(name, TTL_S).acquire(deadline_s=0.5)
        old.send_signal(signal.SIGSTOP)
        lease, strong = kv.lease(name, TTL_S), kv.strong(name)
        with lease.held(deadline_s=20):
            assert lease.epoch == 2
            mine = strong.put("k", b"new", fence=lease)
            old.send_signal(signal.SIGCONT)
            said, _ = old.communicate(timeout=60)
            assert strong.read("k") == mine, "nothing was written under the smaller epoch"
        lines = said.splitlines()
        assert lines[-4:] == ["lost", "refused", "refused", "refused"], lines
        assert "wrote late" not in lines
        assert mine.fence == 2


def test_a_holder_that_stood_still_cannot_write_after_its_successor(cluster: Cluster, kv: Client) -> None:
    """Fault 21: SIGSTOP, a new holder, SIGCONT: the old one's writes are refused, and it is told."""
    stop_and_succeed(cluster, kv, "stopped", {})


@pytest.mark.skipif(faketime_library() is None, reason="libfaketime is not installed")
@pytest.mark.parametrize("skew_s", [288, -288])
def test_nor_one_whose_wall_clock_is_wrong(cluster: Cluster, kv: Client, tmp_path: Path, skew_s: int) -> None:
    """Fault 26: no lease goes by a wall clock."""
    clock = WallClock(tmp_path / "clock")
    clock.set(skew_s)
    try:
        stop_and_succeed(cluster, kv, f"skewed{skew_s}", clock.variables())
    finally:
        clock.close()


def test_epochs_grow_over_releases_deletes_and_restarts(cluster: Cluster, kv: Client) -> None:
    epochs = []
    for _ in range(3):
        with kv.lease("growing", TTL_S).held() as lease:
            epochs.append(lease.epoch)
            kv.strong("growing").put("k", b"v", fence=lease)
    shard = next(each.node for each in cluster.instance.nodes() if each.role == "shard")
    cluster.restarted(cluster.kill(shard, signal.SIGKILL))
    with kv.lease("growing", TTL_S).held(deadline_s=20) as lease:
        epochs.append(lease.epoch)
        kv.strong("growing").delete("k", fence=lease)
    assert epochs == [1, 2, 3, 4]
    for old in (None, 1, 3):
        with pytest.raises(Fenced, match="epoch 4"):
            kv.strong("growing").put("k", b"late", fence=old)
    assert kv.strong("growing").read("k").value is None
    assert kv.strong("growing").put("k", b"v", fence=5).fence == 5


def test_a_lease_lives_through_the_death_of_one_shard(cluster: Cluster, kv: Client) -> None:
    lost: list[Exception] = []
    shard = next(each.node for each in cluster.instance.nodes() if each.role == "shard")
    with kv.lease("survivor", TTL_S).held(lost=lost.append) as lease:
        before, begin = cluster.kill(shard, signal.SIGKILL), time.monotonic()
        cluster.restarted(before)
        eventually(lambda: time.monotonic() > begin + 4.0)
        assert lease.valid() and not lost


async def _async(cluster: Cluster) -> None:
    kv = await connect_async(cluster.config, instance=cluster.instance.name)
    try:
        async with kv.lease("async", TTL_S).held() as lease:
            strong = kv.strong("async")
            version = (await strong.put("k", b"1", fence=lease)).version
            await strong.compare_and_set("k", version, b"2", fence=lease)
            assert (await strong.change("k", lambda value: value, fence=lease)).value == b"2"
            await strong.delete("k", fence=lease)
            with pytest.raises(Fenced):
                await strong.put("k", b"3")
    finally:
        await kv.close()


def test_the_asyncio_face_does_the_same(cluster: Cluster) -> None:
    asyncio.run(_async(cluster))
