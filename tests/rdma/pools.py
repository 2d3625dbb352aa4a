"""A pool behind one device of the rack, as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from kvcomm.block import Incarnation
from l2_rdma.pool import PoolOptions, RunningPool, run_pool
from l2_rdma.rack import Pool
from l2_rdma.transports.port import WireOptions
from tests.peers import CREDENTIALS, PATIENCE_S, until

ROOT = Path(__file__).parents[2]
TENANT_NAME = "acme"
"""Of ``tests.peers.IDENTITY``."""
_CLOCK_OF_ALL_THREADS = 2


class PoolProcess:
    """``run_pool`` with verbs alone, in a process that can be killed and paused.

    Args:
        address: of its data wire.  On 127.0.0.1: what is asked of a pool does not go through the rack's
            cables, so that a pulled one takes nothing but the verbs away.
    """

    def __init__(
        self,
        node: str,
        device: str,
        directory: Path,
        address: str = "tcp://127.0.0.1:0",
        incarnation: int = 21,
    ) -> None:
        self.node, self.device = node, device
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "tests.rdma.pools",
                node, device, str(directory), address, str(incarnation),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line or json.loads(line)["refused"]:
            self.end()
            raise AssertionError(f"the pool does not serve verbs: {line}")
        self.address: str = json.loads(line)["address"]

    @property
    def pool(self) -> Pool:
        """As the ring names it."""
        return Pool(self.node, self.address)

    @property
    def cpu_s(self) -> float:
        """Processor time of its threads so far, as exactly as the kernel schedules."""
        return time.clock_gettime((~self._process.pid << 3) | _CLOCK_OF_ALL_THREADS)

    @property
    def wakeups(self) -> int:
        """How often it has waited for something that then came."""
        return int(psutil.Process(self._process.pid).num_ctx_switches().voluntary)

    def pause(self) -> None:
        """Returns when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Returns when it is gone."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def pool_process(
    node: str, device: str, directory: Path, *, address: str = "tcp://127.0.0.1:0", incarnation: int = 21
) -> Iterator[PoolProcess]:
    pool = PoolProcess(node, device, directory, address, incarnation)
    try:
        yield pool
    finally:
        pool.end()


async def _main(node: str, device: str, directory: str, address: str, incarnation: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def ready(running: RunningPool) -> None:
        told = {"address": running.addresses[0], "refused": dict(running.refused_transports)}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()

    await run_pool(
        node=node,
        instance="tests",
        incarnation=Incarnation(int(incarnation)),
        credentials=CREDENTIALS,
        tenant=TENANT_NAME,
        addresses=[address],
        options=PoolOptions(
            32 << 20,
            directory=Path(directory),
            slab_bytes=1 << 20,
            index_entries=4096,
            hazard_count=64,
            transports=("verbs",),
            wires=WireOptions(rdma_device=device),
        ),
        stop=stop,
        ready=ready,
    )


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
