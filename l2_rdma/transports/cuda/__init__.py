"""The transport between processes of one host over GPU memory, and regions whose slots are there.

``gpu`` is the port to a GPU, ``runtime`` CUDA behind it; ``region`` and ``slots`` are the pool's memory,
``provider`` and ``transport`` the two sides of the wire, ``reader`` the way of a GPU agent that wants the
bytes where it computes; ``xxh3`` and ``checksum`` verify payloads without bringing them to the host.

Importing this loads no CUDA: it is asked for when a transport is made.
"""

from __future__ import annotations

from kvcomm.errors import Unavailable
from l2_rdma.region import Region
from l2_rdma.transports.cuda.provider import CudaProvider
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.cuda.transport import CudaTransport
from l2_rdma.transports.port import WireOptions


def make_transport(options: WireOptions) -> CudaTransport:
    """Raises ``Unavailable``: no GPU, or no bindings for it."""
    from l2_rdma.transports.cuda.runtime import open_gpu

    return CudaTransport(open_gpu(options.cuda_device))


def make_provider(region: Region, options: WireOptions) -> CudaProvider:
    """Raises ``Unavailable``: the region's slots are not in a GPU's memory."""
    if not isinstance(region.device, CudaRegion):
        raise Unavailable("the pool keeps its blocks in host memory (cache.l2_device is not a GPU)")
    return CudaProvider(region.device)
