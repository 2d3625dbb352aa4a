"""What ``kvcomm status`` says beneath its table."""

from __future__ import annotations

from typing import Any

from kvcomm.cli.status import _lines


def row(**more: Any) -> dict[str, Any]:
    return {"node": "pool-0", "transports": [], "refused_transports": {}} | more


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


def test_a_shard_has_nothing_to_say() -> None:
    assert list(_lines([row()])) == []
