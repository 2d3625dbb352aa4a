"""Findings of ``kvcomm doctor`` that need no cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvcomm.cli import doctor, hardware, trials
from kvcomm.cli.app import app
from kvcomm.cli.trials import Trial
from kvcomm.config import parse_config
from kvcomm.errors import ConfigError
from kvcomm.instance import Instance, NodeRecord, process_start_time
from l2_rdma.transports.port import WireOptions

CONFIG = parse_config("cache: {l2_size: 1MiB, l3_size: 1MiB}\ncluster: {shards: 1}\n", ram_bytes=1 << 30)


def free(monkeypatch: pytest.MonkeyPatch, directory: Path, free_bytes: int) -> None:
    monkeypatch.setattr(doctor, "SHM", directory)
    room = SimpleNamespace(f_bavail=free_bytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: room)


def test_too_little_shared_memory_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, tmp_path, (2 << 20) - 1)
    assert [each.verdict for each in doctor._memory(CONFIG)] == ["problem"]
    free(monkeypatch, tmp_path, 2 << 20)
    assert [each.verdict for each in doctor._memory(CONFIG)] == ["ok"]


def test_what_a_running_cluster_holds_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, tmp_path, 1 << 20)
    with (tmp_path / "kvcomm-x-pool-0").open("wb") as region:
        os.posix_fallocate(region.fileno(), 0, 1 << 20)
    (tmp_path / "somebody-elses").write_bytes(bytes(1 << 20))
    assert [each.verdict for each in doctor._memory(CONFIG)] == ["ok"]


def test_pools_in_gpu_memory_want_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, tmp_path, 1 << 20)
    on_gpu = replace(CONFIG, cache=replace(CONFIG.cache, l2_device=0))
    assert [each.verdict for each in doctor._memory(on_gpu)] == ["ok"]


def test_a_host_without_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SHM", tmp_path / "none")
    (finding,) = doctor._memory(CONFIG)
    assert finding.verdict == "problem"


# -- transports ----------------------------------------------------------------------------------------------

FACTS = {"device": "mlx5_0", "mtu": "4096", "gid": "3 RoCE v2"}
HERE = {
    "shm": Trial("shm", "works", "", 5e-6, 8e9),
    "cuda": Trial("cuda", "refused", "cuda-bindings is not installed: pip install 'kvcomm[gpu]'"),
    "verbs": Trial("verbs", "works", "", 3e-6, 4e9, FACTS),
    "tcp": Trial("tcp", "works", "", 5e-5, 1e9),
}


class FakeTrials:
    """Answers with what it was given; keeps what was asked."""

    def __init__(self, answers: dict[str, Trial]) -> None:
        self.answers = answers
        self.wires: list[WireOptions] = []
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, wires: WireOptions) -> FakeTrials:
        self.wires.append(wires)
        return self

    def between_processes(self, transport: str) -> Trial:
        self.asked.append((transport,))
        return self.answers[transport]

    def to_pool(self, transport: str, address: str, token: str) -> Trial:
        self.asked.append((transport, address, token))
        return self.answers[transport]


Doctor = Callable[..., Result]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTrials:
    made = FakeTrials(dict(HERE))
    monkeypatch.setattr(trials, "Trials", made)
    return made


@pytest.fixture
def run(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeTrials) -> Doctor:
    """``kvcomm doctor`` with a small cluster configured, on a host without RDMA and GPU."""
    for name in ("KVCOMM_CONFIG", "KVCOMM_TOKEN", "KVCOMM_INSTANCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware.Host, "here", lambda: hardware.Host(tmp_path, None, "6.1.0"))
    config = tmp_path / "kvcomm.yaml"
    config.write_text("cache: {l2_size: 1MiB, l3_size: 1MiB}\nnetwork: {transports: [shm, verbs, tcp]}\n")

    def run(*arguments: str, text: str | None = None) -> Result:
        if text is not None:
            config.write_text(text)
        return CliRunner().invoke(app, ["doctor", "--config", str(config), *arguments])

    return run


def told(result: Result) -> dict[str, dict[str, Any]]:
    return {each["subject"]: each for each in json.loads(result.stdout)}


def test_every_transport_is_tried_and_the_cheapest_configured_one_is_used(
    run: Doctor, fake: FakeTrials
) -> None:
    result = run()
    assert result.exit_code == 0
    assert fake.asked == [("shm",), ("cuda",), ("verbs",), ("tcp",)]
    assert "transports to a pool of this host" in result.stdout
    assert "cuda: refused: cuda-bindings is not installed: pip install 'kvcomm[gpu]'" in result.stdout
    assert "verbs: slower: 527 us against 267 us for a 2 MiB block" in result.stdout


def test_a_program_is_told_the_same(run: Doctor) -> None:
    said = told(run("--json"))
    assert [said[f"transport {name}"]["verdict"] for name in HERE] == ["ok", "note", "ok", "ok"]
    assert said["transport shm"]["detail"]["used"] is True
    assert said["transport verbs"]["detail"]["facts"] == FACTS | {"gdr": "no", "GPUDirect": "no GPU here"}
    assert said["transport verbs"]["detail"]["latency_s"] == 3e-6
    assert said["transport cuda"]["detail"]["reason"].startswith("refused: cuda-bindings is not installed")


def test_transports_are_tried_as_configured(run: Doctor, fake: FakeTrials) -> None:
    run(text="network: {listen_host: 10.0.0.7, rdma_device: mlx5_1}\ncache: {l2_size: 1MiB, l3_size: 1MiB}\n")
    assert fake.wires == [WireOptions(listen_host="10.0.0.7", rdma_device="mlx5_1")]


def test_a_driver_that_crashes_is_a_problem_told_in_one_line(run: Doctor, fake: FakeTrials) -> None:
    reason = "the probe process of the client died with SIGSEGV"
    fake.answers["verbs"] = replace(HERE["verbs"], verdict="failed", reason=reason)
    result = run()
    assert result.exit_code == 1
    assert f"verbs: {reason}" in result.stdout
    assert "Traceback" not in result.output


def test_nothing_is_tried_with_a_configuration_that_is_wrong(run: Doctor, fake: FakeTrials) -> None:
    result = run("--json", text="network: {transports: [pigeon]}\n")
    assert result.exit_code == 1
    assert told(result)["configuration"]["verdict"] == "problem"
    assert fake.asked == []


def test_an_instances_pools_are_tried_with_its_token(run: Doctor, fake: FakeTrials) -> None:
    instance = Instance.create("small")
    start = process_start_time(os.getpid())
    assert start is not None
    for node, role in (("pool-0", "pool"), ("shard-0", "shard")):
        record = NodeRecord(
            node=node, role=role, pid=os.getpid(), pid_start_time=start, control="", metrics="",
            addresses=[f"unix:///nowhere/{node}", "tcp://127.0.0.1:1"], incarnation=1, region="",
        )  # fmt: skip
        instance.register(record)
    said = told(run("--json", "--instance", "small"))
    token = instance.credentials().token("default")
    assert fake.asked == [(name, "unix:///nowhere/pool-0", token) for name in HERE]
    assert said["transport shm"]["detail"]["pool"] == "small/pool-0"


def test_a_peer_is_tried_with_the_token_of_the_environment(
    run: Doctor, fake: FakeTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCOMM_TOKEN", "default:proof")
    result = run("--peer", "tcp://10.0.0.9:7000")
    assert fake.asked == [(name, "tcp://10.0.0.9:7000", "default:proof") for name in HERE]
    assert "transports to tcp://10.0.0.9:7000" in result.stdout


def test_a_peer_without_a_token_is_the_callers_mistake(run: Doctor) -> None:
    result = run("--peer", "tcp://10.0.0.9:7000")
    assert isinstance(result.exception, ConfigError)
    assert "needs a token" in str(result.exception)


def test_a_peer_that_is_no_address_is_the_callers_mistake(run: Doctor, fake: FakeTrials) -> None:
    assert isinstance(run("--peer", "10.0.0.9").exception, ConfigError)
    assert fake.asked == []


def test_the_gpu_that_pools_are_on_is_the_one_that_is_tried(run: Doctor, fake: FakeTrials) -> None:
    run(text="cache: {l2_device: 'cuda:3', l2_size: 1MiB, l3_size: 1MiB}\nnetwork: {transports: [cuda]}\n")
    assert fake.wires == [WireOptions(cuda_device=3)]


def test_an_instance_that_is_not_there_is_told_among_the_rest(run: Doctor, fake: FakeTrials) -> None:
    result = run("--json", "--instance", "none")
    said = told(result)
    assert result.exit_code == 1 and said["configuration"]["verdict"] == "ok"
    assert said["instances"]["verdict"] == "problem" and "'none'" in said["instances"]["text"]
    assert fake.asked == []


def test_a_token_file_that_cannot_be_read_is_told_among_the_rest(run: Doctor, fake: FakeTrials) -> None:
    result = run("--json", text="security: {token_file: /nowhere/token}\n")
    assert result.exit_code == 1
    assert "/nowhere/token" in told(result)["configuration"]["text"]
    assert fake.asked == []


@pytest.mark.parametrize(
    ("host", "verdict"), [("127.0.0.1", None), ("192.0.2.1", "problem"), ("a.name", None)]
)
def test_where_no_node_could_listen_is_a_problem(run: Doctor, host: str, verdict: str | None) -> None:
    """192.0.2.0/24 is nobody's: it is for documentation."""
    text = f"network: {{listen_host: {host}}}\ncache: {{l2_size: 1MiB, l3_size: 1MiB}}\n"
    assert told(run("--json", text=text)).get("listening", {"verdict": None})["verdict"] == verdict


def test_what_others_cannot_call_is_not_promised_to_them(run: Doctor) -> None:
    sizes = "cache: {l2_size: 1MiB, l3_size: 1MiB}\n"
    closed = "agents of other hosts: none, it listens on 127.0.0.1 (network.listen_host); else verbs, if "
    assert closed in run(text=sizes).stdout
    assert (
        "agents of other hosts: verbs, if " in run(text=f"{sizes}network: {{listen_host: a.name}}\n").stdout
    )


def test_a_pool_in_gpu_memory_is_reached_by_cuda_or_by_nobody(run: Doctor, fake: FakeTrials) -> None:
    text = "cache: {l2_device: 'cuda:0', l2_size: 1MiB, l3_size: 1MiB}\n"
    result = run(text=text)
    assert result.exit_code == 1
    assert "problem: no configured transport reaches a pool of this host" in result.stdout
    fake.answers["cuda"] = Trial("cuda", "works", "", 3e-5, 1e10)
    said = told(run("--json", text=text))
    assert said["transport cuda"]["detail"]["used"] is True
    assert "reached by cuda alone" in said["transport shm"]["text"]
    assert fake.asked == [("cuda",), ("cuda",)]


def test_a_gpu_is_measured_but_reaches_no_pool_in_host_memory(run: Doctor, fake: FakeTrials) -> None:
    fake.answers["cuda"] = Trial("cuda", "works", "", 3e-5, 1e10)
    said = told(run("--json"))
    assert said["transport cuda"]["verdict"] == "ok"
    assert said["transport cuda"]["text"] == "not for pools in host memory (cache.l2_device)"
    alone = run(text="network: {transports: [cuda]}\ncache: {l2_size: 1MiB, l3_size: 1MiB}\n")
    assert alone.exit_code == 1 and "no configured transport reaches" in alone.stdout
