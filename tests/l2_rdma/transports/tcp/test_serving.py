"""The gate between the serving thread and the event loop."""

from __future__ import annotations

import select
import socket
import threading
from typing import Any

from l2_rdma.transports.tcp.protocol import FETCH_ADD, HELLO, MAGIC, REQUEST, WRITE
from l2_rdma.transports.tcp.serving import Serving
from tests.l2_rdma.transports.tcp.wired import PATIENCE_S, Wired, soon


class SlowSocket:
    """Says what the test gave it; its second receive, which is into the region, is as slow as the test
    wants."""

    def __init__(self, said: bytes) -> None:
        self._said = [said[: 64 * 2], said[64 * 2 :]]
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def recv_into(self, buffer: memoryview) -> int:
        if not self._said:
            raise BlockingIOError
        piece = self._said.pop(0)
        if not self._said:
            self.entered.set()
            assert self.go_on.wait(PATIENCE_S)
        buffer[: len(piece)] = piece
        return len(piece)

    def sendmsg(self, buffers: list[bytes]) -> int:
        return sum(map(len, buffers))

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_RDWR


def serving_of(wired: Wired, stream: Any) -> Serving:
    return Serving(stream, wired.region, lambda serving, number, secret: True, b"welcome", soon())


def test_shut_waits_for_a_receive_under_way_and_for_no_other(wired: Wired) -> None:
    hello = HELLO.pack(MAGIC, 1, bytes(16))
    stream = SlowSocket(hello + REQUEST.pack(WRITE, 0, wired.slots, 200, 0) + b"x" * 100)
    serving = serving_of(wired, stream)
    assert serving.ready(select.EPOLLIN)
    receiver = threading.Thread(target=serving.ready, args=(select.EPOLLIN,))
    receiver.start()
    assert stream.entered.wait(PATIENCE_S)
    is_shut = threading.Event()

    def shut() -> None:
        serving.shut()
        is_shut.set()

    closer = threading.Thread(target=shut)
    closer.start()
    assert not is_shut.wait(0.05)
    stream.go_on.set()
    assert is_shut.wait(PATIENCE_S)
    assert wired.region.memory[wired.slots : wired.slots + 101] == b"x" * 100 + b"\0"
    receiver.join()
    closer.join()
    assert not serving.ready(select.EPOLLIN)


def test_what_was_received_before_is_not_done_after_shut(wired: Wired) -> None:
    """Requests that lie in the inbox, a write with its bytes and an atomic."""
    here, there = socket.socketpair()
    here.setblocking(False)
    serving = serving_of(wired, here)
    there.sendall(HELLO.pack(MAGIC, 1, bytes(16)) + REQUEST.pack(WRITE, 0, wired.slots, 8, 0) + b"x" * 8)
    there.sendall(REQUEST.pack(FETCH_ADD, 1, wired.slots + 64, 1, 0))
    assert serving._receive()
    serving.shut()
    serving._answer()
    assert not any(wired.region.memory[wired.slots : wired.slots + 128])
    serving.close()
    there.close()
