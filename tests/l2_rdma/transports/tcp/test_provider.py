"""The pool's side: who is served, who is not, and what a bad client costs the others."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import resource
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import psutil
import pytest

from kvcomm.errors import Corrupt, Refused, Unavailable
from l2_rdma.transports.port import Extent
from l2_rdma.transports.tcp import provider as provider_module
from l2_rdma.transports.tcp.protocol import (
    COMPARE_SWAP,
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
    STREAM_COUNT_MAX,
    TICKET,
    WRITE,
    TcpOffer,
    TcpProposal,
    reply_head,
)
from l2_rdma.transports.tcp.provider import STRANGERS_MAX, TcpProvider
from l2_rdma.transports.tcp.serving import UNSENT_BYTES_MAX
from l2_rdma.transports.tcp.sockets import SILENCE_MAX_S
from tests.l2_rdma.regions import OTHER_TENANT, TENANT
from tests.l2_rdma.transports.tcp.wired import HOLDER, PATIENCE_S, SLAB_BYTES, Wired, soon
from tests.peers import until

HEAD = reply_head(0)


def reply(friend: socket.socket) -> tuple[int, int, int]:
    return HEAD.unpack(friend.recv(HEAD.size, socket.MSG_WAITALL))


def is_over(stream: socket.socket) -> bool:
    """Whether the pool has hung up; waits for it."""
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_proposal_that_is_none_is_corrupt(wired: Wired) -> None:
    with pytest.raises(Corrupt):
        wired.provider.open(HOLDER, TENANT, b"\xc1")


@pytest.mark.parametrize("streams", [0, -1, STREAM_COUNT_MAX + 1])
def test_a_channel_of_so_many_streams_is_refused(wired: Wired, streams: int) -> None:
    with pytest.raises(Refused, match="streams"):
        wired.ticket(streams=streams)


def test_another_tenant_gets_no_ticket(wired: Wired) -> None:
    with pytest.raises(Refused, match="tenant"):
        wired.provider.open(HOLDER, OTHER_TENANT, msgspec.msgpack.encode(TcpProposal(1)))


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "", "no such host"])
def test_nothing_listens_where_nothing_can_be_called(wired: Wired, host: str) -> None:
    with pytest.raises(Unavailable, match="listen"):
        TcpProvider(wired.region, host)


def test_clients_need_no_resolver(wired: Wired) -> None:
    provider = TcpProvider(wired.region, "localhost")
    offer = msgspec.msgpack.decode(provider.offer(), type=TcpOffer)
    assert ipaddress.ip_address(offer.host).is_loopback
    socket.create_connection((offer.host, offer.port), PATIENCE_S).close()
    provider.close()


def test_a_ticket_lets_in_once(wired: Wired) -> None:
    ticket = wired.ticket()
    hello = HELLO.pack(MAGIC, ticket.number, ticket.secret)
    first, second = wired.stranger(), wired.stranger()
    first.sendall(hello)
    assert first.recv(64, socket.MSG_WAITALL).startswith(MAGIC)
    second.sendall(hello)
    assert reply(second) == (0, GOODBYE, TICKET)
    assert is_over(second)


def test_a_guess_does_not_let_in(wired: Wired) -> None:
    ticket = wired.ticket()
    stranger = wired.stranger()
    stranger.sendall(HELLO.pack(MAGIC, ticket.number, bytes(16)))
    assert reply(stranger) == (0, GOODBYE, TICKET)


def test_the_ticket_of_one_who_left_does_not_let_in(wired: Wired) -> None:
    ticket = wired.ticket()
    wired.provider.close_holder(HOLDER)
    stranger = wired.stranger()
    stranger.sendall(HELLO.pack(MAGIC, ticket.number, ticket.secret))
    assert reply(stranger) == (0, GOODBYE, TICKET)


def test_requests_of_a_stranger_do_nothing(wired: Wired) -> None:
    before = bytes(wired.region.memory)
    for request in (
        REQUEST.pack(WRITE, 0, wired.slots, 8, 0) + b"x" * 8,
        REQUEST.pack(FETCH_ADD, 0, wired.slots, 8, 0),
        random.Random(1).randbytes(100_000),
    ):
        stranger = wired.stranger()
        with suppress(ConnectionError, struct.error):  # it hung up while we were sending: no goodbye then
            stranger.sendall(request)
            assert reply(stranger) == (0, GOODBYE, GARBAGE)
        assert is_over(stranger)
    assert wired.region.memory == before


def test_a_silent_stranger_is_dismissed(wired: Wired, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "HELLO_TIMEOUT_S", 0.05)
    stranger = wired.stranger()
    stranger.sendall(MAGIC)
    assert is_over(stranger)


def test_strangers_are_few_and_keep_nobody_out(wired: Wired) -> None:
    strangers = [wired.stranger() for _ in range(STRANGERS_MAX + 3)]
    assert all(is_over(stranger) for stranger in strangers[:3])
    assert wired.fetch(wired.connect(), wired.slots, 1) == b"\0"
    assert len(wired.provider._strangers) < STRANGERS_MAX
    friend = strangers[-1]
    ticket = wired.ticket()
    friend.sendall(HELLO.pack(MAGIC, ticket.number, ticket.secret))
    assert friend.recv(64, socket.MSG_WAITALL).startswith(MAGIC)


@pytest.mark.parametrize(
    ("request_bytes", "reason"),
    [
        (REQUEST.pack(READ, 0, 1 << 62, 8, 0), OUTSIDE),
        (REQUEST.pack(READ, 0, 0, (1 << 64) - 1, 0), OUTSIDE),
        (REQUEST.pack(READ, 0, (1 << 64) - 1, 2, 0), OUTSIDE),
        (REQUEST.pack(WRITE, 0, 0, 1 << 40, 0), OUTSIDE),
        (REQUEST.pack(FETCH_ADD, 0, (1 << 64) - 8, 1, 0), OUTSIDE),
        (REQUEST.pack(COMPARE_SWAP, 0, 4, 0, 1), OUTSIDE),
        (REQUEST.pack(0, 0, 0, 8, 0), GARBAGE),
        (REQUEST.pack(255, 0, 0, 8, 0), GARBAGE),
        (b"GET / HTTP/1.1\r\nHost: a-pool-of-blocks.example:80\r\nAccept: */*\r\n\r\n", GARBAGE),
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_and_hung_up_on(
    wired: Wired, request_bytes: bytes, reason: int
) -> None:
    friend = wired.friend()
    friend.sendall(REQUEST.pack(FETCH_ADD, 0, wired.slots, 1, 0) + request_bytes)
    assert reply(friend) == (0, DONE, 0)
    assert reply(friend) == (0, GOODBYE, reason)
    assert is_over(friend)
    assert wired.region.words[wired.slots // 8] == 1


def test_a_held_word_is_said_to_be_held(wired: Wired) -> None:
    friend = wired.friend()
    with wired.region.atomics._mine:
        friend.sendall(REQUEST.pack(FETCH_ADD, 5, wired.slots, 1, 0))
        assert reply(friend) == (5, HELD, 0)
    friend.sendall(REQUEST.pack(FETCH_ADD, 6, wired.slots, 1, 0))
    assert reply(friend) == (6, DONE, 0)


def test_requests_may_come_in_any_pieces(wired: Wired) -> None:
    friend = wired.friend()
    data = random.Random(3).randbytes(50_000)
    requests = REQUEST.pack(WRITE, 0, wired.slots, len(data), 0) + data
    requests += REQUEST.pack(READ, 1, wired.slots, len(data), 0) + REQUEST.pack(WRITE, 2, wired.slots, 0, 0)
    at = 0
    for size in [1, 62, 2, 1000, 5, 49_000]:
        friend.sendall(requests[at : at + size])
        at += size
    friend.sendall(requests[at:])
    assert reply(friend) == (0, DONE, len(data))
    head = reply_head(len(data))
    whole = friend.recv(head.size + len(data), socket.MSG_WAITALL)
    assert (head.unpack_from(whole), whole[head.size :]) == ((1, DONE, len(data)), data)
    assert reply(friend) == (2, DONE, 0)


def test_a_client_that_does_not_read_costs_only_itself(wired: Wired) -> None:
    friend = wired.friend()
    friend.setblocking(False)
    request = REQUEST.pack(READ, 0, wired.slots, 4 * SLAB_BYTES, 0)
    deadline = time.monotonic() + PATIENCE_S
    sent = 0
    stuck = 0
    while stuck < 50:  # until the pool has stopped reading, and all buffers are full
        assert time.monotonic() < deadline
        try:
            sent += friend.send(request * 64)
            stuck = 0
        except BlockingIOError:
            stuck += 1
            threading.Event().wait(0.001)
    serving = next(iter(wired.provider._held[HOLDER]))
    assert serving._unsent_bytes <= UNSENT_BYTES_MAX + 5 * SLAB_BYTES
    channel = wired.connect(HOLDER + 1)
    assert wired.fetch(channel, wired.slots, 2 * SLAB_BYTES) == bytes(2 * SLAB_BYTES)
    wired.provider.close_holder(HOLDER)
    assert wired.fetch(channel, wired.slots, 8) == bytes(8)


def test_close_holder_ends_its_streams_and_no_other(wired: Wired) -> None:
    mine, other = wired.connect(), wired.connect(HOLDER + 1)
    wired.provider.close_holder(HOLDER)
    wired.provider.close_holder(HOLDER)
    operation = mine.write(Extent(wired.slots, 1), b"x", soon())
    wired.transport.wait([operation])
    assert isinstance(operation.error, Unavailable) and mine.broken is not None
    wired.finish(other.write(Extent(wired.slots, 1), b"y", soon()))
    until(lambda: HOLDER not in wired.provider._held)
    assert wired.fetch(wired.connect(), wired.slots, 1) == b"y"


@pytest.mark.slow
def test_no_byte_arrives_after_close_holder(wired: Wired) -> None:
    """The client fills the same piece again and again, without a pause; each time its holder is closed in the
    middle, and the end of the piece, to which a receive comes last, goes to somebody else."""
    end = wired.region.memory[wired.slots + SLAB_BYTES - 64 : wired.slots + SLAB_BYTES]
    rng = random.Random(4)
    pause = threading.Event()
    for turn in range(1, 101):
        friend = wired.friend()
        request = REQUEST.pack(WRITE, 0, wired.slots, SLAB_BYTES, 0) + bytes([turn]) * SLAB_BYTES
        writer = threading.Thread(target=_send_all, args=(friend, request))
        writer.start()
        until(partial(_starts_with, end, turn))
        pause.wait(rng.random() * 0.002)
        wired.provider.close_holder(HOLDER)
        end[:] = b"\xff" * 64
        writer.join()
        until(lambda: not wired.provider._streams)
        assert end == b"\xff" * 64, f"bytes of turn {turn} arrived after the holder was closed"
        friend.close()


def _starts_with(view: memoryview, value: int) -> bool:
    return view[0] == value


def _send_all(friend: socket.socket, request: bytes) -> None:
    with suppress(OSError):  # until it is hung up on
        while True:
            friend.sendall(request)


def test_a_half_open_stream_is_forgotten(wired: Wired) -> None:
    """The client says that it will not send any more, or resets."""
    polite, rude = wired.friend(), wired.friend()
    polite.shutdown(socket.SHUT_WR)
    rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    rude.close()
    assert is_over(polite)
    until(lambda: not wired.provider._streams and not wired.provider._held)


def test_a_write_that_stops_in_the_middle_holds_up_nobody(wired: Wired) -> None:
    friend = wired.friend()
    friend.sendall(REQUEST.pack(WRITE, 0, wired.slots, 1000, 0) + b"z" * 500)
    until(lambda: wired.region.memory[wired.slots + 499] == ord("z"))
    assert wired.fetch(wired.connect(HOLDER + 1), wired.slots + 499, 2) == b"z\0"


def test_a_pool_with_nothing_to_do_does_nothing(wired: Wired) -> None:
    channel = wired.connect()
    wired.fetch(channel, 0, 8)
    slept, busy_s = _sleeps(wired), _busy_s(wired)
    threading.Event().wait(0.2)
    assert _sleeps(wired) - slept <= 1
    assert _busy_s(wired) - busy_s <= 0.01


def _busy_s(wired: Wired) -> float:
    """Of the serving thread."""
    thread = wired.provider._thread.native_id
    return sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id == thread)


def _sleeps(wired: Wired) -> int:
    """How often the serving thread went to sleep."""
    with open(f"/proc/self/task/{wired.provider._thread.native_id}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))


def test_nothing_is_left_open(make_wired) -> None:
    def descriptors() -> int:
        """Sockets, eventfds and epolls; the regions' own stay while their memory does."""
        links = []
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{name}"))
        return sum(link.startswith(("socket:", "anon_inode:")) for link in links)

    before = descriptors()
    wired = make_wired()
    channel = wired.connect()
    wired.fetch(channel, 0, 8)
    wired.friend()
    wired.connect().close()
    wired.close()
    wired.close()
    assert descriptors() <= before
    assert not wired.provider._thread.is_alive()


def test_a_pool_without_a_descriptor_left_serves_those_it_has_and_accepts_later(wired: Wired) -> None:
    channel = wired.connect()
    client = socket.socket()
    client.settimeout(PATIENCE_S)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, limits[1]))
        spare = _take_descriptors()
        client.connect(("127.0.0.1", wired.port))
        until(lambda: wired.provider._deaf_until is not None)
        assert wired.fetch(channel, wired.slots, 8) == bytes(8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for descriptor in spare:
        os.close(descriptor)
    ticket = wired.ticket()
    client.sendall(HELLO.pack(MAGIC, ticket.number, ticket.secret))
    assert client.recv(64, socket.MSG_WAITALL).startswith(MAGIC)
    client.close()


class FullEpoll:
    """The kernel watches no more sockets for this user."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.refused = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def register(self, descriptor: int, events: int) -> None:
        self.refused.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stream_that_cannot_be_watched_is_hung_up_on_and_the_others_are_served(wired: Wired) -> None:
    channel = wired.connect()
    real = wired.provider._epoll
    wired.provider._epoll = full = FullEpoll(real)  # type: ignore[assignment]
    assert is_over(wired.stranger())
    assert full.refused.is_set()
    wired.provider._epoll = real
    assert wired.fetch(channel, wired.slots, 8) == bytes(8)
    assert wired.fetch(wired.connect(), wired.slots, 8) == bytes(8)


def _take_descriptors() -> list[int]:
    """All that the limit leaves."""
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    return taken


def test_a_host_that_vanishes_is_noticed_by_both_sides(wired: Wired) -> None:
    """Unplugging is for another machine; here, that the kernel is told to look."""
    channel = wired.connect()
    until(lambda: bool(wired.provider._held))
    [serving] = wired.provider._held[HOLDER]
    for stream in (channel.streams[0].socket, serving.socket):
        assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes_s = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + stream.getsockopt(
            socket.IPPROTO_TCP, socket.TCP_KEEPINTVL
        ) * stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert probes_s <= SILENCE_MAX_S
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_MAX_S * 1000
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_disturb_its_parent(wired: Wired) -> None:
    channel = wired.connect()
    wired.fetch(channel, 0, 8)
    into = memoryview(bytearray(8))
    under_way = channel.read([Extent(wired.slots, 8)], [into], soon())
    child = os.fork()
    if not child:
        try:
            with pytest.raises(ValueError, match="forked"):
                wired.transport.wait(under_way)
            operation = channel.write(Extent(wired.slots, 1), b"x", soon())
            fine = operation.done and isinstance(operation.error, Unavailable)
            wired.provider.close()
            wired.transport.close()
            os._exit(0 if fine else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    wired.finish(*under_way)
    assert wired.fetch(channel, wired.slots, 1) == b"\0"
    assert wired.fetch(wired.connect(), wired.slots, 1) == b"\0"
