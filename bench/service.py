"""The service under test: a cluster of real processes on this host, and blocks to put into it."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers.memory import Buffers
from kvcomm.block import BlockKey, Incarnation, block_keys
from kvcomm.client import Client
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.instance import Instance
from kvcomm.namespace import Namespace, TenantDigest
from kvcomm.rpc import Connection, Identity
from kvcomm.wire.messages import PinOpen, PinRange

if TYPE_CHECKING:
    from l2_rdma.reader import Reader

TENANT = "default"
START_DEADLINE_S = 60.0
SETTLE_DEADLINE_S, QUIET_S = 30.0, 0.5
DEADLINE_S = 30.0
_CONFIG = """
cache:
  l1_size: 1KiB  # too small for any block: what is fetched again comes from the pool again
  l1_negative_ttl: 0s
  l2_size: {pool_bytes}
  l3_size: {shard_bytes}
cluster:
  shards: 3
  pools: {pools}
  block_copies: {block_copies}
storage:
  fsync: {fsync}
"""


@dataclass(frozen=True, slots=True)
class Service:
    """A running cluster and a client of it."""

    client: Client
    instance: Instance

    @property
    def tenant(self) -> TenantDigest:
        return self.instance.credentials().tenant_digest(TENANT)


@contextmanager
def service(
    *,
    pool_bytes: int = 2 << 30,
    shard_bytes: int = 512 << 20,
    pools: int = 1,
    block_copies: int = 1,
    fsync: str = "always",
) -> Iterator[Service]:
    """Start it, and stop it whatever happens.  Raises ``Unavailable`` if it does not come up."""
    from kvcomm.connect import connect
    from kvcomm.embedded import Embedded

    with tempfile.TemporaryDirectory(prefix="kvb-") as directory:
        config = Path(directory) / "kvcomm.yaml"
        sizes = {"pool_bytes": pool_bytes, "shard_bytes": shard_bytes}
        config.write_text(_CONFIG.format(**sizes, pools=pools, block_copies=block_copies, fsync=fsync))
        name = f"bench-{secrets.token_hex(4)}"
        embedded = Embedded.start(name, config, time.monotonic() + START_DEADLINE_S)
        try:
            with connect(config, instance=name) as client:
                yield Service(client, Instance.open(name))
        finally:
            embedded.stop()


@contextmanager
def pool_reader(running: Service) -> Iterator[Callable[[], Reader]]:
    """Readers of the host's pool as a client has them, without the client: each knows no block yet.

    They share one connection and its pins.
    """
    from l2_rdma.pins import PinTable
    from l2_rdma.reader import Reader
    from l2_rdma.region import Region

    deadline = time.monotonic() + DEADLINE_S
    connection = Connection.open(pool_address(running), identity(running), deadline)
    try:
        pins = connection.call(PinOpen(slots=64), deadline=deadline).message
        if not isinstance(pins, PinRange):
            raise Unavailable(f"the pool gave no pins: {pins}")
        region = Region.attach(connection.welcome.region, TenantDigest(connection.welcome.tenant))
        table = PinTable(region, pins.first, pins.count)
        yield lambda: Reader(region, table)
    finally:
        connection.close()


def settle(running: Service) -> None:
    """Wait until the pool and this process have entered the region into their page tables.

    They do that in the background for the first seconds, and we measure what comes after.
    """
    settle_processes([os.getpid(), *(node.pid for node in running.instance.nodes())])


def settle_processes(pids: Sequence[int]) -> None:
    """The same for these processes: until none of them has more shared memory in its page tables."""
    deadline, before, since = time.monotonic() + SETTLE_DEADLINE_S, -1, time.monotonic()
    while time.monotonic() < min(deadline, since + QUIET_S):
        shared = sum(shared_kib(pid) for pid in pids)
        if shared != before:
            before, since = shared, time.monotonic()
        time.sleep(0.05)


def shared_kib(pid: int) -> int:
    """Resident shared memory of a process."""
    return int(status_of(pid)["RssShmem"].split()[0])


def status_of(pid: int) -> dict[str, str]:
    """The fields of ``/proc/PID/status``."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def pool_address(running: Service) -> str:
    """Of the pool's socket in the file system."""
    return next(node.addresses[0] for node in running.instance.nodes() if node.role == "pool")


def identity(running: Service) -> Identity:
    """One more client of the same tenant."""
    return identity_of(running.instance.credentials().token(TENANT))


def identity_of(token: str) -> Identity:
    """One more client with this credential."""
    return Identity(token, Incarnation(secrets.randbits(64) | 1))


def namespace(block_bytes: int) -> Namespace:
    """One whose blocks are ``block_bytes`` long, a multiple of 32: 16 tokens, K and V, one byte an
    element."""
    return Namespace(
        model="kvcomm/bench", revision="1", tokenizer="1", vocab_size=1 << 32, dtype="float8_e4m3fn",
        layout="LKHTD", layers=1, kv_heads=1, head_dim=block_bytes // 32, block_tokens=16, rope="none",
        rope_parameters={},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prefixes:
    """One-block contexts that the cluster holds."""

    namespace: Namespace
    tokens: list[list[int]]

    def keys(self, running: Service) -> list[BlockKey]:
        """As the cluster knows them: under the tenant that it derived."""
        bound = self.namespace.for_tenant(running.tenant)
        return [block_keys(bound, tokens)[0] for tokens in self.tokens]


def publish(client: Client, count: int, block_bytes: int) -> Prefixes:
    """Publish ``count`` blocks, each a context of its own.

    Raises:
        KVCommError: a block was not taken; the figures would be those of a miss.
    """
    ns = namespace(block_bytes)
    prefixes = Prefixes(ns, [prompt(index) for index in range(count)])
    for tokens, payload in zip(prefixes.tokens, Buffers(count, block_bytes, seed=5).all, strict=True):
        done = client.publish(ns, tokens, [payload], deadline_s=DEADLINE_S)
        if done.failed:
            raise KVCommError(f"a block of {block_bytes} bytes was not stored: {done.statuses}")
    return prefixes


def prompt(index: int) -> list[int]:
    """The tokens of a block, no two alike."""
    return [index] * 16
