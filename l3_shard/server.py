"""``run_shard``: the role shell of a shard process; the record machine, the block store, and the wire in
front of both.

Everything that decides is in ``Shard`` and in the injected ``BlockStore``; here are the clock, the timers,
and the order of the end: stop listening, drop the connections, finish the commits, close the store.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvcomm.block import Incarnation
from kvcomm.blockservice import BlockService, no_region
from kvcomm.blockstore import BlockStore, Depot, StoreUsage
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import KVCommError, Refused, StaleEpoch, Unavailable
from kvcomm.machine import ConnectionId, Effect, Origin, Tick
from kvcomm.metrics import Histogram
from kvcomm.rpc import Identity
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.runtime import Runtime
from kvcomm.serve import DataServer, ReplyFunction
from kvcomm.validators import Validators
from kvcomm.wire.messages import (
    BlockGet,
    BlockHeld,
    BlockHoldings,
    BlockLookup,
    BlockPut,
    Message,
    RingMap,
    RingNode,
    ShardMove,
)
from l3_shard.commits import Commits
from l3_shard.desk import ShardLimits
from l3_shard.refill import held
from l3_shard.refilling import RefillCounts, Refilling, RefillOptions
from l3_shard.repair import RepairCounts, RepairOptions
from l3_shard.ring import NO_RING, encode_map
from l3_shard.scrub import ScrubCounts
from l3_shard.shard import RingChanged, Shard, ShardCounts, WallAdjusted
from l3_shard.storage import Audit, Database, Load, Persist, Scan
from l3_shard.store import DiskFailed, Fsync, RecordStore
from l3_shard.strong import StrongCounts, StrongIdentity

WALL_INTERVAL_S = 60.0
"""How often the machine hears what the wall clock shows."""
_TICK_MIN_S, _TICK_MAX_S = 0.001, 1.0


class ShardStopped(KVCommError):
    """The shard ended itself: a broken promise is worse than an absent process."""


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """What a shard is made of."""

    directory: Path
    """Of the records."""
    fsync: Fsync = "always"
    """What a power cut may cost; see ``l3_shard.store``."""
    fsync_interval_s: float = 0.05
    map_bytes_max: int = 1 << 40
    """The record database may grow to this size."""
    limits: ShardLimits = field(default_factory=ShardLimits)
    connect_timeout_s: float = 1.0
    repair: RepairOptions = field(default_factory=RepairOptions)
    validators: Validators = field(default_factory=Validators)
    refill: RefillOptions = field(default_factory=RefillOptions)


@dataclass(frozen=True, slots=True)
class RunningShard:
    """What the composition root registers and exports once the shard is up.  Call all of it in the loop's
    thread."""

    addresses: list[str]
    """Bound data-wire addresses, in the order that was asked for."""
    server: DataServer
    grant_counts: Mapping[str, int]
    """Reservations of blocks asked for since start, by the answer."""
    fsync_seconds: Histogram
    """One observation each time that records were forced to disk."""
    ring: Callable[[], RingMap]
    """The newest map that the shard has taken up; epoch 0 before the first."""
    adopt: Callable[[RingMap], int]
    """Offers a map; the epoch that the shard is at afterwards."""
    counts: Callable[[], ShardCounts]
    repair_counts: Callable[[], RepairCounts]
    strong_counts: Callable[[], StrongCounts]
    refill_counts: Callable[[], RefillCounts]
    scrub_counts: Callable[[], Mapping[Database, ScrubCounts]]
    move_status: Callable[[], ShardMove]
    """How far it is with a transition."""
    damaged_now: Callable[[], int]
    usage: Callable[[], StoreUsage]
    """Of the blocks."""
    story: Callable[[bytes], str]
    record_count: Callable[[], int]
    record_bytes: Callable[[], int]
    disk_full: Callable[[], bool]
    """Whether the last write of records was refused for lack of room."""


async def run_shard(
    *,
    node: str,
    instance: str,
    incarnation: Incarnation,
    credentials: Credentials,
    addresses: Sequence[str],
    options: ShardOptions,
    blocks: BlockStore,
    disk: Depot | None = None,
    stop: asyncio.Event,
    ready: Callable[[RunningShard], None] = lambda shard: None,
    region: Callable[[bytes], str] = no_region,
    dial: Callable[[RingNode], str] = lambda peer: peer.address,
    ring_map: RingMap = NO_RING,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serve records and blocks until ``stop`` is set.

    Args:
        blocks: where the copies are; owned by the caller, ticked here.
        disk: beneath them, if there is one; owned by the caller.
        ready: called once, when the shard can be used.
        region: path of the shared-memory region with a tenant's blocks, or "".
        dial: where to call another shard.
        ring_map: the map to start with, if one is known.

    Raises:
        Refused: an address is in use, or another process owns the directory.
        Unavailable: the directory cannot be used.
        ShardStopped: the disk failed or an invariant broke; the message says which.
    """
    store = await asyncio.to_thread(
        RecordStore, options.directory, fsync=options.fsync, map_bytes_max=options.map_bytes_max
    )
    try:
        strong_store = await asyncio.to_thread(_open_strong, options)
    except BaseException:
        store.close()
        raise
    try:
        machine = Shard(
            node,
            store.replica,
            ring_map,
            node_tenant=credentials.tenant_digest(NODE_TENANT),
            origin_ms=_origin_ms(clock),
            limits=options.limits,
            repair=options.repair,
            notes=store.notes(),
            strong=StrongIdentity(strong_store.replica, incarnation, random.random),
            validators=options.validators,
        )
    except BaseException:
        store.close()
        strong_store.close()
        raise
    identity = Identity(credentials.token(NODE_TENANT), incarnation)
    process = _Process(machine, store, strong_store, blocks, disk, options, identity, dial, stop, clock)
    cluster = credentials.tenant_digest(NODE_TENANT)
    service = BlockService(blocks, clock, region=region, epoch=process.epoch, depot=disk, cluster=cluster)
    server = DataServer(
        ShardService(machine, process.runtime, service, partial(_held, machine, blocks, disk, cluster)),
        node=node,
        role="shard",
        instance=instance,
        incarnation=incarnation,
        credentials=credentials,
    )
    try:
        ready(process.running(await server.start(addresses), server, service.grant_counts))
        await process.tick_until_stopped()
    finally:
        await server.close()
        try:
            await process.close()
        except DiskFailed:
            if not process.reason:
                raise  # else it is the same failure once more, and less than what we know
    if process.reason:
        raise ShardStopped(process.reason)


def _held(
    machine: Shard,
    blocks: BlockStore,
    disk: Depot | None,
    cluster: bytes,
    origin: Origin,
    asked: BlockHoldings,
) -> BlockHeld:
    """Only the cluster's own nodes are told which blocks of all tenants there are."""
    if origin.tenant != cluster:
        raise Refused("only the cluster's own nodes ask for blocks by their owners")
    if asked.epoch > machine.ring.epoch:
        raise Unavailable(f"epoch {asked.epoch} is not known here yet; ask again")
    return held(asked, machine.ring, blocks, disk)


def _open_strong(options: ShardOptions) -> RecordStore:
    """Every write is synced, whatever the policy for the rest: a promise or vote that a power cut takes back
    could undo what a majority has decided."""
    return RecordStore(
        options.directory / "strong", fsync="always", database="strong", map_bytes_max=options.map_bytes_max
    )


class _Process:
    """The parts of a running shard and what goes on beside requests."""

    def __init__(
        self,
        machine: Shard,
        store: RecordStore,
        strong_store: RecordStore,
        blocks: BlockStore,
        disk: Depot | None,
        options: ShardOptions,
        identity: Identity,
        dial: Callable[[RingNode], str],
        stop: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self.reason = ""
        """Why the shard ended itself."""
        self._machine, self._store, self._blocks, self._stop, self._clock = (
            machine,
            store,
            blocks,
            stop,
            clock,
        )
        self._peers = AsyncPeers(identity, connect_timeout_s=options.connect_timeout_s, clock=clock)
        self.runtime = Runtime(
            machine,
            clock=clock,
            peers=self._peers,
            resolve=lambda node: dial(machine.shard(node)),
            perform=self._perform,
            on_stop=self._end,
        )
        self._commits = Commits(store, self.runtime.deliver, self._end, clock)
        self._strong_commits = Commits(strong_store, self.runtime.deliver, self._end, clock)
        self._refilling = Refilling(
            machine.node,
            options.refill,
            blocks,
            disk,
            self._peers,
            ring=lambda: machine.ring,
            resolve=lambda node: dial(machine.ring.shard(node)),
            clock=clock,
        )
        self._tasks = [
            asyncio.create_task(self._follow_wall()),
            asyncio.create_task(self._refill()),
        ]
        self.runtime.deliver(Tick())  # the machine reads its membership and begins to repair
        if options.fsync == "interval":
            self._tasks.append(asyncio.create_task(self._commits.sync_regularly(options.fsync_interval_s)))

    def running(
        self, addresses: list[str], server: DataServer, grant_counts: Mapping[str, int]
    ) -> RunningShard:
        return RunningShard(
            addresses,
            server,
            grant_counts,
            self._commits.fsync_seconds,
            ring=self._ring,
            adopt=self._adopt,
            counts=self._machine.counts,
            repair_counts=self._repair_counts,
            strong_counts=self._machine.strong_counts,
            refill_counts=lambda: self._refilling.counts,
            scrub_counts=self._machine.scrub_counts,
            move_status=self._machine.move_status,
            damaged_now=self._machine.damaged_now,
            usage=self._blocks.usage,
            story=self._machine.story,
            record_count=self._store.record_count,
            record_bytes=self._store.used_bytes,
            disk_full=lambda: self._commits.disk_full or self._strong_commits.disk_full,
        )

    def epoch(self) -> int:
        return self._machine.ring.epoch

    def _repair_counts(self) -> RepairCounts:
        counts = self._machine.repair_counts()
        assert counts is not None, "it was made with repair"
        return counts

    def _ring(self) -> RingMap:
        return self._machine.ring.to_map()

    async def tick_until_stopped(self) -> None:
        """Let the block store do what is due, until the end."""
        while not self._stop.is_set():
            now = self._clock()
            self._blocks.tick(now)
            deadline = self._blocks.deadline()
            delay_s = _TICK_MAX_S if deadline is None else min(_TICK_MAX_S, max(_TICK_MIN_S, deadline - now))
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stop.wait()

    async def close(self) -> None:
        """Finish the commits under way and close the store."""
        self.runtime.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._peers.close()
        try:
            await self._commits.close()
        finally:
            await self._strong_commits.close()

    def _perform(self, effect: Effect) -> None:
        strong = isinstance(effect, Load | Persist | Scan | Audit) and effect.database == "strong"
        (self._strong_commits if strong else self._commits).perform(effect)

    def _end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._stop.set()

    def _adopt(self, ring_map: RingMap) -> int:
        self.runtime.deliver(RingChanged(ring_map))
        self._refilling.ring_changed()
        return self.epoch()

    async def _refill(self) -> None:
        """A bug in it must not stay unheard, nor leave the shard serving with fewer and fewer copies."""
        try:
            await self._refilling.run()
        except Exception as error:
            self._end(f"refilling broke: {error!r}")
            raise

    async def _follow_wall(self) -> None:
        while True:
            await asyncio.sleep(WALL_INTERVAL_S)
            self.runtime.deliver(WallAdjusted(_origin_ms(self._clock)))


class ShardService:
    """A ``kvcomm.serve.Service``: blocks to the block service, everything else to the machine."""

    def __init__(
        self,
        machine: Shard,
        runtime: Runtime,
        blocks: BlockService,
        held: Callable[[Origin, BlockHoldings], BlockHeld],
    ) -> None:
        self._machine, self._runtime, self._blocks, self._held = machine, runtime, blocks, held

    def welcome(self, origin: Origin) -> tuple[str, int]:
        return self._blocks.welcome(origin)

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        self._check_epoch(message)
        return self._blocks.sink(origin, message, payload_bytes)

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        if isinstance(message, BlockHoldings):
            self._check_epoch(message)
            reply(self._held(origin, message))
            return
        if not self._blocks.answers(message):
            self._runtime.received(origin, message, reply)
            return
        if not payload:  # else the sink has looked, and a map that came meanwhile does not undo the transfer
            self._check_epoch(message)
        self._blocks.handle(origin, message, payload, reply)

    def closed(self, connection: ConnectionId) -> None:
        self._blocks.closed(connection)
        self._runtime.disconnected(connection)

    def _check_epoch(self, message: Message) -> None:
        """A caller with an old map learns the new one; one with a newer map than ours is served, blocks are
        immutable."""
        if (
            isinstance(message, BlockGet | BlockPut | BlockLookup | BlockHoldings)
            and message.epoch < self._machine.ring.epoch
        ):
            ring = self._machine.ring
            raise StaleEpoch(
                f"epoch {message.epoch} is over, this is {ring.epoch}", encode_map(ring.to_map())
            )


def _origin_ms(clock: Callable[[], float]) -> int:
    return int((time.time() - clock()) * 1_000)
