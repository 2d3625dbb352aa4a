"""The two processes of a trial, each by itself."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcomm.credentials import Credentials
from l2_rdma.trial import TENANT, Order, Outcome, Serving

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SECRET = bytes(32)
PATIENCE_S = 30.0


@contextmanager
def child(role: str, order: Order) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "l2_rdma.trial", role], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        with process:  # closes its pipes and waits
            pass


def order(transport: str = "shm", timeout_s: float = PATIENCE_S, **more: Any) -> Order:
    return Order(
        transport=transport,
        timeout_s=timeout_s,
        listen_host="127.0.0.1",
        rdma_device="",
        secret=SECRET,
        **more,
    )


def address_of(server: subprocess.Popen[bytes]) -> str:
    assert server.stdout is not None
    return msgspec.json.decode(server.stdout.readline(), type=Serving).address


def test_the_pool_ends_with_its_maker_and_leaves_nothing() -> None:
    directory = Path(tempfile.mkdtemp(prefix="kvc-"))
    with child("serve", order(directory=str(directory))) as server:
        assert address_of(server) == f"unix://{directory}/pool"
        assert any(each.name.startswith("kvcomm-") for each in directory.iterdir())
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(PATIENCE_S) == 0
    assert not directory.exists()


def test_the_kernel_ends_a_child_whose_time_is_up(tmp_path: Path) -> None:
    directory = tempfile.mkdtemp(prefix="kvc-", dir=tmp_path)
    with child("serve", order(timeout_s=1.0, directory=directory)) as server:
        assert server.wait(PATIENCE_S) == -signal.SIGALRM


def test_a_pool_that_stands_still_is_refused_while_there_is_time(tmp_path: Path) -> None:
    address = tmp_path / "pool"
    with socket.socket(socket.AF_UNIX) as pool:
        pool.bind(str(address))
        pool.listen()
        still = order(
            "tcp", timeout_s=8.0, address=f"unix://{address}", token=Credentials(SECRET).token(TENANT)
        )
        with child("read", still) as reader:
            said, _ = reader.communicate(timeout=PATIENCE_S)
    assert reader.returncode == 0
    assert str(address) in msgspec.json.decode(said, type=Outcome).refused


def test_the_reader_measures_a_pool_and_says_so_in_one_line() -> None:
    directory = tempfile.mkdtemp(prefix="kvc-")
    with child("serve", order(directory=directory)) as server:
        token = Credentials(SECRET).token(TENANT)
        with child("read", order(address=address_of(server), token=token)) as reader:
            said, _ = reader.communicate(timeout=PATIENCE_S)
        outcome = msgspec.json.decode(said, type=Outcome)
        assert outcome.refused == ""
        assert outcome.latency_s > 0
        assert outcome.bytes_per_s > 0
        assert server.stdin is not None
        server.stdin.close()
        server.wait(PATIENCE_S)


def test_a_transport_that_is_none_is_refused() -> None:
    with child("read", order("pigeon", address="unix:///nowhere", token="t")) as reader:
        said, _ = reader.communicate(timeout=PATIENCE_S)
    assert "pigeon" in msgspec.json.decode(said, type=Outcome).refused


def test_a_pool_without_a_place_says_so(tmp_path: Path) -> None:
    with child("serve", order(directory=f"{tmp_path}/none")) as server:
        said, _ = server.communicate(timeout=PATIENCE_S)
    assert f"{tmp_path}/none" in msgspec.json.decode(said, type=Serving).refused
