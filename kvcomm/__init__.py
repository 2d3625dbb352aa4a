"""KVCOMM: agents publish the attention KV blocks of what they have read and fetch each other's.

This package is the floor of the house.  It owns the words (namespace, block, manifest, record), the wires,
the ports, the client and the composition roots (``kvcomm.connect``, ``kvcomm.cli``, ``kvcomm.chaos``), which
alone may import the tiers ``l1``, ``l2_rdma``, ``l3_shard``, inside function bodies.
"""

from kvcomm.connect import connect, connect_async
from kvcomm.namespace import Namespace

__all__ = ["Namespace", "connect", "connect_async"]
__version__ = "0.1.0"
