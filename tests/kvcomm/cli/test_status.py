"""What ``kvcomm status`` says beneath its table."""

from __future__ import annotations

from typing import Any

from kvcomm.cli.status import _transports


def row(**more: Any) -> dict[str, Any]:
    return {"node": "pool-0", "transports": [], "refused_transports": {}} | more


def test_a_pool_says_what_it_offers_and_why_not_the_rest() -> None:
    refused = {"cuda": "no GPU", "verbs": "no RDMA device"}
    assert list(_transports(row(transports=["shm", "tcp"], refused_transports=refused))) == [
        "offers shm, tcp",
        "refuses cuda: no GPU",
        "refuses verbs: no RDMA device",
    ]


def test_a_pool_that_nobody_can_read_one_sided_says_so() -> None:
    (first, _) = _transports(row(refused_transports={"verbs": "no RDMA device"}))
    assert first.startswith("offers no transport")
