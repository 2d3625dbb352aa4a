"""``run_shard``: the role shell of a shard process; the records (``l3_shard.process``), the block store, and
the wire in front of both.

Everything that decides is in ``Shard`` and in the injected ``BlockStore``; here are the timers, and the order
of the end: stop listening, drop the connections, finish the commits, close the stores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvcomm.block import BlockKey, Buffer, Incarnation
from kvcomm.blockservice import BlockService, no_region
from kvcomm.blockstore import BlockStore, Depot, StoreUsage
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import KVCommError, Refused, StaleEpoch, Unavailable
from kvcomm.machine import ConnectionId, Origin
from kvcomm.metrics import Histogram
from kvcomm.runtime import Runtime
from kvcomm.serve import DataServer, ReplyFunction
from kvcomm.wire.messages import (
    BlockFilter,
    BlockFilterGet,
    BlockGet,
    BlockHeld,
    BlockHoldings,
    BlockLookup,
    BlockPut,
    HotRecords,
    HotReport,
    Message,
    RecordGet,
    RingMap,
    RingNode,
    ShardMove,
    SplitReport,
)
from l3_shard.blockkeeping import BlockKeeping
from l3_shard.blockmove import together
from l3_shard.marking import Marking
from l3_shard.peers import WatchView
from l3_shard.presence import Presence
from l3_shard.process import RecordOptions, RecordProcess
from l3_shard.refill import held
from l3_shard.refilling import RefillCounts, RefillOptions
from l3_shard.repair import RepairCounts
from l3_shard.ring import NO_RING, encode_map
from l3_shard.scrub import ScrubCounts
from l3_shard.shard import Shard, ShardCounts
from l3_shard.shedding import ShedCounts
from l3_shard.storage import Database
from l3_shard.store import DiskFailed
from l3_shard.strong import StrongCounts

_TICK_MIN_S, _TICK_MAX_S = 0.001, 1.0
_PAGE_S = 0.01
"""Between two pages of a filter that is being made."""


class ShardStopped(KVCommError):
    """The shard ended itself: a broken promise is worse than an absent process."""


@dataclass(frozen=True, slots=True)
class ShardOptions(RecordOptions):
    """What a shard is made of."""

    refill: RefillOptions = field(default_factory=RefillOptions)
    orphan_s: float = 10.0
    """See ``l3_shard.shedding``."""


@dataclass(frozen=True, slots=True)
class RunningShard:
    """What the composition root registers and exports once the shard is up.  Call all of it in the loop's
    thread."""

    addresses: list[str]
    """Bound data-wire addresses, in the order that was asked for."""
    server: DataServer
    grant_counts: Mapping[str, int]
    """Reservations of blocks asked for since start, by the answer."""
    block_counts: Callable[[], tuple[int, int]]
    """Blocks that clients asked for since start, and those of them that were here."""
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
    shed_counts: Callable[[], ShedCounts]
    move_status: Callable[[], ShardMove]
    """How far the shard is with a transition of the ring, and with what follows it."""
    watch: Callable[[], WatchView]
    """Which of the other shards answer this one, and on which side of a split it is."""
    split: Callable[[], SplitReport | None]
    """What became of the last split that it was in."""
    scrub_counts: Callable[[], Mapping[Database, ScrubCounts]]
    damaged_now: Callable[[], int]
    usage: Callable[[], StoreUsage]
    """Of the blocks."""
    story: Callable[[bytes], str]
    record_count: Callable[[], int]
    record_bytes: Callable[[], int]
    disk_full: Callable[[], bool]
    """Whether the last write of records was refused for lack of room."""
    on_ring: Callable[[Callable[[], None]], None]
    """Have somebody called whenever the shard has taken up another map, from wherever it came."""
    marking: Marking
    """What it knows of hot keys; its report is for the controllers."""


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
    presence: Presence | None = None,
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
        presence: filters over both, told by ``blocks`` of what is published; ``None`` = clients get none.
        ready: called once, when the shard can be used.
        region: path of the shared-memory region with a tenant's blocks, or "".
        dial: where to call another shard.
        ring_map: the map to start with, if one is known.

    Raises:
        Refused: an address is in use, or another process owns the directory.
        Unavailable: the directory cannot be used.
        ShardStopped: the disk failed or an invariant broke; the message says which.
    """
    ending = _Ending(stop)
    records = await RecordProcess.open(
        node,
        ring_map,
        options,
        credentials=credentials,
        incarnation=incarnation,
        resolve=lambda machine, peer: dial(machine.shard(peer)),
        on_stop=ending.end,
        clock=clock,
    )
    marking = Marking(credentials.tenant_digest(NODE_TENANT))
    process = _Process(records, blocks, disk, options, dial, ending, marking, presence)
    machine = records.machine
    cluster = credentials.tenant_digest(NODE_TENANT)
    service = BlockService(blocks, clock, region=region, epoch=records.epoch, depot=disk, cluster=cluster)
    server = DataServer(
        ShardService(
            machine,
            records.runtime,
            service,
            partial(_held, machine, blocks, disk, cluster),
            marking,
            clock,
            process.keeping.shed,
            presence,
        ),
        node=node,
        role="shard",
        instance=instance,
        incarnation=incarnation,
        credentials=credentials,
    )
    try:
        ready(process.running(await server.start(addresses), server, service))
        await process.tick_until_stopped()
        if not ending.reason:  # else nothing is answered any more
            await server.leave()
    finally:
        await server.close()
        try:
            await process.close()
        except DiskFailed:
            if not ending.reason:
                raise  # else it is the same failure once more, and less than what we know
    if ending.reason:
        raise ShardStopped(ending.reason)


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


class _Ending:
    """Why the shard ended itself, if it did."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.stop, self.reason = stop, ""

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.stop.set()


class _Process:
    """The parts of a running shard and what goes on beside requests."""

    def __init__(
        self,
        records: RecordProcess,
        blocks: BlockStore,
        disk: Depot | None,
        options: ShardOptions,
        dial: Callable[[RingNode], str],
        ending: _Ending,
        marking: Marking,
        presence: Presence | None,
    ) -> None:
        self._marking, self._presence = marking, presence
        self._records, self._blocks, self._ending = records, blocks, ending
        self._stop, self._clock = ending.stop, records.clock
        self.keeping = BlockKeeping(
            records,
            blocks,
            disk,
            options.refill,
            orphan_s=options.orphan_s,
            connect_timeout_s=options.connect_timeout_s,
            dial=dial,
            end=ending.end,
        )

    def running(self, addresses: list[str], server: DataServer, service: BlockService) -> RunningShard:
        records, machine = self._records, self._records.machine
        return RunningShard(
            addresses,
            server,
            service.grant_counts,
            lambda: (service.asked_count, service.found_count),
            records.fsync_seconds,
            ring=records.ring,
            adopt=records.adopt,
            counts=machine.counts,
            repair_counts=records.repair_counts,
            strong_counts=machine.strong_counts,
            refill_counts=self.keeping.refill_counts,
            shed_counts=self.keeping.shed_counts,
            move_status=self._move_status,
            watch=machine.watch_view,
            split=machine.split,
            scrub_counts=records.scrub_counts,
            damaged_now=machine.damaged_now,
            usage=self._blocks.usage,
            story=machine.story,
            record_count=records.store.record_count,
            record_bytes=records.store.used_bytes,
            disk_full=lambda: records.disk_full,
            on_ring=records.ring_listeners.append,
            marking=self._marking,
        )

    async def tick_until_stopped(self) -> None:
        """Let the block store do what is due, until the end."""
        while not self._stop.is_set():
            now = self._clock()
            self._blocks.tick(now)
            deadline = self._blocks.deadline()
            delay_s = _TICK_MAX_S if deadline is None else min(_TICK_MAX_S, max(_TICK_MIN_S, deadline - now))
            if self._presence is not None:
                self._presence.tick(now)
                delay_s = min(delay_s, _PAGE_S) if self._presence.busy else delay_s
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stop.wait()

    async def close(self) -> None:
        """Finish the commits under way and close the stores."""
        await self.keeping.close()
        await self._records.close()

    def _move_status(self) -> ShardMove:
        return together(self._records.machine.move_status(), self.keeping.move())


class ShardService:
    """A ``kvcomm.serve.Service``: blocks to the block service, hot keys to the marking, everything else to
    the machine."""

    def __init__(
        self,
        machine: Shard,
        runtime: Runtime,
        blocks: BlockService,
        held: Callable[[Origin, BlockHoldings], BlockHeld],
        marking: Marking,
        clock: Callable[[], float],
        shed: Callable[[Sequence[BlockKey]], Sequence[BlockKey]] = lambda _: (),
        presence: Presence | None = None,
    ) -> None:
        """``shed`` drops those of some blocks that the shard does not keep, and returns them."""
        self._presence = presence
        self._machine, self._runtime, self._blocks, self._held = machine, runtime, blocks, held
        self._marking, self._clock = marking, clock
        self._shed = shed

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
        if isinstance(message, BlockFilterGet):
            self._check_epoch(message)
            layers = self._presence.layers(origin.tenant, self._clock()) if self._presence else []
            reply(BlockFilter(self._machine.ring.epoch, layers))
            return
        if isinstance(message, HotReport | HotRecords):
            reply(self._marking.take(origin, message, self._clock()))
            return
        if isinstance(message, RecordGet):
            reply = self._marking_if_hot(origin, message, reply)
        if not self._blocks.answers(message):
            self._runtime.received(origin, message, reply)
            return
        if isinstance(message, BlockPut) and message.epoch < self._machine.ring.epoch and payload:
            self._put_late(origin, message, payload, reply)
            return
        if not payload:
            self._check_epoch(message)
        self._blocks.handle(origin, message, payload, reply)

    def _put_late(
        self, origin: Origin, message: BlockPut, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        """A newer map came while the copies did, after the sink had looked.  Those that are kept here all the
        same are stored; where some are not the caller does it once more, by the newer map."""
        answers: list[Message] = []
        self._blocks.handle(origin, message, payload, lambda answer, *_: answers.append(answer))
        if self._shed([BlockKey(want.key) for want in message.wants]):
            self._check_epoch(message)
        reply(answers[0])

    def _marking_if_hot(self, origin: Origin, message: RecordGet, reply: ReplyFunction) -> ReplyFunction:
        """Count what is asked for; an answer about hot records is to be marked."""
        marking = self._marking
        marking.asked(origin.tenant, message.keys)
        hot = marking.among(origin.tenant, message.keys, self._clock())
        if not hot:
            return reply

        def mark(
            answer: Message, payload: Sequence[Buffer] = (), left: Callable[[], None] | None = None
        ) -> None:
            reply(marking.marked(answer, hot), payload, left)

        return mark

    def closed(self, connection: ConnectionId) -> None:
        self._blocks.closed(connection)
        self._runtime.disconnected(connection)

    def _check_epoch(self, message: Message) -> None:
        """A caller with an old map learns the new one; one with a newer map than ours is served, blocks are
        immutable."""
        if (
            isinstance(message, BlockGet | BlockPut | BlockLookup | BlockHoldings | BlockFilterGet)
            and message.epoch < self._machine.ring.epoch
        ):
            ring = self._machine.ring
            raise StaleEpoch(
                f"epoch {message.epoch} is over, this is {ring.epoch}", encode_map(ring.to_map())
            )
