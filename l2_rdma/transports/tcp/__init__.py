"""The wire that is everywhere: one-sided operations over TCP, served by one thread in the pool's process.

The theory of operation stands in ``protocol``; ``transport``, ``channel`` and ``stream`` are the client's
side, ``provider``, ``tickets`` and ``serving`` the pool's.  Imports ``kvcomm`` and the rest of ``l2_rdma``.
"""

from __future__ import annotations

from l2_rdma.region import Region
from l2_rdma.transports.port import WireOptions
from l2_rdma.transports.tcp.provider import TcpProvider
from l2_rdma.transports.tcp.transport import TcpTransport


def make_transport(options: WireOptions) -> TcpTransport:
    return TcpTransport()


def make_provider(region: Region, options: WireOptions) -> TcpProvider:
    return TcpProvider(region, options.listen_host)
