"""``DropTable``: a process that behaves as if the network to some of its peers were cut.

For partitions without root (``kvcomm chaos``, on loopback): every process of a cluster is told its part of a
cut, each direction by itself.  What happens is what happens to TCP behind a cut cable: bytes that were sent
wait and go out when it is mended, if the connection still stands then; bytes of the other side are not seen,
its end included; a new connection gets no welcome.  What differs: the connection itself is made, and a port
where nobody listens says so.

One a process, like its network.  There is none, and nothing is looked up, unless :func:`install` was called
before the first connection: nodes do so where ``network.drop_table`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from kvcomm.wire.messages import DropPeer

Peer = str | int
"""The address that was called, or the incarnation that calls."""


class Holdable(Protocol):
    """A connection."""

    @property
    def peer(self) -> Peer | None:
        """Who is at the other end; ``None`` = it has not said so yet."""
        ...

    def hold(self, gate: Gate) -> None:
        """What passes from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Gate:
    """What does not pass on one connection."""

    mute: bool = False
    deaf: bool = False


OPEN = Gate()


class DropTable:
    """Who is not heard, and not spoken to."""

    def __init__(self) -> None:
        self._gates: dict[Peer, Gate] = {}
        self._connections: WeakSet[Holdable] = WeakSet()

    def watch(self, connection: Holdable) -> Gate:
        """Have ``connection`` told of every change from now on; its gate at present."""
        self._connections.add(connection)
        return self.gate(connection.peer)

    def gate(self, peer: Peer | None) -> Gate:
        return OPEN if peer is None else self._gates.get(peer, OPEN)

    def set(self, peers: Sequence[DropPeer]) -> None:
        """Replaces what was ordered before."""
        self._gates = {
            name: Gate(peer.mute, peer.deaf)
            for peer in peers
            for name in (*peer.addresses, *((peer.caller,) if peer.caller else ()))
        }
        for connection in list(self._connections):
            connection.hold(self.gate(connection.peer))


_installed: DropTable | None = None


def install() -> DropTable:
    """This process's table, made when it is first asked for."""
    global _installed  # noqa: PLW0603 - one network, one table
    _installed = _installed or DropTable()
    return _installed


def installed() -> DropTable | None:
    """``None``: this process takes no orders to drop anything."""
    return _installed
