"""``Controllers``: which controllers a cluster has, and where they are to be called.

They are fixed by configuration.  Where all nodes are on one host each listens on a socket that is named after
it; where they are on several hosts the configuration names an address for each; without either they are
looked up among the instance's nodes, and one that was started again may be somewhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcomm.instance import Instance

if TYPE_CHECKING:
    from kvcomm.config import Config

LOOK_S = 0.5
"""A looked-up address is believed for so long."""


class Controllers:
    """See the module."""

    def __init__(
        self, instance: Instance, settings: Config, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._instance, self._clock = instance, clock
        self._by_socket = settings.network.local_sockets
        self.names = [f"controller-{index}" for index in range(settings.cluster.controllers)]
        self.configured = dict(zip(self.names, settings.cluster.controller_addresses, strict=False))
        """Addresses that the configuration names."""
        self._found: dict[str, tuple[str, float]] = {}

    def locate(self, name: str) -> str:
        """Where it listens, or listened when it was seen last; nobody answers there if it is gone."""
        if self.configured:
            return self.configured[name]
        socket = f"unix://{self._instance.socket_path(name)}"
        if self._by_socket:
            return socket
        address, looked_at = self._found.get(name, (socket, -LOOK_S))
        now = self._clock()
        if now >= looked_at + LOOK_S:
            record = self._instance.node(name)
            address = record.addresses[0] if record is not None else address
            self._found[name] = address, now
        return address
