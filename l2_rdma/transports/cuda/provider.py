"""``CudaProvider``: a pool's side; it hands out the handle of its GPU memory, and the GPUs do the rest."""

from __future__ import annotations

import msgspec

from kvcomm.errors import Corrupt, Refused
from l2_rdma.region import host_id
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.port import TransportName


class CudaOffer(msgspec.Struct, frozen=True, array_like=True):
    host: bytes
    """Handles mean something on one host only, and so does a path."""
    gpu: bytes
    """UUID of the GPU that holds the slots, 16 bytes."""


class CudaProposal(msgspec.Struct, frozen=True, array_like=True):
    host: bytes
    gpu: bytes
    """UUID of the GPU that will read."""


class CudaAnswer(msgspec.Struct, frozen=True, array_like=True):
    path: str
    handle: bytes
    """64 bytes, CUDA's."""


class CudaProvider:
    """Of one region with its slots on a GPU."""

    name: TransportName = "cuda"
    writes_unseen = False
    """A mapping cannot be taken back.  Who writes pins the slot in the region's hazard words, which are in
    the
    file that every client has mapped."""

    def __init__(self, region: CudaRegion) -> None:
        self._region = region
        self._handle = region.handle()

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(CudaOffer(host_id(), self._region.gpu.uuid))

    def open(self, holder: int, tenant: bytes, proposal: bytes) -> bytes:
        try:
            asked = msgspec.msgpack.decode(proposal, type=CudaProposal)
        except msgspec.DecodeError as error:
            raise Corrupt(f"not a proposal for a cuda channel: {error}") from error
        if tenant != self._region.header.tenant:
            raise Refused("this GPU memory is another tenant's")
        if asked.host != host_id():
            raise Refused("GPU memory is shared on one host only, and with its /dev/shm")
        return msgspec.msgpack.encode(CudaAnswer(str(self._region.file.path), self._handle))

    def close_holder(self, holder: int) -> None:
        """Nothing to take back: see :attr:`writes_unseen`."""

    def close(self) -> None:
        """The region is its owner's."""
