"""``L2Tier``: the pools of the rack, as the client sees them.

Theory of operation.  Every key has one home among the pools that this client can reach (``l2_rdma.rack``); an
operation goes to the homes of its keys, and nowhere else.  What each pool is like is its ``Member``'s affair:

* memory of this host is read as views, in the caller's thread, and written directly;
* memory of another host is read and written through a channel, in a ``Work`` step.  What goes to several such
  pools is posted to all of them before any is waited for, and blocks are handed out in order as they arrive.

Operations wait for the first attempt to attach to a home, no longer than ``attach_timeout_s``, but not for
those that follow a failed one: then its keys have other homes.  A pool that is lost or stops in the middle of
an operation is a miss, or ``unavailable``, for its own keys.  Without any pool everything is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from kvcomm.block import BlockKey, Buffer
from kvcomm.errors import PayloadError, Unavailable
from kvcomm.rpc import Identity
from kvcomm.steps import Answer, Ask, Emit, Park, Steps, Work, ask_all
from kvcomm.tier import Block, BlockCopy, PoolView, Presence, PutStatus, TierName
from kvcomm.wire.messages import (
    BlockAbort,
    BlockPublish,
    BlockPut,
    BlockReserve,
    BlockReserved,
    BlockStored,
    Message,
    Want,
)
from l2_rdma.attachment import (
    Attachment,
    AttachOptions,
    Mapped,
    Wired,
    published_statuses,
    put_failed,
)
from l2_rdma.ledger import Ledger, total
from l2_rdma.member import Member
from l2_rdma.rack import Pool, Rack
from l2_rdma.reader import Reader, ReaderCounters
from l2_rdma.remote import SILENCE_S, Fetch
from l2_rdma.wires import Wires

BATCH_BYTES = 64 << 20
BATCH_BLOCKS = 1024
"""A put reserves at most so much of a pool at a time: one writer does not take it all for itself."""

Statuses = dict[int, PutStatus]


@dataclass(frozen=True, slots=True)
class L2Stats:
    """What the tier has seen since it was made, and how it stands now."""

    attached: bool
    """To any pool."""
    region: str
    """Path of a region of this host; empty when none is attached."""
    attach_count: int
    lost_count: int
    """Pools that were lost while we were attached."""
    pinned_bytes: int
    pinned_count: int
    reads: ReaderCounters
    """Of all pools together."""
    reads_by_transport: Mapping[str, ReaderCounters]
    fallbacks: Mapping[tuple[str, str], int]
    """``(wanted, used)``: how often a pool was attached through another transport than a preferred one."""
    pools: Sequence[PoolView]


@dataclass(slots=True)
class _Route:
    """One pool's share of an operation."""

    member: Member
    attachment: Attachment
    positions: Sequence[int]
    """Of its keys, ascending."""


class L2Tier:
    """A ``Tier`` over the pools of a rack.  Thread-safe; a forked child attaches anew.

    Args:
        pools: the pools that there are now; asked at every operation, so it must be quick, and give the same
            object as long as nothing has changed.
        wires: by default shared memory of this host alone.
        clock: monotonic seconds.
    """

    name: TierName = "l2"

    def __init__(
        self,
        pools: Callable[[], Sequence[Pool]],
        identity: Identity,
        *,
        wires: Wires | None = None,
        options: AttachOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._identity = identity
        self._wires = wires or Wires(("shm",))
        self._options = options or AttachOptions()
        self._clock = clock
        self._ledger = Ledger()
        self._closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._seen: Sequence[Pool] | None = None
        self._members: dict[str, Member] = {}
        self._racked: tuple[Mapping[str, Member], Rack] = ({}, Rack(()))
        """The rack of the live ones of these members."""

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        presences: list[Presence] = [None] * len(keys)
        routes = yield from self._routes(keys)
        wired = [route for route in routes if isinstance(route.attachment, Wired)]
        if wired:
            yield Work(partial(self._look_up_wired, wired, keys, presences))
        for route in routes:
            if isinstance(route.attachment, Mapped):
                reader = route.attachment.reader
                if len(route.positions) == len(keys):
                    return list(reader.lookup(keys))
                told = reader.lookup([keys[position] for position in route.positions])
                for position, there in zip(route.positions, told, strict=True):
                    presences[position] = there
        return presences

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        routes = yield from self._routes(keys)
        run = _Run(keys, routes, self._wires)
        for index, key in enumerate(keys):
            reader = run.reader(index)
            if reader is None and run.must_wait(index):
                yield Work(partial(run.advance, index))
            block = run.take(index) if reader is None else reader.view(key)
            if block is not None:
                found(index, block)
                del block  # a paused operation must not keep a pin that the caller gave up
                yield Emit(index)

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        """Raises ``PayloadError`` for a payload that is not as long as its header says."""
        for copy in copies:
            if copy.payload.nbytes != copy.header.payload_bytes or not copy.payload.c_contiguous:
                raise PayloadError(f"the payload must be {copy.header.payload_bytes} contiguous bytes")
        statuses: Statuses = {}
        for route in (yield from self._routes([copy.key for copy in copies])):
            if route.member.may_put():
                begun = self._clock()
                yield from self._put_to(route, copies, statuses)
                mine = [statuses.get(position, "unavailable") for position in route.positions]
                answered = "unavailable" not in mine
                if answered or self._clock() - begun >= SILENCE_S:
                    route.member.put_answered(answered)
        return [statuses.get(index, "unavailable") for index in range(len(copies))]

    def stats(self) -> L2Stats:
        self._follow()  # pools that nobody has asked for anything yet are pools, too
        members = [member for _, member in sorted(self._members.items())]
        attachments = [each for each in (member.current(start=False)[0] for member in members) if each]
        mapped = [each for each in attachments if isinstance(each, Mapped)]
        reads = self._ledger.reads()
        return L2Stats(
            bool(attachments),
            str(mapped[0].region.path) if mapped else "",
            self._ledger.attach_count,
            self._ledger.lost_count,
            sum(each.pins.pinned_bytes for each in mapped),
            sum(each.pins.pinned_count for each in mapped),
            total(reads.values()),
            reads,
            self._ledger.fallbacks(),
            [member.view() for member in members],
        )

    def close(self) -> None:
        """Leave the pools.  Views stay valid, and pinned, for as long as they live.  Idempotent."""
        self._reset_after_fork()
        with self._lock:
            self._closed = True
        for member in list(self._members.values()):
            member.close()
        self._wires.close()

    # -- homes -----------------------------------------------------------------------------------------------

    def _routes(self, keys: Sequence[BlockKey]) -> Steps[list[_Route]]:
        """The pools that ``keys`` have their homes in, and which keys; what has no home is in none of them.

        Waits for homes that are being attached for the first time, all of them at once: those that cannot be
        are no homes any more, so their keys move on to others.
        """
        self._follow()
        members = self._members
        if len(members) == 1:  # one host: a view costs microseconds, so does finding out where it is
            [member] = members.values()
            attachment, _ = member.current()
            if attachment is not None:
                return [_Route(member, attachment, range(len(keys)))]
        until = self._clock() + self._options.attach_timeout_s
        while True:
            now = {node: member.current() for node, member in members.items()}
            homes = self._live(members).homes(keys)
            waited = [now[home][1] for home in dict.fromkeys(homes) if home is not None and not now[home][0]]
            attempts = [attempt for attempt in waited if attempt is not None and attempt.awaited]
            left_s = until - self._clock()
            if not attempts or left_s <= 0:
                break
            if not (yield Park(attempts[0], left_s)):
                attempts[0].awaited = self._clock() < until  # who comes now need not wait as long
                break
        positions: dict[str, list[int]] = {}
        for position, home in enumerate(homes):
            if home is not None:
                positions.setdefault(home, []).append(position)
        found = [(members[home], now[home][0], mine) for home, mine in positions.items()]
        return [_Route(member, attachment, mine) for member, attachment, mine in found if attachment]

    def _live(self, members: Mapping[str, Member]) -> Rack:
        nodes = [node for node, member in members.items() if member.is_home]
        known, rack = self._racked
        if known is not members or len(nodes) != len(rack.nodes) or set(nodes) != set(rack.nodes):
            rack = Rack((node, members[node].pool.weight) for node in nodes)
            self._racked = members, rack
        return rack

    def _follow(self) -> None:
        """Take note of pools that have joined, left or moved."""
        self._reset_after_fork()
        pools = self._pools()
        if pools is self._seen:
            return
        with self._lock:
            if self._closed:
                return
            before = self._members
            members: dict[str, Member] = {}
            for pool in pools:
                known = before.get(pool.node)
                if known is None or known.pool != pool:
                    known = Member(
                        pool, self._identity, self._wires, self._options, self._ledger, self._clock
                    )
                members[pool.node] = known
            self._members, self._seen = members, pools
        for node, member in before.items():
            if members.get(node) is not member:
                member.close()

    def _reset_after_fork(self) -> None:
        """A thread that the child does not have may hold a lock."""
        if self._process != os.getpid():
            self._lock = threading.Lock()
            self._ledger.reset_after_fork()
            self._process = os.getpid()  # last: from now on other threads take the locks

    # -- reading ---------------------------------------------------------------------------------------------

    def _look_up_wired(
        self, routes: Sequence[_Route], keys: Sequence[BlockKey], presences: list[Presence], deadline: float
    ) -> None:
        """Post to all of them before any is waited for."""
        try:
            with self._wires.using():
                readers = [cast("Wired", route.attachment).reader for route in routes]
                probes = [
                    reader.ask([keys[position] for position in route.positions], deadline)
                    for route, reader in zip(routes, readers, strict=True)
                ]
                for route, reader, probe in zip(routes, readers, probes, strict=True):
                    for position, there in zip(route.positions, reader.told(probe), strict=True):
                        presences[position] = there
        except Unavailable:
            return  # closed meanwhile
        for route in routes:
            route.member.judge(route.attachment)

    # -- put -------------------------------------------------------------------------------------------------

    def _put_to(self, route: _Route, copies: Sequence[BlockCopy], statuses: Statuses) -> Steps[None]:
        """All that has its home in one pool, a batch at a time, until it does not answer."""
        attachment, address = route.attachment, route.member.pool.address
        absent = route.positions
        if isinstance(attachment, Mapped):
            # The index is at hand; through a channel the reservation says it without another round.
            told = attachment.reader.lookup([copies[index].key for index in absent])
            statuses |= {index: "present" for index, there in zip(absent, told, strict=True) if there}
            absent = [index for index in absent if index not in statuses]
        mine: Statuses = {}
        for batch in _batches(absent, copies):
            limit = self._options.zero_copy_threshold_bytes
            large = [index for index in batch if copies[index].copy_bytes >= limit]
            left: list[int] = []
            if isinstance(attachment, Mapped):
                left = yield from self._put_by_reference(attachment, address, copies, large, mine)
            elif large:
                yield Work(partial(self._put_wired, route, copies, large, mine))
            inline = sorted({*batch} - {*large} | {*left})
            if "unavailable" not in mine.values():
                yield from self._put_inline(address, copies, inline, mine)
            if "unavailable" in mine.values():
                break  # every further request would wait in vain as long as this one
        statuses |= mine

    def _put_by_reference(
        self,
        attachment: Mapped,
        address: str,
        copies: Sequence[BlockCopy],
        indices: Sequence[int],
        statuses: Statuses,
    ) -> Steps[list[int]]:
        """Reserve, write into the extents, publish.  Returns the copies that must go inline instead."""
        if not indices:
            return []
        wants = [Want(copies[index].key, copies[index].copy_bytes) for index in indices]
        reply = yield from self._ask(address, BlockReserve(wants))
        if not isinstance(reply, BlockReserved) or len(reply.grants) != len(indices):
            statuses.update(dict.fromkeys(indices, put_failed(reply)))
            return []
        written: list[tuple[int, int]] = []  # index, token
        unwritten: list[tuple[int, int]] = []
        for index, grant in zip(indices, reply.grants, strict=True):
            if grant.status != "granted":
                statuses[index] = cast("PutStatus", grant.status)
            elif attachment.write(grant, copies[index]):
                written.append((index, grant.token))
            else:
                unwritten.append((index, grant.token))
        if unwritten:
            yield from self._ask(address, BlockAbort([token for _, token in unwritten]))
        if written:
            reply = yield from self._ask(address, BlockPublish([token for _, token in written]))
            told = published_statuses(reply, len(written))
            statuses |= {index: status for (index, _), status in zip(written, told, strict=True)}
        return [index for index, _ in unwritten]

    def _put_wired(
        self,
        route: _Route,
        copies: Sequence[BlockCopy],
        indices: Sequence[int],
        statuses: Statuses,
        deadline: float,
    ) -> None:
        assert isinstance(route.attachment, Wired)
        try:
            with self._wires.using():
                told = route.attachment.put([copies[index] for index in indices], deadline)
        except Unavailable:
            told = ["unavailable"] * len(indices)  # closed meanwhile
        statuses |= dict(zip(indices, told, strict=True))
        route.member.judge(route.attachment)

    def _put_inline(
        self, address: str, copies: Sequence[BlockCopy], indices: Sequence[int], statuses: Statuses
    ) -> Steps[None]:
        """One message, payloads beside it."""
        if not indices:
            return
        wants = [Want(copies[index].key, copies[index].copy_bytes) for index in indices]
        payload: list[Buffer] = []
        for index in indices:
            payload += [copies[index].header.pack(), copies[index].payload.cast("B")]
        reply = yield from self._ask(address, BlockPut(0, wants), payload)
        if isinstance(reply, BlockStored) and len(reply.statuses) == len(indices):
            told = [cast("PutStatus", status) for status in reply.statuses]
        else:
            told = [put_failed(reply)] * len(indices)
        statuses |= dict(zip(indices, told, strict=True))

    def _ask(self, address: str, message: Message, payload: Sequence[Buffer] = ()) -> Steps[Message]:
        answers: list[Answer] = yield from ask_all(
            [Ask(address, message, payload, timeout_s=self._options.request_timeout_s)]
        )
        return answers[0].message


class _Run:
    """The blocks of one get, on their way from several pools."""

    def __init__(self, keys: Sequence[BlockKey], routes: Sequence[_Route], wires: Wires) -> None:
        self._wires = wires
        self._readers: dict[int, Reader] = {}  # by position, of what is in this host's memory
        self._fetches: dict[int, tuple[Fetch, int]] = {}  # of the rest: what brings it, its place there
        self._under_way: list[tuple[_Route, Fetch]] = []
        self._only: Reader | None = None
        """Of all positions."""
        for route in routes:
            if isinstance(route.attachment, Wired):
                fetch = route.attachment.reader.fetch([keys[position] for position in route.positions])
                self._under_way.append((route, fetch))
                self._fetches |= {position: (fetch, at) for at, position in enumerate(route.positions)}
            elif len(route.positions) == len(keys):
                self._only = route.attachment.reader
            else:
                self._readers |= dict.fromkeys(route.positions, route.attachment.reader)

    def reader(self, position: int) -> Reader | None:
        """Whose view it is, if it is one."""
        return self._only or self._readers.get(position)

    def must_wait(self, position: int) -> bool:
        if position not in self._fetches:
            return False
        fetch, place = self._fetches[position]
        return not fetch.done(place)

    def advance(self, position: int, deadline: float) -> None:
        """Keep all pools busy until one block is there."""
        fetch, place = self._fetches[position]
        try:
            with self._wires.using():
                for _, each in self._under_way:
                    each.pump(deadline)
                fetch.advance(place, deadline)
                for _, each in self._under_way:
                    each.waited_with(fetch)
        except Unavailable:
            fetch.give_up()  # closed meanwhile
        for route, _ in self._under_way:
            route.member.judge(route.attachment)

    def take(self, position: int) -> Block | None:
        """What came through a channel; ``None``: nothing, or it has no home."""
        if position not in self._fetches:
            return None
        fetch, place = self._fetches[position]
        return fetch.take(place)


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
