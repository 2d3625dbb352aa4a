"""Whatever the processes of a trial do, it ends with a verdict, and they end with it."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.cli import trials
from kvcomm.cli.trials import Trial, Trials
from l2_rdma.transports.port import WireOptions
from tests.l2_rdma.pools import TENANT_NAME, pool_thread
from tests.peers import CREDENTIALS

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WIRES = WireOptions(rdma_device="mlx5_0")


def scripted(how: str, timeout_s: float = 20.0) -> Trials:
    return Trials(WIRES, timeout_s, (sys.executable, "-m", "tests.kvcomm.cli.trial_children", how))


@pytest.fixture(autouse=True)
def _no_memory_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials have a place of their own, and leave it empty."""
    place = Path(tempfile.mkdtemp(prefix="kvc-", dir="/dev/shm"))
    monkeypatch.setattr(trials, "_SHM", place)
    yield
    assert list(place.iterdir()) == []
    place.rmdir()


def test_a_transport_that_works_is_measured() -> None:
    assert scripted("works").between_processes("verbs") == Trial(
        "verbs", "works", "", 2e-6, 5e9, {"device": "mlx5_0"}
    )


def test_a_refusal_keeps_its_reason() -> None:
    assert scripted("refuses").between_processes("verbs") == Trial("verbs", "refused", "the peer is gone")


def test_a_probe_that_cannot_be_started_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Trials(WIRES, 20.0, ("/nowhere/python",))
    for trial in (missing.between_processes("tcp"), missing.to_pool("tcp", "tcp://127.0.0.1:1", "t")):
        assert trial.verdict == "failed" and "/nowhere/python" in trial.reason
    monkeypatch.setattr(tempfile, "mkdtemp", _full)
    trial = scripted("works").between_processes("tcp")
    assert trial.verdict == "failed" and "No space left" in trial.reason


def _full(**_: object) -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm")


def test_a_pool_that_cannot_be_made_is_a_refusal() -> None:
    trial = scripted("no-room").between_processes("verbs")
    assert trial == Trial("verbs", "refused", "no pool can be made: /dev/shm is full")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("serve-segfaults", "the probe process of the pool died with SIGSEGV: doorbell page unmapped"),
        ("read-segfaults", "the probe process of the client died with SIGSEGV: doorbell page unmapped"),
        ("read-fails", "the probe process of the client failed (status 1): RuntimeError: no driver for this"),
        ("read-babbles", "the probe process of the client answered nonsense"),
        ("pool-dies-under-the-client", "the probe process of the pool died with SIGBUS"),
        ("serve-crashes-at-its-end", "the probe process of the pool died with SIGSEGV after it had done"),
        ("read-crashes-at-its-end", "the probe process of the client died with SIGSEGV after it had done"),
    ],
)
def test_a_crash_is_a_finding(how: str, says: str) -> None:
    trial = scripted(how).between_processes("verbs")
    assert trial.verdict == "failed"
    assert trial.reason.startswith(says)


@pytest.mark.parametrize(("how", "side"), [("serve-hangs", "pool"), ("read-hangs", "client")])
def test_a_driver_that_hangs_is_given_up_in_time(how: str, side: str) -> None:
    begin = time.monotonic()
    trial = scripted(how, timeout_s=4.0).between_processes("verbs")
    assert trial == Trial("verbs", "failed", f"the probe process of the {side} did not answer in time")
    assert time.monotonic() - begin < 20  # it would sleep for ten minutes


def test_a_driver_that_does_not_let_go_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_END_S", 0.2)
    trial = scripted("read-never-ends").between_processes("verbs")
    assert trial == Trial("verbs", "failed", "the probe process of the client worked, but did not end")


def test_a_crash_of_the_client_of_a_running_pool_is_one_too() -> None:
    trial = scripted("read-segfaults").to_pool("verbs", "unix:///nowhere", "token")
    assert trial.reason.startswith("the probe process of the client died with SIGSEGV")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_runs_everywhere_works_between_processes(transport: str) -> None:
    trial = Trials(WireOptions()).between_processes(transport)
    assert trial.verdict == "works", trial.reason
    assert 0 < trial.latency_s < 1
    assert trial.bytes_per_s > 1e6


def test_slots_on_a_gpu_are_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = Trials(WireOptions(), command=(sys.executable, "-m", "tests.kvcomm.cli.trial_on_host_gpu"))
    with tempfile.TemporaryDirectory(prefix="kvc-") as gpu_memory:
        monkeypatch.setenv("TMPDIR", gpu_memory)
        trial = on_gpu.between_processes("cuda")
    assert trial.verdict == "works", trial.reason
    assert trial.bytes_per_s > 1e6
    assert trial.facts == {
        "device": "0: Plain memory",
        "compute capability": "9.0",
        "dma-buf export (for GPUDirect RDMA)": "no: plain memory",
    }


def test_a_running_pool_is_measured(tmp_path: Path) -> None:
    with pool_thread(tmp_path) as pool:
        trial = Trials(WireOptions()).to_pool("shm", pool.address, CREDENTIALS.token(TENANT_NAME))
    assert trial.verdict == "works", trial.reason


def test_a_pool_says_no_to_strangers_and_to_what_it_does_not_offer(tmp_path: Path) -> None:
    with pool_thread(tmp_path, transports=("tcp",)) as pool:
        attempt = Trials(WireOptions())
        stranger = attempt.to_pool("shm", pool.address, CREDENTIALS.token("stranger"))
        own = attempt.to_pool("shm", pool.address, CREDENTIALS.token(TENANT_NAME))
    assert (stranger.verdict, own.verdict) == ("refused", "refused")
    assert "no memory that this tenant may read" in stranger.reason
    assert "does not offer it" in own.reason


def test_an_absent_pool_is_refused(tmp_path: Path) -> None:
    trial = Trials(WireOptions()).to_pool("shm", f"unix://{tmp_path}/none", CREDENTIALS.token(TENANT_NAME))
    assert trial.verdict == "refused"
