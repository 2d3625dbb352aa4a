"""``Wired``: both sides of the ``tcp`` wire over a small region, and sockets that misbehave."""

from __future__ import annotations

import socket
import time
from functools import partial
from pathlib import Path

import msgspec

from kvcomm.block import Incarnation
from l2_rdma.layout import plan_layout
from l2_rdma.region import Region
from l2_rdma.transports.port import Extent, Operation
from l2_rdma.transports.tcp.channel import TcpChannel
from l2_rdma.transports.tcp.protocol import HELLO, MAGIC, WELCOME, TcpAnswer, TcpOffer, TcpProposal
from l2_rdma.transports.tcp.provider import TcpProvider
from l2_rdma.transports.tcp.transport import TcpTransport
from tests.l2_rdma.regions import TENANT

HOLDER = 7
PATIENCE_S = 10.0
SLAB_BYTES = 1 << 20


def soon(within_s: float = PATIENCE_S) -> float:
    return time.monotonic() + within_s


class Wired:
    """A provider, and a transport whose channels it serves for ``HOLDER``."""

    def __init__(self, directory: Path, *, slab_count: int = 8, stream_count: int = 1) -> None:
        self.region = Region.create(
            directory,
            instance="tests",
            node="pool-0",
            tenant=TENANT,
            incarnation=Incarnation(5),
            layout=plan_layout((slab_count + 1) * SLAB_BYTES, slab_bytes=SLAB_BYTES, hazard_count=64),
        )
        self.region.back(1 << 40)
        self.header = self.region.header
        self.slots = self.header.layout.slots_offset
        self.provider = TcpProvider(self.region, "127.0.0.1")
        self.transport = TcpTransport(stream_count)
        self._strangers: list[socket.socket] = []

    @property
    def port(self) -> int:
        return msgspec.msgpack.decode(self.provider.offer(), type=TcpOffer).port

    def ticket(self, holder: int = HOLDER, streams: int = 1) -> TcpAnswer:
        proposal = msgspec.msgpack.encode(TcpProposal(streams))
        return msgspec.msgpack.decode(self.provider.open(holder, TENANT, proposal), type=TcpAnswer)

    def connect(self, holder: int = HOLDER) -> TcpChannel:
        ask = partial(self.provider.open, holder, TENANT)
        return self.transport.connect(self.provider.offer(), self.header, ask, soon())

    def stranger(self) -> socket.socket:
        """A plain connection to the provider."""
        self._strangers.append(socket.create_connection(("127.0.0.1", self.port), PATIENCE_S))
        return self._strangers[-1]

    def friend(self, holder: int = HOLDER) -> socket.socket:
        """One that has shown a ticket and got its welcome."""
        ticket = self.ticket(holder)
        friend = self.stranger()
        friend.sendall(HELLO.pack(MAGIC, ticket.number, ticket.secret))
        assert friend.recv(WELCOME.size, socket.MSG_WAITALL).startswith(MAGIC)
        return friend

    def finish(self, *operations: Operation) -> None:
        """All are done, and well."""
        self.transport.wait(operations)
        assert [each.error for each in operations] == [None] * len(operations)

    def fetch(self, channel: TcpChannel, offset: int, length: int) -> bytes:
        into = bytearray(length)
        self.finish(*channel.read([Extent(offset, length)], [memoryview(into)], soon()))
        return bytes(into)

    def close(self) -> None:
        for stranger in self._strangers:
            stranger.close()
        self.transport.close()
        self.provider.close()
        self.region.close()
