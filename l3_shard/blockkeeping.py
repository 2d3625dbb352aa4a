"""``BlockKeeping``: what a shard does for its blocks beside serving them: it gets those that the ring gives
it (``Refilling``) and drops those that it takes away (``Shedding``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvcomm.block import BlockKey
from kvcomm.blockstore import BlockStore, Depot
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.wire.messages import RingNode
from l3_shard.blockmove import BlockMove
from l3_shard.process import RecordProcess
from l3_shard.refilling import RefillCounts, Refilling, RefillOptions
from l3_shard.shedding import ShedCounts, Shedding


class BlockKeeping:
    """Begins at once; ended by :meth:`close`.

    Args:
        dial: where to call another shard.
        end: the shard must end, and why.
    """

    def __init__(
        self,
        records: RecordProcess,
        blocks: BlockStore,
        disk: Depot | None,
        options: RefillOptions,
        *,
        orphan_s: float,
        connect_timeout_s: float,
        dial: Callable[[RingNode], str],
        end: Callable[[str], None],
    ) -> None:
        machine = records.machine
        self._epoch, self._end = records.epoch, end
        self._peers = AsyncPeers(
            records.peers.identity, connect_timeout_s=connect_timeout_s, clock=records.clock
        )
        self._shedding = Shedding(machine.node, blocks, disk, ring=lambda: machine.ring, orphan_s=orphan_s)
        self._refilling = Refilling(
            machine.node,
            options,
            blocks,
            disk,
            self._peers,
            ring=lambda: machine.ring,
            resolve=lambda node: dial(machine.ring.shard(node)),
            clock=records.clock,
            arrived=self._shedding.arrived,
        )
        records.ring_listeners.append(self._ring_changed)
        self._tasks = [
            asyncio.create_task(self._or_end("refilling", self._refilling.run())),
            asyncio.create_task(self._or_end("shedding", self._shedding.run())),
        ]

    def refill_counts(self) -> RefillCounts:
        return self._refilling.counts

    def shed_counts(self) -> ShedCounts:
        return self._shedding.counts

    def shed(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Drop those that this shard does not keep, and return them."""
        return self._shedding.arrived(keys)

    def move(self) -> BlockMove:
        """How far it is with a transition, and with what follows it."""
        self._ring_changed()  # what is said is about the ring in force, also before its turn has come
        getting, dropping = self._refilling.left(), self._shedding.left()
        return BlockMove(
            self._epoch() if self._refilling.ready() else 0,
            self._shedding.clean_epoch,
            getting[0] + dropping[0],
            getting[1] + dropping[1],
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()

    def _ring_changed(self) -> None:
        self._refilling.ring_changed()
        self._shedding.ring_changed()

    async def _or_end(self, what: str, work: Awaitable[None]) -> None:
        """A bug in it must not stay unheard, nor leave the shard serving with fewer and fewer copies."""
        try:
            await work
        except Exception as error:
            self._end(f"{what} broke: {error!r}")
            raise
