"""The pool as a whole: a role that starts, serves and ends, also when it is killed or paused."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcomm.errors import ConfigError, Refused
from l2_rdma.region import stale_regions
from tests.l2_rdma.pools import ROOT, pool_process, pool_thread, run_pool_at
from tests.l2_rdma.regions import key_of, payload_of
from tests.l2_rdma.test_tier import LARGE, Agent, copy_of
from tests.peers import PATIENCE_S, until

VIEWER_SCRIPT = """
import sys
from tests.l2_rdma.test_tier import Agent
agent = Agent(sys.argv[1])
views = agent.get(1, 2)
print(len(views), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def agent_of():
    agents = []

    def make(pool, **options):
        agents.append(Agent(pool.address, **options))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


def test_a_pool_that_stops_leaves_nothing(tmp_path):
    with pool_thread(tmp_path) as pool:
        assert Path(pool.running.region).exists()
        assert Path(pool.address.removeprefix("unix://")).exists()

    assert list(tmp_path.iterdir()) == []


def test_memory_arrives_in_the_background(tmp_path):
    with pool_thread(tmp_path, region_bytes=200 << 20, slab_bytes=1 << 20, ahead_bytes=None) as pool:
        until(lambda: pool.usage().capacity_bytes == 199 << 20)


def test_memory_is_taken_as_the_pool_fills_and_nothing_is_evicted_before(tmp_path, agent_of):
    size = 1 << 20
    with pool_thread(tmp_path, region_bytes=200 << 20, slab_bytes=4 << 20, ahead_bytes=0) as pool:
        assert pool.usage().capacity_bytes == 64 << 20
        agent = agent_of(pool)

        for number in range(0, 80, 8):
            puts = [copy_of(each, size - 256) for each in range(number, number + 8)]
            assert agent.put(*puts) == ["stored"] * 8

        assert pool.usage().evicted_count == 0
        assert 80 << 20 <= pool.usage().capacity_bytes <= 100 << 20
        assert agent.lookup(*range(80)) == [True] * 80


def test_a_pool_that_does_not_fit_says_which_setting_to_change(tmp_path):
    with pytest.raises(ConfigError, match=r"cache\.l2_size"), pool_thread(tmp_path, region_bytes=1 << 55):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_address_in_use_leaves_no_region(tmp_path):
    async def second():
        await run_pool_at(tmp_path, lambda running: None, asyncio.Event(), 22)

    with pool_thread(tmp_path) as pool:
        with pytest.raises(Refused):
            asyncio.run(second())
        assert [str(each) for each in tmp_path.glob("kvcomm-*")] == [pool.running.region]


def test_the_pools_own_ticks_expire_reservations(tmp_path, agent_of):
    from kvcomm.wire.messages import Want
    from tests.l2_rdma.test_tier import DIGEST

    with pool_thread(tmp_path, reservation_ttl_s=0.05) as pool:
        store = pool.running.store
        pool._loop.call_soon_threadsafe(
            lambda: store.reserve([Want(key_of(1), copy_of(1).copy_bytes)], 9999, DIGEST, time.monotonic())
        )
        agent = agent_of(pool)
        until(lambda: agent.put(copy_of(1)) == ["stored"])
        assert pool.usage().reserved_bytes == 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_pool_is_a_miss_and_its_successor_cleans_up(tmp_path, agent_of):
    with pool_process(tmp_path, incarnation=21) as pool:
        agent = agent_of(pool)
        assert agent.put(copy_of(1)) == ["stored"]
        view = agent.get(1)[1]
        pool.signal(signal.SIGKILL)

        until(lambda: agent.lookup(1) == [None])
        assert agent.put(copy_of(2)) == ["unavailable"]
        assert bytes(view.payload) == payload_of(1, LARGE)
        assert stale_regions(tmp_path) == [pool.region]

        with pool_process(tmp_path, incarnation=22) as successor:
            assert [str(each) for each in tmp_path.glob("kvcomm-*")] == [successor.region]
            until(lambda: agent.lookup(1) == [False])
            assert agent.put(copy_of(1)) == ["stored"]
            assert bytes(view.payload) == payload_of(1, LARGE)
            successor.signal(signal.SIGTERM)
            until(lambda: not list(tmp_path.glob("kvcomm-*")))


@pytest.mark.slow
@pytest.mark.processes
def test_a_paused_pool_is_still_read(tmp_path, agent_of):
    with pool_process(tmp_path) as pool:
        agent = agent_of(pool, request_timeout_s=0.1)
        assert agent.put(copy_of(1)) == ["stored"]
        pool.signal(signal.SIGSTOP)

        begun = time.monotonic()
        assert bytes(agent.get(1)[1].payload) == payload_of(1, LARGE)
        assert agent.put(copy_of(2)) == ["unavailable"]
        newcomer = agent_of(pool, attach_timeout_s=0.1)
        assert newcomer.get(1) == {}
        assert time.monotonic() - begun < PATIENCE_S, "nothing waits without a bound"

        pool.signal(signal.SIGCONT)
        until(lambda: agent.put(copy_of(3)) == ["stored"])
        until(lambda: 1 in newcomer.get(1))


@pytest.mark.slow
@pytest.mark.processes
def test_pins_of_a_killed_client_are_dropped(tmp_path, agent_of):
    with pool_thread(tmp_path) as pool:
        assert agent_of(pool).put(copy_of(1), copy_of(2)) == ["stored", "stored"]
        viewer = subprocess.Popen(
            [sys.executable, "-c", VIEWER_SCRIPT, pool.address],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert viewer.stdout is not None
            assert viewer.stdout.readline().strip() == "2"
            assert pool.usage().pinned_bytes > 2 * LARGE
            viewer.kill()
            viewer.wait(PATIENCE_S)

            until(lambda: pool.usage().pinned_bytes == 0)
        finally:
            viewer.kill()
            viewer.communicate()
