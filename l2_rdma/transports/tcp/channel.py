"""``TcpChannel``: a region over a few streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcomm.block import Buffer
from kvcomm.errors import KVCommError, Unavailable
from l2_rdma.layout import WORD_BYTES, RegionHeader
from l2_rdma.transports.port import (
    Extent,
    Operation,
    TransportName,
    check_extent,
    check_read,
    check_word,
    outside,
)
from l2_rdma.transports.tcp.protocol import ATOMICS, COMPARE_SWAP, FETCH_ADD, READ, WRITE
from l2_rdma.transports.tcp.stream import Stream, TcpOperation, broke

if TYPE_CHECKING:
    from l2_rdma.transports.tcp.transport import TcpTransport

DEPTH_MAX = 1 << 16
"""So many operations may be under way on one stream; more fail."""

_INTERRUPTED = Unavailable("this process was interrupted, and does not know any more what has been sent")


class TcpChannel:
    """Two locks, taken in this order: *receiving*, held while something is received, so that memory is not
    touched by two, nor after its operation was ended; *posting*, held for moments, over the queues."""

    transport: TransportName = "tcp"

    def __init__(self, transport: TcpTransport, header: RegionHeader, streams: Sequence[Stream]) -> None:
        self.header = header
        self.streams = tuple(streams)
        self._transport = transport
        self._receiving = threading.Lock()
        self._posting = threading.Lock()
        self._broken: KVCommError | None = None
        self._over = False  # broken, and everything has failed

    @property
    def broken(self) -> KVCommError | None:
        return self._broken

    def read(self, extents: Sequence[Extent], into: Sequence[memoryview], deadline: float) -> list[Operation]:
        check_read(extents, into)
        operations = [
            TcpOperation(READ, deadline, offset, length, 0, _octets(view))
            for (offset, length), view in zip(extents, into, strict=True)
        ]
        self._post(operations, deadline)
        return list(operations)

    def write(self, extent: Extent, data: Buffer, deadline: float) -> Operation:
        view = memoryview(data)
        check_extent(extent, view.nbytes)
        return self._post_one(WRITE, deadline, extent.offset, extent.length, 0, _octets(view))

    def fetch_add(self, offset: int, amount: int, deadline: float) -> Operation:
        check_word(offset, amount)
        return self._post_one(FETCH_ADD, deadline, offset, amount, 0, None)

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> Operation:
        check_word(offset, expected, desired)
        return self._post_one(COMPARE_SWAP, deadline, offset, expected, desired, None)

    def close(self) -> None:
        self.break_off(Unavailable("the channel is closed"))

    def break_off(self, error: KVCommError) -> None:
        """Everything fails, now and later.  Nothing touches any operation's memory after this.  Idempotent;
        what was interrupted is finished by the next call."""
        if not self._transport.ours:
            self._abandon(error)
            return
        with self._posting:
            if self._over:
                return
            for stream in self.streams:
                stream.hang_up()  # whoever is receiving returns
        with self._receiving, self._posting:
            self._broken = self._broken or error
            for stream in self.streams:
                stream.fail(self._broken)
                self._transport.forget(stream)
            self._over = True
        self._transport.wake()

    def _abandon(self, error: KVCommError) -> None:
        """In a forked child: the sockets are its parent's, and no lock can be trusted."""
        if self._broken is None:
            self._broken = error
            for stream in self.streams:
                stream.socket.close()

    def send(self, stream: Stream, now: float) -> None:
        """The socket takes more."""
        error: KVCommError | None = _INTERRUPTED
        try:
            with self._posting:
                error = self._send(stream, now)
        finally:
            if error is not None:
                self.break_off(error)

    def receive(self, stream: Stream, *, block: bool) -> None:
        """There is something to receive."""
        error: KVCommError | None = _INTERRUPTED
        try:
            with self._receiving:
                error = self._receive(stream, block)
        finally:
            if error is not None:
                self.break_off(error)

    def _receive(self, stream: Stream, block: bool) -> KVCommError | None:
        """Receiving lock held; why the channel is to be broken off, if so."""
        with self._posting:
            if self._broken is not None:
                return None
            expected = stream.first_awaited()
            if not expected:
                return stream.unexpected()
        ended, error = stream.receive(expected, block=block)
        with self._posting:
            stream.finish(ended)
            if stream.idle:
                self._transport.rest(stream)
        return error

    def expire(self, now: float) -> float:
        """End what is overdue; when to look again."""
        with self._receiving, self._posting:
            errors = [stream.expire(now) for stream in self.streams]
            earliest = min(stream.deadline() for stream in self.streams)
        error = next(filter(None, errors), None)
        if error is not None:
            self.break_off(error)
            return float("inf")
        return earliest

    def _post_one(
        self, kind: int, deadline: float, offset: int, first: int, second: int, memory: memoryview | None
    ) -> Operation:
        operation = TcpOperation(kind, deadline, offset, first, second, memory)
        self._post([operation], deadline)
        return operation

    def _post(self, operations: list[TcpOperation], deadline: float) -> None:
        now = self._transport.now() if self._transport.ours else deadline
        error = self._refusal(deadline, now)
        if error is not None:
            for operation in operations:
                operation.end(error)
            return
        fit = self._inside(operations)
        if not fit:
            return
        error = _INTERRUPTED
        try:
            with self._posting:
                errors = [self._put(stream, share, deadline, now) for stream, share in self._shares(fit)]
            error = next(filter(None, errors), None)
        finally:
            if error is not None:
                self.break_off(error)

    def _refusal(self, deadline: float, now: float) -> KVCommError | None:
        if self._broken is not None:
            return self._broken
        if not self._transport.ours:
            return Unavailable("the channel belongs to the process that this one was forked from")
        return Unavailable("its time was over before it began") if deadline <= now else None

    def _inside(self, operations: list[TcpOperation]) -> list[TcpOperation]:
        """Those inside the region; the others end."""
        region_bytes = self.header.layout.region_bytes
        fit = []
        for each in operations:
            length = WORD_BYTES if each.kind in ATOMICS else each.first
            if each.offset + length <= region_bytes:
                fit.append(each)
            else:
                each.end(outside(self.header, each.offset, length))
        return fit

    def _put(
        self, stream: Stream, operations: list[TcpOperation], deadline: float, now: float
    ) -> KVCommError | None:
        """Posting lock held; why the channel is to be broken off, if so."""
        refusal = self._broken
        if stream.depth + len(operations) > DEPTH_MAX:
            refusal = refusal or Unavailable(f"{stream.depth} operations are under way already")
        if refusal is not None:
            for operation in operations:
                operation.end(refusal)
            return None
        stream.put(operations)
        self._transport.expect(stream, deadline)
        return self._send(stream, now)

    def _shares(self, operations: list[TcpOperation]) -> list[tuple[Stream, list[TcpOperation]]]:
        """Which stream carries what: the least loaded one gets the next."""
        if len(self.streams) == 1:
            return [(self.streams[0], operations)]
        loads = {stream: stream.load_bytes for stream in self.streams}
        shares: dict[Stream, list[TcpOperation]] = {}
        for operation in operations:
            stream = min(loads, key=loads.__getitem__)
            loads[stream] += operation.load_bytes
            shares.setdefault(stream, []).append(operation)
        return list(shares.items())

    def _send(self, stream: Stream, now: float) -> KVCommError | None:
        """Posting lock held."""
        if self._broken is not None:
            return None
        try:
            self._transport.want_to_send(stream, not stream.send(now))
        except OSError as error:
            return broke(error)
        return None


def _octets(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
