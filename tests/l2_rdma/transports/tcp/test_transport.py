"""The loop of all channels: who is woken, and when."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from l2_rdma.transports.port import Extent
from l2_rdma.transports.tcp.transport import TcpTransport
from tests.l2_rdma.transports.tcp.wired import PATIENCE_S, Wired, soon
from tests.peers import until


class Overtaken:
    """A channel; while it looks for what is overdue, somebody goes to sleep for a hundred seconds."""

    def __init__(self, transport: TcpTransport) -> None:
        self._transport = transport

    def expire(self, now: float) -> float:
        assert self._transport._earliest == float("inf")
        self._transport._wakes_at = now + 100
        return now + 5


def test_who_fell_asleep_while_others_looked_for_the_overdue_is_woken() -> None:
    transport = TcpTransport()
    stream = cast("Any", object())
    transport._channels[-1] = cast("Any", Overtaken(transport)), stream
    transport._busy.add(stream)
    transport._expire(1000.0)
    assert transport._earliest == 1005.0
    assert [descriptor for descriptor, _ in transport._epoll.poll(0)] == [transport._alarm]
    transport._channels.clear()
    transport.close()


def test_only_an_earlier_deadline_wakes_who_sleeps(wired: Wired) -> None:
    channel = wired.connect()
    [stream] = channel.streams
    wired.transport._wakes_at = time.monotonic() + 50
    wired.transport.expect(stream, time.monotonic() + 60)
    assert wired.transport._epoll.poll(0) == []
    wired.transport.expect(stream, time.monotonic() + 40)
    assert wired.transport._epoll.poll(0) != []


def test_a_transport_that_is_closed_opens_nothing(wired: Wired) -> None:
    wired.transport.close()
    with pytest.raises(ValueError, match="closed"):
        wired.connect()
    with pytest.raises(ValueError, match="closed"):
        wired.transport.register(memoryview(bytearray(8)))


def test_a_transport_that_is_closed_while_it_connects_leaves_nothing_open(wired: Wired) -> None:
    def ask(proposal: bytes) -> bytes:
        wired.transport.close()
        return wired.provider.open(7, wired.header.tenant, proposal)

    channel = wired.transport.connect(wired.provider.offer(), wired.header, ask, soon())
    assert channel.broken is not None
    assert channel.streams[0].socket.fileno() == -1


def test_a_registration_keeps_memory_for_as_long_as_it_is_open(wired: Wired) -> None:
    memory = bytearray(8)
    registration = wired.transport.register(memoryview(memory))
    with pytest.raises(BufferError):
        memory.append(0)
    registration.close()
    memory.append(0)


def test_one_waiter_ends_the_operations_of_all_channels(wired: Wired) -> None:
    """Also those that nobody waits for, and of threads that have gone."""
    first, second = wired.connect(), wired.connect(8)
    forgotten: list[Any] = []
    poster = threading.Thread(target=lambda: forgotten.append(first.fetch_add(wired.slots, 1, soon())))
    poster.start()
    poster.join()
    until(lambda: wired.region.words[wired.slots // 8] == 1)
    deadline = soon(PATIENCE_S)
    while not forgotten[0].done:
        assert time.monotonic() < deadline
        into = memoryview(bytearray(8))
        wired.finish(*second.read([Extent(wired.slots, 8)], [into], deadline))
    assert forgotten[0].error is None
