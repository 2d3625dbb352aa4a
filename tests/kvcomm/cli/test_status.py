"""What ``kvcomm status`` says beneath its table."""

from __future__ import annotations

from typing import Any

from kvcomm.cli.status import _cells, _lines, _missing, _unregistered
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
