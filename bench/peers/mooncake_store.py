"""Mooncake's store over TCP on this host: a master, a provider process that holds the memory, and a client in
a third.

Its wheel wants packages of its own, so it lives in a virtual environment of its own
(``bench/install-peers``), and our side only tells the client process how often to do what and reads the times
back.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.redis_server import free_port
from bench.timing import Operation

START_DEADLINE_S = 30.0
WORKER = Path(__file__).with_name("mooncake_worker.py")


def environment() -> Path:
    """Where ``bench/install-peers`` puts it."""
    cache = os.environ.get("KVCOMM_CACHE_DIR") or Path.home() / ".cache" / "kvcomm"
    return Path(cache) / "bench" / "mooncake"


@dataclass(frozen=True, slots=True)
class Worker:
    """The client process.  ``commands`` are JSON lines, one answer each."""

    process: subprocess.Popen[str]

    def ask(self, **command: object) -> object:
        """Raises ``RuntimeError`` if the worker says so or is gone."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        # The library prints to standard output too; answers are the lines that begin with "=".
        for line in self.process.stdout:
            if line.startswith("="):
                answer = json.loads(line[1:])
                if "error" in answer:
                    raise RuntimeError(f"mooncake: {answer['error']}")
                return answer["ok"]
        raise RuntimeError("the mooncake client process is gone")


@dataclass(frozen=True, slots=True)
class Remote:
    """One operation of the store, timed where it happens."""

    worker: Worker
    name: str
    verb: str
    arguments: dict[str, int]

    def times(self, count: int) -> list[float]:
        answer = self.worker.ask(verb=self.verb, count=count, **self.arguments)
        assert isinstance(answer, list)
        return [float(taken) for taken in answer]


@dataclass(frozen=True, slots=True)
class MooncakeStore:
    """A running store, and the client that asks it."""

    worker: Worker
    working_set: int

    def gets(self, size_bytes: int) -> list[Operation]:
        """``get`` and ``get_into`` (into registered memory, the faster) of values of ``size_bytes`` that
        another process holds."""
        self.worker.ask(verb="fill", size_bytes=size_bytes, count=self.working_set)
        return [
            Remote(self.worker, f"Mooncake {verb}", verb, {"size_bytes": size_bytes})
            for verb in ("get", "get_into")
        ]

    def run(self, size_bytes: int, items: int) -> Operation:
        """``batch_get_into`` of ``items`` values of those that ``gets`` stored; the time is for one."""
        arguments = {"size_bytes": size_bytes, "items": items}
        return Remote(self.worker, "Mooncake batch_get_into", "batch_get_into", arguments)


@contextmanager
def mooncake(working_set: int, *sizes_bytes: int) -> Iterator[MooncakeStore | str]:
    """A store with room for ``working_set`` values of each size, or the reason why there is none."""
    binaries = environment() / "bin"
    if not (binaries / "mooncake_master").exists():
        yield "mooncake is not installed (bench/install-peers)"
        return
    with tempfile.TemporaryFile(mode="w+") as said:
        started: list[subprocess.Popen[str]] = []
        try:
            master = f"127.0.0.1:{free_port()}"
            try:
                worker = _start(binaries, master, working_set * sum(sizes_bytes), started, said.fileno())
            except RuntimeError as error:
                said.seek(0)
                last = said.read().strip().splitlines()[-1:] or ["it printed nothing"]
                yield f"{error}: {last[0][:200]}"
                return
            yield MooncakeStore(worker, working_set)
        finally:
            for process in reversed(started):
                _stop(process)


def _start(
    binaries: Path,
    master: str,
    stored_bytes: int,
    started: list[subprocess.Popen[str]],
    log: int,
) -> Worker:
    host, port = master.split(":")
    command = [
        str(binaries / "mooncake_master"), "--rpc_address", host, "--rpc_port", port,
        "--metrics_host", host, "--metrics_port", str(free_port()),
    ]  # fmt: skip
    started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True))
    segment_bytes = max(64 << 20, 2 * stored_bytes)
    provider = _worker(binaries, master, segment_bytes, started, log)
    provider.ask(verb="wait")
    return _worker(binaries, master, 0, started, log)


def _worker(
    binaries: Path, master: str, segment_bytes: int, started: list[subprocess.Popen[str]], log: int
) -> Worker:
    command = [str(binaries / "python"), str(WORKER), master, str(segment_bytes)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=_plain_environment(),
    )
    started.append(process)
    return Worker(process)


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _stop(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    process.terminate()
    deadline = time.monotonic() + 5.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if process.poll() is None:
        process.kill()
    process.wait()
