"""The transport of RDMA: one-sided verbs (libibverbs by pyverbs) over reliable connections.

``transport`` and ``channel`` are a client's side, ``provider`` a pool's; ``hub`` is what all channels of a
device share, ``pair`` one end of a connection, ``device`` the choice of device, port and GID, and
``binding`` the only module that imports pyverbs, when it is first asked for.  ``gpudirect`` lets READs land
in GPU memory, where the hardware can.

Runs on InfiniBand and RoCE v2; in software on the kernel's ``rdma_rxe``.  The order of ending is that of the
objects: operations, queue pairs, registered memory, completion queue, protection domain, device.

Imports ``kvcomm`` and ``l2_rdma`` only.
"""

from __future__ import annotations

from l2_rdma.region import Region
from l2_rdma.transports.port import WireOptions
from l2_rdma.transports.verbs.binding import load
from l2_rdma.transports.verbs.device import DeviceReport, open_device, survey
from l2_rdma.transports.verbs.provider import VerbsProvider
from l2_rdma.transports.verbs.transport import VerbsTransport


def make_transport(options: WireOptions) -> VerbsTransport:
    """Raises ``Unavailable`` with the reason: no pyverbs, no device, no active port, no GID, no memory."""
    return VerbsTransport(open_device(load(), options.rdma_device))


def make_provider(region: Region, options: WireOptions) -> VerbsProvider:
    """Raises ``Unavailable`` with the reason, as :func:`make_transport`."""
    return VerbsProvider(region, open_device(load(), options.rdma_device))


def device_reports() -> list[DeviceReport]:
    """What each RDMA device of this host is good for, or why it is not.  Raises ``Unavailable``."""
    return survey(load())
