"""``Refilling``: gets, in the background, the copies of blocks that this shard should have and lacks.

``Round`` decides what to ask; here are the clock, the wire, and the memory.  Copies are received straight
into slots that were free: nothing is evicted for them, and they do not count as used.  A slot is given back
only after its request has ended, so no late byte is received into memory that went to somebody else.  What
memory has no room for goes to the disk tier, if there is one: what a shard that leaves has on its disk is
more than anybody's memory.

A change of the ring begins a round at once.  Who was not reached, or has not heard of the ring yet, is asked
again soon, and less and less often; who told and gave all that it has is not, until the next interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from kvcomm.block import HEADER_BYTES, BlockKey, verify_copy
from kvcomm.blockstore import ANY_TENANT, BlockStore, Depot
from kvcomm.errors import Corrupt
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.steps import Answer, Ask
from kvcomm.wire.frames import discard
from kvcomm.wire.messages import SUSPECTS_MAX, BlockCopies, BlockGet, BlockSuspect, Grant, Message
from l3_shard.blockmove import Getting
from l3_shard.pace import Pace
from l3_shard.refill import WINDOW_BYTES, WINDOW_KEYS, AskHoldings, Round, Take
from l3_shard.ring import CHANGE_REST_S, Ring

RETRY_S = 0.25
"""After a round in which somebody did not answer; twice as long each time, up to the usual interval, and
never shorter than the round took."""
PAGE_PAUSE_S = 0.02
"""Before each further page of names, for each peer: one page takes a shard up to 3 ms, in which it serves
nobody, and all of them may be asking it."""
OPENING_MAX_S = 60.0
"""How long the disk tier may take to know what it holds, until it is not waited for."""
OPENING_LOOK_S = 0.05
RATE_MIN_BYTES = 4 << 20
"""A second: how slowly copies may arrive until the request is given up.  A block of hundreds of megabytes
needs longer than a request may take, and would be begun again for ever."""

KEEP_TIMEOUT_S = 10.0
"""For the disk tier to write one window of copies."""

_HOLDER = -2
"""No connection has this number."""

assert WINDOW_KEYS <= SUSPECTS_MAX, "one report a window"

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
    """Of one request, beside the time that its bytes may take."""
    limit_s: float = 60.0
    """How long a move of the ring waits for blocks."""


class Refilling:
    """Run :meth:`run` as a task; :meth:`ring_changed` wakes it up.

    Args:
        peers: of its own: replies of megabytes would hold up the small ones behind them.
        arrived: hears of copies that were asked for under a ring that is over.
    """

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
        arrived: Callable[[Sequence[BlockKey]], object] = lambda _: None,
    ) -> None:
        self.counts = RefillCounts()
        self._node, self._options, self._blocks, self._disk = node, options, blocks, disk
        self._peers, self._ring, self._resolve, self._clock = peers, ring, resolve, clock
        self._arrived = arrived
        self._getting = Getting(node, ring(), options.limit_s, clock())
        self._pace = Pace(max(1, options.rate_bytes), WINDOW_BYTES)
        self._round: Round | None = None
        self._changed = asyncio.Event()

    def ring_changed(self) -> None:
        """There may be another one; idempotent."""
        if self._getting.placed(self._ring(), self._clock()):
            self._changed.set()

    def ready(self) -> bool:
        """Whether this shard has the blocks that a transition gives it, as far as it will."""
        return not self._options.rate_bytes or self._getting.ready(self._clock())

    def left(self) -> tuple[int, int]:
        """Blocks and bytes that are still to be got, about; none between rounds."""
        return (0, 0) if self._round is None else self._round.left()

    async def run(self) -> None:
        """Until cancelled."""
        if not self._options.rate_bytes:
            return
        retry_s, again = RETRY_S, False
        while True:
            self._changed.clear()
            began = self._clock()
            complete = True
            await self._disk_opened()
            self._getting.placed(self._ring(), self._clock())
            if again or self._due():
                complete = await self._search(self._getting.told if again else frozenset())
                self.counts.rounds["complete" if complete else "failed"] += 1
            again = not complete
            wait_s = self._options.interval_s
            if again:
                wait_s = min(max(retry_s, self._clock() - began), wait_s)
            retry_s = 2 * retry_s if again else RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            if self._changed.is_set():
                retry_s = RETRY_S
                await asyncio.sleep(CHANGE_REST_S)

    def _due(self) -> bool:
        """With one copy of each block only a change of the ring brings a shard what it lacks."""
        return self._ring().to_map().block_copies > 1 or not self._getting.complete

    async def _search(self, told: frozenset[str] | set[str]) -> bool:
        """One round, by rings that place blocks alike; whether everybody told and gave all that it has."""
        ring = self._ring()
        self._getting.placed(ring, self._clock())
        self._round = round_ = Round(self._node, ring, self._lacks, frozenset(told))
        try:
            while (order := round_.next()) is not None:
                await asyncio.sleep(self._wait_s(order, ring))  # also lets requests in between, at 0.0
                if self._ring().epoch != ring.epoch:
                    was, ring = ring, self._ring()
                    if ring.block_placement != was.block_placement:
                        return False
                    round_.renew(ring)
                    continue
                if isinstance(order, AskHoldings):
                    answer = await self._ask(order.node, order.message)
                    round_.listed(answer.message)
                else:
                    self._pace.spend(await self._take(ring, order, round_), self._clock())
        finally:
            self._round = None
        self._getting.took(ring, round_.told, full=round_.full)
        return not round_.failed

    def _wait_s(self, order: AskHoldings | Take, ring: Ring) -> float:
        if isinstance(order, Take):
            return self._pace.wait_s(self._clock())
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

    async def _take(self, ring: Ring, take: Take, round_: Round) -> int:
        """Make room, receive, verify, publish; how many bytes that were."""
        grants = self._blocks.reserve(take.wants, _HOLDER, ANY_TENANT, self._clock(), evict=False)
        slots = [
            _Slot(BlockKey(want.key), want.copy_bytes, grant)
            for want, grant in zip(take.wants, grants, strict=True)
            if grant.status == "granted" or (self._disk is not None and grant.status in _NO_ROOM_ABOVE)
        ]
        full = self._disk is None and any(grant.status == "full" for grant in grants)
        self.counts.blocks["full"] += sum(grant.status == "full" for grant in grants) if full else 0
        if not slots:
            round_.took(full=full)
            return 0
        size_bytes = sum(slot.copy_bytes for slot in slots)
        try:
            receiving = _Receiving(self._blocks, slots)
            message = BlockGet(ring.epoch, [slot.key for slot in slots])
            answer = await self._ask(take.node, message, receiving, size_bytes)
            arrived = _arrived(slots, answer.message)
            stored = self._publish([slot for slot in arrived if slot.above])
            kept, refused = await self._keep([slot for slot in arrived if not slot.above])
        finally:  # what was published is not touched by it
            self._blocks.abort([slot.grant.token for slot in slots if slot.above], _HOLDER)
        if self._disk is not None:
            self._disk.stored([slot.key for slot in stored])
        stored += kept
        self._count(slots, stored, refused)
        stored_bytes = sum(slot.copy_bytes for slot in stored)
        round_.took(
            count=len(stored),
            copy_bytes=stored_bytes,
            failed=not isinstance(answer.message, BlockCopies),
            full=full or bool(refused),
            short=len(stored) + len(refused) < len(slots),
        )
        if self._ring().epoch != ring.epoch:
            self._arrived([slot.key for slot in stored])
        elif damaged := [slot.key for slot in arrived if slot not in stored and slot not in refused]:
            await self._ask(take.node, BlockSuspect([*damaged]))  # else it would name them for ever
        return size_bytes

    def _count(self, slots: Sequence[_Slot], stored: Sequence[_Slot], refused: Sequence[_Slot]) -> None:
        blocks = self.counts.blocks
        blocks["full"] += len(refused)
        blocks["stored"] += len(stored)
        blocks["failed"] += len(slots) - len(stored) - len(refused)
        self.counts.stored_bytes += sum(slot.copy_bytes for slot in stored)

    def _publish(self, arrived: list[_Slot]) -> list[_Slot]:
        """Those that verified."""
        tokens = [slot.grant.token for slot in arrived]
        outcomes = self._blocks.publish(tokens, _HOLDER, self._clock(), verify=True)
        return [slot for slot, outcome in zip(arrived, outcomes, strict=True) if outcome == "published"]

    async def _keep(self, arrived: list[_Slot]) -> tuple[list[_Slot], list[_Slot]]:
        """To the disk; those that are there now, and those for which it has no room."""
        sound = [slot for slot in arrived if _is_sound(slot)]
        if not sound:
            return [], []
        assert self._disk is not None and all(slot.scratch is not None for slot in sound)
        outcomes: dict[BlockKey, bool] = {}
        over = asyncio.Event()

        def heard(key: BlockKey, kept: bool) -> None:
            outcomes[key] = kept
            if len(outcomes) == len(sound):
                over.set()

        for slot in sound:
            self._disk.keep(slot.key, slot.buffer, partial(heard, slot.key))
        with suppress(TimeoutError):  # a disk that stalls has no room for us
            async with asyncio.timeout(KEEP_TIMEOUT_S):
                await over.wait()
        kept = [slot for slot in sound if outcomes.get(slot.key)]
        return kept, [slot for slot in sound if slot not in kept]

    async def _ask(
        self, node: str, message: Message, receiving: _Receiving | None = None, size_bytes: int = 0
    ) -> Answer:
        ask = Ask(self._resolve(node), message, sink=None if receiving is None else receiving.sink)
        wait_s = self._options.timeout_s + size_bytes / RATE_MIN_BYTES
        request = self._peers.start([ask], self._clock() + wait_s)[0]
        try:
            return await request.answer()
        finally:
            self._peers.give_up(request, "given up: this shard is ending")


_NO_ROOM_ABOVE = ("full", "too_large")


@dataclass(eq=False, slots=True)
class _Slot:
    key: BlockKey
    copy_bytes: int
    grant: Grant
    scratch: memoryview | None = None
    """Where it is received if there is no room above."""

    @property
    def above(self) -> bool:
        return self.grant.status == "granted"

    @property
    def buffer(self) -> memoryview:
        if self.scratch is None:
            self.scratch = memoryview(bytearray(self.copy_bytes))
        return self.scratch


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
        if not slot.above:
            return slot.buffer
        try:
            return self._blocks.extent(slot.grant.token)
        except KeyError:
            return None  # the reservation has expired


def _arrived(slots: Sequence[_Slot], answer: Message) -> list[_Slot]:
    """Those that came with the size that was asked for."""
    if not isinstance(answer, BlockCopies) or len(answer.copy_bytes) != len(slots):
        return []
    return [slot for slot, size in zip(slots, answer.copy_bytes, strict=True) if size == slot.copy_bytes]


def _is_sound(slot: _Slot) -> bool:
    if slot.scratch is None:
        return False  # nothing was received
    try:
        return HEADER_BYTES + verify_copy(slot.scratch, slot.key).payload_bytes == slot.copy_bytes
    except Corrupt:
        return False
