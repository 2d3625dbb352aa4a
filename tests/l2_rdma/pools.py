"""A running pool for tests: on a thread of this process, or as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcomm.block import Incarnation
from kvcomm.blockstore import StoreUsage
from l2_rdma.pool import PoolOptions, RunningPool, run_pool
from tests.peers import CREDENTIALS, PATIENCE_S

ROOT = Path(__file__).parents[2]
TENANT_NAME = "acme"
"""Of ``tests.peers.IDENTITY``."""
OPTIONS: dict[str, Any] = {
    "region_bytes": 2 << 20,
    "slab_bytes": 64 << 10,
    "index_entries": 256,
    "hazard_count": 64,
}


def run_pool_at(
    directory: Path,
    ready: Callable[[RunningPool], None],
    stop: asyncio.Event,
    incarnation: int,
    *,
    node: str = "pool-0",
    **options: Any,
) -> Any:
    """The coroutine."""
    return run_pool(
        node=node,
        instance="tests",
        incarnation=Incarnation(incarnation),
        credentials=CREDENTIALS,
        tenant=TENANT_NAME,
        addresses=[f"unix://{directory}/{'pool' if node == 'pool-0' else node}.sock"],
        options=PoolOptions(directory=directory, **(OPTIONS | options)),
        stop=stop,
        ready=ready,
    )


class PoolThread:
    """``run_pool`` on a thread."""

    def __init__(self, directory: Path, incarnation: int, options: dict[str, Any]) -> None:
        self._ready = threading.Event()
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(directory, incarnation, options), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        if self._failure:
            raise self._failure[0]
        self.address = self.running.addresses[0]

    def usage(self) -> StoreUsage:
        async def read() -> StoreUsage:
            return self.running.store.usage()

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self, directory: Path, incarnation: int, options: dict[str, Any]) -> None:
        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await run_pool_at(directory, self._started, self._stop, incarnation, **options)

        try:
            asyncio.run(main())
        except BaseException as error:
            self._failure.append(error)
            self._ready.set()

    def _started(self, running: RunningPool) -> None:
        self.running = running
        self._ready.set()


@contextmanager
def pool_thread(directory: Path, *, incarnation: int = 21, **options: Any) -> Iterator[PoolThread]:
    pool = PoolThread(directory, incarnation, options)
    try:
        yield pool
    finally:
        if pool._thread.is_alive():
            pool.stop()


class PoolProcess:
    """``run_pool`` in a process that can be killed and paused."""

    def __init__(
        self, directory: Path, incarnation: int, node: str = "pool-0", transports: Sequence[str] = ("shm",)
    ) -> None:
        self.node = node
        arguments = [str(directory), str(incarnation), node, *transports]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.l2_rdma.pools", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline())
        self.address, self.region = ready["address"], ready["region"]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(PATIENCE_S)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def pool_process(
    directory: Path, *, incarnation: int = 21, node: str = "pool-0", transports: Sequence[str] = ("shm",)
) -> Iterator[PoolProcess]:
    pool = PoolProcess(directory, incarnation, node, transports)
    try:
        yield pool
    finally:
        pool.end()


async def _main(directory: Path, incarnation: int, node: str, transports: Sequence[str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def ready(running: RunningPool) -> None:
        sys.stdout.write(json.dumps({"address": running.addresses[0], "region": running.region}) + "\n")
        sys.stdout.flush()

    await run_pool_at(directory, ready, stop, incarnation, node=node, transports=transports)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
