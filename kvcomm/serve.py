"""``DataServer``: the server's side of the data wire, on an event loop.

Theory of operation.  Every accepted connection first says ``Hello``: protocol, credential and key vector are
checked, and only then its messages reach the :class:`Service`, under an :class:`Origin` whose tenant the
server derived.  Bounds before trust: until ``Hello`` was accepted a peer may send a few KiB within a few
seconds.  After that a connection is read only while its unanswered requests and its unsent bytes are below
their bounds (one read, 64 KiB of requests, may overshoot them).  A request's number is its own until it is
answered: services go by it, so a second request with the same number ends the connection before they see it.
What one peer does wrong closes its own connection and nothing else.

A server that stops in order (:meth:`DataServer.leave`) answers what it has begun and refuses the rest; then
it says ``Goodbye``, and takes in what still comes, unread, until the peer has hung up.  A connection that is
closed with requests on their way leaves every write among them in doubt.

A request whose deadline has passed before it could be looked at (this process stood still, the network held
it back) is refused as ``unavailable``, and nothing of it is done: its sender waits no longer.  Not so if it
brought a payload, which only blocks do: those are immutable, and their room has been given away already.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from kvcomm.block import Buffer, Incarnation
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import Corrupt, KVCommError, Refused, TooLarge, Unavailable
from kvcomm.machine import ConnectionId, Origin
from kvcomm.metrics import Histogram
from kvcomm.rpc import droptable
from kvcomm.rpc.droptable import Gate, Peer
from kvcomm.rpc.session import KEY_VECTOR
from kvcomm.rpc.sockets import listen, tune
from kvcomm.rpc.stream import STALL_S, FrameStream
from kvcomm.wire.address import Address, parse_address
from kvcomm.wire.deadlines import overdue_s, stamp_of
from kvcomm.wire.frames import (
    HELLO_NUMBER,
    KNOWS_STAMPS,
    MESSAGE_BYTES_MAX,
    Frame,
    FrameReader,
    discard,
    encode_frame,
)
from kvcomm.wire.messages import (
    PROTOCOL_VERSION,
    BlockGet,
    BlockLookup,
    BlockPut,
    BlockReserve,
    Done,
    DropOrder,
    Failure,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    RecordGet,
    RecordPut,
    RecordScan,
    StrongChange,
    StrongRead,
    Welcome,
)
from kvcomm.wire.outbox import HIGH_WATER_BYTES, Outbox

T = TypeVar("T")


class ReplyFunction(Protocol):
    """Answers one request, once."""

    def __call__(
        self, message: Message, payload: Sequence[Buffer] = (), left: Callable[[], None] | None = None, /
    ) -> None:
        """``left`` is called once: when the payload's bytes have left, or when the connection died before;
        until then they must not change."""
        ...


CLIENT_MESSAGES = frozenset(
    {
        BlockLookup, BlockGet, BlockPut, BlockReserve, RecordGet, RecordPut, RecordScan, StrongRead,
        StrongChange,
    }
)  # fmt: skip
"""What clients ask for; everything else is housekeeping, or spoken among nodes."""
HELLO_BYTES_MAX = 4096
UNPLACED_BYTES_MAX = 16 << 20
"""Largest payload that is received into a fresh buffer, when the service names no destination."""

LEAVE_S = 2.0
"""What is under way when a server stops in order has so long to be answered."""
HANG_UP_S = 0.1
"""Who was told goodbye has so long to hang up; the owner of an idle connection may not be looking."""

_ACCEPTS_MAX = 64
_ACCEPT_PAUSE_S = 0.5
_STOPPING = "this node is stopping, nothing was done; ask another one"
_connection_ids = itertools.count(1)
_log = logging.getLogger(__name__)


class Service(Protocol):
    """What a server does with messages.  All calls come from the event loop's thread."""

    def welcome(self, origin: Origin) -> tuple[str, int]:
        """A caller was accepted.  (path of the region with its blocks or "", ring epoch)."""
        ...

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        """Where the payload of a request is received; ``None`` = a fresh buffer.

        A ``KVCommError`` that it raises is the reply; the payload is thrown away and ``handle`` is not
        called.
        """
        ...

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        """A whole request is here.  Call ``reply`` once, now or later, or raise a ``KVCommError`` that is the
        reply."""
        ...

    def closed(self, connection: ConnectionId) -> None:
        """The connection ended.  Called once for every connection that was welcomed; nothing is received for
        it any more."""
        ...


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on uvloop where it is installed: a small request costs a quarter less on a unix
    socket."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class DataServer:
    """Serves one :class:`Service` at any number of addresses."""

    def __init__(
        self,
        service: Service,
        *,
        node: str,
        role: str,
        instance: str,
        incarnation: Incarnation,
        credentials: Credentials,
        connections_max: int = 4096,
        outstanding_max: int = 256,
        payload_bytes_max: int = 1 << 30,
        hello_timeout_s: float = 5.0,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            connections_max: further connections are closed at once.
            outstanding_max: unanswered requests of one connection; at the bound it is not read.
            payload_bytes_max: a frame that announces more ends its connection.
            stall_s: a peer that does not take its replies for so long, or leaves a payload unfinished for one
            to two times
                as long, is disconnected.
        """
        self.service = service
        self.node = node
        self.role = role
        self.instance = instance
        self.incarnation = incarnation
        self.credentials = credentials
        self.outstanding_max = outstanding_max
        self.payload_bytes_max = payload_bytes_max
        self.hello_timeout_s = hello_timeout_s
        self.stall_s = stall_s
        self.clock = clock
        self.overdue_count = 0
        """Requests refused since start because their time was over."""
        self._connections_max = connections_max
        self._connections: dict[ConnectionId, _Accepted] = {}
        self._listening: dict[socket.socket, tuple[Address, int]] = {}
        self._changed = asyncio.Event()
        """A connection has ended, or its goodbye has left."""
        self.client_seconds = Histogram()
        """Of requests of clients: from their arrival, or their payload's beginning, to the answer."""
        self.request_counts: dict[type[Message], int] = {}
        """Requests received since start, by message; a plain dictionary, taken over when somebody looks."""

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    async def start(self, addresses: Sequence[str]) -> list[str]:
        """Listen at every address (``tcp://127.0.0.1:0``, ``unix:///path.sock``); the bound addresses in the
        same order.

        Raises:
            Refused: an address is in use or cannot be bound; then none is listened on.
            ConfigError: not an address.
        """
        bound: list[str] = []
        try:
            for address in map(parse_address, addresses):
                listening, at = listen(address)
                self._listening[listening] = (at, os.stat(at.path).st_ino if at.path else 0)
                asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)
                bound.append(str(at))
        except BaseException:
            await self.close()
            raise
        return bound

    async def leave(self, limit_s: float = LEAVE_S) -> None:
        """Stop in order, for at most ``limit_s`` and ``HANG_UP_S``: nothing new is begun, what is under way
        is answered, and every peer learns that the rest was not done.  Ends like :meth:`close`."""
        self._stop_listening()
        for connection in list(self._connections.values()):
            connection.leave()
        await self._until(lambda: all(each.parted for each in self._connections.values()), limit_s)
        await self._until(lambda: not self._connections, HANG_UP_S)
        await self.close()

    async def close(self) -> None:
        """Stop listening and drop every connection.  Idempotent."""
        self._stop_listening()
        for connection in list(self._connections.values()):
            connection.end(ConnectionAbortedError("the server is closing"))

    def forget(self, connection: ConnectionId) -> None:
        """One of our connections has ended."""
        del self._connections[connection]
        self.changed()

    def changed(self) -> None:
        """Whoever waits for the connections to end may look again."""
        self._changed.set()

    async def _until(self, done: Callable[[], bool], limit_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()

    def _stop_listening(self) -> None:
        listening, self._listening = self._listening, {}
        for server, (address, inode) in listening.items():
            asyncio.get_running_loop().remove_reader(server.fileno())
            server.close()
            if address.path:
                with suppress(FileNotFoundError):
                    if os.stat(address.path).st_ino == inode:  # a successor may have taken the path over
                        os.unlink(address.path)

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_MAX):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                _log.warning("cannot accept for %s s: %s", _ACCEPT_PAUSE_S, error.strerror)
                loop.remove_reader(listening.fileno())
                loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, listening)
                return
            if len(self._connections) >= self._connections_max:
                accepted.close()
                continue
            accepted.setblocking(False)
            tune(accepted)
            connection = ConnectionId(next(_connection_ids))
            self._connections[connection] = _Accepted(self, accepted, connection)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)


class _Accepted:
    """One connection: greeting, then open, perhaps leaving, then ended."""

    def __init__(self, server: DataServer, connection: socket.socket, number: ConnectionId) -> None:
        self._server = server
        self._service = server.service
        self._number = number
        self._reader = FrameReader(self._sink, message_bytes_max=HELLO_BYTES_MAX, payload_bytes_max=0)
        self._outbox = Outbox()
        self._origin: Origin | None = None
        self._caller: int | None = None
        self._unheard: Frame | None = None
        """Its ``Hello``, while the drop table says that it is not heard."""
        self._refused: dict[int, KVCommError] = {}
        self._unanswered: dict[int, float] = {}
        """Request -> when it came; 0 = it is no client's."""
        self._knows_stamps = False
        self._corked = False
        self._ended = False
        self._leaving = False
        self._said_goodbye = False
        self.parted = False
        """Whether our goodbye has left."""
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(
            server.hello_timeout_s, self.end, TimeoutError("no Hello in time")
        )
        self._stream = FrameStream(
            loop, connection, reader=self._reader, outbox=self._outbox,
            received=self._received, lost=self.end, drained=self._regulate, stall_s=server.stall_s,
        )  # fmt: skip

    def leave(self) -> None:
        """Begin nothing more, and say goodbye when all that was begun is answered."""
        if self._origin is None:
            self.end(ConnectionAbortedError("the server is stopping"))
            return
        self._leaving = True
        self._part()
        self._stream.flush()

    def end(self, error: Exception) -> None:
        """Idempotent."""
        if self._ended:
            return
        self._ended = True
        if not isinstance(error, OSError):
            _log.warning("connection %d of node %s dropped: %s", self._number, self._server.node, error)
        self._hello_timer.cancel()
        self._stream.close()
        self._server.forget(self._number)
        if self._origin is not None:
            self._service.closed(self._number)

    def answer(
        self, number: int, message: Message, payload: Sequence[Buffer], left: Callable[[], None] | None
    ) -> None:
        """Send a reply; several of one batch leave together."""
        if self._ended:
            if left is not None:
                left()
            return
        try:
            frame = encode_frame(number, message, payload, self._stamp())
        except TooLarge as error:
            if left is not None:
                left()
            left, frame = None, encode_frame(number, Failure(error.code, error.message), (), self._stamp())
        if came_at := self._unanswered.pop(number):  # not before it is sure that there is an answer
            self._server.client_seconds.observe(self._server.clock() - came_at)
        self._outbox.put(frame, None if left is None else lambda _: left())
        self._part()
        if not self._corked:
            self._stream.flush()
            self._regulate()

    def _part(self) -> None:
        if self._leaving and not self._unanswered and not self._said_goodbye:
            self._said_goodbye = True
            self._outbox.put(encode_frame(HELLO_NUMBER, Goodbye()), self._parted)

    def _parted(self, _: bool) -> None:
        self.parted = True
        self._server.changed()

    def _received(self, received_bytes: int) -> None:
        self._corked = True
        try:
            for frame in self._reader.advance(received_bytes):
                if self._origin is None:
                    self._greet(frame)
                else:
                    self._request(self._origin, frame)
        except KVCommError as error:
            self._show_out(error)
            return
        finally:
            self._corked = False
        if self._outbox:
            self._stream.flush()
        self._regulate()

    @property
    def peer(self) -> Peer | None:
        return self._caller

    def hold(self, gate: Gate) -> None:
        """A caller that is not to be heard waits for its welcome; what it said is looked at later."""
        if self._ended:
            return
        self._stream.hold(gate)
        hello = self._unheard
        if hello is not None and not gate.deaf:
            self._unheard = None
            try:
                self._greet(hello)
            except KVCommError as error:
                self._show_out(error)
            else:
                self._stream.flush()

    def _greet(self, frame: Frame) -> None:
        hello, server, table = frame.message, self._server, droptable.installed()
        if table is not None and isinstance(hello, Hello) and self._caller is None:
            self._caller = hello.caller
            gate = table.watch(self)
            self._stream.hold(gate)
            if gate.deaf:
                self._unheard = frame
                return
        if not isinstance(hello, Hello):
            raise Refused(f"the first message must be Hello, not {type(hello).__name__}")
        if hello.protocol != PROTOCOL_VERSION:
            raise Refused(
                f"this server speaks protocol {PROTOCOL_VERSION}, not {hello.protocol}; use equal versions"
            )
        if hello.key_vector != KEY_VECTOR:
            raise Refused("this client derives other block keys than the server; use equal versions")
        tenant = server.credentials.tenant_digest(server.credentials.tenant_of(hello.token))
        origin = Origin(self._number, frame.request, tenant, hello.caller)
        region, epoch = self._service.welcome(origin)
        self._origin = origin
        self._knows_stamps = bool(frame.flags & KNOWS_STAMPS)
        self._hello_timer.cancel()
        self._reader.message_bytes_max = MESSAGE_BYTES_MAX
        self._reader.payload_bytes_max = server.payload_bytes_max
        welcome = Welcome(
            server.node, server.role, server.instance, server.incarnation, tenant, region, epoch
        )
        self._outbox.put(encode_frame(frame.request, welcome, (), self._stamp()))

    def _request(self, origin: Origin, frame: Frame) -> None:
        if self._said_goodbye:
            return  # its sender knows by that, or will
        kind, counts = type(frame.message), self._server.request_counts
        counts[kind] = counts.get(kind, 0) + 1
        if not frame.payload:  # else it began when its payload did
            self._begin(frame.request, kind)
        reply = _Reply(self, frame.request)
        try:
            if frame.request in self._refused:
                raise self._refused.pop(frame.request)
            if isinstance(frame.message, Ping):
                reply(Pong())
            elif isinstance(frame.message, DropOrder):
                self._drop(origin, frame.message)
                reply(Done())
            elif self._leaving and not frame.payload:
                raise Unavailable(_STOPPING)
            elif frame.stamp and not frame.payload and self._is_overdue(frame):
                raise Unavailable("its time was over before it could be looked at; nothing was done")
            else:
                self._service.handle(self._asked(origin, frame.request), frame.message, frame.payload, reply)
        except KVCommError as error:
            reply(Failure(error.code, error.message, error.detail))

    def _drop(self, origin: Origin, order: DropOrder) -> None:
        table = droptable.installed()
        if table is None:
            raise Refused("this node takes no such orders: start it with network.drop_table: true")
        if origin.tenant != self._server.credentials.tenant_digest(NODE_TENANT):
            raise Refused("only the cluster's own token may cut its network")
        table.set(order.peers)

    def _stamp(self) -> int:
        return stamp_of(self._server.clock()) if self._knows_stamps else 0

    def _is_overdue(self, frame: Frame) -> bool:
        overdue = overdue_s(frame.stamp, self._server.clock()) > 0
        self._server.overdue_count += overdue
        return overdue

    def _sink(self, number: int, message: Message, payload_bytes: int) -> list[memoryview] | None:
        assert self._origin is not None, "no payload is taken before Hello"
        if self._said_goodbye:
            return discard(payload_bytes)
        self._begin(number, type(message))
        try:
            if self._leaving:
                raise Unavailable(_STOPPING)
            pieces = self._service.sink(self._asked(self._origin, number), message, payload_bytes)
            if pieces is None and payload_bytes > UNPLACED_BYTES_MAX:
                raise TooLarge(f"{type(message).__name__} takes at most {UNPLACED_BYTES_MAX} payload bytes")
        except KVCommError as error:
            self._refused[number] = error
            return discard(payload_bytes)
        return pieces

    def _begin(self, number: int, kind: type[Message]) -> None:
        if number in self._unanswered:
            raise Corrupt(f"request {number} is not answered yet, and its number is used again")
        self._unanswered[number] = self._server.clock() if kind in CLIENT_MESSAGES else 0.0

    @staticmethod
    def _asked(caller: Origin, number: int) -> Origin:
        return Origin(caller.connection, number, caller.tenant, caller.caller)

    def _regulate(self) -> None:
        """Read only what can be answered."""
        if (
            len(self._unanswered) < self._server.outstanding_max
            and self._outbox.unsent_bytes < HIGH_WATER_BYTES
        ):
            self._stream.resume_reading()
        else:
            self._stream.pause_reading()

    def _show_out(self, error: KVCommError) -> None:
        """Tell the peer why, if it takes one more small frame at once, and close."""
        self._outbox.put(encode_frame(HELLO_NUMBER, Failure(error.code, error.message)))
        self._stream.flush()
        self.end(error)


class _Reply:
    """The reply function of one request."""

    __slots__ = ("_connection", "_number")

    def __init__(self, connection: _Accepted, number: int) -> None:
        self._connection: _Accepted | None = connection
        self._number = number

    def __call__(
        self, message: Message, payload: Sequence[Buffer] = (), left: Callable[[], None] | None = None
    ) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None, f"request {self._number} was answered twice"
        connection.answer(self._number, message, payload, left)
