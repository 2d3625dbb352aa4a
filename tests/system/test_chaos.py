"""Scenarios on real processes: networks that are cut as they are told, and stories told to their end.

Times are not asserted: machines that run tests are busy.  That no promise of the data is broken is.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer.testing

from kvcomm.chaos.live.cluster import Cluster
from kvcomm.chaos.live.namespaces import Namespaces, missing
from kvcomm.chaos.live.orders import States, Stored
from kvcomm.chaos.live.story import tell
from kvcomm.chaos.report import Report
from kvcomm.chaos.scenario import SAFETY, Load, Restart, Scenario, Stop
from kvcomm.chaos.scenarios import scenario_named
from kvcomm.chaos.shapes import Cut, ShapeName, cuts_of
from kvcomm.chaos.simulated import run_in_simulator
from kvcomm.cli.app import app
from kvcomm.errors import Unavailable
from tests.system.conftest import eventually

pytestmark = [pytest.mark.slow, pytest.mark.processes]

BACKENDS = ["namespaces", "loopback"]
QUIET = Load(eventual=0, strong=0, blocks=0)
SHAPED: list[tuple[ShapeName, list[list[str]]]] = [
    ("halves", [["n1"], ["n2", "n3", "n4"]]),
    ("isolate", [["n3"]]),
    ("bridge", [["n1"], ["n2"], ["n3", "n4"]]),
    ("ring", []),
    ("one-way", [["n1"], ["n2"]]),
    ("alone", []),
]
CONNECTING = """
import socket, sys
for target in sys.argv[1:]:
    try:
        socket.create_connection((target, 9), 0.3)
    except ConnectionRefusedError:
        print(target)
    except OSError:
        pass
"""
"""Prints the hosts that say that nobody listens there: they have heard, and were heard."""


def usable(backend: str) -> str:
    """Skips where there is no such backend."""
    if backend == "namespaces" and (why := missing()):
        pytest.skip(why)
    return backend


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def own_namespaces() -> list[str]:
    named = Path("/run/netns")
    return (
        [each.name for each in named.iterdir() if f"-{os.getpid()}-" in each.name] if named.exists() else []
    )


def reaches(hosts: Namespaces, node: str, expected: set[str]) -> bool:
    """Never anybody else, and all of these soon."""

    def exactly() -> bool:
        found = reached(hosts, node)
        assert found <= expected, f"{node} reaches {found}"
        return found == expected

    return eventually(exactly)


def reached(hosts: Namespaces, node: str) -> set[str]:
    targets = {hosts.address(other): other for other in hosts.nodes if other != node}
    command = hosts.command(node, [sys.executable, "-S", "-c", CONNECTING, *targets])
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    return {targets[line] for line in said.split()}


def test_a_network_of_namespaces_is_cut_as_it_is_told_and_leaves_nothing() -> None:
    usable("namespaces")
    before = interfaces()
    hosts = Namespaces(3, "t")
    try:
        assert reaches(hosts, "n1", {"n2", "n3"})
        hosts.cut(cuts_of("one-way", [["n2"], ["n1"]], hosts.nodes))
        assert reaches(hosts, "n1", {"n3"})
        hosts.cut(cuts_of("isolate", [["n3"]], hosts.nodes))
        assert reaches(hosts, "n1", {"n2"})
        assert reaches(hosts, "n3", set())
        hosts.slow("n2", 1000)
        hosts.lose(10)
        hosts.heal()
        assert reaches(hosts, "n3", {"n1", "n2"})
        assert interfaces() == before
    finally:
        hosts.close()
    assert own_namespaces() == []


def test_what_a_killed_lab_left_is_removed_by_the_next() -> None:
    usable("namespaces")
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    name = f"kvchaos-{ended.pid}-n1"
    subprocess.run(["ip", "netns", "add", name], check=True)
    Namespaces(1, "t").close()
    assert not (Path("/run/netns") / name).exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_shape_cuts_the_same_calls(backend: str, tmp_path: Path) -> None:
    """The referee, and those who are to be as honest as it is: a call comes back if nothing is cut between
    the two, in either direction."""
    usable(backend)
    scenario = Scenario("shapes", "cut as told", [], nodes=4, controllers=1, load=QUIET)
    cluster = Cluster(scenario, backend, tmp_path, seed=1)
    try:
        cluster.start()
        for shape, groups in SHAPED:
            cuts = cuts_of(shape, groups, cluster.nodes)
            cluster.hosts.cut(cuts)
            heard_as_told(cluster, cuts, shape)
        cluster.hosts.heal()
        heard_as_told(cluster, frozenset(), "healed")
    finally:
        cluster.close()
    assert own_namespaces() == []


def heard_as_told(cluster: Cluster, cuts: frozenset[Cut], what: str) -> None:
    """Nobody is heard who should not be; who should is heard soon: machines that run tests are busy."""
    shards = cluster.shard_addresses()
    lost = {node: {a if b == node else b for a, b in cuts if node in (a, b)} for node in cluster.nodes}

    def exactly() -> bool:
        missing: dict[str, set[str]] = {}
        for node, answer in cluster.everybody(States([], [], shards, 0.7)).items():
            assert isinstance(answer, Stored)
            missing[node] = {cluster.host_of(name) for name in answer.missing}
            assert missing[node] >= lost[node], f"{what}: {node} is heard"
        return missing == lost

    eventually(exactly)


def kept_safe(report: Report) -> None:
    """Whatever took how long: nothing was broken."""
    assert report.outcome != "skipped", report.why
    assert report.verdicts, report.why
    safety = {promise.measure for promise in SAFETY} | {
        "strong_wrong_side",
        "epochs_doubled",
        "terms_doubled",
    }
    broken = [each for each in report.verdicts if each.measure in safety and not each.kept]
    assert not broken, report.text()
    assert report.measured["equal_s"] != "never", report.text()
    assert report.measured["first_good_s"] != "never", report.text()


def test_halves() -> None:
    scenario = msgspec.structs.replace(scenario_named("halves", 2.5), settle_s=3.0)
    report = tell(scenario, "loopback" if missing() else "namespaces", seed=3)
    kept_safe(report)
    assert report.faults[0].sides == [["n1", "n2"], ["n3", "n4", "n5"]]
    strong, eventual = report.measured["strong_answered"], report.measured["eventual_answered"]
    assert isinstance(strong, float) and strong > 0
    assert isinstance(eventual, float) and eventual > 0
    assert report.calls["strong refused"] > 0, "a minority that is not refused was not cut off"


def test_the_leader_is_isolated() -> None:
    scenario = msgspec.structs.replace(scenario_named("isolate-leader", 7.5), settle_s=3.0)
    report = tell(scenario, usable("namespaces"), seed=4)
    kept_safe(report)
    assert report.measured["leader_back_s"] != "never", report.text()


def test_a_random_split() -> None:
    scenario = msgspec.structs.replace(scenario_named("random-split", 2.0, seed=5), settle_s=3.0)
    kept_safe(tell(scenario, usable("namespaces"), seed=5))


def test_a_node_that_is_stopped_fails_no_eventual_call() -> None:
    scenario = Scenario(
        "stopped",
        "no eventual call fails",
        [Stop(at_s=2.0, node="n3"), Restart(at_s=2.5, node="n3")],
        nodes=3,
        controllers=1,
        load=Load(eventual=4, strong=1, blocks=0, pace_s=0.01),
    )
    report = tell(scenario, "loopback", seed=6)
    kept_safe(report)
    assert report.measured["eventual_failed"] == 0, report.text()
    assert report.calls["eventual good"] > 100


def test_what_a_backend_cannot_do_is_skipped_and_says_so() -> None:
    assert "loss" in tell(scenario_named("loss"), "loopback", seed=1).why
    assert "crashing only" in run_in_simulator(scenario_named("rolling-restart"), seed=1).why
    assert "no Ray launcher" in tell(scenario_named("ray-head"), "loopback", seed=1).why


def test_a_cluster_that_does_not_come_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("not today")

    monkeypatch.setattr("kvcomm.chaos.live.cluster.Cluster._start_agents", refuse)
    report = tell(Scenario("fails", "it does not", [], nodes=1, controllers=1), "loopback", seed=1)
    assert (report.outcome, report.why) == ("failed", "unavailable: not today")


def test_the_command_lists_shows_and_runs(tmp_path: Path) -> None:
    runner = typer.testing.CliRunner()
    listed = runner.invoke(app, ["chaos", "list"])
    assert "halves  (fault 1, 5 s)" in listed.stdout
    shown = runner.invoke(app, ["chaos", "show", "ray-head"])
    mine = tmp_path / "mine.yaml"
    mine.write_text(shown.stdout)
    ran = runner.invoke(
        app, ["chaos", "run", str(mine), "--backend", "loopback", "--out", str(tmp_path / "out")]
    )
    assert ran.exit_code == 0
    assert "SKIPPED" in ran.stdout
    report = msgspec.json.decode((tmp_path / "out" / "ray-head-loopback-0.json").read_bytes(), type=Report)
    assert report.outcome == "skipped"
