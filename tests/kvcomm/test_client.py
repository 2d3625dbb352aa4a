"""The faces: when they refuse to begin, and what they leave behind when given up."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from kvcomm.aio import AsyncClient
from kvcomm.block import Incarnation
from kvcomm.blockplane import BlockPlane
from kvcomm.client import Client
from kvcomm.deadline import DEADLINE_S_MAX
from kvcomm.metrics import Metrics
from kvcomm.namespace import TenantDigest
from kvcomm.operations import Operations
from kvcomm.rpc import AsyncPeers, Identity, Peers
from kvcomm.steps import Emit, Steps
from kvcomm.tally import Tally
from tests.kvcomm.test_blockplane import NAMESPACE, near_with

IDENTITY = Identity("default:" + "0" * 64, Incarnation(1))


def operations() -> Operations:
    tally = Tally(Metrics("client"), clock=lambda: 0.0)
    blocks: BlockPlane[Any] = BlockPlane(near_with(), None, None, clock=lambda: 0.0)
    return Operations(blocks, None, tally, TenantDigest(bytes(16)), Incarnation(1))


def client(closed: list[str] | None = None) -> Client:
    calls = [] if closed is None else closed
    return Client(operations(), Peers(IDENTITY), lambda: {}, lambda: calls.append("closed"))


def async_client(steps: Steps[Any] | None = None) -> AsyncClient:
    made = operations()
    if steps is not None:
        made.fetch = lambda *_, **__: steps  # type: ignore[method-assign]

    async def close() -> None:
        return

    return AsyncClient(made, AsyncPeers(IDENTITY), lambda: {}, close)


@pytest.mark.parametrize("deadline_s", [math.inf, math.nan, -1.0, DEADLINE_S_MAX + 1])
def test_a_wait_without_an_end_is_refused(deadline_s: float) -> None:
    kv = client()
    for call in (kv.fetch, kv.stream):
        with pytest.raises(ValueError, match="deadline_s"):
            call(NAMESPACE, [1, 2], deadline_s=deadline_s)

    async def ask() -> None:
        other = async_client()
        with pytest.raises(ValueError, match="deadline_s"):
            await other.fetch(NAMESPACE, [1, 2], deadline_s=deadline_s)
        with pytest.raises(ValueError, match="deadline_s"):
            await anext(other.stream(NAMESPACE, [1, 2], deadline_s=deadline_s))

    asyncio.run(ask())


def test_no_time_at_all_is_enough_for_what_needs_no_io() -> None:
    assert client().fetch(NAMESPACE, [1, 2], deadline_s=0).token_count == 0


def test_a_closed_client_says_so_and_closes_once() -> None:
    closed: list[str] = []
    with client(closed) as kv:
        pass
    kv.close()
    assert closed == ["closed"]
    for call in (kv.fetch, kv.stream):
        with pytest.raises(ValueError, match="closed"):
            call(NAMESPACE, [1, 2])
    with pytest.raises(ValueError, match="closed"):
        kv.state("s").get("k")

    async def ask() -> None:
        async with async_client() as other:
            pass
        with pytest.raises(ValueError, match="closed"):
            await other.fetch(NAMESPACE, [1, 2])
        with pytest.raises(ValueError, match="closed"):
            await anext(other.stream(NAMESPACE, [1, 2]))

    asyncio.run(ask())


def test_a_stream_that_is_closed_early_has_given_up_when_close_returns() -> None:
    ended: list[str] = []

    def endless() -> Steps[None]:
        try:
            while True:
                yield Emit("block")
        finally:
            ended.append("ended")

    async def ask() -> None:
        stream: Any = async_client(endless()).stream(NAMESPACE, [1, 2])
        assert await anext(stream) == "block"
        await stream.aclose()
        assert ended == ["ended"]

    asyncio.run(ask())
