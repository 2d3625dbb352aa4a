"""``register_gpu``: GPU memory that READs land in directly (GPUDirect RDMA by dma-buf).

The driver of the GPU exports an allocation as a dma-buf, the RDMA device registers that.  Both must be able
to, and either says so: soft-RoCE answers EOPNOTSUPP.  The path was never run on hardware that can do it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvcomm.errors import Refused
from l2_rdma.layout import PAGE_BYTES
from l2_rdma.transports.verbs.registered import RegisteredMemory
from l2_rdma.transports.verbs.transport import VerbsTransport

if TYPE_CHECKING:
    from l2_rdma.transports.cuda.runtime import CudaGpu


def register_gpu(transport: VerbsTransport, gpu: CudaGpu, pointer: int, length: int) -> RegisteredMemory:
    """``length`` bytes at ``pointer`` of ``gpu`` 's memory, for ``VerbsChannel.read_device``.

    Closing the registration is the caller's, before the memory is freed.

    Raises:
        ValueError: there is nothing of it.
        Refused: the GPU's driver or the RDMA device cannot do it; the message says which.
    """
    if length <= 0:
        raise ValueError("nothing is to be registered")
    # The exported range is of whole pages; the registration begins within it.
    begin = pointer - pointer % PAGE_BYTES
    end = -(-(pointer + length) // PAGE_BYTES) * PAGE_BYTES
    descriptor = export_dma_buf(gpu, begin, end - begin)
    try:
        return transport.register_dmabuf(descriptor, pointer - begin, length)
    finally:
        os.close(descriptor)  # the registration keeps the dma-buf


def export_dma_buf(gpu: CudaGpu, pointer: int, nbytes: int) -> int:
    """A descriptor of this memory (whole pages), the caller's to close.  Raises ``Refused``."""
    driver = gpu.driver
    gpu.use()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
    status, supported = driver.cuDeviceGetAttribute(attribute, gpu.ordinal)
    if int(status) or not supported:
        raise Refused(f"{gpu.name}: its driver exports no dma-buf")
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    status, descriptor = driver.cuMemGetHandleForAddressRange(pointer, nbytes, kind, 0)
    if int(status):
        raise Refused(f"{gpu.name} does not export this memory: {driver.CUresult(int(status)).name}")
    return int(descriptor)
