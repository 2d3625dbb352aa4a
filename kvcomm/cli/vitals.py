"""What a pool and a shard say of themselves in their heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from kvcomm.heart import Vitals
from kvcomm.loadmeter import Counted, LoadMeter
from kvcomm.wire.messages import ShardLoad

if TYPE_CHECKING:
    from kvcomm.blockstore import Depot
    from l2_rdma.pool import RunningPool
    from l3_shard.server import RunningShard

WATCH_S = 0.1
"""How soon the controllers hear that a step of a move is done."""


class PoolVitals:
    """Call it before each beat."""

    def __init__(self, running: RunningPool) -> None:
        self._running = running
        self._meter = LoadMeter(time.monotonic())

    def __call__(self) -> Vitals:
        running = self._running
        counted = Counted(running.server.client_seconds, *running.block_counts())
        rates, usage = self._meter.look(counted, time.monotonic()), running.store.usage()
        return Vitals(
            load=ShardLoad(
                rates.ops_s,
                rates.hit_share,
                rates.p99_s,
                block_count=usage.block_count,
                block_bytes=usage.used_bytes,
                capacity_bytes=usage.capacity_bytes,
            )
        )


class ShardVitals:
    """Call it before each beat."""

    def __init__(self, running: RunningShard, disk: Depot | None) -> None:
        self._running, self._disk = running, disk
        self._meter = LoadMeter(time.monotonic())

    def __call__(self) -> Vitals:
        running = self._running
        counted = Counted(running.server.client_seconds, *running.block_counts())
        rates, usage = self._meter.look(counted, time.monotonic()), running.usage()
        load = ShardLoad(
            rates.ops_s,
            rates.hit_share,
            rates.p99_s,
            record_count=running.record_count(),
            record_bytes=running.record_bytes(),
            block_count=usage.block_count,
            block_bytes=usage.used_bytes,
            disk_bytes=0 if self._disk is None else self._disk.usage().used_bytes,
            capacity_bytes=usage.capacity_bytes,
        )
        return Vitals(
            silent=running.watch().silent, load=load, move=running.move_status(), split=running.split()
        )

    async def tell_steps(self, beat: Callable[[], None]) -> NoReturn:
        """Call ``beat`` as soon as the shard has got further with a move; until cancelled."""
        told = None
        while True:
            move = self._running.move_status()
            steps = (move.ready_epoch, move.strong_epoch, move.clean_epoch)
            if steps != told:
                told = steps
                beat()
            await asyncio.sleep(WATCH_S)
