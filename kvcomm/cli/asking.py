"""Asking the controllers, from the command line."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import KVCommError
from kvcomm.wire.messages import ClusterGet, ClusterView, Message

if TYPE_CHECKING:
    from kvcomm.instance import Instance, NodeRecord


def cluster_view(
    instance: Instance, nodes: Sequence[NodeRecord], timeout_s: float = 2.0
) -> ClusterView | None:
    """What the leading controller says of the cluster, else another one of those among ``nodes``; ``None`` =
    nobody answers."""
    view: ClusterView | None = None
    for record in nodes:
        if record.role == "controller":
            answer = ask(instance, record.addresses[0], ClusterGet(), timeout_s)
            if isinstance(answer, ClusterView):
                view = answer
                if answer.leader == answer.controller:
                    break
    return view


def ask(instance: Instance, address: str, message: Message, timeout_s: float) -> Message | None:
    """As one of the cluster's own processes; ``None`` = no answer."""
    from kvcomm.rpc import Identity, Peers, run_blocking
    from kvcomm.steps import Ask, ask_all

    identity = Identity(instance.credentials().token(NODE_TENANT), Incarnation(secrets.randbits(64) | 1))
    peers = Peers(identity, connect_timeout_s=timeout_s)
    try:
        asks = ask_all([Ask(address, message)])
        return run_blocking(asks, peers, time.monotonic() + timeout_s)[0].message
    except KVCommError:
        return None
    finally:
        peers.close()
