"""The floor under a durable change: a message there, the same bytes appended and synced, a byte back.

Two processes, one blocking socket, one file, no protocol to speak of.  Run as a module it is the server,
which ends when its standard input closes, so also when the benchmark dies.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.timing import Call

SYNCED_ECHO = "raw round trip and fdatasync"
TIMEOUT_S = 30.0


@contextmanager
def synced_echo(directory: Path, size_bytes: int) -> Iterator[Call]:
    """Send ``size_bytes`` to the other process, which syncs them to a file under ``directory``."""
    command = [sys.executable, "-m", "bench.peers.synced_echo", str(directory), str(size_bytes)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    payload = bytes(size_bytes)
    with server, server.stdin:  # closing it ends the server, leaving ``server`` waits for that
        if server.stdout.readline() != "ready\n":
            raise ConnectionError("the raw server did not come up")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(directory / "echo.sock"))

            def change() -> None:
                connection.sendall(payload)
                if not connection.recv(1):
                    raise ConnectionError("the raw server is gone")

            yield Call(SYNCED_ECHO, change)


def _serve(directory: Path, size_bytes: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "echo.sock"))
        listener.listen()
        print("ready", flush=True)
        connection, _ = listener.accept()
    file = os.open(directory / "echo", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    while asked := connection.recv(size_bytes, socket.MSG_WAITALL):
        os.pwrite(file, asked, 0)
        os.fdatasync(file)
        connection.sendall(b"1")


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
