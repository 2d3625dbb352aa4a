"""The owner of a region, in a process of its own: ``python -m tests.contracts.transports.peer ...``.

It serves one transport with nothing around it: no store, no data wire.  Who connects to its control socket is
a holder, whose channels end with that connection; one packet is one question, ``[verb, *arguments]``.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcomm.block import Incarnation
from kvcomm.errors import KVCommError
from l2_rdma.copying import address_of
from l2_rdma.layout import plan_layout
from l2_rdma.region import Region, reclaim_stale
from l2_rdma.transports.cuda.gpu import Gpu
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.cuda.runtime import open_gpu
from l2_rdma.transports.known import find_providers
from l2_rdma.transports.port import Provider, WireOptions
from tests.l2_rdma.regions import TENANT
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu

MIB = 1 << 20
READ_BYTES = 17 * MIB
"""From the first slot on: holds what :func:`expected` says, and nobody writes there."""
SCRATCH_BYTES = 17 * MIB
"""After that: for whoever wants to write."""
SCRATCH_WORDS = 512
"""The hazard words, for atomics: memory of the host also where the slots are elsewhere."""
LAYOUT = plan_layout(
    READ_BYTES + SCRATCH_BYTES + MIB, slab_bytes=MIB, index_entries=64, hazard_count=SCRATCH_WORDS
)
CONTROL = "control.sock"
PACKET_BYTES_MAX = 128 << 10
_PERIOD = 65_521
"""Of the pattern, a prime: no power of two, and no sum of few, repeats it."""


def expected(incarnation: int, offset: int, length: int) -> bytes:
    """What a peer of this incarnation holds in its slots, ``offset`` counted from the first."""
    return _pattern(incarnation)[offset : offset + length]


@cache
def _pattern(incarnation: int) -> bytes:
    step = 2 * incarnation + 1
    period = bytes((step * at + at // 251) & 0xFF for at in range(_PERIOD))
    return (period * (READ_BYTES // _PERIOD + 1))[:READ_BYTES]


class HostMemory:
    """A region of shared memory."""

    def __init__(self, directory: Path, incarnation: int) -> None:
        self.region = Region.create(
            directory,
            instance="tests",
            node="peer",
            tenant=TENANT,
            incarnation=Incarnation(incarnation),
            layout=LAYOUT,
        )
        self.region.back(1 << 40)
        self.poke(LAYOUT.slots_offset, expected(incarnation, 0, READ_BYTES))

    def peek(self, offset: int, length: int) -> bytes:
        return bytes(self.region.memory[offset : offset + length])

    def poke(self, offset: int, data: bytes) -> None:
        self.region.memory[offset : offset + len(data)] = data

    def close(self) -> None:
        self.region.close()


class DeviceMemory:
    """A region with its slots on a GPU, or on one of plain memory."""

    def __init__(self, gpu: Gpu, directory: Path, incarnation: int) -> None:
        self._region = CudaRegion.create(
            directory,
            gpu,
            instance="tests",
            node="peer",
            tenant=TENANT,
            incarnation=Incarnation(incarnation),
            layout=LAYOUT,
        )
        self._stream = gpu.stream()
        self.region = self._region.file
        self.poke(LAYOUT.slots_offset, expected(incarnation, 0, READ_BYTES))

    def peek(self, offset: int, length: int) -> bytes:
        on_host = max(0, min(LAYOUT.slots_offset - offset, length))
        rest = memoryview(bytearray(length - on_host))
        if rest.nbytes:
            self._stream.copy(address_of(rest), self._region.address(offset + on_host), rest.nbytes)
            self._stream.wait()
        return bytes(self.region.memory[offset : offset + on_host]) + bytes(rest)

    def poke(self, offset: int, data: bytes) -> None:
        on_host = max(0, min(LAYOUT.slots_offset - offset, len(data)))
        self.region.memory[offset : offset + on_host] = data[:on_host]
        rest = memoryview(data)[on_host:]
        if rest.nbytes:
            self._stream.copy(self._region.address(offset + on_host), address_of(rest), rest.nbytes)
            self._stream.wait()

    def close(self) -> None:
        self._stream.close()
        self._region.close()


Memory = HostMemory | DeviceMemory


def open_memory(transport: str, directory: Path, incarnation: int) -> Memory:
    """What a peer of this transport serves."""
    if transport == "cuda":
        return DeviceMemory(open_gpu(), directory, incarnation)
    if transport == "cuda-plain":
        return DeviceMemory(HostGpu(directory), directory, incarnation)
    return HostMemory(directory, incarnation)


class _Desk:
    """Answers the questions of one peer's holders."""

    def __init__(self, memory: Memory, provider: Provider) -> None:
        self._memory = memory
        self._provider = provider
        self._verbs: dict[str, Callable[..., Any]] = {
            "meet": lambda holder: [provider.offer(), memory.region.header.pack()],
            "open": lambda holder, proposal: provider.open(holder, TENANT, proposal),
            "peek": lambda holder, offset, length: memory.peek(offset, length),
            "poke": lambda holder, offset, data: memory.poke(offset, data),
            "revoke": lambda holder, other: provider.close_holder(other),
            "who": lambda holder: holder,
            "shut": lambda holder: provider.close(),
            "facts": lambda holder: [len(os.listdir("/proc/self/fd")), threading.active_count()],
        }

    def answer(self, holder: int, packet: bytes) -> bytes:
        verb, *arguments = msgspec.msgpack.decode(packet)
        try:
            return msgspec.msgpack.encode(["ok", self._verbs[verb](holder, *arguments)])
        except KVCommError as error:
            return msgspec.msgpack.encode([error.code, error.message])

    def ended(self, holder: int) -> None:
        self._provider.close_holder(holder)


def serve(transport: str, directory: Path, incarnation: int) -> None:
    """Until standard input ends."""
    reclaim_stale(directory)  # of the peer whose place this one takes
    memory = open_memory(transport, directory, incarnation)
    options = WireOptions(rdma_device=os.environ.get("KVCOMM_TEST_RDMA_DEVICE", ""))
    name = transport.removesuffix("-plain")
    found = find_providers([name], memory.region, options)
    if found.refused:
        say(refused=found.refused[name])
        memory.close()
        return
    provider = next(iter(found.running.values()))
    (directory / CONTROL).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(directory / CONTROL))
        listening.listen()
        say(incarnation=incarnation)
        _answer_all(listening, _Desk(memory, provider))
    provider.close()
    memory.close()


def _answer_all(listening: socket.socket, desk: _Desk) -> None:
    holders: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listening:
                    connection, _ = listening.accept()
                    holders[connection] = len(holders) + 1
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                packet = _received(connection)
                if packet:
                    with suppress(OSError):
                        connection.send(desk.answer(holders[connection], packet))
                else:
                    selector.unregister(connection)
                    desk.ended(holders[connection])
                    connection.close()


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(PACKET_BYTES_MAX + 1024)
    except OSError:
        return b""


def say(**facts: Any) -> None:
    """One line for the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
