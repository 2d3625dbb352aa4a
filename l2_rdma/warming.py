"""``Warming``: gets copies of blocks that many ask for into this pool before its own clients ask.

A pool of a rack gets what the leading controller names (``WarmOrder``): it asks the shards, verifies each
copy, and publishes it like any writer.  What it takes is bounded: bytes a second, a share of the pool, and
what may have to go for it are blocks that nobody has read lately (``kvcomm.sieve``).  Nothing is pinned and
nothing is kept longer than others: a copy that nobody reads is the next one to be evicted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvcomm.block import HEADER_BYTES, BlockKey
from kvcomm.blockstore import BlockStore
from kvcomm.tier import Block
from kvcomm.wire.messages import HOT_KEYS_MAX, Want, WarmOrder

SHARE = 8
"""Copies that were brought here take at most one part in so many of the pool."""
WINDOW_KEYS = 4
"""Blocks asked for together."""
ABSENT_S = 30.0
"""What the shards did not have, or there was no room for, is not tried again for so long."""
REMEMBERED_MAX = 4 * HOT_KEYS_MAX
KEY_BYTES = 32

Outcome = Literal["stored", "absent", "full", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_HOLDER = -3
"""No connection has this number."""


@dataclass(slots=True)
class WarmCounts:
    """Since start."""

    blocks: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    stored_bytes: int = 0
    dropped_count: int = 0
    """Copies that were brought here and have been evicted since."""


Source = Callable[[Sequence[BlockKey]], Awaitable[Sequence[Block]]]
"""The shards' copies of some blocks, verified; those that are not to be had are left out."""


async def no_source(keys: Sequence[BlockKey]) -> Sequence[Block]:
    """Of a pool that knows no shards."""
    return ()


class Warming:
    """Run :meth:`run` as a task; hand it orders.

    Args:
        tenant: whose blocks the pool holds.
        clock: monotonic seconds.
        pause: waits so many seconds.
    """

    def __init__(
        self,
        store: BlockStore,
        tenant: bytes,
        source: Source,
        clock: Callable[[], float],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.counts = WarmCounts()
        self._store, self._tenant, self._source = store, tenant, source
        self._clock, self._pause = clock, pause
        self._wanted: OrderedDict[BlockKey, None] = OrderedDict()
        self._rate_bytes = 0
        self._not_before: OrderedDict[BlockKey, float] = OrderedDict()
        self._warm: OrderedDict[BlockKey, int] = OrderedDict()
        """Copies that were brought here, as long as they are known to be here, and their bytes."""
        self._ordered = asyncio.Event()

    def order(self, order: WarmOrder) -> None:
        """Have these, from now on at this rate.  What is waiting and not named again waits behind."""
        self._rate_bytes = max(0, order.rate_bytes)
        for key in reversed([BlockKey(key) for key in order.keys[:HOT_KEYS_MAX] if len(key) == KEY_BYTES]):
            self._wanted[key] = None
            self._wanted.move_to_end(key, last=False)
        while len(self._wanted) > HOT_KEYS_MAX:
            self._wanted.popitem()
        self._ordered.set()

    @property
    def warm_count(self) -> int:
        """Copies that were brought here and are here still."""
        self._forget_evicted()
        return len(self._warm)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            while self._rate_bytes and (keys := self._next()):
                spent_bytes = await self._get(keys)
                await self._pause(spent_bytes / self._rate_bytes)

    def _next(self) -> list[BlockKey]:
        """The hottest that are not here and may be tried."""
        now, keys = self._clock(), list[BlockKey]()
        while self._wanted and len(keys) < WINDOW_KEYS:
            key, _ = self._wanted.popitem(last=False)
            if self._not_before.get(key, now) <= now and not self._store.present([key], self._tenant)[0]:
                keys.append(key)
        return keys

    async def _get(self, keys: Sequence[BlockKey]) -> int:
        """Fetch and store; bytes that were moved."""
        blocks = {block.key: block for block in await self._source(keys)}
        moved_bytes = 0
        for key in keys:
            block = blocks.get(key)
            outcome: Outcome = "absent" if block is None else self._put(block)
            self.counts.blocks[outcome] += 1
            if outcome != "stored":
                self._later(key)
            if block is not None:
                moved_bytes += block.copy.nbytes
        return moved_bytes

    def _put(self, block: Block) -> Outcome:
        """First into room that nobody uses; else in place of what was not read lately, within our share."""
        key, size_bytes, now = block.key, HEADER_BYTES + block.header.payload_bytes, self._clock()
        if self._over_share(size_bytes):
            return "full"
        wants = [Want(key, size_bytes)]
        [grant] = self._store.reserve(wants, _HOLDER, self._tenant, now, evict=False)
        if grant.status == "full":
            [grant] = self._store.reserve(wants, _HOLDER, self._tenant, now)
        if grant.status != "granted":
            return "full" if grant.status == "full" else "failed"
        try:
            self._store.extent(grant.token)[:] = block.copy[:size_bytes]
            [outcome] = self._store.publish([grant.token], _HOLDER, now, verify=True)
        finally:
            self._store.abort([grant.token], _HOLDER)  # what was published is not touched by it
        if outcome != "published":
            return "failed"
        self._warm[key] = size_bytes
        self.counts.stored_bytes += size_bytes
        return "stored"

    def _over_share(self, more_bytes: int) -> bool:
        limit = self._store.usage().capacity_bytes // SHARE
        if sum(self._warm.values()) + more_bytes <= limit:
            return False
        self._forget_evicted()
        return sum(self._warm.values()) + more_bytes > limit

    def _forget_evicted(self) -> None:
        here = self._store.present(list(self._warm), self._tenant)
        for key in [key for key, present in zip(self._warm, here, strict=True) if not present]:
            del self._warm[key]
            self.counts.dropped_count += 1

    def _later(self, key: BlockKey) -> None:
        self._not_before.pop(key, None)
        self._not_before[key] = self._clock() + ABSENT_S
        while len(self._not_before) > REMEMBERED_MAX:
            self._not_before.popitem(last=False)
