"""``TcpProvider``: serves a region over TCP, in a thread of its own."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from itertools import islice

import msgspec

from kvcomm.errors import Corrupt, Refused, Unavailable
from l2_rdma.region import Region
from l2_rdma.transports.port import TransportName
from l2_rdma.transports.tcp.protocol import (
    MAGIC,
    STREAM_COUNT_MAX,
    WELCOME,
    TcpAnswer,
    TcpOffer,
    TcpProposal,
)
from l2_rdma.transports.tcp.serving import Serving
from l2_rdma.transports.tcp.sockets import tune
from l2_rdma.transports.tcp.tickets import Tickets

HELLO_TIMEOUT_S = 5.0
STREAMS_MAX = 4096
STRANGERS_MAX = 64
"""Streams that have not shown a ticket yet; beyond, the oldest is closed: who has one shows it at once."""
STREAMS_PER_HOLDER_MAX = 64
_BACKLOG = 256
_JOIN_TIMEOUT_S = 5.0
_ACCEPTS_PER_TURN = 32
_DEAF_S = 0.25
"""How long nobody is accepted after there was no descriptor or memory for somebody."""
_WILDCARDS = ("", "0.0.0.0", "::")

_log = logging.getLogger(__name__)


class TcpProvider:
    """The pool's side.  One thread serves all streams and sleeps while none has anything to say.

    Args:
        host: the local address, or its name, to listen on; clients are told to call the address.

    Raises:
        Unavailable: nothing can listen there.
    """

    name: TransportName = "tcp"
    writes_unseen = True

    def __init__(self, region: Region, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._region = region
        self._clock = clock
        self._process = os.getpid()
        self._listener = _listen(host)
        # Not the name: a resolver keeps its own time, and a name may stand for several addresses.
        self._offer = TcpOffer(*self._listener.getsockname()[:2])
        header = region.header
        self._welcome = WELCOME.pack(MAGIC, header.incarnation, header.layout.region_bytes)
        self._lock = threading.Lock()  # of what both the event loop and the thread use: the next two
        self._tickets = Tickets(secrets.token_bytes)
        self._held: dict[int, set[Serving]] = {}
        self._streams: dict[int, Serving] = {}
        self._strangers: dict[Serving, None] = {}  # in the order in which they came
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._deaf_until: float | None = None
        self._closing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvcomm-tcp", daemon=True)
        self._thread.start()

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(self._offer)

    def open(self, holder: int, tenant: bytes, proposal: bytes) -> bytes:
        if tenant != bytes(self._region.header.tenant):
            raise Refused("the region belongs to another tenant")
        try:
            wanted = msgspec.msgpack.decode(proposal, type=TcpProposal).streams
        except msgspec.DecodeError as error:
            raise Corrupt(f"a proposal of tcp streams that is none: {error}") from error
        if not 1 <= wanted <= STREAM_COUNT_MAX:
            raise Refused(f"a channel has 1 to {STREAM_COUNT_MAX} streams, not {wanted}")
        with self._lock:
            if self._closing:
                raise Refused("the pool is closing")
            number, secret = self._tickets.issue(holder, wanted, self._clock())
        return msgspec.msgpack.encode(TcpAnswer(number, secret))

    def close_holder(self, holder: int) -> None:
        with self._lock:
            self._tickets.revoke(holder)
            held = self._held.pop(holder, set())
        for serving in held:
            serving.shut()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            self._abandon()
            return
        with self._lock:
            self._closing = True
            held = [serving for streams in self._held.values() for serving in streams]
            self._held.clear()
        for serving in held:
            serving.shut()
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_TIMEOUT_S)
        assert not self._thread.is_alive(), "nothing in the serving thread blocks"
        self._epoll.close()
        os.close(self._wake)

    def _abandon(self) -> None:
        """In a forked child: it has no thread, and the streams are its parent's; only the descriptors are
        its own."""
        for serving in self._streams.values():
            serving.socket.close()
        self._listener.close()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._closing:
                events = dict(self._epoll.poll(self._patience_s()))
                knocked = events.pop(self._listener.fileno(), 0)
                for descriptor, what in events.items():
                    self._turn(descriptor, what)
                if knocked:
                    self._accept()  # last: no event above is of the former owner of a new one's descriptor
                self._look_after(self._clock())
        finally:
            for serving in list(self._streams.values()):
                self._end(serving)
            self._listener.close()

    def _turn(self, descriptor: int, events: int) -> None:
        serving = self._streams.get(descriptor)
        if serving is not None:
            self._serve(serving, events)
        elif descriptor == self._wake:
            os.eventfd_read(self._wake)

    def _serve(self, serving: Serving, events: int) -> None:
        before = serving.interest
        if not serving.ready(events):
            self._end(serving)
        elif serving.interest != before:
            self._epoll.modify(serving.socket.fileno(), serving.interest)

    def _patience_s(self) -> float | None:
        """How long nothing needs to be done, whoever is silent."""
        times = [] if self._deaf_until is None else [self._deaf_until]
        times += [each.hello_deadline for each in islice(self._strangers, 1)]
        return max(0.0, min(times) - self._clock()) if times else None

    def _look_after(self, now: float) -> None:
        """Dismiss who has been a stranger for too long; listen again."""
        for serving in [each for each in self._strangers if each.hello_deadline <= now]:
            self._end(serving)
        if self._deaf_until is not None and self._deaf_until <= now:
            self._deaf_until = None
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    _log.warning("cannot accept a stream: %s", error)
                    self._deaf_until = self._clock() + _DEAF_S  # the listener stays readable
                    self._epoll.modify(self._listener.fileno(), 0)
                    return
                continue  # the client is gone already
            if len(self._strangers) >= STRANGERS_MAX:
                self._end(next(iter(self._strangers)))
            if len(self._streams) >= STREAMS_MAX:
                accepted.close()
                continue
            self._welcome_stranger(accepted)

    def _welcome_stranger(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        serving = Serving(
            accepted,
            self._region,
            self._redeem,
            self._welcome,
            self._clock() + HELLO_TIMEOUT_S,
            self._clock,
        )
        try:
            tune(accepted)
            self._epoll.register(accepted.fileno(), serving.interest)
        except OSError:
            accepted.close()  # it was reset meanwhile, or is one more than the kernel watches for us
            return
        self._strangers[serving] = None
        self._streams[accepted.fileno()] = serving

    def _redeem(self, serving: Serving, number: int, secret: bytes) -> bool:
        """Whether the ticket is good; then the stream is its holder's.  In the serving thread."""
        with self._lock:
            holder = self._tickets.redeem(number, secret, self._clock())
            if holder is None or self._closing:
                return False
            held = self._held.setdefault(holder, set())
            if len(held) >= STREAMS_PER_HOLDER_MAX:
                return False
            held.add(serving)
        serving.holder = holder
        self._strangers.pop(serving, None)
        return True

    def _end(self, serving: Serving) -> None:
        """In the serving thread."""
        self._strangers.pop(serving, None)
        with self._lock:
            held = self._held.get(serving.holder)
            if held is not None:
                held.discard(serving)
                if not held:
                    del self._held[serving.holder]
        del self._streams[serving.socket.fileno()]
        self._epoll.unregister(serving.socket.fileno())
        serving.close()


def _listen(host: str) -> socket.socket:
    if host in _WILDCARDS:
        raise Unavailable(f"tcp listens on one address that clients can call, not on {host!r}")
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Unavailable(f"tcp cannot listen on {host!r}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
