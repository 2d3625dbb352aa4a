"""What ``kvcomm status`` says beneath its table."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm.cli.status import _cells, _lines, _missing, _other_controllers, _unregistered, _well
from kvcomm.instance import NodeRecord, Survey
from kvcomm.wire.messages import ClusterView, NodeView, RingMap, RingNode


def row(**more: Any) -> dict[str, Any]:
    return {"node": "pool-0", "pid": 7, "error": "", "transports": [], "refused_transports": {}} | more


def test_a_pool_says_what_it_serves_and_why_not_the_rest() -> None:
    refused = {"cuda": "no GPU", "verbs": "no RDMA device"}
    assert list(_lines([row(transports=["shm", "tcp"], refused_transports=refused)])) == [
        "pool-0 serves shm, tcp",
        "pool-0 cannot serve cuda: no GPU",
        "pool-0 cannot serve verbs: no RDMA device",
    ]


def test_a_pool_that_serves_nothing_says_so() -> None:
    lines = list(_lines([row(refused_transports={"verbs": "no RDMA device"})]))
    assert lines[0] == "pool-0 serves no transport: nobody reads its memory"


def test_a_node_that_does_not_answer_says_why_where_there_is_room() -> None:
    silent = row(error="no connection within 2 s")
    assert _cells(silent) == ["-", "silent"]
    assert list(_lines([silent])) == ["pool-0 does not answer: no connection within 2 s"]


def test_the_controller_that_leads_says_so() -> None:
    assert list(_lines([row(node="controller-1", leads=True)])) == ["controller-1 leads"]


def test_a_launcher_is_known_to_the_controllers_only() -> None:
    nodes = [NodeView(f"{role}-0", role, "r", "alive", 0.1, 3, 1, []) for role in ("launcher", "shard")]
    nodes.append(NodeView("launcher-1", "launcher", "r", "dead", 9.0, 3, 1, []))
    view = ClusterView("controller-0", "controller-0", 1, "whole", None, nodes, [])
    alive, dead = _unregistered("small", view)
    assert (alive["node"], _cells(alive)) == ("launcher-0", ["3", "-"])
    assert (dead["node"], _cells(dead)) == ("launcher-1", ["-", "down"])
    assert list(_unregistered("small", None)) == []


def test_a_controller_that_has_ended_is_missed_before_its_peers_notice() -> None:
    nodes = [
        NodeView("controller-0", "controller", "r", "alive", 0.1, 3, 1, [], control="h:1"),
        NodeView("controller-1", "controller", "r", "alive", 0.1, 3, 1, [], control="h:2"),
        NodeView("controller-2", "controller", "r", "alive", 0.1, 3, 1, [], control="elsewhere:3"),
        NodeView("controller-3", "controller", "", "unknown", -1.0, 0, 0, []),
    ]
    here = NodeRecord(
        node="controller-0", role="controller", pid=1, pid_start_time=1, control="h:1", metrics="",
        addresses=[],
        incarnation=1, region="",
    )  # fmt: skip
    view = ClusterView("controller-0", "controller-0", 1, "whole", None, nodes, [])
    survey = Survey([here], None, [])
    told = {
        each["node"]: each["error"]
        for each in _other_controllers("small", survey, view, lambda control: control == "elsewhere:3")
    }
    assert told == {"controller-1": "not running", "controller-2": "", "controller-3": "not running"}
    assert list(_other_controllers("small", survey, None, lambda control: True)) == []


@pytest.mark.parametrize(
    ("rows", "well"),
    [
        ([], False),
        ([row(instance="a", cluster={"mode": "whole"}), row(instance="a")], True),
        ([row(instance="a", cluster={"mode": "leaderless"})], False),
        ([row(instance="a")], False),
        ([row(instance="a", cluster={"mode": "whole"}), row(instance="a", error="not running")], False),
        ([row(instance="a", cluster={"mode": "whole"}), row(instance="b")], False),
    ],
    ids=["nothing", "whole", "no leader", "no controller", "a node is missing", "the second is not whole"],
)
def test_all_is_well_only_if_somebody_says_so(rows: list[dict[str, Any]], well: bool) -> None:
    assert _well(rows) is well


def test_a_shard_has_nothing_to_say() -> None:
    assert list(_lines([row()])) == []


def test_a_node_of_the_ring_that_is_not_there_is_told_while_others_are() -> None:
    record = NodeRecord(
        node="shard-0", role="shard", pid=1, pid_start_time=1, control="", metrics="", addresses=[],
        incarnation=1, region="",
    )  # fmt: skip
    pool, shard = (RingNode(node, "tcp://h:1", "", "", "r", 1) for node in ("pool-0", "shard-0"))
    ring = RingMap(1, 1, 1, 1, 1, [shard], [pool])
    (missing,) = _missing("small", Survey([record], ring, []))
    assert (missing["node"], missing["role"], missing["error"]) == ("pool-0", "pool", "not running")
    assert _cells(missing) == ["-", "down"]
    assert list(_missing("small", Survey([], ring, []))) == []  # all of it was stopped
    assert list(_missing("small", Survey([record], None, []))) == []  # it is just starting
