"""``Shedding``: drops, in the background, the blocks that this shard does not keep any more, from memory and
from the disk tier.

Only a ring that does not move says what a shard keeps.  Under each new one the shard walks over all that it
has, in order of the keys and in small steps, and drops what belongs to others; when the walk has come to its
end the shard is *clean* by that ring, and stays so: nothing comes in that it does not keep, for a put that
began under an older ring is not acknowledged (``l3_shard.server``), and what was being fetched meanwhile is
looked at once more (:meth:`Shedding.arrived`).

Nothing of it is noted on the disk.  A shard that dies on the way finds what is left when it has started: it
is clean by nothing until it has walked again.

A shard that has not seen the move itself (it was away, or the ring changed without one) does not know whether
the others have got yet what it finds: they are given ``orphan_s`` to fetch it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from kvcomm.block import BlockKey
from kvcomm.blockstore import ANY_TENANT, BlockStore, Depot
from kvcomm.wire.messages import BlockItem
from l3_shard.refill import Progress, distinct
from l3_shard.ring import NO_RING, Ring

PAGE_KEYS = 256
"""Of one step, about a millisecond."""
STEP_PAUSE_S = 0.005
"""Between two steps, for requests."""
DISK_LOOK_S = 0.05
"""How often it is looked whether the disk tier answers again."""

DISK_DROP_S = 5.0
"""How long removing the files of one step is waited for."""


@dataclass(slots=True)
class ShedCounts:
    """Since start."""

    blocks: int = 0
    block_bytes: int = 0


class Shedding:
    """Run :meth:`run` as a task; :meth:`ring_changed` wakes it up."""

    def __init__(
        self,
        node: str,
        blocks: BlockStore,
        disk: Depot | None,
        *,
        ring: Callable[[], Ring],
        orphan_s: float = 10.0,
    ) -> None:
        self.counts = ShedCounts()
        self._node, self._blocks, self._disk, self._ring_now = node, blocks, disk, ring
        self._orphan_s = orphan_s
        self._ring = ring()
        self._saw_move = False
        self._clean_epoch = 0
        self._progress: Progress | None = None
        self._changed = asyncio.Event()
        self._changed.set()

    def ring_changed(self) -> None:
        """There may be another one; idempotent."""
        was, self._ring = self._ring, self._ring_now()
        if self._ring.epoch == was.epoch:
            return
        follows = self._ring.epoch == was.epoch + 1 and not self._ring.moving
        if follows and self._clean_epoch == was.epoch and self._ring.block_placement == was.block_placement:
            self._clean_epoch = self._ring.epoch  # and no map between them can have brought us anything
            return
        self._saw_move = was.moving
        self._changed.set()

    @property
    def clean_epoch(self) -> int:
        """The newest ring by which this shard keeps nothing that it should not; 0 = none yet."""
        return self._clean_epoch

    def left(self) -> tuple[int, int]:
        """Blocks and bytes that are still to be dropped, about."""
        return (0, 0) if self._progress is None else self._progress.left()

    def arrived(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """These came under a ring that is over; those that belong to others are dropped, and returned."""
        ring = self._ring_now()
        if ring.moving or ring.epoch == NO_RING.epoch:
            return []
        strays = [key for key in keys if self._node not in ring.block_keepers(key)]
        if strays:
            self._blocks.drop(strays)
            if self._disk is not None:
                self._disk.drop(strays, lambda: None)
        return strays

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            ring = self._ring
            if not ring.moving and ring.epoch != NO_RING.epoch:
                try:
                    if await self._walk(ring):
                        self._clean_epoch = ring.epoch
                finally:
                    self._progress = None

    async def _walk(self, ring: Ring) -> bool:
        """Whether it came to its end under this ring."""
        self._progress = progress = Progress(1)
        patient = not self._saw_move
        after = b""
        while True:
            await self._disk_answers()
            if self._changed.is_set():
                return False
            page = list(islice(self._listing(after), PAGE_KEYS))
            foreign = [item for item in page if self._node not in ring.block_keepers(item.key)]
            if foreign and patient:
                patient = False
                if await self._changed_within(self._orphan_s):
                    return False
                continue  # from the same place: they may be gone by now
            size_bytes = sum(item.copy_bytes for item in foreign)
            progress.found(len(foreign), size_bytes)
            if foreign:
                await self._drop(foreign)
                progress.got(len(foreign), size_bytes)
            if len(page) < PAGE_KEYS:
                return not self._changed.is_set()
            after = page[-1].key
            progress.at(after)
            await asyncio.sleep(STEP_PAUSE_S)

    def _listing(self, after: bytes) -> Iterator[BlockItem]:
        above = self._blocks.listing(after, PAGE_KEYS, ANY_TENANT)
        return distinct(above, [] if self._disk is None else self._disk.listing(after, PAGE_KEYS))

    async def _drop(self, foreign: Sequence[BlockItem]) -> None:
        keys = [BlockKey(item.key) for item in foreign]
        self._blocks.drop(keys)
        if self._disk is not None:
            gone = asyncio.Event()
            self._disk.drop(keys, gone.set)
            with suppress(TimeoutError):  # then it stalls, and is waited for before the next step
                async with asyncio.timeout(DISK_DROP_S):
                    await gone.wait()  # one step's files at a time: the disk has other work as well
        self.counts.blocks += len(foreign)
        self.counts.block_bytes += sum(item.copy_bytes for item in foreign)

    async def _disk_answers(self) -> None:
        """A disk that does not say what it has is not known to be clean; one that is off for the rest of this
        life brings nothing back in it."""
        while self._disk is not None and self._disk.usage().state in ("opening", "stalled"):
            await asyncio.sleep(DISK_LOOK_S)

    async def _changed_within(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
