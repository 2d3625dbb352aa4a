"""The transport of one host: the region's file, mapped.  Operations are done when they are posted.

``L2Tier`` does better than this on its own host: it hands out views (``l2_rdma.reader``).  As a transport
among the others it is what their contract is first held against, and what ``kvcomm doctor`` measures.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvcomm.block import Buffer
from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from l2_rdma.copying import copy_bytes
from l2_rdma.layout import WORD_BYTES, RegionHeader
from l2_rdma.region import Region, host_id
from l2_rdma.transports.port import (
    Ask,
    Extent,
    Operation,
    PlainRegistration,
    TransportName,
    WireOptions,
    check_extent,
    check_read,
    check_word,
    outside,
)


class ShmOffer(msgspec.Struct, frozen=True, array_like=True):
    host: bytes
    """Of whom the file is: a path means something on one host only."""
    path: str


class ShmProvider:
    """Names the file; the kernel does the rest."""

    name: TransportName = "shm"
    writes_unseen = False

    def __init__(self, region: Region) -> None:
        self._region = region

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(ShmOffer(host_id(), str(self._region.path)))

    def open(self, holder: int, tenant: bytes, proposal: bytes) -> bytes:
        raise Refused("shared memory is opened by its path")

    def close_holder(self, holder: int) -> None:
        """A mapping cannot be taken back: its users pin what they write to."""

    def close(self) -> None:
        """The region is its owner's."""


class ShmTransport:
    """Maps regions of this host."""

    name: TransportName = "shm"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._channels: weakref.WeakSet[ShmChannel] = weakref.WeakSet()
        self._opening = threading.Lock()
        self._closed = False

    def register(self, buffer: memoryview) -> PlainRegistration:
        self._require_open()
        return PlainRegistration(buffer)

    def connect(self, offer: bytes, header: RegionHeader, ask: Ask, deadline: float) -> ShmChannel:
        self._require_open()
        try:
            where = msgspec.msgpack.decode(offer, type=ShmOffer)
        except msgspec.DecodeError as error:
            raise Corrupt(f"an offer of shared memory that is none: {error}") from error
        if where.host != host_id():
            raise Refused("the pool is on another host, or in another container with its own /dev/shm")
        region = Region.attach(where.path, header.tenant)
        if region.header != header:
            region.close()
            raise Unavailable(f"{where.path} is of another life of the pool")
        channel = ShmChannel(region, self._clock)
        with self._opening:
            if self._closed:
                channel.close()
            self._channels.add(channel)
        return channel

    def wait(self, operations: Sequence[Operation]) -> None:
        assert all(operation.done for operation in operations), "operations end when they are posted"

    def close(self) -> None:
        with self._opening:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the transport is closed")


class ShmChannel:
    """A mapped region."""

    transport: TransportName = "shm"

    def __init__(self, region: Region, clock: Callable[[], float]) -> None:
        self.header = region.header
        self._region = region
        self._clock = clock
        self._closed = False

    @property
    def broken(self) -> KVCommError | None:
        if self._closed:
            return Unavailable("the channel is closed")
        return None if self._region.open else Unavailable("the pool has closed its region")

    def read(self, extents: Sequence[Extent], into: Sequence[memoryview], deadline: float) -> list[Operation]:
        check_read(extents, into)
        return [
            self._done(extent, deadline, partial(self._load, extent, view))
            for extent, view in zip(extents, into, strict=True)
        ]

    def write(self, extent: Extent, data: Buffer, deadline: float) -> Operation:
        view = memoryview(data)
        check_extent(extent, view.nbytes)
        return self._done(extent, deadline, partial(self._store, extent, view))

    def fetch_add(self, offset: int, amount: int, deadline: float) -> Operation:
        check_word(offset, amount)
        act = partial(self._region.atomics.fetch_add, offset, amount, deadline)
        return self._done(Extent(offset, WORD_BYTES), deadline, act)

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> Operation:
        check_word(offset, expected, desired)
        act = partial(self._region.atomics.compare_swap, offset, expected, desired, deadline)
        return self._done(Extent(offset, WORD_BYTES), deadline, act)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._region.close()

    def _load(self, extent: Extent, view: memoryview) -> int:
        copy_bytes(view, self._region.memory[extent.offset : extent.offset + extent.length])
        return 0

    def _store(self, extent: Extent, view: memoryview) -> int:
        copy_bytes(self._region.memory[extent.offset : extent.offset + extent.length], view)
        return 0

    def _done(self, extent: Extent, deadline: float, act: Callable[[], int]) -> Operation:
        operation = Operation(deadline)
        error = self.broken or outside(self.header, *extent) or self._overdue(deadline)
        if error is not None:
            operation.fail(error)
            return operation
        try:
            operation.complete(act())
        except KVCommError as failure:
            operation.fail(failure)
        return operation

    def _overdue(self, deadline: float) -> KVCommError | None:
        return Unavailable("its time was over before it began") if self._clock() >= deadline else None


def make_transport(options: WireOptions) -> ShmTransport:
    return ShmTransport()


def make_provider(region: Region, options: WireOptions) -> ShmProvider:
    return ShmProvider(region)
