"""``run_pool``: the role shell of a pool process; a region, its owner, and the wire in front of it.

Everything that decides is in ``Owner``; here are the clock, the timer, and the order of the end: stop
listening, drop the connections, remove the region.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcomm.block import Incarnation
from kvcomm.blockservice import BlockService
from kvcomm.blockstore import BlockStore
from kvcomm.credentials import Credentials
from kvcomm.serve import DataServer
from l2_rdma.hosted import RegionOptions, hosted_store
from l2_rdma.owner import Owner

PoolOptions = RegionOptions
"""``region_bytes`` is ``cache.l2_size``."""

_TICK_MIN_S = 0.001


@dataclass(frozen=True, slots=True)
class RunningPool:
    """What the composition root registers and exports once the pool is up."""

    addresses: list[str]
    """Bound data-wire addresses, in the order that was asked for."""
    region: str
    store: BlockStore
    """For the control wire and the metrics; to be used in the event loop's thread only."""
    server: DataServer


async def run_pool(
    *,
    node: str,
    instance: str,
    incarnation: Incarnation,
    credentials: Credentials,
    tenant: str,
    addresses: Sequence[str],
    options: RegionOptions,
    stop: asyncio.Event,
    ready: Callable[[RunningPool], None] = lambda pool: None,
    epoch: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serve until ``stop`` is set; the region is gone when this returns, however it returns.

    Args:
        tenant: whose blocks the region holds.  Others may connect, but are shown no region and refused.
        ready: called once, when the pool can be used.
        epoch: the ring epoch that a greeting names.

    Raises:
        ConfigError: shared memory does not suffice.
        Refused: an address is in use.
    """
    digest = credentials.tenant_digest(tenant)
    async with hosted_store(
        node=node, instance=instance, incarnation=incarnation, options=options, tenant=digest
    ) as hosted:
        service = BlockService(
            hosted.owner, clock, region=lambda caller: hosted.region if caller == digest else "", epoch=epoch
        )
        server = DataServer(
            service, node=node, role="pool", instance=instance, incarnation=incarnation,
            credentials=credentials,
        )  # fmt: skip
        bound = await server.start(addresses)
        try:
            ready(RunningPool(bound, hosted.region, hosted.owner, server))
            while not stop.is_set():
                hosted.owner.tick(clock())
                await _until(hosted.owner, stop, clock)
        finally:
            await server.close()


async def _until(owner: Owner, stop: asyncio.Event, clock: Callable[[], float]) -> None:
    """Sleep until the owner wants to be ticked, or the end."""
    deadline = owner.deadline()
    assert deadline is not None, "an owner always looks at its readers' marks again"
    try:
        async with asyncio.timeout(max(deadline - clock(), _TICK_MIN_S)):
            await stop.wait()
    except TimeoutError:
        return
