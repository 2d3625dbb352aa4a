"""``hosted_store``: a region and its owner inside an asyncio process, for as long as a ``with`` lasts.

The pool serves one, the shard another (its blocks); both get a ``BlockStore`` and tick it themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcomm.block import NO_TENANT, Incarnation
from kvcomm.errors import ConfigError
from kvcomm.namespace import TenantDigest
from l2_rdma.fence import barrier_everywhere, grace_s
from l2_rdma.layout import plan_layout
from l2_rdma.owner import Owner
from l2_rdma.region import SHM_DIRECTORY, Region, reclaim_stale

BACK_SLICE_BYTES = 64 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """What a region is made of."""

    region_bytes: int
    """All of it: index and pin table included."""
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


@dataclass(frozen=True, slots=True)
class HostedStore:
    owner: Owner
    region: str
    """Path of the region."""


@asynccontextmanager
async def hosted_store(
    *,
    node: str,
    instance: str,
    incarnation: Incarnation,
    options: RegionOptions,
    tenant: TenantDigest = NO_TENANT,
) -> AsyncIterator[HostedStore]:
    """Make a region and its owner; the region is gone after the ``with``, however it ends.

    The first slice of memory is there at once, the rest arrives in the background.  The caller ticks the
    owner.

    Args:
        tenant: whose blocks it holds; without, it takes every tenant's, shows each only its own, and no
            client can attach it.

    Raises:
        ConfigError: shared memory does not suffice.
    """
    for path in reclaim_stale(options.directory):
        _log.warning("removed %s, left behind by a process that was killed", path)
    layout = plan_layout(
        options.region_bytes,
        slab_bytes=options.slab_bytes,
        index_entries=options.index_entries,
        hazard_count=options.hazard_count,
    )
    region = Region.create(
        options.directory, instance=instance, node=node, tenant=tenant, incarnation=incarnation, layout=layout
    )
    ending = asyncio.Event()
    try:
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
        )
        backing = asyncio.create_task(_back(owner, region, first, ending))
        try:
            yield HostedStore(owner, str(region.path))
        finally:
            ending.set()  # a slice under way must be done before the region is
            await backing
    finally:
        region.close()


async def _back(owner: Owner, region: Region, reached: int, ending: asyncio.Event) -> None:
    """Bring the rest of the memory, a slice at a time, in a thread; a store that cannot get it all goes on
    with less."""
    while reached < region.header.layout.slots_end and not ending.is_set():
        try:
            reached = await asyncio.to_thread(region.back, BACK_SLICE_BYTES)
        except ConfigError as error:
            _log.error("the region stays smaller than configured: %s", error)
            return
        owner.grow(reached)
