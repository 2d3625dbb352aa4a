"""``TcpTransport``: all channels of this process over TCP, and the loop that drives them."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvcomm.errors import Corrupt, Unavailable
from l2_rdma.layout import RegionHeader
from l2_rdma.transports.poll import PollLoop
from l2_rdma.transports.port import Ask, Operation, PlainRegistration, TransportName
from l2_rdma.transports.tcp.channel import TcpChannel
from l2_rdma.transports.tcp.protocol import (
    GOODBYE,
    HELLO,
    MAGIC,
    WELCOME,
    TcpAnswer,
    TcpOffer,
    TcpProposal,
    goodbye_error,
    reply_head,
)
from l2_rdma.transports.tcp.sockets import bound_receive, tune
from l2_rdma.transports.tcp.stream import Stream

STREAM_COUNT = 1
BLOCK_S = 0.002
"""How long others may have to wait while the replies of the only busy stream are received in one call."""

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_SLEEP_MAX_S = 3600.0  # epoll counts milliseconds in 31 bits
_NEVER = float("inf")


class TcpTransport:
    """Nothing runs while nobody waits: whoever does polls the sockets of all channels."""

    name: TransportName = "tcp"

    def __init__(self, stream_count: int = STREAM_COUNT, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream_count = stream_count
        self._clock = clock
        self._born = _fork_count
        self._loop = PollLoop(self._poll, clock)
        self._epoll = select.epoll()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._alarm, _IN)
        self._polling = threading.Lock()  # held by whoever polls
        self._lock = threading.Lock()  # of all below; the last to be taken
        self._channels: dict[int, tuple[TcpChannel, Stream]] = {}  # by descriptor
        self._busy: set[Stream] = set()
        self._sending: set[Stream] = set()
        self._earliest = _NEVER
        self._wakes_at = -_NEVER  # of the polling thread, if it sleeps
        self._closed = False
        self._over = False  # and nobody polls any more

    def register(self, buffer: memoryview) -> PlainRegistration:
        self._require_open()
        return PlainRegistration(buffer)

    def connect(self, offer: bytes, header: RegionHeader, ask: Ask, deadline: float) -> TcpChannel:
        self._require_open()
        try:
            where = msgspec.msgpack.decode(offer, type=TcpOffer)
            proposal = msgspec.msgpack.encode(TcpProposal(self._stream_count))
            ticket = msgspec.msgpack.decode(ask(proposal), type=TcpAnswer)
            hello = HELLO.pack(MAGIC, ticket.number, ticket.secret)
        except (msgspec.DecodeError, struct.error) as error:
            raise Corrupt(f"an offer of tcp that is none: {error}") from error
        streams: list[Stream] = []
        try:
            for _ in range(self._stream_count):
                streams.append(Stream(self._open(where, hello, header, deadline)))
        except BaseException:
            for stream in streams:
                stream.socket.close()
            raise
        channel = TcpChannel(self, header, streams)
        with self._lock:
            for stream in streams if not self._closed else ():
                self._channels[stream.socket.fileno()] = channel, stream
                self._epoll.register(stream.socket.fileno(), _IN)
        if self._closed:
            channel.close()
        return channel

    def wait(self, operations: Sequence[Operation]) -> None:
        if not self.ours:
            raise ValueError("the transport was made by the process that this one was forked from")
        self._loop.wait(operations)

    def close(self) -> None:
        if not self.ours:
            self._abandon()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = {channel for channel, _ in self._channels.values()}
        for channel in channels:
            channel.close()
        self.wake()
        with self._polling, self._lock:
            self._over = True
            self._epoll.close()
            os.close(self._alarm)

    def _abandon(self) -> None:
        """In a forked child: only the descriptors are its own, and no lock can be trusted."""
        if not self._over:
            self._closed = self._over = True
            for channel, _ in self._channels.values():
                channel.close()
            self._epoll.close()
            os.close(self._alarm)

    @property
    def ours(self) -> bool:
        """Whether this process made it: a forked child has no part in its parent's streams."""
        return self._born == _fork_count

    def now(self) -> float:
        """Monotonic seconds.  Whatever was overdue has ended when this returns."""
        now = self._clock()
        if now >= self._earliest:
            self._expire(now)
        return now

    def expect(self, stream: Stream, deadline: float) -> None:
        """Something is under way."""
        with self._lock:
            self._busy.add(stream)
            self._look_by(deadline)

    def rest(self, stream: Stream) -> None:
        """Nothing is under way any more."""
        with self._lock:
            self._busy.discard(stream)

    def want_to_send(self, stream: Stream, wanted: bool) -> None:
        """Whether the channel is to be told when the socket takes more."""
        if wanted == (stream in self._sending):
            return
        with self._lock:
            self._epoll.modify(stream.socket.fileno(), _IN | _OUT if wanted else _IN)
            if wanted:
                self._sending.add(stream)
            else:
                self._sending.discard(stream)

    def forget(self, stream: Stream) -> None:
        """Close it."""
        with self._lock:
            self._busy.discard(stream)
            self._sending.discard(stream)
            if self._channels.pop(stream.socket.fileno(), None) is not None:
                self._epoll.unregister(stream.socket.fileno())  # closing does not, if a fork has it too
            stream.socket.close()

    def wake(self) -> None:
        """Whoever polls looks at its operations again."""
        with self._lock:
            if not self._over:
                os.eventfd_write(self._alarm, 1)

    def _require_open(self) -> None:
        if self._closed or not self.ours:
            raise ValueError("the transport is closed, or was made by the process this one was forked from")

    def _poll(self, timeout_s: float) -> None:
        with self._polling:
            if self._over:
                return
            now = self._clock()
            with self._lock:
                until = min(now + min(timeout_s, _SLEEP_MAX_S), self._earliest)
                self._wakes_at = until
            events = self._epoll.poll(max(0.0, until - now))
            self._wakes_at = -_NEVER
            block = len(events) == 1 and len(self._busy) == 1
            for descriptor, what in events:
                self._turn(descriptor, what, block)
        self.now()

    def _turn(self, descriptor: int, what: int, block: bool) -> None:
        if descriptor == self._alarm:
            os.eventfd_read(self._alarm)
            return
        channel, stream = self._channels.get(descriptor, (None, None))
        if channel is None or stream is None:
            return  # closed meanwhile
        if what & _OUT:
            channel.send(stream, self._clock())
        if what & ~_OUT:
            channel.receive(stream, block=block)

    def _expire(self, now: float) -> None:
        with self._lock:
            self._earliest = _NEVER
            channels = {channel for channel, stream in self._channels.values() if stream in self._busy}
        earliest = now  # if we are interrupted: nobody else would look again
        try:
            earliest = min((channel.expire(now) for channel in channels), default=_NEVER)
        finally:
            with self._lock:
                self._look_by(earliest)

    def _look_by(self, deadline: float) -> None:
        """Lock held: look for what is overdue then, at the latest."""
        self._earliest = min(self._earliest, deadline)
        if deadline < self._wakes_at:
            os.eventfd_write(self._alarm, 1)

    def _open(self, where: TcpOffer, hello: bytes, header: RegionHeader, deadline: float) -> socket.socket:
        """One stream, greeted and ready."""
        there = f"the pool's port for tcp, {where.host}:{where.port},"
        try:
            connected = socket.create_connection((where.host, where.port), self._left_s(deadline))
        except (OSError, OverflowError, UnicodeError) as error:
            raise Unavailable(f"{there} cannot be reached: {error}") from error
        try:
            self._greet(connected, hello, header, deadline)
        except OSError as error:
            connected.close()
            raise Unavailable(f"{there} does not answer: {error}") from error
        except BaseException:
            connected.close()
            raise
        return connected

    def _greet(self, connected: socket.socket, hello: bytes, header: RegionHeader, deadline: float) -> None:
        tune(connected)
        connected.settimeout(self._left_s(deadline))
        connected.sendall(hello, socket.MSG_NOSIGNAL)
        welcome = self._receive_whole(connected, WELCOME.size, deadline)
        magic, incarnation, region_bytes = WELCOME.unpack(welcome)
        if magic != MAGIC:
            number, status, reason = reply_head(0).unpack(welcome)
            if (number, status) == (0, GOODBYE):
                raise goodbye_error(reason)
            raise Corrupt("what answers on the pool's port does not speak this protocol")
        if (incarnation, region_bytes) != (header.incarnation, header.layout.region_bytes):
            raise Unavailable("another life of the pool answers on its port; ask it for its offers anew")
        bound_receive(connected, BLOCK_S)
        connected.setblocking(True)

    def _receive_whole(self, connected: socket.socket, size: int, deadline: float) -> bytes:
        got = b""
        while len(got) < size:
            connected.settimeout(self._left_s(deadline))
            more = connected.recv(size - len(got))
            if not more:
                raise ConnectionError("it has closed the connection")
            got += more
        return got

    def _left_s(self, deadline: float) -> float:
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise Unavailable("the pool could not be reached in time")
        return left_s


def _count_fork() -> None:
    global _fork_count  # noqa: PLW0603, the process is one
    _fork_count += 1


_fork_count = 0
"""Of this process's ancestors and itself: cheaper to look at than the process's number, and no less sure."""
os.register_at_fork(after_in_child=_count_fork)
