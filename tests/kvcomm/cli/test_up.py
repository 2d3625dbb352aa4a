"""What ``kvcomm up`` refuses before it starts anything, and what it says of those that end."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.supervisor import NodeExited
from kvcomm.cli.up import (
    STORAGE_FILE,
    _say_exit,
    _say_ready,
    check_placement,
    check_storage,
    note_storage,
    up,
)
from kvcomm.config import ClusterConfig, parse_config
from kvcomm.errors import ConfigError
from kvcomm.instance import Instance
from kvcomm.wire.messages import RingMap, RingNode


def test_a_pool_that_nobody_can_reach_is_told_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = {"verbs": "no RDMA device", "cuda": "no GPU"}
    nodes = [
        SimpleNamespace(node="pool-0", role="pool", transports=[], refused_transports=why),
        SimpleNamespace(node="pool-1", role="pool", transports=["tcp"], refused_transports=why),
        SimpleNamespace(node="shard-0", role="shard", transports=[], refused_transports={}),
    ]
    instance: Any = SimpleNamespace(name="small", directory=tmp_path, nodes=lambda: nodes)
    _say_ready(instance, parse_config("", ram_bytes=1 << 30), lifeline=False)
    said = capsys.readouterr().out
    assert "cluster 'small' is up: pool-0, pool-1, shard-0" in said
    assert "pool-0 serves no transport, nobody reads its memory: verbs: no RDMA device; cuda: no GPU" in said
    assert "pool-1 serves no transport" not in said and "shard-0 serves" not in said


def ring(shards: int, replicas: int) -> RingMap:
    nodes = [RingNode(f"shard-{index}", "tcp://h:1", "", "", "r", 1) for index in range(shards)]
    return RingMap(7, replicas, 2, 1, 1, nodes, [])


def cluster(text: str) -> ClusterConfig:
    return parse_config(f"cluster: {text}\n", ram_bytes=1 << 30).cluster


def test_the_first_run_and_the_same_placement_are_fine() -> None:
    check_placement(None, cluster("{shards: 5}"))
    check_placement(ring(3, 3), cluster("{shards: 3, pools: 2, controllers: 3}"))
    check_placement(ring(3, 3), cluster("{shards: 5}"))


@pytest.mark.parametrize(
    ("given", "before"),
    [
        ("replicas: 2", "replicas: 3"),
        ("write_quorum: 1", "write_quorum: 2"),
        ("read_quorum: 2", "read_quorum: 1"),
        ("block_copies: 2", "block_copies: 1"),
    ],
)
def test_a_number_that_would_have_no_effect_is_refused(given: str, before: str) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.{before}"):
        check_placement(ring(3, 3), cluster("{shards: 3, " + given + "}"))


def stored(where: Path, *, before: Path | None = None, ran: bool = True) -> Instance:
    """An instance whose records were kept in ``before``, checked for ``where``."""
    instance = Instance.create()
    if before is not None:
        note_storage(instance, before)
    if ran:
        instance.write_ring(ring(3, 3))
    check_storage(instance, where)
    return instance


def test_an_instance_does_not_leave_its_records_behind(runtime_dir: Path, tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    told = f"in {before}, but .* in {now}.*--config.*move {before} to {now}.*remove {runtime_dir}"
    with pytest.raises(ConfigError, match=told):
        stored(now, before=before)
    now.mkdir()  # others may be kept there
    with pytest.raises(ConfigError, match="--config that it ran with; to start over"):
        stored(now, before=before)


def test_another_storage_directory_is_fine_where_no_records_are_left_behind(
    runtime_dir: Path, tmp_path: Path
) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    stored(now)
    stored(before, before=before)
    stored(now, before=before, ran=False)  # it never came up
    stored(now, before=tmp_path / "removed")
    (stored(now).directory / STORAGE_FILE).write_text("")  # lost in a power cut


def test_up_that_forgot_its_configuration_starts_nothing(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "records"
    config = tmp_path / "ops.yaml"
    config.write_text(f"storage: {{directory: {records}}}\ncluster: {{replicas: 2}}\n")
    started: list[str] = []

    def run(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        started.append("")

    monkeypatch.setattr("kvcomm.serve.run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCOMM_CONFIG", raising=False)
    for _ in range(2):
        up("ops", config)
        Instance.open("ops").write_ring(ring(3, 2))
    with pytest.raises(ConfigError, match=f"{records}.*{runtime_dir / 'ops' / 'data'}"):
        up("ops")
    up("ops", config)
    assert len(started) == 3
    for _ in range(2):
        up("plain")
        Instance.open("plain").write_ring(ring(3, 3))
    (Instance.open("plain").directory / "data").mkdir()
    with pytest.raises(ConfigError, match="storage"):
        up("plain", config)
    assert not list(tmp_path.glob("**/*.draft"))


class Ended:
    """A launcher and its supervisor after a node has ended."""

    def __init__(self, fate: str, said: str = "") -> None:
        self._fate, self._said = fate, said

    def fate(self, node: str) -> str:
        return self._fate

    def last_words(self, node: str) -> str:
        return self._said

    def log_path(self, node: str) -> Path:
        return Path(f"/logs/{node}.log")


LOG = "all that it said is in /logs/shard-4.log"


@pytest.mark.parametrize(
    ("code", "fate", "words", "told"),
    [
        (0, "stopped", "", ["shard-4 has stopped"]),
        (-15, "stopped", "", ["shard-4 has stopped"]),
        (-9, "stopped", "", ["shard-4 was told to stop and ended by SIGKILL: it printed nothing", LOG]),
        (0, "starts again", "", ["shard-4 ended with code 0; it is started again"]),
        (1, "starts again", "no disk", ["shard-4 ended with code 1: no disk", f"it is started again; {LOG}"]),
        (1, "given up", "no disk", ["shard-4 ended with code 1: no disk", LOG]),
    ],
)
def test_an_end_that_was_ordered_does_not_read_like_a_failure(
    code: int, fate: str, words: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ended: Any = Ended(fate, words)
    _say_exit(NodeExited("shard-4", code), ended, ended)
    assert capsys.readouterr().err.splitlines() == [f"kvcomm: {line}" for line in told]
