"""``run_pool``: the role shell of a pool process; a region, its owner, and the wire in front of it.

Everything that decides is in ``Owner``; here are the clock, the timer, the memory that arrives slice by
slice, and the order of the end: stop listening, drop the connections, remove the region.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvcomm.block import Incarnation
from kvcomm.blockservice import BlockService
from kvcomm.blockstore import BlockStore
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import ConfigError, Refused
from kvcomm.machine import Origin
from kvcomm.namespace import TenantDigest
from kvcomm.serve import DataServer, ReplyFunction
from kvcomm.wire.messages import Done, Message, WarmOrder
from l2_rdma.fence import barrier_everywhere, grace_s
from l2_rdma.layout import plan_layout
from l2_rdma.owner import Owner
from l2_rdma.region import SHM_DIRECTORY, Region, reclaim_stale
from l2_rdma.transports.cuda.gpu import Gpu
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.cuda.slots import DeviceSlots
from l2_rdma.transports.desk import Desk
from l2_rdma.transports.known import find_providers
from l2_rdma.transports.port import WireOptions
from l2_rdma.warming import Source, Warming, no_source

BACK_SLICE_BYTES = 64 << 20
_TICK_MIN_S = 0.001
_AHEAD_INTERVAL_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a pool is made of."""

    region_bytes: int
    """All of it: index and pin table included (``cache.l2_size``)."""
    pin_budget_bytes: int | None = None
    """What readers' views may keep from eviction; by default half."""
    reservation_ttl_s: float = 10.0
    slab_bytes: int | None = None
    """Unit of the size classes and largest copy; by default 1/64 of the region, 1 to 64 MiB."""
    index_entries: int | None = None
    """Blocks that readers can find; by default one for each 32 KiB."""
    hazard_count: int = 16_384
    """Views of all clients together."""
    directory: Path = SHM_DIRECTORY
    ahead_bytes: int | None = 256 << 20
    """Memory is put behind the region as it fills, so much ahead of need: a small cache costs little.
    ``None``: all of it at once, in the background; nobody else can take it then."""
    transports: Sequence[str] = ("shm",)
    """One-sided ways in that are offered, of those that run here (``network.transports``)."""
    wires: WireOptions = field(default_factory=WireOptions)
    gpu: Gpu | None = None
    """The GPU whose memory holds the slots (``cache.l2_device``); ``None`` = shared memory of the host
    does."""


@dataclass(frozen=True, slots=True)
class RunningPool:
    """What the composition root registers and exports once the pool is up."""

    addresses: list[str]
    """Bound data-wire addresses, in the order that was asked for."""
    region: str
    store: BlockStore
    """For the control wire and the metrics; to be used in the event loop's thread only."""
    server: DataServer
    grant_counts: Mapping[str, int]
    """Reservations asked for since start, by the answer."""
    block_counts: Callable[[], tuple[int, int]]
    """Blocks asked for over the data wire since start, and those of them that were here; reads of its memory
    are not seen."""
    transports: Sequence[str]
    """One-sided ways into its memory that it offers."""
    refused_transports: Mapping[str, str]
    """What was to be offered and cannot run here, and why."""
    warming: Warming
    """Brings copies here that many ask for."""


@asynccontextmanager
async def block_region(
    *, node: str, instance: str, incarnation: Incarnation, tenant: TenantDigest, options: PoolOptions
) -> AsyncIterator[tuple[Owner, Region]]:
    """A region of shared memory and its owner, for as long as the context lasts; used by pools and shards.

    The memory behind the region arrives slice by slice in the background, ahead of need; a burst that
    overtakes it gets its slice at once, before anything is evicted.  The caller ticks the owner.

    Args:
        tenant: whose blocks the region holds; ``kvcomm.block.NO_TENANT`` = everybody's (then its path is
            nobody's business).

    Raises:
        ConfigError: shared memory does not suffice.
    """
    for name in reclaim_stale(options.directory):
        _log.warning("removed %s, left behind by a process that was killed", name)
    layout = plan_layout(
        options.region_bytes,
        slab_bytes=options.slab_bytes,
        index_entries=options.index_entries,
        hazard_count=options.hazard_count,
    )
    if options.gpu is not None:
        region_on_gpu = CudaRegion.create(
            options.directory,
            options.gpu,
            instance=instance,
            node=node,
            tenant=tenant,
            incarnation=incarnation,
            layout=layout,
        )
        with _owner_on_gpu(region_on_gpu, options) as owner:
            yield owner, region_on_gpu.file
        return
    region = Region.create(
        options.directory, instance=instance, node=node, tenant=tenant, incarnation=incarnation, layout=layout
    )
    stop = asyncio.Event()
    try:
        backing = _Backing(region)
        first = await asyncio.to_thread(region.back, max(BACK_SLICE_BYTES, layout.slab_bytes))
        owner = Owner(
            region.memory,
            region.header,
            locked=region.hazards_locked,
            barrier=barrier_everywhere,
            reservation_ttl_s=options.reservation_ttl_s,
            pin_budget_bytes=options.pin_budget_bytes,
            grace_s=grace_s(),
            backed_bytes=first,
            more=lambda: backing.more(layout.slab_bytes),
        )
        ahead = asyncio.create_task(backing.keep_ahead(owner, options.ahead_bytes, stop))
        try:
            yield owner, region
        finally:
            stop.set()
            await ahead  # it must end before the region does
    finally:
        region.close()


@contextmanager
def _owner_on_gpu(region: CudaRegion, options: PoolOptions) -> Iterator[Owner]:
    """All of its memory is there from the start: a GPU hands it out at once."""
    try:
        slots = DeviceSlots(region)
        try:
            yield Owner(
                region.file.memory,
                region.header,
                locked=region.file.hazards_locked,
                barrier=barrier_everywhere,
                reservation_ttl_s=options.reservation_ttl_s,
                pin_budget_bytes=options.pin_budget_bytes,
                grace_s=grace_s(),
                slot_memory=slots,
            )
        finally:
            slots.close()
    finally:
        region.close()


async def run_pool(
    *,
    node: str,
    instance: str,
    incarnation: Incarnation,
    credentials: Credentials,
    tenant: str,
    addresses: Sequence[str],
    options: PoolOptions,
    stop: asyncio.Event,
    ready: Callable[[RunningPool], None] = lambda pool: None,
    epoch: Callable[[], int] = lambda: 0,
    source: Source = no_source,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serve until ``stop`` is set; the region is gone when this returns, however it returns.

    Args:
        tenant: whose blocks the region holds.  Others may connect, but are shown no region and refused.
        ready: called once, when the pool can be used.
        epoch: the ring epoch that a greeting names.
        source: where copies of hot blocks are got from; see ``Warming``.

    Raises:
        ConfigError: shared memory does not suffice.
        Refused: an address is in use.
    """
    digest = credentials.tenant_digest(tenant)
    async with block_region(
        node=node, instance=instance, incarnation=incarnation, tenant=digest, options=options
    ) as (owner, region):
        found = find_providers(options.transports, region, options.wires)
        desk = Desk(region.header, list(found.running.values()), found.refused)
        service = BlockService(
            owner,
            clock,
            region=lambda caller: str(region.path) if caller == digest else "",
            epoch=epoch,
            channels=desk,
        )
        warming = Warming(owner, digest, source, clock)
        server = DataServer(
            PoolService(service, warming, credentials.tenant_digest(NODE_TENANT)),
            node=node,
            role="pool",
            instance=instance,
            incarnation=incarnation,
            credentials=credentials,
        )
        warmer: asyncio.Task[None] | None = None
        try:
            bound = await server.start(addresses)
            ready(
                RunningPool(
                    bound,
                    str(region.path),
                    owner,
                    server,
                    service.grant_counts,
                    lambda: (service.asked_count, service.found_count),
                    list(found.running),
                    dict(found.refused),
                    warming,
                )
            )
            warmer = asyncio.create_task(warming.run())
            warmer.add_done_callback(_unheard)
            while not stop.is_set():
                owner.tick(clock())
                service.fence_late_writers()
                await _until(owner, stop, clock)
            await server.leave()
        finally:
            if warmer is not None:
                warmer.cancel()
                await asyncio.gather(warmer, return_exceptions=True)
            await server.close()
            desk.stop()


class PoolService:
    """A ``kvcomm.serve.Service``: orders of the controllers to the warming, everything else to the block
    service.

    Args:
        cluster: tenant digest of the cluster's own nodes.
    """

    def __init__(self, blocks: BlockService, warming: Warming, cluster: bytes) -> None:
        self._blocks, self._warming, self._cluster = blocks, warming, cluster
        self.welcome, self.sink, self.closed = blocks.welcome, blocks.sink, blocks.closed

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        if not isinstance(message, WarmOrder):
            self._blocks.handle(origin, message, payload, reply)
            return
        if origin.tenant != self._cluster:
            raise Refused("only the cluster's own nodes say which blocks a pool is to have")
        self._warming.order(message)
        reply(Done())


def _unheard(task: asyncio.Task[None]) -> None:
    """A pool without warming still serves; but why it has none is said."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("bringing hot blocks here broke: %r", error, exc_info=error)


async def _until(owner: Owner, stop: asyncio.Event, clock: Callable[[], float]) -> None:
    """Sleep until the owner wants to be ticked, or the end."""
    deadline = owner.deadline()
    assert deadline is not None, "an owner always looks at its readers' marks again"
    try:
        async with asyncio.timeout(max(deadline - clock(), _TICK_MIN_S)):
            await stop.wait()
    except TimeoutError:
        return


class _Backing:
    """Puts memory behind a region; for the owner in need, and ahead of need."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._refused = False

    def more(self, slice_bytes: int) -> int | None:
        """How far the memory reaches now; ``None`` when there is no more: the store stays smaller."""
        if self._refused or self._region.backed_bytes >= self._region.header.layout.slots_end:
            return None
        try:
            return self._region.back(slice_bytes)
        except ConfigError as error:
            self._refused = True
            _log.error("the region stays smaller than configured: %s", error)
            return None

    async def keep_ahead(self, owner: Owner, ahead_bytes: int | None, stop: asyncio.Event) -> None:
        """A slice at a time, in a thread, until there is no more or the end."""
        while not stop.is_set():
            if ahead_bytes is None or owner.spare_bytes < ahead_bytes:
                reached = await asyncio.to_thread(self.more, BACK_SLICE_BYTES)
                if reached is None:
                    return
                owner.grow(reached)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_AHEAD_INTERVAL_S):
                        await stop.wait()
