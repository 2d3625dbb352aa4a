"""``ShardSource``: the shards' copies of blocks, for a pool that is told to have them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcomm.block import BlockKey
from kvcomm.rpc import Identity
from kvcomm.rpc.asynchronous import AsyncPeers, run_async
from kvcomm.tier import Block
from kvcomm.wire.messages import RingMap, RingNode

if TYPE_CHECKING:
    from l3_shard.tier import L3Tier

FETCH_S = 10.0
"""Of one window of blocks; what has not come then is asked for another time."""


class ShardSource:
    """Call it with keys, in the loop that it was made in.

    Args:
        ring: the newest map that this process has heard of, if any.
        identity: with a token of the pool's tenant: shards show no other blocks to it.
    """

    def __init__(
        self,
        ring: Callable[[], RingMap | None],
        identity: Identity,
        *,
        dial: Callable[[RingNode], str],
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self._ring, self._dial, self._timeout_s = ring, dial, timeout_s
        self._peers = AsyncPeers(identity, connect_timeout_s=connect_timeout_s)
        self._tier: L3Tier | None = None

    async def __call__(self, keys: Sequence[BlockKey]) -> Sequence[Block]:
        """Verified copies of those that some shard has."""
        tier = self._newest()
        if tier is None:
            return ()
        blocks: list[Block] = []
        steps = tier.get(keys, lambda _, block: blocks.append(block))
        await run_async(steps, self._peers, time.monotonic() + FETCH_S)
        return blocks

    async def close(self) -> None:
        await self._peers.close()

    def _newest(self) -> L3Tier | None:
        from l3_shard.tier import L3Tier

        ring = self._ring()
        if ring is None or not ring.shards:
            return self._tier
        if self._tier is None or self._tier.ring.epoch < ring.epoch:
            self._tier = L3Tier(ring, dial=self._dial, timeout_s=self._timeout_s)
        return self._tier
