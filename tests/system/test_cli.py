"""The commands, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.instance import Instance
from tests.system.conftest import CONFIG, Cluster, eventually, make_namespace, payloads

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def kvcomm(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvcomm.cli", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_state_from_the_shell(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("--instance", cluster.instance.name, "--config", str(cluster.config))
    assert kvcomm("get", "lamp", "color", *at).returncode == 1
    assert kvcomm("put", "lamp", "color", "red", *at).returncode == 0
    assert kvcomm("put", "lamp", "color", "-", *at, stdin=b"green\x00").returncode == 0
    got = kvcomm("get", "lamp", "color", *at)
    assert (got.returncode, got.stdout) == (0, b"green\x00\n"), got.stderr
    assert kvcomm("put", "lamp", "color", "blue", "--blind", *at).returncode == 0
    siblings = kvcomm("get", "lamp", "color", "--json", *at)
    assert len(json.loads(siblings.stdout)["values_base64"]) == 2
    monkeypatch.setenv("KVCOMM_ADDRESS", "tcp://127.0.0.1:1")  # what the options say goes before it
    assert kvcomm("put", "lamp-2", "color", "red", *at).returncode == 0
    listed = kvcomm("ls", "state/lamp", *at)
    assert listed.stdout == b"state/lamp/color\n"
    assert kvcomm("ls", "state/lamp/color", *at).stdout == b"state/lamp/color\n"


def test_status_names_every_node(cluster: Cluster) -> None:
    said = kvcomm("status", "--instance", cluster.instance.name, "--json")
    assert said.returncode == 0, said.stderr
    rows = {row["node"]: row for row in json.loads(said.stdout)}
    stores = ["pool-0", "shard-0", "shard-1", "shard-2"]
    assert sorted(rows) == ["controller-0", "launcher-0", *stores]
    assert all(rows[node]["usage"]["capacity_bytes"] > 0 for node in stores)
    assert not any(row["error"] for row in rows.values())
    assert [node for node in rows if rows[node]["leads"]] == ["controller-0"]
    assert rows["shard-0"]["epoch"] >= 1
    table = kvcomm("status", "--instance", cluster.instance.name).stdout.decode()
    assert all(node in table for node in rows)
    assert "controller-0 leads" in table
    served = rows["pool-0"]["transports"]
    assert {"shm", "tcp"} <= set(served)
    assert f"pool-0 serves {', '.join(served)}" in table
    assert all(f"pool-0 cannot serve {name}: " in table for name in rows["pool-0"]["refused_transports"])


def test_doctor_finds_the_cluster_well(cluster: Cluster) -> None:
    said = kvcomm("doctor", "--json", "--config", str(cluster.config))
    findings = json.loads(said.stdout)
    assert said.returncode == 0, findings
    subjects = {finding["subject"] for finding in findings}
    assert {f"{cluster.instance.name}/pool-0", f"{cluster.instance.name}/shard-2"} <= subjects
    assert all(finding["verdict"] != "problem" for finding in findings)


def test_doctor_tries_the_transports_to_a_clusters_pools(cluster: Cluster) -> None:
    at = ("--instance", cluster.instance.name, "--config", str(cluster.config))
    said = kvcomm("doctor", "--json", *at)
    assert said.returncode == 0, said.stderr
    tried = {each["subject"]: each["detail"] for each in json.loads(said.stdout) if each["detail"]}
    assert tried["transport shm"]["used"]
    assert tried["transport shm"]["pool"] == f"{cluster.instance.name}/pool-0"
    assert tried["transport tcp"]["verdict"] == "works", tried["transport tcp"]["reason"]
    assert tried["transport tcp"]["bytes_per_s"] > 0


def test_bench_fetch_measures(cluster: Cluster) -> None:
    said = kvcomm("bench", "fetch", "--blocks", "8", "--block-kib", "64", "--rounds", "2", "--json",
                  "--instance", cluster.instance.name, "--config", str(cluster.config))  # fmt: skip
    rows = json.loads(said.stdout)
    assert [row["what"] for row in rows] == ["memcpy", "publish", "fetch, first", "fetch, repeated"]
    assert all(row["blocks"] == 8 for row in rows)


def scraped(cluster: Cluster, node: str) -> dict[str, float]:
    import urllib.request

    with urllib.request.urlopen(f"http://{cluster.node(node).metrics}/metrics", timeout=5) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines)}


def test_metrics_are_served_and_count_what_happens(cluster: Cluster) -> None:
    with cluster.client() as kv:
        for index in range(20):
            kv.state("counted").put(str(index), b"v")
        kv.publish(make_namespace("counted"), range(32), payloads(make_namespace("counted"), 2))
        pool, shards = scraped(cluster, "pool-0"), [scraped(cluster, f"shard-{n}") for n in range(3)]
    assert pool["kvcomm_store_capacity_bytes"] > 0
    assert any(name.startswith("kvcomm_node_info") and 'node="pool-0"' in name for name in pool)
    assert pool['kvcomm_requests_total{message="BlockReserve"}'] >= 1
    assert pool['kvcomm_reservations_total{status="granted"}'] >= 2
    assert pool["kvcomm_connections"] >= 1
    total = {name: sum(shard.get(name, 0) for shard in shards) for name in shards[0]}
    assert total['kvcomm_requests_total{message="RecordPut"}'] >= 1
    assert total['kvcomm_replication_acks_total{outcome="acked"}'] >= 20
    assert total['kvcomm_reservations_total{status="granted"}'] >= 2
    for shard in shards:
        assert shard["kvcomm_fsyncs_total"] == shard["kvcomm_fsync_seconds_count"]
    eventually(lambda: any(scraped(cluster, f"shard-{n}")["kvcomm_fsyncs_total"] for n in range(3)))


def test_up_says_why_a_node_cannot_start(tmp_path: Path) -> None:
    config = tmp_path / "kvcomm.yaml"
    config.write_text("cache: {l2_size: 900TB, l3_size: 16MiB}\ncluster: {shards: 1}\n")
    said = kvcomm("up", "--instance", "hopeless", "--config", str(config))
    instance = Instance.open("hopeless")
    try:
        assert said.returncode == 1, said.stderr
        text = said.stderr.decode()
        assert "pool-0 does not come up" in text
        assert "asked for" in text
        assert "Traceback" not in text
        assert instance.nodes() == []
    finally:
        eventually(lambda: not instance.nodes())
        instance.remove()


def test_an_embedded_cluster_that_cannot_start_says_why(tmp_path: Path) -> None:
    from kvcomm.embedded import Embedded
    from kvcomm.errors import Unavailable

    config = tmp_path / "kvcomm.yaml"
    config.write_text("cache: {l2_size: 900TB, l3_size: 16MiB}\ncluster: {shards: 1}\n")
    with pytest.raises(Unavailable, match=r"asked for"):
        Embedded.start("hopeless-guest", config, time.monotonic() + 60)
    assert "hopeless-guest" not in [each.name for each in Instance.list()]


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["get", "a", "b", "--instance", "no-such-instance"], "no instance", 1),
        (["put", "a", "b", "c", "--address", "tcp://127.0.0.1:1"], "token", 1),
        (["up", "--config", "/no/such/file.yaml"], "No such file", 2),
        (["status", "--instance", "Bad Name!"], "name", 2),
    ],
)
def test_mistakes_are_explained_without_a_traceback(arguments: list[str], text: str, code: int) -> None:
    said = kvcomm(*arguments)
    assert said.returncode == code, said.stderr
    assert text in said.stderr.decode()
    assert b"Traceback" not in said.stderr


def test_an_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "kvcomm.yaml"
    config.write_text("cache: {l1_sise: 1GB}\n")
    said = kvcomm("up", "--config", str(config))
    assert said.returncode == 2
    assert "cache.l1_size" in said.stderr.decode()


@pytest.fixture
def foreground(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    config = tmp_path / "kvcomm.yaml"
    config.write_text(CONFIG.replace("shards: 3", "shards: 1"))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcomm.cli", "up", "--instance", "fg", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        instance = Instance.open("fg")
        eventually(lambda: not instance.nodes())
        instance.remove()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_stops_cleanly_and_keeps_its_records(foreground: subprocess.Popen[bytes], number: int) -> None:
    from kvcomm import connect

    assert foreground.stdout is not None
    assert b"is up" in foreground.stdout.readline()
    again = kvcomm("up", "--instance", "fg")
    assert again.returncode == 1
    assert b"running already" in again.stderr
    instance = Instance.open("fg")
    with connect(instance="fg") as kv:
        kv.state("kept").put("k", b"v")
    pids = [record.pid for record in instance.nodes()]
    assert len(pids) == 3
    foreground.send_signal(number)
    assert foreground.wait(30) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not list(Path("/dev/shm").glob("kvcomm-fg-*"))
    config = instance.directory / "kvcomm.yaml"
    second = subprocess.Popen(
        [sys.executable, "-m", "kvcomm.cli", "up", "--instance", "fg", "--config", str(config)],
        stdout=subprocess.PIPE,
    )
    try:
        assert second.stdout is not None
        assert b"is up" in second.stdout.readline()
        with connect(instance="fg") as kv:
            assert kv.state("kept").get("k").value == b"v"
    finally:
        second.send_signal(signal.SIGTERM)
        assert second.wait(30) == 0
        second.stdout.close() if second.stdout else None


def test_records_in_a_lasting_place_outlive_the_instance_and_another_number_of_shards(tmp_path: Path) -> None:
    from kvcomm import connect

    config = tmp_path / "kvcomm.yaml"
    command = [sys.executable, "-m", "kvcomm.cli", "up", "--instance", "lasting", "--config", str(config)]
    for life in range(2):
        text = CONFIG.replace("shards: 3", f"shards: {life + 1}\n  replicas: 1")
        config.write_text(text + f"  directory: {tmp_path / 'records'}\n")
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert b"is up" in process.stdout.readline()
            with connect(config, instance="lasting") as kv:
                state = kv.state("kept")
                if life:
                    assert all(state.get(str(index)).value == b"v" for index in range(20))
                    eventually(lambda: moved_to(2))
                    assert all(state.get(str(index)).value == b"v" for index in range(20))
                else:
                    for index in range(20):
                        state.put(str(index), b"v")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            process.stdout.close() if process.stdout else None
            Instance.open("lasting").remove()  # as a restart of the host does


def moved_to(shards: int) -> bool:
    ring = Instance.open("lasting").ring()
    return ring is not None and ring.transition is None and len(ring.shards) == shards


def test_a_killed_supervisor_takes_its_nodes_along(foreground: subprocess.Popen[bytes]) -> None:
    assert foreground.stdout is not None
    assert b"is up" in foreground.stdout.readline()
    pids = [record.pid for record in Instance.open("fg").nodes()]
    os.kill(foreground.pid, signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    eventually(lambda: not list(Path("/dev/shm").glob("kvcomm-fg-*")))


def test_importing_the_client_loads_nothing_heavy() -> None:
    heavy = {"torch", "grpc", "ray", "numpy", "transformers", "asyncio"}
    program = f"import sys, kvcomm; print(sorted({heavy} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert said.stdout == b"[]\n"


def test_an_idle_node_is_small(cluster: Cluster) -> None:
    """Resident memory beyond the region: a bound in bytes, not in time."""
    for record in cluster.instance.nodes():
        status = Path(f"/proc/{record.pid}/status").read_text()
        resident = {
            line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Rss")
        }
        private_kib = int(resident["RssAnon"]) + int(resident["RssFile"])
        assert private_kib <= 80 * 1024, (record.node, resident)
