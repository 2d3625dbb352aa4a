"""A running pool for tests: on a thread of this process, or as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from kvcomm.block import Incarnation
from kvcomm.blockstore import StoreUsage
from l2_rdma.pool import PoolOptions, RunningPool, run_pool
from l2_rdma.transports.cuda.runtime import open_gpu
from l2_rdma.transports.desk import Desk
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu
from tests.peers import CREDENTIALS, PATIENCE_S, until

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

    def __init__(self, directory: Path, incarnation: int, options: dict[str, Any]) -> None:
        self.node = options.get("node", "pool-0")
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.l2_rdma.pools",
                str(directory),
                str(incarnation),
                json.dumps(options),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        ready = self._heard()
        self.address, self.region, self.refused = ready["address"], ready["region"], ready["refused"]

    def usage(self) -> dict[str, int]:
        """``StoreUsage``, by name."""
        assert self._process.stdin is not None
        self._process.stdin.write("usage\n")
        self._process.stdin.flush()
        return self._heard()

    def signal(self, number: signal.Signals) -> None:
        """Returns when it has stopped, if that is what it was told."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(PATIENCE_S)
        if number == signal.SIGSTOP:
            process = psutil.Process(self.pid)
            until(lambda: process.status() == psutil.STATUS_STOPPED)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def pool_process(directory: Path, *, incarnation: int = 21, **options: Any) -> Iterator[PoolProcess]:
    """
    Args:
        options: of ``PoolOptions``; ``gpu="cuda"`` or ``"cuda-plain"``: its slots are on a GPU, or on one of
            plain memory; ``unfenced=True``: it takes late writers for shut out, and shuts nobody out.
    """
    pool = PoolProcess(directory, incarnation, options)
    try:
        yield pool
    finally:
        pool.end()


async def _main(directory: Path, incarnation: int, options: dict[str, Any]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if "gpu" in options:
        options["gpu"] = open_gpu() if options["gpu"] == "cuda" else HostGpu(directory)
    if options.pop("unfenced", False):
        Desk.close = lambda self, holder: None  # type: ignore[method-assign]

    def say(facts: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    def answer(running: RunningPool) -> None:
        if sys.stdin.readline():
            say(asdict(running.store.usage()))
        else:
            loop.remove_reader(sys.stdin)

    def ready(running: RunningPool) -> None:
        refused = dict(running.refused_transports)
        say({"address": running.addresses[0], "region": running.region, "refused": refused})
        loop.add_reader(sys.stdin, answer, running)

    await run_pool_at(directory, ready, stop, incarnation, **options)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
