"""The end of a role process whose announcement did not get through."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvcomm.cli import roles
from kvcomm.errors import Refused


async def _ended(work: Coroutine[Any, Any, None]) -> tuple[asyncio.Event, list[asyncio.Task[None]]]:
    stop = asyncio.Event()
    announcing = [asyncio.create_task(roles._or_stop(work, stop))]
    await asyncio.sleep(0)
    await roles._end(announcing)
    return stop, announcing


def test_a_stop_during_the_announcement_is_a_clean_end() -> None:
    registered: list[str] = []

    async def announce() -> None:
        await asyncio.get_running_loop().create_future()
        registered.append("after the withdrawal")

    async def story() -> None:
        _, announcing = await _ended(announce())
        roles._check(announcing)
        assert registered == []

    asyncio.run(story())


def test_a_failed_announcement_ends_the_node_with_its_reason() -> None:
    async def announce() -> None:
        raise Refused("metrics cannot be served")

    async def story() -> None:
        stop, announcing = await _ended(announce())
        assert stop.is_set()
        with pytest.raises(Refused, match="metrics"):
            roles._check(announcing)

    asyncio.run(story())
