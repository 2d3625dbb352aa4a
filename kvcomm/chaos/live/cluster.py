"""``Cluster``: the service's own processes on the hosts of a story, and the clients of each host.

Host ``n1`` has ``shard-0`` and, if the scenario has controllers for it, ``controller-0``, and so on.  Each
process is started with a configuration of its host, as an operator of several machines would.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from kvcomm.block import Incarnation
from kvcomm.chaos.live.loopback import Endpoint, Loopback
from kvcomm.chaos.live.namespaces import Namespaces
from kvcomm.chaos.live.orders import AnyAnswer, AnyOrder, Drop, Setup
from kvcomm.chaos.live.process import Agent, Process
from kvcomm.chaos.scenario import LEADER, Part, Scenario, Step
from kvcomm.chaos.shapes import Cut
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.instance import Instance, NodeRecord
from kvcomm.rpc import Connection, Identity
from kvcomm.wire.messages import ClusterGet, ClusterView, DropOrder, DropPeer, Message, RingMap, RingNode

CONTROLLER_PORT = 7400
STARTED_WITHIN_S = 60.0
REQUEST_TIMEOUT_S = 0.5
CONNECT_TIMEOUT_S = 0.5

_CONFIG = """
cache: {{l1_size: 4MiB, l3_size: 48MiB}}
network:
  listen_host: {address}
  local_sockets: false
  drop_table: {drop_table}
  request_timeout: 500ms
  connect_timeout: 500ms
cluster:
  shards: {shards}
  pools: 0
  replicas: {replicas}
  read_quorum: {read_quorum}
  block_copies: 2
  repair_interval: 1s
storage: {{directory: {storage}}}
"""


class Hosts(Protocol):
    """Machines and the network between them."""

    kind: str
    nodes: list[str]
    able: frozenset[type[Step]]
    """Kinds of steps that only some networks can do, and this one can."""

    def address(self, node: str) -> str: ...

    def command(self, node: str, command: Sequence[str]) -> list[str]: ...

    def cut(self, cuts: Iterable[Cut]) -> None: ...

    def lose(self, percent: float) -> None: ...

    def slow(self, node: str, kbit_s: int) -> None: ...

    def heal(self) -> None: ...

    def close(self) -> None: ...
