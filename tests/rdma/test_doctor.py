"""`kvcomm doctor` where there is RDMA: the device is described and measured, and a pulled cable is said."""

import pytest

from kvcomm.cli.hardware import Host as Machine
from kvcomm.cli.hardware import hardware_findings
from kvcomm.cli.trials import Trials
from l2_rdma.transports.port import WireOptions
from tests.rdma.rack import Host

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.processes]


def test_the_configured_device_is_tried_between_processes(rack: list[Host]) -> None:
    trial = Trials(WireOptions(rdma_device="rx2")).between_processes("verbs")
    assert trial.verdict == "works", trial.reason
    assert trial.facts["device"] == "rx2/1"
    assert trial.facts["gid"].endswith("RoCE v2")
    assert trial.facts["GID"] == "::ffff:198.51.100.2"
    assert trial.latency_s > 0
    assert trial.bytes_per_s > 0


def test_a_pulled_cable_and_a_wrong_name_are_refused_with_the_reason(rack: list[Host]) -> None:
    rack[0].pull()
    pulled = Trials(WireOptions(rdma_device="rx1")).between_processes("verbs")
    wrong = Trials(WireOptions(rdma_device="mlx5_7")).between_processes("verbs")
    assert (pulled.verdict, wrong.verdict) == ("refused", "refused")
    assert "port 1 is not active" in pulled.reason
    assert "there are: rx1, rx2, rx3" in wrong.reason


def test_the_kernels_files_tell_the_same(rack: list[Host]) -> None:
    rack[2].pull()
    found = {each.subject: each for each in hardware_findings(Machine.here(), 1 << 30)}
    assert found["rdma rx1/1"].verdict == "ok"
    assert "software (soft-RoCE)" in found["rdma rx1/1"].text
    assert "::ffff:198.51.100.1 (RoCE v2" in found["rdma rx1/1"].text
    assert found["rdma rx3/1"].verdict == "note"
    assert found["rdma access"].verdict == "ok"
