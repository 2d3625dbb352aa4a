"""``L2Tier``: this host's pool, as the client sees it.

Theory of operation.  The tier holds one connection to the pool.  Its greeting names the region and gets
hazard words; after that, ``lookup`` and ``get`` are memory operations in the caller's thread and ``put`` asks
the pool twice a batch (reserve, publish), writing the bytes itself in between.  A paused pool does not stop
reads.

When the connection ends the pool is gone: the region is dropped (views already handed out keep it mapped; an
attendant thread sees to it that an idle agent does not keep a dead pool's memory), and attaching is tried
again, in a thread of its own, not before a back-off.  Operations wait for the first attempt, no longer than
``attach_timeout_s``, but not for those that follow a failed one: a pool that is paused or gone must not take
the other tiers' time.  Without a pool everything is a miss, or ``unavailable``.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from kvcomm.block import BlockKey, Buffer
from kvcomm.errors import KVCommError, PayloadError, Unavailable
from kvcomm.namespace import TenantDigest
from kvcomm.rpc import Connection, Identity
from kvcomm.steps import Answer, Ask, Emit, Park, Steps, ask_all
from kvcomm.tier import Block, BlockCopy, Presence, PutStatus, TierName
from kvcomm.wire.messages import (
    BlockAbort,
    BlockPublish,
    BlockPublished,
    BlockPut,
    BlockReserve,
    BlockReserved,
    BlockStored,
    Failure,
    Grant,
    Message,
    PinOpen,
    PinRange,
    Want,
)
from l2_rdma.pins import PinTable
from l2_rdma.reader import Reader, ReaderCounters
from l2_rdma.region import Region

BATCH_BYTES = 64 << 20
BATCH_BLOCKS = 1024
"""A put reserves at most so much at a time: one writer does not take the whole pool for itself."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
ALIVE_INTERVAL_S = 0.02
"""How old the knowledge that the pool lives may be; reads of a dead pool's region stay right, it only
ages."""
_PREFAULT_SLICE_BYTES = 2 << 20
_PREFAULT_REST = 9
"""Prefaulting rests so many times as long as it works: 0.1 to 0.4 s of CPU a GiB, at most a tenth of a core
at a time, and never long in the way of somebody else who changes this process's mappings."""
_PREFAULT_REST_MIN_S = 0.002
_ATTEND_INTERVAL_S = 0.5

_PUBLISHED: dict[str, PutStatus] = {"published": "stored", "expired": "expired", "corrupt": "corrupt"}
_FAILED: dict[str, PutStatus] = {
    "unavailable": "unavailable",
    "outcome_unknown": "unavailable",
    "too_large": "too_large",
}


@dataclass(frozen=True, slots=True)
class L2Stats:
    """What the tier has seen since it was made."""

    attached: bool
    region: str
    """Path; empty when not attached."""
    attach_count: int
    lost_count: int
    """Pools whose connection ended while we were attached."""
    pinned_bytes: int
    pinned_count: int
    reads: ReaderCounters


class L2Tier:
    """One pool's ``Tier``.  Thread-safe; a forked child attaches anew.

    Args:
        address: of the pool, ``unix:///path`` (shared memory needs the same host).
        zero_copy_threshold_bytes: copies at least as large are given as pinned views and written by
            reference; smaller ones are copied out, and put in one message.
        pin_slots: views that can exist at once before reads fall back to copies.
        pin_budget_bytes: bytes that views may pin; by default this client's share, as the pool says.
        attach_timeout_s: how long an operation waits for the pool to take us in.
        request_timeout_s: how long a put waits for one reply.
        prefault: enter the region into the page tables in the background, so that first reads and writes do
            not fault.
        clock: monotonic seconds.
    """

    name: TierName = "l2"

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        zero_copy_threshold_bytes: int = 4096,
        pin_slots: int = 256,
        pin_budget_bytes: int | None = None,
        attach_timeout_s: float = 1.0,
        request_timeout_s: float = 2.0,
        prefault: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._identity = identity
        self._threshold_bytes = zero_copy_threshold_bytes
        self._pin_slots = pin_slots
        self._pin_budget_bytes = pin_budget_bytes
        self._attach_timeout_s = attach_timeout_s
        self._request_timeout_s = request_timeout_s
        self._prefault = prefault
        self._clock = clock
        self._closed = False
        self._counters = ReaderCounters()
        self._attach_count = self._lost_count = 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._attachment: _Attachment | None = None
        self._attempt: _Attempt | None = None
        self._retry_at = 0.0
        self._backoff_s = BACKOFF_FIRST_S

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        reader = yield from self._attached()
        if reader is None:
            return [None] * len(keys)
        return list(reader.lookup(keys))

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        reader = yield from self._attached()
        if reader is None:
            return
        for index, key in enumerate(keys):
            block = reader.view(key)
            if block is not None:
                found(index, block)
                del block  # a paused operation must not keep a pin that the caller gave up
                yield Emit(index)

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        """Raises ``PayloadError`` for a payload that is not as long as its header says."""
        for copy in copies:
            if copy.payload.nbytes != copy.header.payload_bytes or not copy.payload.c_contiguous:
                raise PayloadError(f"the payload must be {copy.header.payload_bytes} contiguous bytes")
        reader = yield from self._attached()
        if reader is None:
            return ["unavailable"] * len(copies)
        statuses: dict[int, PutStatus] = {}
        for index, there in enumerate(reader.lookup([copy.key for copy in copies])):
            if there:
                statuses[index] = "present"
        absent = [index for index in range(len(copies)) if index not in statuses]
        for batch in _batches(absent, copies):
            large = [index for index in batch if copies[index].copy_bytes >= self._threshold_bytes]
            left = yield from self._put_by_reference(reader, copies, large, statuses)
            inline = sorted({*batch} - {*large} | {*left})
            if "unavailable" not in statuses.values():
                yield from self._put_inline(copies, inline, statuses)
            if "unavailable" in statuses.values():
                break  # every further request would wait in vain as long as this one
        return [statuses.get(index, "unavailable") for index in range(len(copies))]

    def stats(self) -> L2Stats:
        with self._lock:
            now = self._attachment
            attached = now is not None and now.region.open
            reads = replace(self._counters)
            if now is not None:
                _add(reads, now.reader.counters)
            return L2Stats(
                attached,
                str(now.region.path) if now is not None else "",
                self._attach_count,
                self._lost_count,
                now.pins.pinned_bytes if now is not None else 0,
                now.pins.pinned_count if now is not None else 0,
                reads,
            )

    def close(self) -> None:
        """Leave the pool.  Views stay valid, and pinned, for as long as they live.  Idempotent."""
        with self._lock:
            self._closed = True
            self._drop()

    # -- put -------------------------------------------------------------------------------------------------

    def _put_by_reference(
        self,
        reader: Reader,
        copies: Sequence[BlockCopy],
        indices: Sequence[int],
        statuses: dict[int, PutStatus],
    ) -> Steps[list[int]]:
        """Reserve, write into the extents, publish.  Returns the copies that must go inline instead."""
        if not indices:
            return []
        wants = [Want(copies[index].key, copies[index].copy_bytes) for index in indices]
        reply = yield from self._ask(BlockReserve(wants))
        if not isinstance(reply, BlockReserved):
            statuses.update(dict.fromkeys(indices, _failed(reply)))
            return []
        written: list[tuple[int, int]] = []  # index, token
        unwritten: list[tuple[int, int]] = []
        for index, grant in zip(indices, reply.grants, strict=True):
            if grant.status != "granted":
                statuses[index] = cast("PutStatus", grant.status)
            elif _write(reader, grant, copies[index]):
                written.append((index, grant.token))
            else:
                unwritten.append((index, grant.token))
        if unwritten:
            yield from self._ask(BlockAbort([token for _, token in unwritten]))
        if written:
            reply = yield from self._ask(BlockPublish([token for _, token in written]))
            published = reply.statuses if isinstance(reply, BlockPublished) else []
            for place, (index, _) in enumerate(written):
                statuses[index] = _PUBLISHED[published[place]] if published else _failed(reply)
        return [index for index, _ in unwritten]

    def _put_inline(
        self, copies: Sequence[BlockCopy], indices: Sequence[int], statuses: dict[int, PutStatus]
    ) -> Steps[None]:
        """One message, payloads beside it."""
        if not indices:
            return
        wants = [Want(copies[index].key, copies[index].copy_bytes) for index in indices]
        payload: list[Buffer] = []
        for index in indices:
            payload += [copies[index].header.pack(), copies[index].payload.cast("B")]
        reply = yield from self._ask(BlockPut(0, wants), payload)
        for place, index in enumerate(indices):
            if isinstance(reply, BlockStored):
                statuses[index] = cast("PutStatus", reply.statuses[place])
            else:
                statuses[index] = _failed(reply)

    def _ask(self, message: Message, payload: Sequence[Buffer] = ()) -> Steps[Message]:
        answers: list[Answer] = yield from ask_all(
            [Ask(self._address, message, payload, timeout_s=self._request_timeout_s)]
        )
        return answers[0].message

    # -- attaching -------------------------------------------------------------------------------------------

    def _attached(self) -> Steps[Reader | None]:
        """The reader of the living pool; ``None`` if there is none.  Waits for a first attempt to attach."""
        attachment, attempt = self._current()
        if attachment is None and attempt is not None and attempt.awaited:
            yield Park(attempt, self._attach_timeout_s)
            attachment, _ = self._current(start=False)
        return attachment.reader if attachment is not None else None

    def _current(self, *, start: bool = True) -> tuple[_Attachment | None, _Attempt | None]:
        if self._process != os.getpid():
            self._reset_after_fork()
        with self._lock:
            now = self._clock()
            if self._attachment is not None and not self._attachment.alive(now):
                self._lost_count += 1
                self._drop()
            if self._attachment is None and self._attempt is None and start:
                self._start_attempt(now)
            return self._attachment, self._attempt

    def _start_attempt(self, now: float) -> None:
        if self._closed or now < self._retry_at:
            return
        attempt = self._attempt = _Attempt(awaited=self._backoff_s == BACKOFF_FIRST_S)
        threading.Thread(target=self._attach, args=(attempt,), name="kvcomm-l2-attach", daemon=True).start()

    def _attach(self, attempt: _Attempt) -> None:
        """Runs in a thread of its own."""
        attachment: _Attachment | None = None
        try:
            attachment = _open(
                self._address, self._identity, self._clock() + self._attach_timeout_s, self._clock,
                self._pin_slots, self._pin_budget_bytes, self._threshold_bytes,
            )  # fmt: skip
        except KVCommError:
            pass  # not there (yet), or not for us: a miss until the back-off is over
        finally:
            with self._lock:
                self._attempt = None
                if attachment is None:
                    self._retry_at = self._clock() + self._backoff_s
                    self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
                elif self._closed:
                    attachment.close()
                else:
                    self._attachment, self._backoff_s = attachment, BACKOFF_FIRST_S
                    self._attach_count += 1
                    self._attend(attachment)
            attempt.finish()

    def _attend(self, attachment: _Attachment) -> None:
        rests = _prefault(attachment.region) if self._prefault else itertools.repeat(_ATTEND_INTERVAL_S)
        threading.Thread(
            target=_attend,
            args=(weakref.ref(self), attachment, rests),
            name="kvcomm-l2-attendant",
            daemon=True,
        ).start()

    def _drop(self) -> None:
        if self._attachment is not None:
            _add(self._counters, self._attachment.reader.counters)
            self._attachment.close()
            self._attachment = None

    def holds(self, attachment: _Attachment) -> bool:
        """Whether it is ours and its pool lives; drops it if not.  For the attendant."""
        return self._current(start=False)[0] is attachment

    def _reset_after_fork(self) -> None:
        """The connection, the pins and the threads are the parent's."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._attachment = self._attempt = None
        self._retry_at, self._backoff_s = 0.0, BACKOFF_FIRST_S


class _Attachment:
    """A region and the connection whose life is the life of our hazard words."""

    def __init__(self, connection: Connection, region: Region, pins: PinTable, reader: Reader) -> None:
        self.region = region
        self.pins = pins
        self.reader = reader
        self._connection = connection
        self._alive_until = 0.0
        self.closed = threading.Event()

    def alive(self, now: float) -> bool:
        if now >= self._alive_until:
            if not (self.region.open and self._connection.alive()):
                return False
            self._alive_until = now + ALIVE_INTERVAL_S
        return True

    def close(self) -> None:
        self.closed.set()
        self._connection.close()


class _Attempt:
    """A ``Waiter`` for one try at attaching."""

    def __init__(self, *, awaited: bool) -> None:
        self.awaited = awaited
        """Whether operations wait for it: the one before has not failed."""
        self._lock = threading.Lock()
        self._done = False
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(call)
                return
        call()

    def finish(self) -> None:
        with self._lock:
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call()


def _open(
    address: str,
    identity: Identity,
    deadline: float,
    clock: Callable[[], float],
    pin_slots: int,
    pin_budget_bytes: int | None,
    threshold_bytes: int,
) -> _Attachment:
    """Greet, map, get hazard words.

    Raises:
        KVCommError: no pool, no region for our tenant, or not in time.
    """
    connection = Connection.open(address, identity, deadline, clock=clock)
    try:
        welcome = connection.welcome
        if not welcome.region:
            raise Unavailable(f"{address} has no shared memory for this tenant")
        region = Region.attach(welcome.region, TenantDigest(welcome.tenant))
        if region.header.incarnation != welcome.incarnation:
            raise Unavailable(f"{welcome.region} was made by another life of {welcome.node}")
        reply = connection.call(PinOpen(pin_slots), deadline=deadline).message
        given = reply if isinstance(reply, PinRange) else PinRange(0, 0, 0)
        in_table = given.first >= 0 and given.first + given.count <= region.header.layout.hazard_count
        pins = PinTable(region, given.first, given.count if in_table else 0, pin_budget_bytes)
        return _Attachment(connection, region, pins, Reader(region, pins, view_bytes_min=threshold_bytes))
    except BaseException:
        connection.close()
        raise


def _write(reader: Reader, grant: Grant, copy: BlockCopy) -> bool:
    pin = reader.begin_write(grant.offset, grant.generation, copy.copy_bytes)
    if pin is None:
        return False
    try:
        reader.write(grant.offset, copy.header.pack(), copy.payload)
    finally:
        reader.end_write(pin)
    return True


def _batches(indices: Sequence[int], copies: Sequence[BlockCopy]) -> Iterator[list[int]]:
    batch: list[int] = []
    batch_bytes = 0
    for index in indices:
        if batch and (batch_bytes + copies[index].copy_bytes > BATCH_BYTES or len(batch) >= BATCH_BLOCKS):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(index)
        batch_bytes += copies[index].copy_bytes
    if batch:
        yield batch


def _failed(reply: Message) -> PutStatus:
    return _FAILED.get(reply.code, "refused") if isinstance(reply, Failure) else "refused"


def _add(total: ReaderCounters, more: ReaderCounters) -> None:
    for name in ReaderCounters.__slots__:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def _attend(tier: weakref.ref[L2Tier], attachment: _Attachment, rests: Iterator[float]) -> None:
    """Until the attachment is closed, its pool is gone, or nobody has the tier any more."""
    for rest_s in rests:
        if attachment.closed.wait(rest_s):
            return
        still = tier()
        if still is None:
            attachment.close()
        elif still.holds(attachment):
            del still
            continue
        return


def _prefault(region: Region, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Enter all of the region into this process's page tables, a slice each time after the rest (s) that is
    yielded; the owner may still be adding memory to it.  Never ends."""
    at, end = 0, region.header.layout.slots_end
    while True:
        step = min(at + _PREFAULT_SLICE_BYTES, region.backed_bytes, end)
        rest_s = _ATTEND_INTERVAL_S
        if step > at:
            begun = clock()
            at = step if region.populate(at, step) else end
            rest_s = max(_PREFAULT_REST * (clock() - begun), _PREFAULT_REST_MIN_S)
        yield rest_s
