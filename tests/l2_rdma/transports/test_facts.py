"""A driver's report in words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.transports.facts import facts_of
from l2_rdma.transports.port import WireOptions


@dataclass
class Report:
    device: str
    refused: str = ""
    port: int = 1
    gid: str = "0000:0000:0000:0000:0000:ffff:c633:6401"
    gid_index: int = 1
    gid_kind: str = "RoCE v2"
    mtu_bytes: int = 4096
    atomics: str = "hca"
    on_demand: bool = False
    firmware: str = ""


def verbs(monkeypatch: pytest.MonkeyPatch, *reports: Report, device: str = "") -> dict[str, str]:
    module = SimpleNamespace(device_reports=lambda: list(reports))
    monkeypatch.setitem(sys.modules, "l2_rdma.transports.verbs", module)
    return facts_of("verbs", WireOptions(rdma_device=device))


def test_the_device_that_is_used_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verbs(monkeypatch, Report("mlx5_0", firmware="22.36")) == {
        "device": "mlx5_0/1",
        "mtu": "4096",
        "gid": "1 RoCE v2",
        "GID": "::ffff:198.51.100.1",
        "atomics": "hca",
        "on-demand paging": "no: a pool's memory is locked whole",
        "firmware": "22.36",
    }


def test_the_others_say_why_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    said = verbs(monkeypatch, Report("mlx5_0", "port 1 is not active"), Report("mlx5_1"), Report("mlx5_2"))
    assert said["device"] == "mlx5_1/1"
    assert said["other device mlx5_0"] == "port 1 is not active"
    assert "network.rdma_device" in said["other device mlx5_2"]


def test_the_configured_device_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verbs(monkeypatch, Report("mlx5_0"), Report("mlx5_1"), device="mlx5_1")["device"] == "mlx5_1/1"
    assert "device" not in verbs(monkeypatch, Report("mlx5_0"), device="mlx5_7")


def test_an_ipv6_gid_is_written_short(monkeypatch: pytest.MonkeyPatch) -> None:
    gid = "fe80:0000:0000:0000:0000:0000:0000:0001"
    assert verbs(monkeypatch, Report("mlx5_0", gid=gid))["GID"] == "fe80::1"


def test_wires_without_a_device_have_nothing_to_tell() -> None:
    assert facts_of("shm", WireOptions()) == facts_of("tcp", WireOptions()) == {}


def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(Unavailable):
        facts_of("cuda", WireOptions(cuda_device=10_000))
