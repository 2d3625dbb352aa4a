"""The end of a role process whose announcement did not get through."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvcomm.cli import roles
from kvcomm.cli.node import NodeProcess, StoreBackend
from kvcomm.errors import Refused
from kvcomm.instance import Instance
from l2_rdma import pool
from l2_rdma.transports.cuda import runtime
from l2_rdma.transports.port import WireOptions
from tests.blockstores import DictStore


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


@pytest.mark.slow
def test_a_withdrawn_node_lets_go_of_what_its_control_calls_hold(runtime_dir: Path) -> None:
    closed: list[str] = []

    class Holding(StoreBackend):
        async def close(self) -> None:
            closed.append("backend")

    async def story() -> None:
        Instance.create("roles")
        process = NodeProcess("roles", "pool-0", "pool", None)
        await process.announce(Holding(process, DictStore()), ["unix:///nowhere"], "", lambda: None)
        assert closed == []
        await process.withdraw()
        await process.withdraw()
        assert closed == ["backend"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("host", "listens"),
    [("127.0.0.1", "tcp://127.0.0.1:0"), ("10.0.0.7", "tcp://10.0.0.7:0"), ("::1", "tcp://[::1]:0")],
)
def test_a_pool_listens_and_uses_the_device_as_configured(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, listens: str
) -> None:
    given: dict[str, Any] = {}

    async def run_pool(**options: Any) -> None:
        given.update(options)

    monkeypatch.setattr(pool, "run_pool", run_pool)
    config = tmp_path / "kvcomm.yaml"
    config.write_text(f"network: {{listen_host: '{host}', rdma_device: rxe1}}\n")
    Instance.create("roles")
    asyncio.run(roles._pool(NodeProcess("roles", "pool-0", "pool", config), lifeline=False))
    assert given["addresses"][1:] == [listens]
    assert given["options"].wires == WireOptions(listen_host=host, rdma_device="rxe1")


def test_a_pools_blocks_are_put_where_the_configuration_says(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    async def run_pool(**options: Any) -> None:
        given.update(options)

    monkeypatch.setattr(pool, "run_pool", run_pool)
    monkeypatch.setattr(runtime, "open_gpu", lambda ordinal: f"gpu {ordinal}")
    config = tmp_path / "kvcomm.yaml"
    config.write_text("cache: {l2_device: 'cuda:1', l2_size: 1GiB}\nnetwork: {transports: [cuda, tcp]}\n")
    Instance.create("roles")
    asyncio.run(roles._pool(NodeProcess("roles", "pool-0", "pool", config), lifeline=False))
    assert given["options"].gpu == "gpu 1"
