"""``Link``: one blocking connection to a peer; it moves a :class:`Session`'s bytes and waits no longer than
it is told."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable

from kvcomm.errors import Unavailable
from kvcomm.rpc.session import Identity, Session
from kvcomm.rpc.sockets import connecting_result, set_timeout_option, start_connecting
from kvcomm.wire.address import parse_address

_KERNEL_WAIT_S = 0.25
"""A receive that is all there is to do waits in the kernel, at most so long at a time; shorter waits go
through poll."""

_NOW = socket.MSG_DONTWAIT
_SEND_NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Link:
    """A socket and its session.

    Once connected the socket is in blocking mode with a receive timeout set once, so that the common wait (a
    request is out, nothing else to do) is one system call; everything that must not block says so with
    ``MSG_DONTWAIT``.

    :meth:`on_events`, :meth:`send` and :meth:`receive` raise ``OSError``, ``Corrupt`` or ``TooLarge`` when
    the connection is of no further use.
    """

    def __init__(
        self, address: str, identity: Identity, *, connect_timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """Start to connect.

        Raises:
            ConfigError: not an address.
            Unavailable: refused at once, or the name is unknown.
        """
        self.address = address
        self.session = Session(identity)
        self.greet_deadline = clock() + connect_timeout_s
        """Until when ``Welcome`` must be here."""
        self.reused = False
        """Whether it was idle before this operation: then it may turn out dead."""
        self._clock = clock
        self._connected = False
        try:
            self._socket = start_connecting(parse_address(address), connect_timeout_s)
        except OSError as error:
            raise Unavailable(f"{address}: cannot connect: {error.strerror or error}") from error
        self._pid = os.getpid()
        self.descriptor = self._socket.fileno()
        self._readable = select.poll()
        self._readable.register(self.descriptor, select.POLLIN)

    @property
    def only_waits(self) -> bool:
        """Whether receiving is all there is to do."""
        return self.session.welcome is not None and not self.session.outbox

    @property
    def interest(self) -> int:
        """Event mask for ``poll``."""
        if not self._connected:
            return select.POLLOUT
        return select.POLLIN | select.POLLOUT if self.session.outbox else select.POLLIN

    def on_events(self, events: int) -> None:
        """``poll`` reported ``events``."""
        if not self._connected:
            self._finish_connecting()
        elif events & select.POLLOUT:
            self.send()
        if events & ~select.POLLOUT:
            self._receive(_NOW)

    def send(self) -> None:
        """Send what the kernel takes at once."""
        outbox = self.session.outbox
        while outbox and self._connected:
            pieces = outbox.gather()
            try:
                if len(pieces) == 1:
                    sent_bytes = self._socket.send(pieces[0], _SEND_NOW)
                else:
                    sent_bytes = self._socket.sendmsg(pieces, (), _SEND_NOW)
            except BlockingIOError:
                return
            except OSError:
                self._hear_last_words()
                raise
            outbox.taken(sent_bytes)
            if not outbox:
                self.session.pump(self._clock())

    def receive(self, timeout_s: float) -> None:
        """Wait for bytes and take them in; returns without any at the timeout, or sooner."""
        if timeout_s >= _KERNEL_WAIT_S:
            self._receive(socket.MSG_WAITALL if self.session.reader.receiving else 0)
        elif self._readable.poll(timeout_s * 1000 + 1):
            self._receive(_NOW)

    def alive(self) -> bool:
        """Whether the connection, which is idle, has neither ended nor said anything unasked.  Does not
        wait."""
        return self._pid == os.getpid() and not self._readable.poll(0)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, flags: int) -> None:
        try:
            received_bytes = self._socket.recv_into(self.session.reader.buffer(), 0, flags)
        except BlockingIOError:
            return
        if not received_bytes:
            raise ConnectionResetError("the peer closed the connection")
        self.session.received(received_bytes, self._clock())
        if self.session.outbox:
            self.send()

    def _hear_last_words(self) -> None:
        """The peer has closed; what it said before, a goodbye perhaps, may lie unread."""
        while self._readable.poll(0):
            self._receive(_NOW)

    def _finish_connecting(self) -> None:
        connecting_result(self._socket)
        self._socket.setblocking(True)
        set_timeout_option(self._socket, socket.SO_RCVTIMEO, _KERNEL_WAIT_S)
        self._connected = True
        self.send()
