"""``ShardBackend`` and ``ControllerBackend``: a shard's and a controller's side of the control wire.

A shard's record calls are for programs that speak gRPC only: any shard takes them and passes them on to the
owners over the data wire, under the caller's own tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcomm.blockstore import BlockStore, Depot
from kvcomm.cli.node import NodeProcess, RoleBackend, StoreBackend
from kvcomm.errors import Conflict
from kvcomm.rpc import AsyncPeers, Identity, run_async
from kvcomm.wire.messages import RecordStates, RecordVersion, RecordWrite, RingMap

if TYPE_CHECKING:
    from controller.process import RunningController
    from kvcomm.control import Caller
    from kvcomm.wire.control_codec import NodeStatus
    from l3_shard.server import RunningShard
    from l3_shard.tier import L3Tier


class ShardBackend(StoreBackend):
    """Blocks of this shard, records of the whole ring."""

    def __init__(
        self, process: NodeProcess, store: BlockStore, running: RunningShard, disk: Depot | None = None
    ) -> None:
        super().__init__(process, store)
        self._running = running
        self._disk = disk
        self._peers: dict[str, AsyncPeers] = {}

    def status(self) -> NodeStatus:
        view = self._running.watch()
        status = self._process.status(self._store, self._running.ring().epoch, self._disk)
        return replace(status, mode=view.mode, silent=view.silent)

    def ring(self) -> RingMap | None:
        ring = self._running.ring()
        return ring if ring.epoch else None

    async def set_ring(self, ring: RingMap) -> None:
        standing = self._running.ring()
        if self._running.adopt(ring) > ring.epoch or (standing.epoch == ring.epoch and standing != ring):
            raise Conflict(f"ring epoch {standing.epoch} stands; epoch {ring.epoch} cannot replace it")

    async def get_records(self, caller: Caller, keys: Sequence[bytes], timeout_s: float) -> RecordStates:
        steps = self._records().record_states(keys)
        return await run_async(steps, self._peers_of(caller.tenant), time.monotonic() + timeout_s)

    async def put_records(
        self, caller: Caller, writes: Sequence[RecordWrite], timeout_s: float
    ) -> list[RecordVersion]:
        steps = self._records().record_put(writes)
        return await run_async(steps, self._peers_of(caller.tenant), time.monotonic() + timeout_s)

    async def close(self) -> None:
        """Let go of the connections that calls were passed on over."""
        await asyncio.gather(*(peers.close() for peers in self._peers.values()))

    def _records(self) -> L3Tier:
        from l3_shard.tier import L3Tier

        return L3Tier(
            self._running.ring(),
            dial=lambda shard: shard.local_address or shard.address,
            timeout_s=self._process.settings.network.request_timeout_s,
        )

    def _peers_of(self, tenant: str) -> AsyncPeers:
        if tenant not in self._peers:
            identity = Identity(self._process.instance.credentials().token(tenant), self._process.incarnation)
            timeout_s = self._process.settings.network.connect_timeout_s
            self._peers[tenant] = AsyncPeers(identity, connect_timeout_s=timeout_s)
        return self._peers[tenant]


class ControllerBackend(RoleBackend):
    """How the controller is, and the cluster's ring as far as it knows."""

    def __init__(self, process: NodeProcess, running: RunningController) -> None:
        super().__init__(process)
        self._running = running

    def ring(self) -> RingMap | None:
        return self._running.machine.ring
