"""``attach``: become a client of one pool, by the best way into its memory that there is.

Two kinds of attachment, which end with the control connection or with what they read through:

* :class:`Mapped`: the pool's memory is on this host (``shm``).  Reads are views, pinned by hazard words, and
  writes go into the extents directly.
* :class:`Wired`: a channel (``l2_rdma.transports``).  Reads are copies.  What is written through a channel is
  reserved and published over the control connection that the channel belongs to, so that the pool can fence a
  writer that dies or stops (``Channels.writes_unseen``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES
from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from kvcomm.namespace import TenantDigest
from kvcomm.rpc import Connection, Identity
from kvcomm.tier import BlockCopy, PutStatus
from kvcomm.wire.messages import (
    BlockAbort,
    BlockPublish,
    BlockPublished,
    BlockReserve,
    BlockReserved,
    ChannelAsk,
    ChannelOffers,
    ChannelOpen,
    ChannelOpened,
    Failure,
    Grant,
    Message,
    PinOpen,
    PinRange,
    Want,
)
from l2_rdma.choice import Measured, choose
from l2_rdma.layout import RegionHeader
from l2_rdma.pins import PinTable
from l2_rdma.probing import measure, prove
from l2_rdma.reader import Reader, ReaderCounters
from l2_rdma.region import Region
from l2_rdma.remote import SILENCE_S, RemoteReader
from l2_rdma.transports.port import Channel, Extent, MappedChannel, Operation, Transport, TransportName
from l2_rdma.wires import Wires

ALIVE_INTERVAL_S = 0.02
"""How old the knowledge that the pool lives may be; reads of a dead pool's region stay right, it only
ages."""
MEASURE_S = 0.02
"""What measuring one transport may take, where there is a choice."""

_PUBLISHED: dict[str, PutStatus] = {"published": "stored", "expired": "expired", "corrupt": "corrupt"}
_FAILED: dict[str, PutStatus] = {
    "unavailable": "unavailable",
    "outcome_unknown": "unavailable",
    "too_large": "too_large",
}


def put_failed(reply: Message) -> PutStatus:
    """The status of a copy that got another answer than it should have."""
    return _FAILED.get(reply.code, "refused") if isinstance(reply, Failure) else "refused"


def published_statuses(reply: Message, count: int) -> list[PutStatus]:
    """What became of ``count`` written copies."""
    if isinstance(reply, BlockPublished) and len(reply.statuses) == count:
        return [_PUBLISHED.get(status, "refused") for status in reply.statuses]
    return [put_failed(reply)] * count


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """How a client uses its pools."""

    zero_copy_threshold_bytes: int = 4096
    """Copies at least as large are given as pinned views and written by reference; smaller ones are copied
    out, and put in one message."""
    pin_slots: int = 256
    """Views of one pool that can exist at once before reads fall back to copies."""
    pin_budget_bytes: int | None = None
    """Bytes of one pool that views may pin; by default this client's share, as the pool says."""
    attach_timeout_s: float = 1.0
    """How long an operation waits for a pool to take us in."""
    request_timeout_s: float = 2.0
    """How long a put waits for one reply, and a read for one round."""
    prefault: bool = True
    """Enter a region on this host into the page tables in the background, so that first reads and writes do
    not fault."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """The transports that are not used."""

    unusable: Mapping[str, str]
    """Those that cannot be, and why."""
    unused: Mapping[str, str]
    """Those that could, and why they are not."""


class Mapped:
    """A region of this host, and the connection whose life is the life of our hazard words."""

    transport: TransportName = "shm"

    def __init__(
        self, connection: Connection, region: Region, pins: PinTable, reader: Reader, refused: _Refused
    ) -> None:
        self.region = region
        self.pins = pins
        self.reader = reader
        self.refused = refused
        self.failure: KVCommError | None = None
        self.silent = False
        self.closed = threading.Event()
        self._connection = connection
        self._alive_until = 0.0

    @property
    def counters(self) -> ReaderCounters:
        return self.reader.counters

    def alive(self, now: float) -> bool:
        if now >= self._alive_until:
            if not (self.region.open and self._connection.alive()):
                return False
            self._alive_until = now + ALIVE_INTERVAL_S
        return True

    def close(self) -> None:
        self.closed.set()
        self._connection.close()

    def write(self, grant: Grant, copy: BlockCopy) -> bool:
        """Fill a reserved extent; ``False``: it is not ours, or nothing can be pinned."""
        pin = self.reader.begin_write(grant.offset, grant.generation, copy.copy_bytes)
        if pin is None:
            return False
        try:
            self.reader.write(grant.offset, copy.header.pack(), copy.payload)
        finally:
            self.reader.end_write(pin)
        return True


class Wired:
    """A channel, and the control connection that it lives with."""

    def __init__(
        self,
        connection: Connection,
        opened: _Opened,
        wires: Wires,
        refused: _Refused,
        timeout_s: float,
        clock: Callable[[], float],
        pins: PinTable | None = None,
    ) -> None:
        """``pins``: what is written to is pinned by these; ``None`` = the pool can shut us out."""
        self.transport: TransportName = opened.channel.transport
        self.refused = refused
        self.closed = threading.Event()
        self.wires = wires
        self.reader = RemoteReader(
            opened.channel,
            opened.transport,
            allocate=wires.slabs.take,
            timeout_s=timeout_s,
            clock=clock,
        )
        self._connection = connection
        self._channel = opened.channel
        self._wire = opened.transport
        self._pins = pins
        self._timeout_s = timeout_s
        self._clock = clock
        self._asking = threading.Lock()  # a connection serves one call at a time
        self._failure: KVCommError | None = None
        self._silent = False
        self._alive_until = 0.0

    @property
    def counters(self) -> ReaderCounters:
        return self.reader.counters

    @property
    def failure(self) -> KVCommError | None:
        """Why it should be given up."""
        return self._failure or self.reader.failure

    @property
    def silent(self) -> bool:
        """Whether the pool did not answer in time, instead of being gone."""
        return self._silent or self.reader.silent

    def alive(self, now: float) -> bool:
        if self._channel.broken is not None:
            return False
        if now >= self._alive_until and self._asking.acquire(blocking=False):
            try:
                if not self._connection.alive():
                    return False
            finally:
                self._asking.release()
            self._alive_until = now + ALIVE_INTERVAL_S
        return True

    def close(self) -> None:
        self.closed.set()
        self._channel.close()
        self._hang_up()

    def put(self, copies: Sequence[BlockCopy], deadline: float) -> list[PutStatus]:
        """Reserve, write through the channel, publish.  Blocks until ``deadline`` at most."""
        if self._clock() >= deadline:  # a question that nobody waits for would cost everybody the connection
            return ["unavailable"] * len(copies)
        wants = [Want(copy.key, copy.copy_bytes) for copy in copies]
        reply = self._ask(BlockReserve(wants), deadline)
        if not isinstance(reply, BlockReserved) or len(reply.grants) != len(copies):
            return [put_failed(reply)] * len(copies)
        statuses: list[PutStatus] = [cast("PutStatus", grant.status) for grant in reply.grants]
        written = self._write(reply.grants, copies, deadline)
        unwritten = [
            place
            for place, grant in enumerate(reply.grants)
            if grant.status == "granted" and place not in written
        ]
        for place in unwritten:
            statuses[place] = "unavailable"
        if unwritten and self._channel.broken is None:
            self._ask(BlockAbort([reply.grants[place].token for place in unwritten]), deadline)
        if written:
            told = self._ask(BlockPublish([reply.grants[place].token for place in written]), deadline)
            for place, status in zip(written, published_statuses(told, len(written)), strict=True):
                statuses[place] = status
        return statuses

    def _write(self, grants: Sequence[Grant], copies: Sequence[BlockCopy], deadline: float) -> list[int]:
        """Places of the copies whose bytes are all there."""
        region = self._channel.header
        until, begun = self._until(deadline), self._clock()
        places = [
            place
            for place, (grant, copy) in enumerate(zip(grants, copies, strict=True))
            if grant.status == "granted"
            and region.layout.holds_copy(grant.offset, copy.copy_bytes)
            and region.owns_generation(grant.generation)
        ]
        written: list[int] = []
        while places:
            pinned, places = self._pinned(places, grants, copies)
            if not pinned:
                break
            try:
                written += self._written(list(pinned), grants, copies, until, begun)
            finally:
                self._unpin(pinned)
        return written

    def _pinned(
        self, places: list[int], grants: Sequence[Grant], copies: Sequence[BlockCopy]
    ) -> tuple[dict[int, int], list[int]]:
        """The pins of those that are written next, and the places that come after them.  Where nothing needs
        to be pinned: all."""
        if self._pins is None:
            return dict.fromkeys(places, 0), []
        pinned: dict[int, int] = {}
        for at, place in enumerate(places):
            grant = grants[place]
            number = self._pins.pin(grant.offset, copies[place].copy_bytes)
            if number is None:
                return pinned, places[at:]
            if self._pins.reserved(grant.offset, grant.generation):
                pinned[place] = number
            else:  # it took us so long that somebody else has the slot
                self._pins.unpin(number)
        return pinned, []

    def _unpin(self, pinned: Mapping[int, int]) -> None:
        if self._pins is not None:
            for number in pinned.values():
                self._pins.unpin(number)

    def _written(
        self,
        places: Sequence[int],
        grants: Sequence[Grant],
        copies: Sequence[BlockCopy],
        until: float,
        begun: float,
    ) -> list[int]:
        """Post all, wait for all."""
        writes: dict[int, list[Operation]] = {}
        for place in places:
            grant, copy = grants[place], copies[place]
            header = copy.header.pack()[:GENERATION_OFFSET]  # the generation word is the owner's
            extent = Extent(grant.offset + HEADER_BYTES, copy.payload.nbytes)
            writes[place] = [
                self._channel.write(Extent(grant.offset, GENERATION_OFFSET), header, until),
                self._channel.write(extent, copy.payload.cast("B"), until),
            ]
        self._wire.wait([operation for pair in writes.values() for operation in pair])
        too_short = until - begun < SILENCE_S and self._clock() >= until and self._channel.broken is None
        for error in (operation.error for pair in writes.values() for operation in pair):
            if error is not None and not too_short:  # else it says nothing of the pool
                self._fail(error, begun)
                break
        return [place for place, pair in writes.items() if all(each.error is None for each in pair)]

    def _ask(self, message: Message, deadline: float) -> Message:
        begun, until = self._clock(), self._until(deadline)
        if not self._asking.acquire(timeout=max(0.0, until - begun)):
            return Failure("unavailable", "the connection is taken by other puts")
        try:
            return self._connection.call(message, deadline=until).message
        except KVCommError as error:
            if not self._connection.alive():  # else it is the pool's own word
                self._fail(error, begun)
            return Failure(error.code, error.message)
        finally:
            self._asking.release()
            if self.closed.is_set():
                self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection, unless a call is under way: then it does so when it ends."""
        if self._asking.acquire(blocking=False):
            self._connection.close()
            self._asking.release()

    def _until(self, deadline: float) -> float:
        return min(deadline, self._clock() + self._timeout_s)

    def _fail(self, error: KVCommError, begun: float) -> None:
        self._failure = self._failure or error
        self._silent = self._silent or self._clock() - begun >= SILENCE_S


Attachment = Mapped | Wired


@dataclass(frozen=True, slots=True)
class _Opened:
    transport: Transport
    channel: Channel


class Unusable(Refused):
    """A pool that answers, and none of the transports reaches its memory; ``refused`` says why not."""

    def __init__(self, refused: dict[str, str]) -> None:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        super().__init__(f"no transport reaches the pool's memory: {reasons}")
        self.refused = refused


@dataclass(slots=True)
class _Meeting:
    """One try at attaching."""

    connection: Connection
    offers: ChannelOffers
    header: RegionHeader
    wires: Wires
    options: AttachOptions
    deadline: float
    clock: Callable[[], float]
    refused: dict[str, str] = field(default_factory=dict)
    """Transports of ours that cannot be used, and why."""

    def mapped(self) -> Mapped | None:
        if not self._offered("shm"):
            return None
        try:
            region = Region.attach(self.connection.welcome.region, self.header.tenant)
        except KVCommError as error:
            self.refused["shm"] = error.message
            return None
        if region.header != self.header:
            region.close()
            self.refused["shm"] = f"{region.path} is of another life of the pool, or of another host"
            return None
        pins = self._pin_table(region)
        reader = Reader(region, pins, view_bytes_min=self.options.zero_copy_threshold_bytes)
        others = [name for name in self.wires.names if name != "shm" and self._offered(name)]
        unused = dict.fromkeys(others, "not needed: the pool's memory is mapped")
        return Mapped(self.connection, region, pins, reader, _Refused(self.refused, unused))

    def _pin_table(self, region: Region) -> PinTable:
        reply = self.connection.call(PinOpen(self.options.pin_slots), deadline=self.deadline).message
        given = reply if isinstance(reply, PinRange) else PinRange(0, 0, 0)
        return PinTable(region, given.first, given.count, self.options.pin_budget_bytes)

    def wired(self) -> Wired | None:
        """Through the cheapest of the channels that can be opened."""
        opened: dict[TransportName, _Opened] = {}
        found = self.wires.found()
        # Loading libraries and asking devices may have taken all the time; that is not the pool's fault.
        self.deadline = self.clock() + self.options.attach_timeout_s
        self.refused |= found.refused
        both = [(name, transport) for name, transport in found.running.items() if self._offered(name)]
        for place, (name, transport) in enumerate(both):
            channel = self._open(name, transport, self._share(len(both) - place + 1))
            if channel is not None:
                opened[name] = _Opened(transport, channel)
        used: TransportName | None = None
        unused: Mapping[str, str] = {}
        try:
            used, unused = self._cheapest(opened)
        finally:
            for name, each in opened.items():
                if name != used:
                    each.channel.close()
        if used is None:
            return None
        self.wires.used(used)
        timeout_s = self.options.request_timeout_s
        refused = _Refused(self.refused, unused)
        channel = opened[used].channel
        pins = self._pin_table(channel.file) if isinstance(channel, MappedChannel) else None
        return Wired(self.connection, opened[used], self.wires, refused, timeout_s, self.clock, pins)

    def _offered(self, name: str) -> bool:
        if name not in self.wires.names:
            return False
        if any(offer.transport == name for offer in self.offers.offers):
            return True
        reasons = [each.detail for each in self.offers.refused if each.transport == name]
        why = reasons[0].decode(errors="replace") if reasons else "it does not offer it"
        self.refused[name] = f"the pool: {why}"
        return False

    def _share(self, count: int) -> float:
        """Until when the first of ``count`` may take: whoever hangs leaves time to those that come after."""
        now = self.clock()
        return now + (self.deadline - now) / count

    def _open(self, name: TransportName, transport: Transport, deadline: float) -> Channel | None:
        detail = next(offer.detail for offer in self.offers.offers if offer.transport == name)

        def ask(proposal: bytes) -> bytes:
            reply = self.connection.call(ChannelOpen(name, proposal), deadline=deadline).message
            if not isinstance(reply, ChannelOpened):
                raise Corrupt(f"the pool answers {type(reply).__name__} when a channel is to be opened")
            return reply.answer

        try:
            return transport.connect(detail, self.header, ask, deadline)
        except KVCommError as error:
            self.refused[name] = error.message
            return None

    def _cheapest(
        self, opened: dict[TransportName, _Opened]
    ) -> tuple[TransportName | None, Mapping[str, str]]:
        """One, and why not the others.  A wire can be open and carry nothing: none is kept unread."""
        measured: list[Measured] = []
        for place, (name, each) in enumerate(opened.items()):
            until = self._share(len(opened) - place)
            try:
                if len(opened) == 1:
                    prove(each.transport, each.channel, until)
                    return name, {}
                measured.append(
                    measure(each.transport, each.channel, until, budget_s=MEASURE_S, clock=self.clock)
                )
            except KVCommError as error:
                self.refused[name] = error.message
        working = [each.transport for each in measured]
        choice = choose(measured, {}, [name for name in self.wires.names if name in working])
        return choice.used, choice.reasons


def attach(
    address: str,
    identity: Identity,
    wires: Wires,
    options: AttachOptions,
    clock: Callable[[], float] = time.monotonic,
) -> Attachment:
    """Greet the pool at ``address`` and find the best way into its memory.

    Memory of this host is mapped where ``shm`` is among the transports: nothing is cheaper than no copy.
    Else all channels that can be opened are measured, and the cheapest is kept.

    Raises:
        Unusable: there is no way.
        KVCommError: no pool, no region for our tenant, or not in time.
    """
    deadline = clock() + options.attach_timeout_s
    connection = Connection.open(address, identity, deadline, clock=clock)
    try:
        welcome = connection.welcome
        offers = connection.call(ChannelAsk(), deadline=deadline).message
        if not isinstance(offers, ChannelOffers) or not offers.header:
            raise Refused(f"{address} has no memory that is shared with this tenant")
        header = RegionHeader.unpack(offers.header)
        if header.incarnation != welcome.incarnation or header.tenant != TenantDigest(welcome.tenant):
            raise Unavailable(f"{address} offers the memory of another life or another tenant")
        meeting = _Meeting(connection, offers, header, wires, options, deadline, clock)
        attachment: Attachment | None = meeting.mapped() or meeting.wired()
        if attachment is None:
            raise Unusable(meeting.refused)
        return attachment
    except BaseException:
        connection.close()
        raise
