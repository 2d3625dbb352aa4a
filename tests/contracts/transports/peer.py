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
from l2_rdma.layout import RegionLayout, plan_layout
from l2_rdma.region import Region, reclaim_stale
from l2_rdma.slotmemory import FileSlots, SlotMemory
from l2_rdma.transports.cuda.gpu import Gpu
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.cuda.runtime import open_gpu
from l2_rdma.transports.cuda.slots import DeviceSlots
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

    def __init__(self, directory: Path, incarnation: int, layout: RegionLayout = LAYOUT) -> None:
        self.region = Region.create(
            directory,
            instance="tests",
            node="peer",
            tenant=TENANT,
            incarnation=Incarnation(incarnation),
            layout=layout,
        )
        self.region.back(1 << 40)

    def peek(self, offset: int, length: int) -> bytes:
        return bytes(self.region.memory[offset : offset + length])

    def poke(self, offset: int, data: bytes) -> None:
        self.region.memory[offset : offset + len(data)] = data

    def slots(self) -> SlotMemory:
        """For an owner."""
        return FileSlots(self.region.memory)

    def close(self) -> None:
        self.region.close()


class DeviceMemory:
    """A region with its slots on a GPU, or on one of plain memory."""

    def __init__(self, gpu: Gpu, directory: Path, incarnation: int, layout: RegionLayout) -> None:
        self._region = CudaRegion.create(
            directory,
            gpu,
            instance="tests",
            node="peer",
            tenant=TENANT,
            incarnation=Incarnation(incarnation),
            layout=layout,
        )
        self._stream = gpu.stream()
        self.region = self._region.file

    def peek(self, offset: int, length: int) -> bytes:
        on_host = max(0, min(self.region.header.layout.slots_offset - offset, length))
        rest = memoryview(bytearray(length - on_host))
        if rest.nbytes:
            self._stream.copy(address_of(rest), self._region.address(offset + on_host), rest.nbytes)
            self._stream.wait()
        return bytes(self.region.memory[offset : offset + on_host]) + bytes(rest)

    def poke(self, offset: int, data: bytes) -> None:
        on_host = max(0, min(self.region.header.layout.slots_offset - offset, len(data)))
        self.region.memory[offset : offset + on_host] = data[:on_host]
        rest = memoryview(data)[on_host:]
        if rest.nbytes:
            self._stream.copy(self._region.address(offset + on_host), address_of(rest), rest.nbytes)
            self._stream.wait()

    def slots(self) -> SlotMemory:
        """For an owner."""
        return DeviceSlots(self._region)

    def close(self) -> None:
        self._stream.close()
        self._region.close()


Memory = HostMemory | DeviceMemory


def open_memory(transport: str, directory: Path, incarnation: int, layout: RegionLayout = LAYOUT) -> Memory:
    """What a peer of this transport serves."""
    if transport == "cuda":
        return DeviceMemory(open_gpu(), directory, incarnation, layout)
    if transport == "cuda-plain":
        return DeviceMemory(HostGpu(directory), directory, incarnation, layout)
    return HostMemory(directory, incarnation, layout)


class Answers:
    """Answers the questions of a peer's holders.

    Args:
        more: questions of the peer's own, by verb: the function gets the holder and the arguments.
    """

    def __init__(
        self, memory: Memory, provider: Provider, more: dict[str, Callable[..., Any]] | None = None
    ) -> None:
        self._provider = provider
        self._shut = False
        self._verbs: dict[str, Callable[..., Any]] = {
            "meet": lambda holder: [provider.offer(), memory.region.header.pack()],
            "open": lambda holder, proposal: provider.open(holder, TENANT, proposal),
            "peek": lambda holder, offset, length: memory.peek(offset, length),
            "poke": lambda holder, offset, data: memory.poke(offset, data),
            "revoke": lambda holder, other: provider.close_holder(other),
            "who": lambda holder: holder,
            "shut": self._shut_provider,
            "serves": lambda holder: not self._shut,
            "facts": lambda holder: [len(os.listdir("/proc/self/fd")), threading.active_count()],
            **(more or {}),
        }

    def _shut_provider(self, holder: int) -> None:
        self._shut = True
        self._provider.close()

    def answer(self, holder: int, packet: bytes) -> bytes:
        verb, *arguments = msgspec.msgpack.decode(packet)
        try:
            return msgspec.msgpack.encode(["ok", self._verbs[verb](holder, *arguments)])
        except KVCommError as error:
            return msgspec.msgpack.encode([error.code, error.message])

    def ended(self, holder: int) -> None:
        self._provider.close_holder(holder)


class Listening:
    """The control socket in ``directory``."""

    def __init__(self, directory: Path, answers: Answers) -> None:
        (directory / CONTROL).unlink(missing_ok=True)
        self._answers = answers
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(directory / CONTROL))
        self._socket.listen()
        self._holders: dict[Any, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def step(self, timeout_s: float | None = None) -> bool:
        """Answer what was asked, having waited so long for something; whether to go on: until standard input
        ends."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is sys.stdin:
                return False
            if key.fileobj is self._socket:
                connection, _ = self._socket.accept()
                self._holders[connection] = len(self._holders) + 1
                self._selector.register(connection, selectors.EVENT_READ)
            else:
                self._answer(key.fileobj)
        return True

    def _answer(self, connection: Any) -> None:
        holder = self._holders[connection]
        try:
            packet = connection.recv(PACKET_BYTES_MAX + 1024)
        except OSError:
            packet = b""
        if packet:
            with suppress(OSError):
                connection.send(self._answers.answer(holder, packet))
            return
        self._selector.unregister(connection)
        self._answers.ended(holder)
        connection.close()


def open_provider(transport: str, memory: Memory) -> Provider | None:
    """``None``: it does not run here, and the test is told why."""
    options = WireOptions(rdma_device=os.environ.get("KVCOMM_TEST_RDMA_PEER_DEVICE", ""))
    name = transport.removesuffix("-plain")
    found = find_providers([name], memory.region, options)
    if found.refused:
        say(refused=found.refused[name])
        return None
    return next(iter(found.running.values()))


def serve(transport: str, directory: Path, incarnation: int) -> None:
    """Until standard input ends."""
    reclaim_stale(directory)  # of the peer whose place this one takes
    memory = open_memory(transport, directory, incarnation)
    memory.poke(LAYOUT.slots_offset, expected(incarnation, 0, READ_BYTES))
    provider = open_provider(transport, memory)
    if provider is not None:
        listening = Listening(directory, Answers(memory, provider))
        say(incarnation=incarnation)
        while listening.step():
            pass
        provider.close()
    memory.close()


def say(**facts: Any) -> None:
    """One line for the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
