"""What ``kvcomm up`` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcomm.cli.up import _say_ready, check_placement
from kvcomm.config import ClusterConfig, parse_config
from kvcomm.errors import ConfigError
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
    return RingMap(7, replicas, 1, 1, 1, nodes, [])


def cluster(text: str) -> ClusterConfig:
    return parse_config(f"cluster: {text}\n", ram_bytes=1 << 30).cluster


def test_the_first_run_and_the_same_placement_are_fine() -> None:
    check_placement(None, cluster("{shards: 5}"))
    check_placement(ring(3, 3), cluster("{shards: 3, pools: 2, write_quorum: 1, block_copies: 2}"))
    check_placement(ring(3, 3), cluster("{shards: 5}"))


def test_records_are_not_made_to_disappear() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.replicas: 3"):
        check_placement(ring(3, 3), cluster("{shards: 3, replicas: 2}"))
