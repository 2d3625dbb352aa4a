"""``Refilling``: gets back, in the background, the copies of blocks that this shard should have and lacks.

``Round`` decides what to ask; here are the clock, the wire, and the memory.  Copies are received straight
into slots that were free: nothing is evicted for them, and they do not count as used.  A slot is given back
only after its request has ended, so no late byte is received into memory that went to somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from kvcomm.block import BlockKey
from kvcomm.blockstore import ANY_TENANT, BlockStore, Depot
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.steps import Answer, Ask
from kvcomm.wire.frames import discard
from kvcomm.wire.messages import BlockCopies, BlockGet, Grant, Message
from l3_shard.pace import Pace
from l3_shard.refill import WINDOW_BYTES, AskHoldings, Round, Take
from l3_shard.ring import Ring

SETTLE_S = 1.0
"""After a change of the ring: the others hear of it, too."""
RETRY_S = 5.0
"""After a round in which somebody did not answer; twice as long each time, up to the usual interval."""
PAGE_PAUSE_S = 0.02
"""Before each further page of names, for each peer: one page takes a shard 2 to 3 ms, in which it serves
nobody, and all of them may be asking it."""
OPENING_MAX_S = 60.0
"""How long the disk tier may take to know what it holds, until it is not waited for."""
OPENING_LOOK_S = 0.05

_HOLDER = -2
"""No connection has this number."""

Outcome = Literal["stored", "full", "failed"]


@dataclass(slots=True)
class RefillCounts:
    """Since start."""

    blocks: dict[Outcome, int] = field(default_factory=lambda: {"stored": 0, "full": 0, "failed": 0})
    stored_bytes: int = 0
    rounds: dict[str, int] = field(default_factory=lambda: {"complete": 0, "failed": 0})


@dataclass(frozen=True, slots=True)
class RefillOptions:
    """How hard a shard tries to have its blocks."""

    rate_bytes: int = 64 << 20
    """Bytes a second; 0 = it does not try."""
    interval_s: float = 60.0
    """Between rounds when nothing happened."""
    timeout_s: float = 2.0
    """Of one request."""


class Refilling:
    """Run :meth:`run` as a task; :meth:`ring_changed` wakes it up."""

    def __init__(
        self,
        node: str,
        options: RefillOptions,
        blocks: BlockStore,
        disk: Depot | None,
        peers: AsyncPeers,
        *,
        ring: Callable[[], Ring],
        resolve: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self.counts = RefillCounts()
        self._node, self._options, self._blocks, self._disk = node, options, blocks, disk
        self._peers, self._ring, self._resolve, self._clock = peers, ring, resolve, clock
        self._changed = asyncio.Event()
        self._changed.set()  # we have just started
        self._done_epoch = -1

    def ring_changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        if not self._options.rate_bytes:
            return
        retry_s = RETRY_S
        while True:
            if self._changed.is_set():
                self._changed.clear()
                retry_s = RETRY_S
                await asyncio.sleep(SETTLE_S)
            complete = True
            await self._disk_opened()
            if self._due():
                ring = self._ring()
                complete = await self._round(ring)
                self.counts.rounds["complete" if complete else "failed"] += 1
                self._done_epoch = ring.epoch if complete else self._done_epoch
            wait_s = self._options.interval_s if complete else min(retry_s, self._options.interval_s)
            retry_s = RETRY_S if complete else 2 * wait_s
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    def _due(self) -> bool:
        """With one copy of each block only a change of the ring brings a shard what it lacks."""
        ring = self._ring()
        return ring.to_map().block_copies > 1 or ring.epoch != self._done_epoch

    async def _round(self, ring: Ring) -> bool:
        """Whether everybody was asked, by a ring that is still the newest."""
        round_ = Round(self._node, ring, self._lacks)
        pace = Pace(self._options.rate_bytes, WINDOW_BYTES)
        while (order := round_.next()) is not None:
            await asyncio.sleep(self._wait_s(order, pace, ring))  # also lets requests in between, at 0.0
            if self._ring().epoch != ring.epoch:  # the peer may not be in the newest one
                return False
            if isinstance(order, AskHoldings):
                answer = await self._ask(Ask(self._resolve(order.node), order.message))
                round_.listed(answer.message)
                continue
            copies_bytes = await self._take(ring.epoch, order, round_)
            pace.spend(copies_bytes, self._clock())
        return not round_.failed

    def _wait_s(self, order: AskHoldings | Take, pace: Pace, ring: Ring) -> float:
        if isinstance(order, Take):
            return pace.wait_s(self._clock())
        return PAGE_PAUSE_S * (len(ring.names) - 1) if order.message.after else 0.0

    async def _disk_opened(self) -> None:
        """Until then the disk tier names nothing, and all that it has would be got from the others again."""
        if self._disk is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(OPENING_MAX_S):
                while self._disk.usage().state == "opening":
                    await asyncio.sleep(OPENING_LOOK_S)

    def _lacks(self, keys: Sequence[BlockKey]) -> list[bool]:
        present = self._blocks.present(keys, ANY_TENANT)
        if self._disk is not None:
            below = self._disk.present(keys, ANY_TENANT)
            present = [here or there for here, there in zip(present, below, strict=True)]
        return [not here for here in present]

    async def _take(self, epoch: int, take: Take, round_: Round) -> int:
        """Reserve, receive, verify, publish; how many bytes that were."""
        grants = self._blocks.reserve(take.wants, _HOLDER, ANY_TENANT, self._clock(), evict=False)
        full_count = sum(grant.status == "full" for grant in grants)
        self.counts.blocks["full"] += full_count
        slots = [
            _Slot(BlockKey(want.key), want.copy_bytes, grant)
            for want, grant in zip(take.wants, grants, strict=True)
            if grant.status == "granted"
        ]
        if not slots:
            round_.took(full=full_count > 0)
            return 0
        tokens = [slot.grant.token for slot in slots]
        try:
            receiving = _Receiving(self._blocks, slots)
            message = BlockGet(epoch, [slot.key for slot in slots])
            answer = await self._ask(Ask(self._resolve(take.node), message, sink=receiving.sink))
            stored = self._publish(slots, answer.message)
        finally:
            self._blocks.abort(tokens, _HOLDER)  # what was published is not touched by it
        round_.took(failed=not isinstance(answer.message, BlockCopies), full=full_count > 0)
        self.counts.blocks["stored"] += len(stored)
        self.counts.blocks["failed"] += len(slots) - len(stored)
        stored_bytes = sum(slot.copy_bytes for slot in stored)
        self.counts.stored_bytes += stored_bytes
        if self._disk is not None:
            self._disk.stored([slot.key for slot in stored])
        return sum(slot.copy_bytes for slot in slots)

    def _publish(self, slots: list[_Slot], answer: Message) -> list[_Slot]:
        """Those that arrived and verified."""
        if not isinstance(answer, BlockCopies) or len(answer.copy_bytes) != len(slots):
            return []
        arrived = [
            slot for slot, size in zip(slots, answer.copy_bytes, strict=True) if size == slot.copy_bytes
        ]
        tokens = [slot.grant.token for slot in arrived]
        outcomes = self._blocks.publish(tokens, _HOLDER, self._clock(), verify=True)
        return [slot for slot, outcome in zip(arrived, outcomes, strict=True) if outcome == "published"]

    async def _ask(self, ask: Ask) -> Answer:
        request = self._peers.start([ask], self._clock() + self._options.timeout_s)[0]
        try:
            return await request.answer()
        finally:
            self._peers.give_up(request, "given up: this shard is ending")


@dataclass(frozen=True, slots=True)
class _Slot:
    key: BlockKey
    copy_bytes: int
    grant: Grant


class _Receiving:
    """Where the copies of one answer go."""

    def __init__(self, blocks: BlockStore, slots: list[_Slot]) -> None:
        self._blocks, self._slots = blocks, slots

    def sink(self, _request: int, message: Message, payload_bytes: int) -> list[memoryview] | None:
        """Slots for what was asked for, the bin for what has another size."""
        if not isinstance(message, BlockCopies) or len(message.copy_bytes) != len(self._slots):
            return discard(payload_bytes)
        if sum(message.copy_bytes) != payload_bytes or min(message.copy_bytes) < 0:
            return discard(payload_bytes)
        pieces: list[memoryview] = []
        for slot, size in zip(self._slots, message.copy_bytes, strict=True):
            if size == slot.copy_bytes and (extent := self._extent(slot)) is not None:
                pieces.append(extent)
            elif size:
                pieces += discard(size)
        return pieces

    def _extent(self, slot: _Slot) -> memoryview | None:
        try:
            return self._blocks.extent(slot.grant.token)
        except KeyError:
            return None  # the reservation has expired
