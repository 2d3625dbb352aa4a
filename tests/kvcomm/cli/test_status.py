"""What ``kvcomm status`` says beneath its table."""

from __future__ import annotations

from typing import Any

from kvcomm.cli.status import _cells, _lines, _missing
from kvcomm.instance import NodeRecord, Survey
from kvcomm.wire.messages import RingMap, RingNode


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
