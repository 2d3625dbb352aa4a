"""Our transports as operations to time: a channel into the region of a pool of another process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from bench.peers.memory import Buffers
from bench.pool import Pool, identity
from bench.service import DEADLINE_S
from bench.timing import Call, round_robin
from kvcomm.block import HEADER_BYTES, BlockKey
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.namespace import TenantDigest
from kvcomm.rpc import Connection
from kvcomm.slabs import Slabs
from kvcomm.wire.messages import ChannelAsk, ChannelOffers, ChannelOpen, ChannelOpened, PinOpen, PinRange
from l2_rdma.index import IndexReader
from l2_rdma.layout import RegionHeader
from l2_rdma.pins import PinTable
from l2_rdma.reader import Reader
from l2_rdma.region import Region
from l2_rdma.remote import RemoteReader
from l2_rdma.transports.cuda.gpu import DeviceBuffer
from l2_rdma.transports.cuda.transport import CudaTransport
from l2_rdma.transports.known import find_transports
from l2_rdma.transports.port import Channel, Extent, Transport, WireOptions

PIN_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Reads:
    """A channel, and who drives it."""

    transport: Transport
    channel: Channel

    def of(self, name: str, extents: Sequence[Extent], items: int = 1) -> Call:
        """Post reads of ``items`` extents, wait for all of them, go on to the next ones; the time is for one.

        They land in memory that is there already and that the wire knows, as for every peer.
        """
        into = [memoryview(buffer) for buffer in Buffers(items, extents[0].length).all]
        known = [self.transport.register(view) for view in into]
        return self._into(name, extents, items, into, known)

    def to_gpu(self, name: str, extents: Sequence[Extent], items: int = 1) -> Call:
        """The same over ``cuda``, into memory of this process's GPU."""
        assert isinstance(self.transport, CudaTransport)
        gpu, size = self.transport.gpu, extents[0].length
        into = [DeviceBuffer(gpu.allocate(size), size) for _ in range(items)]
        return self._into(name, extents, items, into, None)

    def _into(
        self, name: str, extents: Sequence[Extent], items: int, into: Sequence[Any], known: object
    ) -> Call:
        turn = cycle(extents)
        runs = [[next(turn) for _ in range(items)] for _ in extents]

        def read(run: Sequence[Extent], _keep: object = known) -> None:
            operations = self.channel.read(run, into, time.monotonic() + DEADLINE_S)
            self.transport.wait(operations)
            for operation in operations:
                if operation.error is not None:
                    raise operation.error

        return Call(name, round_robin(read, runs), items=items)

    def blocks(self, name: str, keys: Sequence[BlockKey], items: int = 1) -> Call:
        """Get runs of ``items`` blocks by their keys, found in the index and verified, as a client does from
        a pool that is not its host's; the time is for one."""
        slabs = Slabs()
        slabs.register_with(self.transport.name, self.transport.register)
        reader = RemoteReader(self.channel, self.transport, allocate=slabs.take)
        turn = cycle(keys)
        runs = [[next(turn) for _ in range(items)] for _ in keys]

        def get(run: Sequence[BlockKey]) -> None:
            found: list[int] = []
            reader.get(run, lambda index, _: found.append(index), time.monotonic() + DEADLINE_S)
            if len(found) < len(run):
                raise RuntimeError(f"the pool lost a block that was to be fetched: {reader.failure}")

        return Call(name, round_robin(get, runs), items=items)


@contextmanager
def channel(pool: Pool, name: str) -> Iterator[Reads | str]:
    """A channel to ``pool`` over the transport ``name``, or the reason why there is none."""
    found = find_transports([name], WireOptions())
    for transport in found.running.values():
        connection = Connection.open(pool.address, identity(), time.monotonic() + DEADLINE_S)
        try:
            try:
                opened = _opened(connection, transport)
            except KVCommError as error:
                yield error.message
                return
            yield Reads(transport, opened)
            opened.close()
        finally:
            transport.close()
            connection.close()
        return
    yield next(iter(found.refused.values()))


def _opened(connection: Connection, transport: Transport) -> Channel:
    deadline = time.monotonic() + DEADLINE_S
    offers = connection.call(ChannelAsk(), deadline=deadline).message
    assert isinstance(offers, ChannelOffers)
    for refused in offers.refused:
        if refused.transport == transport.name:
            raise Unavailable(refused.detail.decode())
    detail = next((each.detail for each in offers.offers if each.transport == transport.name), None)
    if detail is None:
        raise Unavailable(f"the pool does not offer {transport.name}")

    def ask(proposal: bytes) -> bytes:
        opened = connection.call(ChannelOpen(transport.name, proposal), deadline=deadline).message
        if not isinstance(opened, ChannelOpened):
            raise Unavailable(f"the pool opened no channel: {opened}")
        return opened.answer

    return transport.connect(detail, RegionHeader.unpack(offers.header), ask, deadline)


@dataclass(frozen=True, slots=True)
class Mapped:
    """The pool's region in our own memory: where blocks lie, and views of them."""

    index: IndexReader
    reader: Reader

    def payloads(self, keys: Sequence[BlockKey]) -> list[Extent]:
        """Where the payloads are.  Raises ``RuntimeError`` if a block is not there."""
        hints = [self.index.probe(key) for key in keys]
        if None in hints:
            raise RuntimeError("the pool lost a block that was to be read")
        return [Extent(hint.offset + HEADER_BYTES, hint.copy_bytes - HEADER_BYTES) for hint in hints if hint]

    def views(self, name: str, keys: Sequence[BlockKey]) -> Call:
        """A pinned and verified view, no copy."""

        def view(key: BlockKey) -> None:
            if self.reader.view(key) is None:
                raise RuntimeError("the pool lost a block that was to be viewed")

        return Call(name, round_robin(view, keys))


@contextmanager
def mapped(pool: Pool, *, on_gpu: bool = False) -> Iterator[Mapped]:
    """Attach the region, with hazard words for views (of which there are none where its slots are
    ``on_gpu``)."""
    deadline = time.monotonic() + DEADLINE_S
    connection = Connection.open(pool.address, identity(), deadline)
    try:
        pins = connection.call(PinOpen(slots=PIN_SLOTS), deadline=deadline).message
        assert isinstance(pins, PinRange)
        tenant = TenantDigest(connection.welcome.tenant)
        region = Region.attach(connection.welcome.region, tenant, device_slots=on_gpu)
        reader = Reader(region, PinTable(region, pins.first, pins.count))
        yield Mapped(IndexReader(region.memory, region.header.layout), reader)
    finally:
        connection.close()
