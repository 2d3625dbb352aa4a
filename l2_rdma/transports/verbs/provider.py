"""``VerbsProvider``: a pool's side; the region, registered, and one queue pair a channel.

After that no code of the pool runs for what clients do: the device answers READs, WRITEs and atomics, also
while the process is stopped.

**The whole region is registered once.**  Where the device pages memory in on demand (ODP) that costs
nothing; elsewhere registering pins it, so all memory that the region is configured for is taken at the start
(it is put behind the file first, so a full ``/dev/shm`` is an error and not a signal).  *Turned down*: a key
for each slice, handed out while the region grows.  Every client would have to hear of every slice, by a
thread here or a question there, to save memory that was configured to be used.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import msgspec

from kvcomm.errors import ConfigError, Corrupt, Refused, Unavailable
from l2_rdma.region import Region
from l2_rdma.transports.port import TransportName
from l2_rdma.transports.verbs.device import Device, DeviceReport, in_child, no_device_error
from l2_rdma.transports.verbs.pair import Endpoint, Pair, check

CHANNELS_PER_HOLDER_MAX = 8
"""A holder that opens more loses its oldest: a client that reconnects does not pile up queue pairs."""


class VerbsOffer(msgspec.Struct, frozen=True, array_like=True):
    device: str
    link_layer: str
    gid: str


class VerbsAnswer(msgspec.Struct, frozen=True, array_like=True):
    endpoint: Endpoint
    address: int
    """Of the region's first byte, in the owner's memory."""
    key: int
    """The rkey."""
    length: int


class VerbsProvider:
    """Serves one region.

    Args:
        device: to be closed by this, whatever happens.

    Raises:
        Unavailable: the region cannot be registered.
    """

    name: TransportName = "verbs"
    writes_unseen = True

    def __init__(self, region: Region, device: Device) -> None:
        self.report: DeviceReport = device.report
        self._device = device
        self._tenant = region.header.tenant
        self._pairs: dict[int, deque[Pair]] = {}
        self._closed = False
        self._registration: Any = None
        self._domain: Any = None
        self._queue: Any = None
        # The export keeps the mapping's memory where it is for as long as it is registered.
        self._memory: Any = (ctypes.c_char * len(region.mapping)).from_buffer(region.mapping)
        try:
            self._register(region)
        except BaseException:
            self.close()
            raise
        in_child(self)

    def offer(self) -> bytes:
        report = self.report
        return msgspec.msgpack.encode(VerbsOffer(report.device, report.link_layer, report.gid))

    def open(self, holder: int, tenant: bytes, proposal: bytes) -> bytes:
        try:
            peer = check(msgspec.msgpack.decode(proposal, type=Endpoint), "a client")
        except msgspec.DecodeError as error:
            raise Corrupt(f"a proposal of verbs that is none: {error}") from error
        if tenant != self._tenant:
            raise Refused("this node's memory is not shared with this tenant")
        if self._closed:
            raise Refused("this node is closing its RDMA channels")
        constants = self._device.binding.constants
        rights = (
            constants.IBV_ACCESS_REMOTE_READ
            | constants.IBV_ACCESS_REMOTE_WRITE
            | constants.IBV_ACCESS_REMOTE_ATOMIC
        )
        try:
            with no_device_error(self._device.binding, "the pool cannot make a queue pair for this client"):
                pair = Pair(self._device, self._domain, self._queue, depth=1, rights=rights)
                try:
                    pair.connect(peer)
                except BaseException:
                    pair.close()
                    raise
        except Unavailable as error:
            raise Refused(error.message) from error
        pairs = self._pairs.setdefault(holder, deque())
        pairs.append(pair)
        if len(pairs) > CHANNELS_PER_HOLDER_MAX:
            pairs.popleft().close()
        answer = VerbsAnswer(
            pair.endpoint(), ctypes.addressof(self._memory), self._registration.rkey, len(self._memory)
        )
        return msgspec.msgpack.encode(answer)

    def close_holder(self, holder: int) -> None:
        if not self._closed:
            self._close_pairs(holder)

    def close(self) -> None:
        """Queue pairs, then what they reach, then the device."""
        if self._closed:
            return
        self._closed = True
        for holder in list(self._pairs):
            self._close_pairs(holder)
        for part in (self._registration, self._queue, self._domain):
            if part is not None:
                part.close()
        self._memory = None
        self._device.close()

    def abandon(self) -> None:
        """In a forked child: the region is the parent's to serve."""
        self._closed = True

    def _close_pairs(self, holder: int) -> None:
        for pair in self._pairs.pop(holder, ()):
            pair.close()

    def _register(self, region: Region) -> None:
        binding, constants = self._device.binding, self._device.binding.constants
        rights = (
            constants.IBV_ACCESS_LOCAL_WRITE
            | constants.IBV_ACCESS_REMOTE_READ
            | constants.IBV_ACCESS_REMOTE_WRITE
            | constants.IBV_ACCESS_REMOTE_ATOMIC
        )
        if self.report.on_demand:
            rights |= constants.IBV_ACCESS_ON_DEMAND
        else:
            try:
                region.back(region.header.layout.region_bytes)
            except ConfigError as error:
                raise Unavailable(f"RDMA pins the whole region: {error}") from error
        size = len(self._memory)
        with no_device_error(binding, f"the region of {size} bytes cannot be registered"):
            self._domain = binding.PD(self._device.context)
            self._queue = binding.CQ(self._device.context, 1)
            address = ctypes.addressof(self._memory)
            self._registration = binding.MR(self._domain, size, rights, address=address)
