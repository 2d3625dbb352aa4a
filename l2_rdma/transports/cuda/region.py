"""``CudaRegion``: a region whose slots are in the memory of one GPU.

Index, hazards and shared words are in a file as ever, and so is a copy of every published header; the slots
themselves, header and payload, are one allocation of the owner's GPU, mapped by other processes of the host
through CUDA IPC.  Both sides are one address space::

    0 .. slots_offset             the file
    slots_offset .. the end       address ``slots.pointer + (offset - slots_offset)`` on the GPU

The file is as long as the address space and full of holes: of each slot only the page with the header has
memory behind it.  A mapping stays valid when the owner dies, until it is closed; so a reader can finish, and
learns from its control connection that it must not begin again.
"""

from __future__ import annotations

from pathlib import Path

from kvcomm.block import Incarnation
from kvcomm.errors import Corrupt
from kvcomm.namespace import TenantDigest
from l2_rdma.layout import RegionHeader, RegionLayout
from l2_rdma.region import Region
from l2_rdma.transports.cuda.gpu import DeviceBuffer, Gpu


class CudaRegion:
    """``file`` and ``slots`` of one region, in one process; made by :meth:`create` or :meth:`map`."""

    def __init__(self, file: Region, gpu: Gpu, pointer: int, *, owned: bool) -> None:
        layout = file.header.layout
        self.file = file
        self.header: RegionHeader = file.header
        self.gpu = gpu
        self.slots = DeviceBuffer(pointer, layout.region_bytes - layout.slots_offset, self)
        self._owned = owned
        self._exported = False
        self._open = True
        file.device = self

    @staticmethod
    def create(
        directory: Path,
        gpu: Gpu,
        *,
        instance: str,
        node: str,
        tenant: TenantDigest,
        incarnation: Incarnation,
        layout: RegionLayout,
    ) -> CudaRegion:
        """Make one and become its owner.

        Raises:
            ConfigError: the GPU or ``directory`` cannot hold it.
        """
        pointer = gpu.allocate(layout.region_bytes - layout.slots_offset)
        try:
            file = Region.create(
                directory,
                instance=instance,
                node=node,
                tenant=tenant,
                incarnation=incarnation,
                layout=layout,
                device_slots=True,
            )
        except BaseException:
            gpu.free(pointer)
            raise
        return CudaRegion(file, gpu, pointer, owned=True)

    @staticmethod
    def map(path: str, tenant: TenantDigest, gpu: Gpu, handle: bytes) -> CudaRegion:
        """Somebody's, as a client.

        Raises:
            Unavailable, Corrupt, Refused: as ``Region.attach``; or ``gpu`` cannot reach the memory.
        """
        file = Region.attach(path, tenant, device_slots=True)
        try:
            return CudaRegion(file, gpu, gpu.open(handle), owned=False)
        except BaseException:
            file.close()
            raise

    @property
    def open(self) -> bool:
        """Whether it is served and mapped here, as far as memory tells."""
        return self._open and self.file.open

    def handle(self) -> bytes:
        """What another process passes to :meth:`map`."""
        self._exported = True
        return self.gpu.export(self.slots.pointer)

    def address(self, offset: int) -> int:
        """Of a byte of the slots, on the GPU."""
        layout = self.header.layout
        if not layout.slots_offset <= offset <= layout.region_bytes:
            raise Corrupt(f"offset {offset} is not in the slots")
        return self.slots.pointer + offset - layout.slots_offset

    def close(self) -> None:
        """Owner: the region ends.  Client: unmap; no copy may be under way.  Idempotent.

        Memory that others may have mapped is not freed before the process ends, as CUDA asks."""
        if not self._open:
            return
        self._open = False
        self.file.device = None
        self.file.close()
        if not self._owned:
            self.gpu.close(self.slots.pointer)
        elif not self._exported:
            self.gpu.free(self.slots.pointer)
