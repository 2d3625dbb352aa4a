"""A channel whose pool is silent, slow or mad: it ends what it was given, and touches nothing afterwards."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest

from kvcomm.block import Incarnation
from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from l2_rdma.layout import plan_layout
from l2_rdma.transports.port import Extent, Operation
from l2_rdma.transports.tcp import stream as stream_module
from l2_rdma.transports.tcp.channel import TcpChannel
from l2_rdma.transports.tcp.protocol import (
    DONE,
    GARBAGE,
    GOODBYE,
    HELD,
    HELLO,
    MAGIC,
    OUTSIDE,
    REQUEST,
    TICKET,
    WELCOME,
    WRITE,
    TcpAnswer,
    TcpOffer,
    reply_head,
)
from l2_rdma.transports.tcp.transport import TcpTransport
from tests.l2_rdma.regions import region_header
from tests.l2_rdma.transports.tcp.wired import PATIENCE_S, soon

HEADER = region_header(plan_layout(6 << 20, slab_bytes=1 << 20))
GREETING = WELCOME.pack(MAGIC, HEADER.incarnation, HEADER.layout.region_bytes)
SLOTS = HEADER.layout.slots_offset
SHORT_S = 0.05


class ScriptedPool:
    """Greets as a pool does, then the test speaks and listens for it."""

    def __init__(self, greeting: bytes = GREETING, receive_bytes: int = 0) -> None:
        self._greeting = greeting
        self._listener = socket.socket()
        if receive_bytes:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self.transport = TcpTransport()
        self._connected: list[socket.socket] = []

    @property
    def offer(self) -> bytes:
        return msgspec.msgpack.encode(TcpOffer("127.0.0.1", self._listener.getsockname()[1]))

    def connect(self, deadline: float | None = None) -> TcpChannel:
        greeter = threading.Thread(target=self._greet)
        greeter.start()
        try:
            answer = msgspec.msgpack.encode(TcpAnswer(1, bytes(16)))
            return self.transport.connect(self.offer, HEADER, lambda _: answer, deadline or soon())
        finally:
            greeter.join()

    @property
    def peer(self) -> socket.socket:
        return self._connected[-1]

    def _greet(self) -> None:
        with suppress(OSError):  # nobody comes if the client's time is over first
            connected, _ = self._listener.accept()
            self._connected.append(connected)
            connected.settimeout(PATIENCE_S)
            connected.recv(HELLO.size, socket.MSG_WAITALL)
            connected.sendall(self._greeting)

    def close(self) -> None:
        self.transport.close()
        for each in (*self._connected, self._listener):
            each.close()


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ScriptedPool]]:
    pools: list[ScriptedPool] = []

    def make(*arguments, **options) -> ScriptedPool:
        pools.append(ScriptedPool(*arguments, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make_pool) -> ScriptedPool:
    return make_pool()


def answer(number: int, data: bytes) -> bytes:
    return reply_head(len(data)).pack(number, DONE, len(data)) + data


def read(channel: TcpChannel, length: int, deadline: float) -> tuple[Operation, bytearray]:
    into = bytearray(b"\xee" * length)
    [operation] = channel.read([Extent(SLOTS, length)], [memoryview(into)], deadline)
    return operation, into


@pytest.mark.parametrize(
    ("greeting", "error"),
    [
        (b"", Unavailable),
        (GREETING[:-1], Unavailable),
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", Corrupt),
        (WELCOME.pack(MAGIC, HEADER.incarnation + 1, HEADER.layout.region_bytes), Unavailable),
        (WELCOME.pack(MAGIC, HEADER.incarnation, HEADER.layout.region_bytes - 4096), Unavailable),
        (reply_head(0).pack(0, GOODBYE, TICKET), Refused),
        (reply_head(0).pack(0, GOODBYE, GARBAGE), Corrupt),
    ],
)
def test_a_greeting_that_is_none_opens_no_channel(make_pool, greeting: bytes, error: type) -> None:
    with pytest.raises(error):
        make_pool(greeting).connect(soon(2 * SHORT_S) if len(greeting) < 64 else soon())


def test_a_pool_that_is_gone_is_unavailable(pool: ScriptedPool) -> None:
    offer = pool.offer
    pool.close()
    transport = TcpTransport()
    with pytest.raises(Unavailable, match="cannot be reached"):
        transport.connect(offer, HEADER, lambda _: msgspec.msgpack.encode(TcpAnswer(1, bytes(16))), soon())
    with pytest.raises(Unavailable, match="in time"):
        transport.connect(offer, HEADER, lambda _: msgspec.msgpack.encode(TcpAnswer(1, bytes(16))), soon(-1))
    transport.close()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (reply_head(4096).pack(1, DONE, 4096), Corrupt),
        (reply_head(4096).pack(0, DONE, 4095), Corrupt),
        (reply_head(4096).pack(0, HELD, 4096), Corrupt),
        (reply_head(4096).pack(0, 77, 4096), Corrupt),
        (random.Random(5).randbytes(9000), Corrupt),
        (reply_head(0).pack(0, GOODBYE, OUTSIDE), Refused),
        (reply_head(0).pack(0, GOODBYE, 9), Corrupt),
    ],
)
def test_replies_that_are_none_break_the_channel(pool: ScriptedPool, said: bytes, error: type) -> None:
    channel = pool.connect()
    first, _ = read(channel, 4096, soon())
    pool.peer.sendall(said)
    pool.transport.wait([first])
    assert type(first.error) is error
    assert channel.broken is first.error
    assert len(pool.peer.recv(1 << 16)) == REQUEST.size
    with suppress(ConnectionResetError):  # it had not read all that we said
        assert pool.peer.recv(1) == b""


def test_what_nobody_asked_for_breaks_the_channel(pool: ScriptedPool) -> None:
    channel = pool.connect()
    first, _ = read(channel, 8, soon())
    pool.peer.sendall(answer(0, bytes(8)))
    pool.transport.wait([first])
    pool.peer.sendall(b"?")
    pool.transport._poll(1.0)
    assert type(channel.broken) is Corrupt


def test_a_connection_that_ends_in_the_middle_of_a_reply_fails_all(pool: ScriptedPool) -> None:
    channel = pool.connect()
    operations = [read(channel, 4096, soon())[0] for _ in range(3)]
    pool.peer.sendall(answer(0, bytes(4096)) + answer(1, bytes(4096))[:1000])
    pool.peer.close()
    pool.transport.wait(operations)
    assert [type(each.error) for each in operations] in (
        [type(None), Unavailable, Unavailable],
        [Unavailable] * 3,  # the reset overtook what was sent before
    )
    assert isinstance(channel.broken, Unavailable)


@pytest.mark.parametrize("said_before", [0, 10, 64, 5000])
def test_late_bytes_come_to_nobody_and_the_channel_goes_on(pool: ScriptedPool, said_before: int) -> None:
    channel = pool.connect()
    said = answer(0, bytes(range(256)) * 4096)
    late, into = read(channel, 1 << 20, soon(SHORT_S))
    pool.peer.sendall(said[:said_before])
    begun = time.monotonic()
    pool.transport.wait([late])
    assert isinstance(late.error, Unavailable) and channel.broken is None
    assert time.monotonic() - begun < PATIENCE_S
    then = bytes(into)
    assert then[max(0, said_before - 64) :].strip(b"\xee") == b""
    next_one, small = read(channel, 8, soon())
    talk = threading.Thread(target=pool.peer.sendall, args=(said[said_before:] + answer(1, b"12345678"),))
    talk.start()
    pool.transport.wait([next_one])
    talk.join()
    assert next_one.error is None and small == b"12345678"
    assert into == then
    assert late.done and isinstance(late.error, Unavailable)


def test_who_is_interrupted_while_it_ends_the_overdue_is_not_the_last_to_do_so(
    pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = pool.connect()
    late = channel.fetch_add(SLOTS, 1, soon(SHORT_S))

    def interrupted(now: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(channel.streams[0], "expire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.transport.wait([late])
    monkeypatch.undo()
    pool.transport._poll(0.0)
    assert isinstance(late.error, Unavailable)


def test_who_is_interrupted_while_it_breaks_a_channel_is_not_the_last_to_do_so(
    pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = pool.connect()
    under_way = channel.fetch_add(SLOTS, 1, soon())

    def interrupted(error: KVCommError) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(channel.streams[0], "fail", interrupted)
    with pytest.raises(KeyboardInterrupt):
        channel.close()
    monkeypatch.undo()
    channel.close()
    assert isinstance(under_way.error, Unavailable)
    assert channel.streams[0].socket.fileno() == -1


def test_a_pool_that_owes_too_much_is_given_up(pool: ScriptedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "OWED_BYTES_MAX", 3 << 20)
    channel = pool.connect()
    for _ in range(3):
        operation, _ = read(channel, 1 << 20, soon(SHORT_S))
        assert channel.broken is None
        pool.transport.wait([operation])
        assert isinstance(operation.error, Unavailable)
    assert isinstance(channel.broken, Unavailable)


def test_a_write_that_cannot_be_sent_in_time_breaks_the_channel(make_pool) -> None:
    """Its rest must not follow later, and half of it cannot be taken back."""
    pool = make_pool(receive_bytes=4096)
    channel = pool.connect()
    data = bytearray(4 << 20)
    deadline = soon(SHORT_S)
    operations = [channel.write(Extent(SLOTS, len(data)), data, deadline) for _ in range(3)]
    pool.transport.wait(operations)
    assert [type(each.error) for each in operations] == [Unavailable] * 3
    assert isinstance(channel.broken, Unavailable)
    data[:] = b"\xff" * len(data)  # ours again: nobody sends it
    got = b""
    with suppress(ConnectionError):
        while more := pool.peer.recv(1 << 20):
            got += more
    assert len(got) < REQUEST.size + len(data)
    assert b"\xff" not in got[REQUEST.size :]


def test_what_waits_behind_a_stuck_write_is_not_sent_after_its_deadline(make_pool) -> None:
    pool = make_pool(receive_bytes=4096)
    channel = pool.connect()
    data = bytes(4 << 20)
    stuck = channel.write(Extent(SLOTS, len(data)), data, soon())
    late = channel.fetch_add(SLOTS, 1, soon(SHORT_S))
    pool.transport.wait([late])
    assert isinstance(late.error, Unavailable) and channel.broken is None and not stuck.done
    good = channel.fetch_add(SLOTS, 2, soon())

    def serve() -> None:
        head = pool.peer.recv(REQUEST.size, socket.MSG_WAITALL)
        assert REQUEST.unpack(head) == (WRITE, 0, SLOTS, len(data), 0)
        left = len(data)
        while left:
            left -= len(pool.peer.recv(min(left, 1 << 20)))
        assert REQUEST.unpack(pool.peer.recv(REQUEST.size, socket.MSG_WAITALL))[1:4] == (1, SLOTS, 2)
        head_only = reply_head(0)
        pool.peer.sendall(head_only.pack(0, DONE, len(data)) + head_only.pack(1, DONE, 40))

    server = threading.Thread(target=serve)
    server.start()
    pool.transport.wait([stuck, good])
    server.join()
    assert (stuck.error, good.error, good.value) == (None, None, 40)


def test_replies_in_any_pieces_reach_their_places(pool: ScriptedPool) -> None:
    rng = random.Random(6)
    channel = pool.connect()
    sizes = [rng.choice([0, 1, 8, 48, 512, 5000, 300_000]) for _ in range(300)]
    reads = [read(channel, size, soon()) for size in sizes]
    data = [rng.randbytes(size) for size in sizes]
    said = b"".join(answer(number, each) for number, each in enumerate(data))
    cuts = sorted(rng.randrange(len(said)) for _ in range(400))

    def speak() -> None:
        for begin, end in pairwise([0, *cuts, len(said)]):
            pool.peer.sendall(said[begin:end])

    talk = threading.Thread(target=speak)
    talk.start()
    pool.transport.wait([operation for operation, _ in reads])
    talk.join()
    for (operation, into), expected in zip(reads, data, strict=True):
        assert operation.error is None and into == expected


def test_another_life_of_the_region_is_not_read(make_pool) -> None:
    pool = make_pool(WELCOME.pack(MAGIC, Incarnation(99), HEADER.layout.region_bytes))
    with pytest.raises(Unavailable, match="another life"):
        pool.connect()
