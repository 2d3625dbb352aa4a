"""What ``kvcomm up`` refuses before it starts anything."""

from __future__ import annotations

import pytest

from kvcomm.cli.up import check_placement
from kvcomm.config import ClusterConfig, parse_config
from kvcomm.errors import ConfigError
from kvcomm.wire.messages import RingMap, RingNode


def ring(shards: int, replicas: int) -> RingMap:
    nodes = [RingNode(f"shard-{index}", "tcp://h:1", "", "", "r", 1) for index in range(shards)]
    return RingMap(7, replicas, 1, 1, 1, nodes, [])


def cluster(text: str) -> ClusterConfig:
    return parse_config(f"cluster: {text}\n", ram_bytes=1 << 30).cluster


def test_the_first_run_and_the_same_placement_are_fine() -> None:
    check_placement(None, cluster("{shards: 5}"))
    check_placement(ring(3, 3), cluster("{shards: 3, pools: 2, write_quorum: 1, block_copies: 2}"))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ("{shards: 2}", "cluster.shards: 3"),
        ("{shards: 4}", "cluster.shards: 3"),
        ("{shards: 3, replicas: 2}", "cluster.replicas: 3"),
    ],
)
def test_records_are_not_made_to_disappear(now: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_placement(ring(3, 3), cluster(now))
