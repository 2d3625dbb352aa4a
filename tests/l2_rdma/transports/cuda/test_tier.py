"""An agent's L2 over a pool in GPU memory, attached like any other pool."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.transports.cuda import runtime
from tests.l2_rdma.pools import pool_thread
from tests.l2_rdma.regions import payload_of
from tests.l2_rdma.test_tier import Agent, attachment_of, copy_of
from tests.l2_rdma.transports.cuda.conftest import real_gpu
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu
from tests.peers import until


@pytest.fixture
def directory():
    made = Path(tempfile.mkdtemp(prefix="kvc-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, directory, monkeypatch):
    """The pool's; clients find one of the same kind when they look for the transport ``cuda``."""
    if request.param == "cuda":
        return real_gpu()
    monkeypatch.setattr(runtime, "open_gpu", lambda ordinal=0: HostGpu(directory))
    return HostGpu(directory)


@pytest.fixture
def pool(gpu, directory):
    with pool_thread(directory, transports=("shm", "cuda", "tcp"), gpu=gpu) as pool:
        yield pool


@pytest.fixture
def make_agent(pool):
    agents = []

    def make(*transports, **options):
        agents.append(Agent(pool.address, transports=transports, **options))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("payload_bytes", [64, 768, 40_000])
def test_blocks_are_put_and_read_through_the_gpu(pool, make_agent, payload_bytes):
    writer, reader = make_agent("cuda"), make_agent("shm", "cuda", "tcp")
    copies = [copy_of(number, payload_bytes) for number in range(12)]

    assert writer.put(*copies) == ["stored"] * 12
    assert writer.put(copies[0]) == ["present"]
    found = reader.get(*range(14))

    assert list(found) == list(range(12))
    assert all(bytes(found[n].payload) == payload_of(n, payload_bytes) for n in range(12))
    assert set(reader.tier.stats().reads_by_transport) == {"cuda"}


def test_other_transports_are_told_that_they_do_not_reach_it(pool, make_agent):
    agent = make_agent("shm", "tcp")

    assert agent.lookup(1) == [None]
    assert set(pool.running.refused_transports) == {"shm", "tcp"}
    assert all("GPU's memory" in why for why in pool.running.refused_transports.values())


def test_what_is_written_is_pinned_until_it_is_there(pool, make_agent, directory, monkeypatch):
    """A writer that stops in the middle keeps its slot, also when its reservation is over."""
    agent = make_agent("cuda")
    agent.put(copy_of(1))
    attached = attachment_of(agent.tier)
    pinned = []
    write = attached._channel.write

    def seen(extent, data, deadline):
        pinned.append(attached._pins.pinned_count)
        return write(extent, data, deadline)

    monkeypatch.setattr(attached._channel, "write", seen)
    assert agent.put(copy_of(2), copy_of(3)) == ["stored"] * 2
    assert pinned == [2] * 4
    assert attached._pins.pinned_count == 0


def test_a_reservation_that_is_over_is_not_written_to(pool, make_agent, monkeypatch):
    agent = make_agent("cuda")
    agent.put(copy_of(1))
    attached = attachment_of(agent.tier)
    monkeypatch.setattr(attached._pins, "reserved", lambda offset, generation: False)

    assert agent.put(copy_of(2)) == ["unavailable"]
    assert attached._pins.pinned_count == 0
    assert agent.lookup(2) == [False]


def test_more_copies_than_can_be_pinned_are_written_in_turns(pool, make_agent):
    agent = make_agent("cuda", pin_slots=2)
    copies = [copy_of(number) for number in range(9)]

    assert agent.put(*copies) == ["stored"] * 9
    assert list(agent.get(*range(9))) == list(range(9))


def test_a_pool_that_ends_is_noticed(pool, make_agent):
    agent = make_agent("cuda")
    agent.put(copy_of(1))
    pool.stop()

    until(lambda: agent.lookup(1) == [None])
    begun = time.monotonic()
    assert agent.get(1) == {}
    assert time.monotonic() - begun < 5


def test_a_host_without_a_gpu_says_so(pool, make_agent, monkeypatch, gpu):
    def none(ordinal=0):
        raise Unavailable("no GPU can be used here")

    monkeypatch.setattr(runtime, "open_gpu", none)
    agent = make_agent("cuda")
    assert agent.put(copy_of(1)) == ["unavailable"]
    [view] = agent.tier.stats().pools
    assert "no GPU" in view.refused["cuda"]
