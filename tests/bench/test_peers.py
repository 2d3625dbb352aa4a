"""The baselines really move the bytes they are timed for, and clean up after themselves."""

from __future__ import annotations

import os

import pytest

from bench.peers import mooncake_store
from bench.peers.bare_verbs import bare_verbs
from bench.peers.memory import Buffers, memcpy
from bench.peers.mooncake_store import mooncake
from bench.peers.raw_socket import Family, raw_socket
from bench.peers.redis_server import redis_server


def test_buffers_are_distinct_and_repeatable():
    one, again = Buffers(3, 64), Buffers(3, 64)
    assert one.all == again.all and len({bytes(buffer) for buffer in one.all}) == 3
    assert len(set(one.addresses())) == 3


def test_memcpy_goes_round_its_working_set():
    assert len(memcpy(2, 1024).times(5)) == 5


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("family", "blocking"), [("tcp", False), ("tcp", True), ("unix", False)])
def test_the_raw_socket_answers(family: Family, blocking: bool):
    with raw_socket(2, 1 << 20, family, blocking=blocking) as raw:
        assert len(raw.one.times(5)) == 5
        assert len(raw.stream(3).times(5)) == 5
        assert raw.stream(3).name != raw.one.name
        assert raw.connection.gettimeout() is None, "Python polls before every call of one with a time limit"


@pytest.mark.slow
@pytest.mark.processes
def test_redis_answers_both_ways():
    with redis_server() as server:
        if isinstance(server, str):
            pytest.skip(server)
        for way, client in server.clients.items():
            client.set(way, b"value")
            assert client.get(way) == b"value"
        assert [len(call.times(2)) for call in server.gets([b"one", b"two"])] == [2, 2]
        assert [len(call.times(2)) for call in server.runs(2, 3)] == [2, 2]


@pytest.mark.slow
@pytest.mark.processes
def test_mooncake_answers():
    with mooncake(2, 64, 64 << 10) as store:
        if isinstance(store, str):
            pytest.skip(store)
        for size_bytes in (64, 64 << 10):
            operations = [*store.gets(size_bytes), store.run(size_bytes, 3)]
            assert [len(operation.times(2)) for operation in operations] == [2, 2, 2]


@pytest.mark.rdma
@pytest.mark.slow
@pytest.mark.processes
def test_bare_verbs_reads():
    with bare_verbs(3, 4096) as verbs:
        if isinstance(verbs, str):
            pytest.skip(verbs)
        run = verbs.run(4096, 16)
        into = next(each for each in verbs.kept if isinstance(each, Buffers))
        assert len(run.times(5)) == 5
        [theirs] = Buffers(1, 3 * 4096, seed=3).all
        pieces = [bytes(theirs[4096 * number : 4096 * (number + 1)]) for number in range(3)]
        assert [bytes(each) for each in into.all] == [pieces[(4 + at) % 3] for at in range(16)], "all arrived"
        assert len(verbs.one(64).times(5)) == 5
        assert len(verbs.making(64).times(5)) == 5


def test_a_missing_peer_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: object):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("KVCOMM_CACHE_DIR", str(tmp_path))
    assert mooncake_store.environment().parent.parent == tmp_path
    with redis_server() as server, mooncake(1, 1024) as operations:
        assert "install-peers" in str(server) and "install-peers" in str(operations)


def test_mooncake_workers_do_not_see_our_packages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert "PYTHONPATH" not in mooncake_store._plain_environment() and "PYTHONPATH" in os.environ
