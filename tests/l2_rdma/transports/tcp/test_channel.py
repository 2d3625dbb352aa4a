"""What a channel over TCP does, against a real provider."""

from __future__ import annotations

import random
import signal
import socket
import threading
from typing import Any

import pytest

from kvcomm.errors import Refused, Unavailable
from l2_rdma.transports.port import Extent
from tests.l2_rdma.transports.tcp.wired import SLAB_BYTES, Wired, soon


def test_bytes_written_are_read_back(wired: Wired) -> None:
    channel = wired.connect()
    data = random.Random(1).randbytes(3 << 20)
    wired.finish(channel.write(Extent(wired.slots + 5, len(data)), data, soon()))
    assert wired.region.memory[wired.slots + 5 :][: len(data)] == data
    assert wired.fetch(channel, wired.slots + 5, len(data)) == data


def test_many_operations_of_all_sizes_at_once(wired: Wired) -> None:
    channel = wired.connect()
    rng = random.Random(2)
    wired.region.memory[wired.slots : wired.slots + 8 * SLAB_BYTES] = rng.randbytes(8 * SLAB_BYTES)
    extents = [
        Extent(wired.slots + rng.randrange(4 * SLAB_BYTES), rng.choice([0, 1, 8, 511, 4096, 1 << 18]))
        for _ in range(500)
    ]
    into = [memoryview(bytearray(extent.length)) for extent in extents]
    wired.finish(*channel.read(extents, into, soon()))
    for extent, view in zip(extents, into, strict=True):
        assert view == wired.region.memory[extent.offset : extent.offset + extent.length]


def test_views_of_any_format_are_filled(wired: Wired) -> None:
    channel = wired.connect()
    wired.region.words[wired.slots // 8] = 77
    into = memoryview(bytearray(16)).cast("Q", [2, 1])
    wired.finish(*channel.read([Extent(wired.slots, 16)], [into], soon()))
    assert into.tobytes() == (77).to_bytes(16, "little")


def test_words_are_counted_and_swapped(wired: Wired) -> None:
    channel = wired.connect()
    added = channel.fetch_add(wired.slots, (1 << 64) - 1, soon())
    again = channel.fetch_add(wired.slots, 3, soon())
    lost = channel.compare_swap(wired.slots, 1, 9, soon())
    won = channel.compare_swap(wired.slots, 2, 9, soon())
    wired.finish(added, again, lost, won)
    assert [each.value for each in (added, again, lost, won)] == [0, (1 << 64) - 1, 2, 2]
    assert wired.region.words[wired.slots // 8] == 9


def test_what_is_outside_the_region_is_refused_and_the_channel_goes_on(wired: Wired) -> None:
    channel = wired.connect()
    end = wired.header.layout.region_bytes
    operations = channel.read([Extent(end - 8, 16)], [memoryview(bytearray(16))], soon())
    operations += [channel.write(Extent(end, 1), b"x", soon()), channel.fetch_add(end, 1, soon())]
    wired.transport.wait(operations)
    assert all(isinstance(each.error, Refused) for each in operations)
    assert channel.broken is None
    assert wired.fetch(channel, end - 8, 8) == bytes(wired.region.memory[end - 8 : end])


@pytest.mark.parametrize("stream_count", [1, 3])
def test_many_threads_share_a_channel(make_wired, stream_count: int) -> None:
    wired = make_wired(stream_count=stream_count)
    channel = wired.connect()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        offset = wired.slots + number * SLAB_BYTES
        try:
            for _ in range(20):
                data = rng.randbytes(rng.choice([8, 5000, 300_000]))
                wired.finish(channel.write(Extent(offset, len(data)), data, soon()))
                assert wired.fetch(channel, offset, len(data)) == data
                wired.finish(channel.fetch_add(wired.slots + 8 * SLAB_BYTES - 8, 1, soon()))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert wired.region.words[(wired.slots + 8 * SLAB_BYTES - 8) // 8] == 120


def test_a_closed_channel_fails_what_is_posted(wired: Wired) -> None:
    channel = wired.connect()
    channel.close()
    channel.close()
    operation = channel.write(Extent(wired.slots, 1), b"x", soon())
    assert operation.done and isinstance(operation.error, Unavailable)
    assert isinstance(channel.broken, Unavailable)


def test_a_pool_that_ends_fails_all_at_once(wired: Wired) -> None:
    channel = wired.connect()
    wired.provider.close()
    operation = channel.write(Extent(wired.slots, 1), b"x", soon(60))
    wired.transport.wait([operation])
    assert isinstance(operation.error, Unavailable)
    assert channel.broken is not None


def test_a_connection_that_is_over_sends_no_signal(wired: Wired) -> None:
    """SIGPIPE ends a process that has not asked Python to ignore it."""
    channel = wired.connect()
    signals: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, frame: signals.append(number))
    try:
        channel.streams[0].socket.shutdown(socket.SHUT_WR)
        operation = channel.fetch_add(wired.slots, 1, soon())
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert isinstance(operation.error, Unavailable)
    assert signals == []


class InterruptedSocket:
    """Does what it is asked for, and then the user presses Ctrl-C."""

    def __init__(self, real: Any, name: str) -> None:
        self._real = real
        self._name = name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        if name != self._name:
            return method

        def act(*arguments: Any) -> None:
            method(*arguments)
            raise KeyboardInterrupt

        return act


@pytest.mark.parametrize("call", ["sendmsg", "recvmsg_into"])
def test_an_interrupted_call_breaks_the_channel(wired: Wired, call: str) -> None:
    """What it did is not known any more: a request must not be sent twice, nor a reply put elsewhere."""
    channel = wired.connect()
    [stream] = channel.streams
    stream.socket = InterruptedSocket(stream.socket, call)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        wired.finish(channel.fetch_add(wired.slots, 1, soon()))
    assert isinstance(channel.broken, Unavailable)
    assert wired.region.words[wired.slots // 8] <= 1
