"""``VerbsTransport``: this process's side of RDMA."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from l2_rdma.copying import address_of
from l2_rdma.layout import REGION_HEADER_BYTES, RegionHeader
from l2_rdma.transports.poll import PollLoop
from l2_rdma.transports.port import Ask, Extent, Operation, TransportName
from l2_rdma.transports.verbs.channel import VerbsChannel
from l2_rdma.transports.verbs.device import Device, DeviceReport, no_device_error
from l2_rdma.transports.verbs.hub import Hub
from l2_rdma.transports.verbs.pair import check
from l2_rdma.transports.verbs.provider import VerbsAnswer, VerbsOffer
from l2_rdma.transports.verbs.registered import RegisteredMemory

T = TypeVar("T")


class VerbsTransport:
    """Channels over one device.

    Args:
        device: closed by this, whatever happens.

    Raises:
        Unavailable: the device has no room for us.
    """

    name: TransportName = "verbs"

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self.report: DeviceReport = device.report
        self._device = device
        self._clock = clock
        self._hub = Hub(device, clock)
        self._loop = PollLoop(self._hub.poll, clock)
        self._channels: list[VerbsChannel] = []

    def register(self, buffer: memoryview) -> RegisteredMemory:
        """Pin it and make it known to the device.

        Raises:
            ValueError: it is empty or not contiguous, or the transport is closed.
            Unavailable: so much memory cannot be pinned.
        """
        if not buffer.nbytes or not buffer.c_contiguous:
            raise ValueError("what is registered must be contiguous and not empty")
        address = address_of(buffer, writable=not buffer.readonly)
        rights = 0 if buffer.readonly else self._device.binding.constants.IBV_ACCESS_LOCAL_WRITE
        with self._hub.lock:
            self._require_open()
            with no_device_error(self._device.binding, f"{buffer.nbytes} bytes cannot be registered"):
                region = self._device.binding.MR(self._hub.domain, buffer.nbytes, rights, address=address)
            memory = RegisteredMemory(
                region, buffer, address, buffer.nbytes, self._hub.memory, writable=not buffer.readonly
            )
            self._hub.memory.add(memory)
        return memory

    def register_dmabuf(self, descriptor: int, offset: int, length: int) -> RegisteredMemory:
        """Device memory (a GPU's) that its driver has exported as a dma-buf; for
        ``VerbsChannel.read_device``.

        Raises:
            ValueError: nothing of it, or the transport is closed.
            Refused: the RDMA device or its driver cannot reach such memory.
        """
        if length <= 0 or offset < 0:
            raise ValueError(f"[{offset}, {offset + length}) is no part of a dma-buf")
        binding = self._device.binding
        rights = binding.constants.IBV_ACCESS_LOCAL_WRITE
        with self._hub.lock:
            self._require_open()
            try:
                with no_device_error(binding, f"{self.report.device} cannot reach GPU memory"):
                    region = binding.DmaBufMR(
                        self._hub.domain, length, rights, dmabuf=descriptor, offset=offset
                    )
            except Unavailable as error:
                raise Refused(error.message) from error
            # The device names its bytes by their offset in the dma-buf; there is no address of ours.
            memory = RegisteredMemory(region, None, offset, length, self._hub.memory)
            self._hub.memory.add(memory, by_address=False)
        return memory

    def connect(self, offer: bytes, header: RegionHeader, ask: Ask, deadline: float) -> VerbsChannel:
        there = _decoded(offer, VerbsOffer, "offer")
        if there.link_layer != self.report.link_layer:
            raise Refused(
                f"the pool's RDMA device {there.device} is on {there.link_layer}, "
                f"ours ({self.report.device}) on {self.report.link_layer}"
            )
        with self._hub.lock:
            self._require_open()
            with no_device_error(self._device.binding, "no queue pair can be made"):
                channel = VerbsChannel(self._hub, header)
        try:
            answer = _decoded(ask(msgspec.msgpack.encode(channel.endpoint())), VerbsAnswer, "answer")
            if answer.length < header.layout.region_bytes:
                raise Corrupt(f"{header.node} has registered {answer.length} bytes of its region only")
            with self._hub.lock:
                self._require_open()
                with no_device_error(self._device.binding, "the queue pair cannot be connected"):
                    channel.connect(check(answer.endpoint, header.node), answer.address, answer.key)
                self._channels = [each for each in self._channels if each.broken is None]
                self._channels.append(channel)
            self._try(channel, there, header, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def wait(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if not operation.done:
                if self._hub.closed:
                    raise ValueError("the transport is closed")
                self._loop.wait(operations)
                return

    def close(self) -> None:
        with self._hub.lock:
            for channel in self._channels:
                channel.close_locked()
            self._hub.close()

    def _try(self, channel: VerbsChannel, there: VerbsOffer, header: RegionHeader, deadline: float) -> None:
        """Read the region's header: whether packets of full size come through, and whose memory it is."""
        head = memoryview(bytearray(REGION_HEADER_BYTES))
        operations = channel.read([Extent(0, len(head))], [head], deadline)
        self.wait(operations)
        error: KVCommError | None = operations[0].error
        if error is not None:
            raise Unavailable(
                f"{error.message}: no packet comes back from {there.gid} (device {there.device}) "
                f"to {self.report.gid} (device {self.report.device}); look at their route and MTU"
            )
        packed = header.pack()
        if bytes(head[: len(packed)]) != packed:
            raise Unavailable(f"the memory of {header.node} is of another life of the pool")

    def _require_open(self) -> None:
        if self._hub.closed:
            raise ValueError("the transport is closed")


def _decoded(packed: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except msgspec.DecodeError as error:
        raise Corrupt(f"an {what} of verbs that is none: {error}") from error
