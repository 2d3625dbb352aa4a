"""``Stream``: one socket of a channel; requests out, replies in.

Requests leave in the order in which they were put, and so do their replies come (``protocol``).  An operation
is *unsent* until its request has left as a whole, then *awaited*.  One that is over before its reply has come
stays awaited, without its memory: its bytes go to the bin.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

from kvcomm.block import Buffer
from kvcomm.errors import Corrupt, KVCommError, Unavailable
from l2_rdma.transports.port import Operation
from l2_rdma.transports.tcp.protocol import (
    ATOMICS,
    DONE,
    GOODBYE,
    HEAD_BYTES_MAX,
    HELD,
    NUMBER_MASK,
    READ,
    REPLY_HEADS,
    REQUEST,
    WRITE,
    goodbye_error,
    head_bytes,
)

REPLIES_AT_ONCE = 128
REPLY_BYTES_AT_ONCE = 4 << 20
REQUESTS_AT_ONCE = 256
BIN_BYTES = 256 << 10
OWED_BYTES_MAX = 64 << 20
"""So much of late replies is thrown away at most; a new channel is cheaper."""
_EACH_BYTES = 4096
"""What an operation counts for besides its bytes."""

_SEND_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
"""No signal: our process may be one that SIGPIPE ends."""
_ANY_HEAD = REPLY_HEADS[-1]
_bin = memoryview(bytearray(BIN_BYTES))  # written by everybody, read by nobody


class TcpOperation(Operation):
    """An operation with its request, and where its reply goes.

    Args:
        memory: where the bytes of a read go, what a write sends; ``None`` once the operation is over.
    """

    __slots__ = (
        "first",
        "head_bytes",
        "kind",
        "load_bytes",
        "memory",
        "number",
        "offset",
        "reply_bytes",
        "second",
    )

    def __init__(
        self, kind: int, deadline: float, offset: int, first: int, second: int, memory: memoryview | None
    ) -> None:
        super().__init__(deadline)
        self.kind = kind
        self.number = 0
        self.offset = offset
        self.first = first
        self.second = second
        self.memory = memory
        self.reply_bytes = first if kind == READ else 0
        self.head_bytes = head_bytes(self.reply_bytes)
        self.load_bytes = _EACH_BYTES + (first if memory is not None else 0)

    def end(self, error: KVCommError | None, value: int = 0) -> None:
        """Once; later ends change nothing."""
        self.memory = None
        if self.done:
            return
        if error is None:
            self.complete(value)
        else:
            self.fail(error)


class Stream:
    """Not thread-safe: the channel calls what is sent under one lock, what is received under another, and
    :meth:`expire` and :meth:`fail` under both."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.load_bytes = 0
        """What is under way, both ways."""
        self._unsent: deque[TcpOperation] = deque()
        self._sent_bytes = 0  # of the first unsent one's request
        self._awaited: deque[TcpOperation] = deque()
        self._got_bytes = 0  # of the first awaited one's reply
        self._next_number = 0
        self._heads_memory = bytearray(REPLIES_AT_ONCE * HEAD_BYTES_MAX)
        whole = memoryview(self._heads_memory)
        self._heads = [whole[at : at + HEAD_BYTES_MAX] for at in range(0, len(whole), HEAD_BYTES_MAX)]

    @property
    def idle(self) -> bool:
        return not self._unsent and not self._awaited

    @property
    def depth(self) -> int:
        """How many operations are under way."""
        return len(self._unsent) + len(self._awaited)

    def put(self, operations: Sequence[TcpOperation]) -> None:
        self.load_bytes += sum([operation.load_bytes for operation in operations])
        self._unsent.extend(operations)

    def send(self, now: float) -> bool:
        """Send what the socket takes at once; whether that is all.  Nothing that is overdue is sent.

        Raises:
            OSError: the stream is over.
        """
        while self._unsent:
            if self._unsent[0].deadline <= now:
                return False  # ended, or cut off, by ``expire``
            batch = self._requests(now)
            try:
                sent = self.socket.sendmsg(batch, (), _SEND_NOW)
            except BlockingIOError:
                return False
            self._move_sent(sent)
            if sent < sum(map(len, batch)):
                return False
        return True

    def first_awaited(self) -> list[TcpOperation]:
        """What :meth:`receive` is to receive."""
        return list(islice(self._awaited, REPLIES_AT_ONCE))

    def receive(self, expected: list[TcpOperation], *, block: bool) -> tuple[int, KVCommError | None]:
        """Receive replies, or parts; how many came to their end, and why the stream is over, if so.

        Args:
            expected: what :meth:`first_awaited` said, not nothing.
            block: wait, shortly, until all of it is there.
        """
        flags = socket.MSG_WAITALL if block else socket.MSG_DONTWAIT
        try:
            got = self.socket.recvmsg_into(self._places(expected), 0, flags)[0]
        except BlockingIOError:
            return 0, None
        except OSError as error:
            return 0, broke(error)
        if not got:
            return 0, Unavailable("the pool has closed the connection")
        return self._sort(expected, got)

    def unexpected(self) -> KVCommError | None:
        """Why the stream is over, if it is readable while nothing is awaited."""
        try:
            if self.socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                return Corrupt("the pool sends what nobody asked for")
        except BlockingIOError:
            return None  # it is not: the event was of another socket, closed since
        except OSError as error:
            return broke(error)
        return Unavailable("the pool has closed the connection")

    def finish(self, count: int) -> None:
        """Forget the first ``count``, whose replies have come."""
        for _ in range(count):
            self.load_bytes -= self._awaited.popleft().load_bytes

    def deadline(self) -> float:
        """The earliest of those that are not over."""
        ahead = [each.deadline for each in self._awaited if not each.done]
        return min([*ahead, *(each.deadline for each in self._unsent)], default=float("inf"))

    def expire(self, now: float) -> KVCommError | None:
        """End what is overdue; why the stream cannot go on, if so."""
        error = Unavailable("the pool did not answer in time")
        owed_bytes = 0
        for operation in self._awaited:
            if operation.deadline <= now:
                operation.end(error)
            if operation.done:
                owed_bytes += operation.reply_bytes + _EACH_BYTES
        if owed_bytes > OWED_BYTES_MAX:
            return Unavailable("the pool does not answer")
        if self._unsent and self._sent_bytes and self._unsent[0].deadline <= now:
            return Unavailable("the pool takes nothing more: a request could not be sent in time")
        for operation in self._unsent:
            if operation.deadline <= now:
                self.load_bytes -= operation.load_bytes
                operation.end(error)
        self._unsent = deque(each for each in self._unsent if not each.done)
        return None

    def fail(self, error: KVCommError) -> None:
        """End everything."""
        for operation in (*self._awaited, *self._unsent):
            operation.end(error)
        self._awaited.clear()
        self._unsent.clear()

    def hang_up(self) -> None:
        """From any thread: whoever is receiving returns."""
        with suppress(OSError):  # closed already, or by the pool
            self.socket.shutdown(socket.SHUT_RDWR)

    def _requests(self, now: float) -> list[Buffer]:
        batch: list[Buffer] = []
        for index, each in enumerate(islice(self._unsent, REQUESTS_AT_ONCE)):
            if each.deadline <= now:
                break
            each.number = (self._next_number + index) & NUMBER_MASK
            batch.append(REQUEST.pack(each.kind, each.number, each.offset, each.first, each.second))
            if each.kind == WRITE and each.memory is not None:
                batch.append(each.memory)
        skip = self._sent_bytes
        while skip:
            first = len(batch[0])
            if skip < first:
                batch[0] = memoryview(batch[0])[skip:]
                break
            skip -= first
            del batch[0]
        return batch

    def _move_sent(self, sent: int) -> None:
        sent += self._sent_bytes
        while self._unsent:
            each = self._unsent[0]
            size = REQUEST.size + (each.first if each.kind == WRITE else 0)
            if sent < size:
                break
            sent -= size
            self._awaited.append(self._unsent.popleft())
            self._next_number = (self._next_number + 1) & NUMBER_MASK
        self._sent_bytes = sent

    def _places(self, expected: list[TcpOperation]) -> list[memoryview]:
        """Where the bytes go that come next."""
        places: list[memoryview] = []
        got, size = self._got_bytes, 0
        for index, operation in enumerate(expected):
            head = operation.head_bytes
            if got < head:
                places.append(self._heads[index][got:head])
                got = head
            missing = operation.reply_bytes - (got - head)
            if missing:
                view = operation.memory
                if view is None:
                    places.append(_bin[:missing])
                    if missing > BIN_BYTES:
                        break
                else:
                    places.append(view[got - head :] if got > head else view)
            size += missing
            if size >= REPLY_BYTES_AT_ONCE:
                break
            got = 0
        return places

    def _sort(self, expected: list[TcpOperation], got: int) -> tuple[int, KVCommError | None]:
        """What has come: ``got`` more bytes."""
        before, got = self._got_bytes, self._got_bytes + got
        ended = 0
        heads = _ANY_HEAD.iter_unpack(self._heads_memory)
        for operation, (number, status, value) in zip(expected, heads, strict=False):
            head = operation.head_bytes
            if got < head:
                break
            if before < head:
                error = _breach(operation, number, status, value)
                if error is not None:
                    return ended, error
            whole = head + operation.reply_bytes
            if got < whole:
                break
            got -= whole
            before = 0
            ended += 1
            operation.end(None if status == DONE else Unavailable("somebody else holds the word"), value)
        if ended and got:
            self._heads[0][:] = self._heads[ended]
        self._got_bytes = got
        return ended, None


def broke(error: OSError) -> KVCommError:
    return Unavailable(f"the connection to the pool broke: {error.strerror or error}")


def _breach(operation: TcpOperation, number: int, status: int, value: int) -> KVCommError | None:
    """Why this cannot be the head of the operation's reply."""
    if number == operation.number:
        if operation.kind in ATOMICS:
            if status in (DONE, HELD):
                return None
        elif status == DONE and value == operation.first:
            return None
    if status == GOODBYE:
        return goodbye_error(value)
    return Corrupt("the pool's replies do not go with our requests")
