"""A pool in a process of its own without a cluster around it: what the transports are measured on.

A machine that has little else (the guest with an RDMA device, a machine with a GPU) can start one in a
second.  Run as a module it is the pool, which ends when its standard input closes, so also when the benchmark
dies.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.memory import Buffers
from bench.service import DEADLINE_S, TENANT, namespace, prompt
from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for
from kvcomm.credentials import Credentials
from kvcomm.errors import Unavailable
from kvcomm.rpc import Identity, Peers, run_blocking
from kvcomm.serve import run
from kvcomm.tier import BlockCopy

_PROCESS_CLOCK = 2
"""Which of a process's clocks: what the scheduler has counted (``clock_getcpuclockid`` makes such ids)."""
_SECRET = bytes(range(32))
_CREDENTIALS = Credentials(_SECRET)
REGION_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Pool:
    """A running pool."""

    node: str
    address: str
    """Of its socket in the file system."""
    remote_address: str
    """Of its port, as other hosts would dial it."""
    pid: int

    def fill(self, count: int, payload_bytes: int) -> list[BlockKey]:
        """Put ``count`` blocks; the same ones for the same size.

        Raises:
            Unavailable: one was not taken.
        """
        from l2_rdma.rack import Pool as Address
        from l2_rdma.tier import L2Tier
        from l2_rdma.wires import Wires

        mine, pools = identity(), [Address(self.node, self.address)]
        tier, peers = L2Tier(lambda: pools, mine, wires=Wires(("shm", "cuda"))), Peers(mine)
        try:
            copies = Made(count, payload_bytes).copies(range(count))
            statuses = run_blocking(tier.put(copies), peers, time.monotonic() + DEADLINE_S)
            if not set(statuses) <= {"stored", "present"}:
                raise Unavailable(f"{self.node} did not take blocks of {payload_bytes} bytes: {statuses}")
            return [copy.key for copy in copies]
        finally:
            tier.close()
            peers.close()

    def processor_seconds(self) -> float:
        """What it has used of the processors, all threads, to the nanosecond."""
        return time.clock_gettime(~self.pid << 3 | _PROCESS_CLOCK)


def identity() -> Identity:
    """One more client of the tenant that the pools' regions are for."""
    return Identity(_CREDENTIALS.token(TENANT), Incarnation(secrets.randbits(64) | 1))


class Made:
    """Blocks of one namespace with random payloads, each a context of its own."""

    def __init__(self, count: int, payload_bytes: int) -> None:
        self._namespace = namespace(payload_bytes).for_tenant(_CREDENTIALS.tenant_digest(TENANT))
        self._payloads = [memoryview(buffer) for buffer in Buffers(count, payload_bytes, seed=5).all]

    def copies(self, numbers: Iterable[int]) -> list[BlockCopy]:
        """All payloads once, under the keys of these prompts."""
        return [self._copy(number, payload) for payload, number in zip(self._payloads, numbers, strict=False)]

    def _copy(self, number: int, payload: memoryview) -> BlockCopy:
        bound, key = self._namespace, block_keys(self._namespace, prompt(number))[0]
        header = header_for(bound, key, NO_PARENT, payload, logical_start=0, producer=Incarnation(1))
        return BlockCopy(header, payload)


@contextmanager
def pools(
    count: int,
    *,
    region_bytes: int = REGION_BYTES,
    index_entries: int | None = None,
    transports: Sequence[str] = (),
) -> Iterator[list[Pool]]:
    """``count`` of them, started together and ended whatever happens.

    Args:
        addresses=[f"unix://{directory}/{node}.sock", "tcp://127.0.0.1:0"],
        options=PoolOptions(
            region_bytes,
            index_entries=index_entries or None,
            transports=transports,
            gpu=open_gpu() if "cuda" in transports else None,
        ),
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-"))
        nodes = [f"pool-{number}" for number in range(count)]
        arguments = [directory, str(region_bytes), str(index_entries or 0), "shm", *transports]
        started = [_start(stack, [node, *arguments]) for node in nodes]
        yield [_ready(node, process) for node, process in zip(nodes, started, strict=True)]


def _start(stack: ExitStack, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.pool", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    stack.enter_context(process)  # leaving it waits for the end, which closing its standard input brings
    stack.enter_context(process.stdin)
    return process


def _ready(node: str, process: subprocess.Popen[str]) -> Pool:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Unavailable(f"{node} did not come up")
    address, remote_address = line.split()
    return Pool(node, address, remote_address, process.pid)


async def _serve(
    node: str, directory: Path, region_bytes: int, index_entries: int, transports: Sequence[str]
) -> None:
    from l2_rdma.pool import PoolOptions, RunningPool, run_pool
    from l2_rdma.transports.cuda.runtime import open_gpu

    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)

    def ready(pool: RunningPool) -> None:
        print(*pool.addresses, flush=True)

    await run_pool(
        node=node,
        instance=f"bench-{directory.name.lower()}",
        incarnation=Incarnation(secrets.randbits(64) | 1),
        credentials=_CREDENTIALS,
        tenant=TENANT,
        addresses=[f"unix://{directory}/{node}.sock", "tcp://127.0.0.1:0"],
        options=PoolOptions(
            region_bytes,
            index_entries=index_entries or None,
            transports=transports,
            gpu=open_gpu() if "cuda" in transports else None,
        ),
        stop=stop,
        ready=ready,
    )


def main(arguments: Sequence[str]) -> None:
    node, directory, region_bytes, index_entries, *transports = arguments
    run(_serve(node, Path(directory), int(region_bytes), int(index_entries), transports))


if __name__ == "__main__":
    main(sys.argv[1:])
