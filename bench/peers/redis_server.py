"""Redis on this host, without persistence: over a unix socket, which is its fastest way in, and over TCP."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.timing import Call, round_robin
from kvcomm.block import Buffer

START_DEADLINE_S = 15.0


class RedisServer:
    """A running server of our own.  ``clients`` by way in: ``unix`` and ``tcp``."""

    def __init__(self, clients: dict[str, Any], version: str) -> None:
        self.clients = clients
        self.version = version

    def gets(self, values: Sequence[Buffer]) -> list[Call]:
        """Store ``values`` and get them in turn, by each way in."""
        names = _names(len(values))
        for name, value in zip(names, values, strict=True):
            self.clients["unix"].set(name, bytes(value))
        return [
            Call(f"Redis GET, {way}", round_robin(client.get, names)) for way, client in self.clients.items()
        ]

    def runs(self, count: int, items: int) -> list[Call]:
        """MGET of ``items`` of the ``count`` values that ``gets`` stored, going round them; the time is for
        one."""
        turn = cycle(_names(count))
        runs = [[next(turn) for _ in range(items)] for _ in range(count)]
        return [
            Call(f"Redis MGET, {way}", round_robin(client.mget, runs), items=items)
            for way, client in self.clients.items()
        ]


@contextmanager
def redis_server() -> Iterator[RedisServer | str]:
    """The server, or the reason why there is none."""
    reason = _missing()
    if reason:
        yield reason
        return
    import redis

    with tempfile.TemporaryDirectory(prefix="kvb-") as directory:
        path, port = Path(directory) / "redis.sock", free_port()
        command = [
            "redis-server", "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", str(path),
            "--save", "", "--appendonly", "no", "--dir", directory, "--loglevel", "warning",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            clients = {
                "unix": redis.Redis(unix_socket_path=str(path)),
                "tcp": redis.Redis(host="127.0.0.1", port=port),
            }
            _wait_for(process, path, clients["unix"])
            yield RedisServer(clients, str(clients["unix"].info("server")["redis_version"]))
            for client in clients.values():
                client.close()
        finally:
            process.terminate()
            process.wait(START_DEADLINE_S)


def _names(count: int) -> list[str]:
    return [f"value-{index}" for index in range(count)]


def free_port() -> int:
    """A port that was free a moment ago, for servers that cannot be given port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _missing() -> str | None:
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (bench/install-peers)"
    try:
        import hiredis
        import redis
    except ImportError as error:
        return f"{error.name} is not installed"
    assert hiredis and redis
    return None


def _wait_for(process: subprocess.Popen[bytes], path: Path, client: Any) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and client.ping():
            return
        time.sleep(0.01)
    raise RuntimeError("redis-server did not come up")
