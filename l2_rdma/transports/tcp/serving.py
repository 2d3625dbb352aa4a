"""``Serving``: one client's stream, as the pool's thread serves it.

Bytes go between the socket and the region by system calls alone: what is read is sent from the region, and
what is written is received into it.  Python looks at requests only.

**The gate.**  The event loop ends a holder while the serving thread may be receiving its bytes.  All that
changes the region happens behind the stream's gate, which the serving thread takes for one non-blocking call
at a time and only while the stream is not shut.  :meth:`Serving.shut` says that it is, and passes the gate
once: after that no byte of this stream arrives any more.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from kvcomm.block import Buffer
from kvcomm.errors import Unavailable
from l2_rdma.layout import WORD_BYTES
from l2_rdma.region import Region
from l2_rdma.transports.tcp.protocol import (
    ATOMICS,
    DONE,
    FETCH_ADD,
    GARBAGE,
    GOODBYE,
    HELD,
    HELLO,
    MAGIC,
    OUTSIDE,
    READ,
    REQUEST,
    TICKET,
    WRITE,
    reply_head,
)

INBOX_BYTES = 16 << 10
"""Of requests that are received at once; also how much of a write may take the way through the inbox."""
REPLIES_MAX = 2048
"""Buffers of replies that wait to be sent; beyond, requests wait in the kernel, and then at the client."""
UNSENT_BYTES_MAX = 32 << 20
TURN_BYTES = 4 << 20
"""How much one stream may send or write before the next one's turn."""
GATE_BYTES = 1 << 20
"""How much is received into the region before somebody who waits at the gate gets through."""
BUFFERS_MAX = 1024  # IOV_MAX of Linux
ATOMIC_PATIENCE_S = 0.001
"""How long a word may be held by another process before the client is told; everybody waits with it."""

NOBODY = -1
_HEAD = reply_head(0)

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


class Serving:
    """A stream that is open.

    Args:
        redeem: whether there is a ticket with this number and secret; sets the holder.
        welcome: what a client with a ticket is told.
    """

    def __init__(
        self,
        stream: socket.socket,
        region: Region,
        redeem: Callable[[Serving, int, bytes], bool],
        welcome: bytes,
        hello_deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = stream
        self.holder = NOBODY
        self.hello_deadline = hello_deadline
        """When it must have shown its ticket; infinite once it has."""
        self.interest = _IN
        """What the thread waits for."""
        self._region = region
        self._region_bytes = region.header.layout.region_bytes
        self._memory = region.memory
        self._redeem = redeem
        self._welcome = welcome
        self._clock = clock
        self._gate = threading.Lock()
        self._shut = False
        self._leaving = False
        self._inbox = memoryview(bytearray(INBOX_BYTES))
        self._inbox_bytes = 0
        self._write_number = 0
        self._write_bytes = 0
        self._write_offset = 0
        self._write_left = 0
        self._replies: deque[Buffer] = deque()
        self._unsent_bytes = 0

    def shut(self) -> None:
        """From any thread: no byte of this stream arrives in the region after this.  The serving thread
        closes it."""
        self._shut = True
        with self._gate, suppress(OSError):  # the client was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """In the serving thread.  Behind the gate, for :meth:`shut` must not meet a descriptor that is
        somebody else's by now."""
        with self._gate:
            self.socket.close()

    def ready(self, events: int) -> bool:
        """Do what ``events`` allow; False when the stream is over."""
        if self._shut or events & (select.EPOLLERR | select.EPOLLHUP):
            return False
        try:
            if events & _IN and not self._leaving and not self._receive():
                return False
            self._answer()
            while not self._send() and not self._leaving and self._whole_request_waits:
                self._answer()
        except OSError:
            return False  # reset, or silent for too long
        if self._leaving and not self._replies:
            return False
        self.interest = (0 if self._full or self._leaving else _IN) | (_OUT if self._replies else 0)
        return True

    @property
    def _full(self) -> bool:
        return len(self._replies) >= REPLIES_MAX or self._unsent_bytes >= UNSENT_BYTES_MAX

    @property
    def _whole_request_waits(self) -> bool:
        return not self._write_left and self._inbox_bytes >= REQUEST.size

    def _receive(self) -> bool:
        """Requests into the inbox, what they write into the region; False at the end of the stream."""
        turn = 0
        try:
            while self._write_left and turn < TURN_BYTES:
                end = self._write_offset + min(self._write_left, GATE_BYTES)
                with self._gate:
                    if self._shut:
                        return False
                    got = self.socket.recv_into(self._memory[self._write_offset : end])
                if not got:
                    return False
                self._wrote(got)
                turn += got
            if not self._write_left and self._inbox_bytes < INBOX_BYTES:
                got = self.socket.recv_into(self._inbox[self._inbox_bytes :])
                self._inbox_bytes += got
                return got > 0
        except BlockingIOError:
            pass
        return True

    def _answer(self) -> None:
        """Every whole request in the inbox, as long as there is room for replies."""
        if self.hello_deadline != float("inf") and not self._greet():
            return
        inbox, region_bytes = self._inbox, self._region_bytes
        at, end = 0, self._inbox_bytes
        while end - at >= REQUEST.size and not (self._write_left or self._leaving or self._full):
            kind, number, offset, first, second = REQUEST.unpack_from(inbox, at)
            at += REQUEST.size
            if kind == READ and offset + first <= region_bytes:
                self._read(number, offset, first)
            elif kind == WRITE and offset + first <= region_bytes:
                at += self._begin_write(number, offset, first, inbox[at:end])
            elif kind in ATOMICS and offset + WORD_BYTES <= region_bytes and not offset % WORD_BYTES:
                self._exchange(kind, number, offset, first, second)
            else:
                self._leave(OUTSIDE if READ <= kind <= ATOMICS[-1] else GARBAGE)
        if at:
            self._inbox[: end - at] = self._inbox[at:end]
            self._inbox_bytes = end - at

    def _greet(self) -> bool:
        if self._inbox_bytes < HELLO.size:
            return False
        magic, number, secret = HELLO.unpack_from(self._inbox)
        rest = self._inbox_bytes - HELLO.size
        self._inbox[:rest] = self._inbox[HELLO.size : self._inbox_bytes]
        self._inbox_bytes = rest
        if magic != MAGIC:
            self._leave(GARBAGE)
        elif not self._redeem(self, number, secret):
            self._leave(TICKET)
        else:
            self.hello_deadline = float("inf")
            self._queue(self._welcome)
        return not self._leaving

    def _read(self, number: int, offset: int, length: int) -> None:
        replies, end = self._replies, offset + length
        head = reply_head(length)
        replies.append(head.pack(number, DONE, length))
        self._unsent_bytes += head.size + length
        while end - offset > TURN_BYTES:
            replies.append(self._memory[offset : offset + TURN_BYTES])
            offset += TURN_BYTES
        replies.append(self._memory[offset:end])

    def _begin_write(self, number: int, offset: int, length: int, arrived: memoryview) -> int:
        """How many of the bytes in the inbox belong to it."""
        self._write_number, self._write_bytes = number, length
        self._write_offset, self._write_left = offset, length
        size = min(length, arrived.nbytes)
        with self._gate:
            if not self._shut:
                self._memory[offset : offset + size] = arrived[:size]
        self._wrote(size)
        return size

    def _wrote(self, size: int) -> None:
        self._write_offset += size
        self._write_left -= size
        if not self._write_left:
            self._queue(_HEAD.pack(self._write_number, DONE, self._write_bytes))

    def _exchange(self, kind: int, number: int, offset: int, first: int, second: int) -> None:
        deadline = self._clock() + ATOMIC_PATIENCE_S
        atomics = self._region.atomics
        old, status = 0, DONE
        with self._gate:
            if self._shut:
                return
            try:
                if kind == FETCH_ADD:
                    old = atomics.fetch_add(offset, first, deadline)
                else:
                    old = atomics.compare_swap(offset, first, second, deadline)
            except Unavailable:
                status = HELD
        self._queue(_HEAD.pack(number, status, old))

    def _leave(self, reason: int) -> None:
        """Say goodbye in the place of the next reply, and nothing after it."""
        self._queue(_HEAD.pack(0, GOODBYE, reason))
        self._leaving = True

    def _queue(self, buffer: Buffer) -> None:
        self._replies.append(buffer)
        self._unsent_bytes += len(buffer)

    def _send(self) -> bool:
        """One turn's worth; whether the socket or the turn is full, so that there is something left."""
        if not self._replies:
            return False
        batch: list[Buffer] = []
        size = 0
        for buffer in islice(self._replies, BUFFERS_MAX):
            batch.append(buffer)
            size += len(buffer)
            if size >= TURN_BYTES:
                break
        try:
            sent = self.socket.sendmsg(batch)
        except BlockingIOError:
            return True
        self._unsent_bytes -= sent
        for buffer in batch:
            if sent < len(buffer):
                self._replies[0] = memoryview(buffer)[sent:]
                return True
            sent -= len(buffer)
            self._replies.popleft()
        return bool(self._replies)
