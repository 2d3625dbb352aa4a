"""The floor under a block service over sockets: two processes, one socket, no protocol to speak of.

The client sends sixteen bytes, "send me so many pieces of that size", and blocks in the kernel until they are
there; the server answers with exactly those.  Over TCP it sends large ones as Python does with a time limit:
as much as there is room for, then ``poll``; on one host that takes two thirds of the time of a ``send`` that
blocks, which can be had as well.  Over TCP and over a unix socket, where the two are equal.  Run as a module
it is the server, which ends when its standard input closes, so also when the benchmark dies.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Literal

from bench.peers.memory import Buffers
from bench.timing import Call

Family = Literal["tcp", "unix"]
RAW_SOCKET, RAW_UNIX = "raw TCP socket", "raw unix socket"
RAW_BLOCKING = f"{RAW_SOCKET}, blocking at both ends"
NAMES: dict[Family, str] = {"tcp": RAW_SOCKET, "unix": RAW_UNIX}
STREAM = "{name}, stream"
TIMEOUT_S = 30.0
JOINED_BYTES_MAX = 64 << 10
SEND_BUFFER_BYTES = 512 << 10
"""Of TCP: on one host faster than what the kernel grows to, for the bytes are still in the processor's cache
when they are received."""
_ASK = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class RawSocket:
    """A connection to the other process; what is fetched lands in memory that is there already."""

    name: str
    connection: socket.socket
    size_bytes: int

    def sized(self, size_bytes: int) -> RawSocket:
        """The same connection for smaller pieces."""
        return replace(self, size_bytes=size_bytes)

    @property
    def one(self) -> Call:
        """Ask for one piece, wait for it."""
        return Call(self.name, self._fetch(1))

    def stream(self, count: int) -> Call:
        """Ask once for ``count`` pieces, which come back to back; the time is for one."""
        return Call(STREAM.format(name=self.name), self._fetch(count), items=count)

    def _fetch(self, count: int) -> Callable[[], None]:
        connection, wanted = self.connection, count * self.size_bytes
        view, question = memoryview(Buffers(1, wanted).all[0]), _ASK.pack(count, self.size_bytes)

        def fetch() -> None:
            connection.sendall(question)
            have = 0
            while have < wanted:
                received = connection.recv_into(view[have:], 0, socket.MSG_WAITALL)
                if not received:
                    raise ConnectionError("the raw socket's server is gone")
                have += received

        return fetch


@contextmanager
def raw_socket(
    working_set: int, size_bytes: int, family: Family = "tcp", *, blocking: bool = False
) -> Iterator[RawSocket]:
    """The server goes round ``working_set`` distinct pieces of ``size_bytes``; ``blocking``: its ``send``
    blocks."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as directory:
        path = str(Path(directory) / "raw.sock")
        command = [
            sys.executable, "-m", "bench.peers.raw_socket",
            family if family == "tcp" else path, str(working_set), str(size_bytes),
            *(["blocking"] if blocking or family == "unix" else []),
        ]  # fmt: skip
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdin is not None and server.stdout is not None
        with server, server.stdin:  # closing it ends the server, leaving ``server`` waits for that
            port = int(server.stdout.readline())
            with _connected(family, path, port) as connection:
                _block(connection)
                yield RawSocket(RAW_BLOCKING if blocking else NAMES[family], connection, size_bytes)


def _connected(family: Family, path: str, port: int) -> socket.socket:
    if family == "tcp":
        connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    connection.connect(path)
    return connection


def _block(connection: socket.socket) -> None:
    """In the kernel, for so long: Python's own time limit would make it poll before every call."""
    connection.settimeout(None)
    limit = struct.pack("@ll", int(TIMEOUT_S), 0)
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, direction, limit)


def _serve(where: str, working_set: int, size_bytes: int, *, blocking: bool) -> None:
    answers = cycle([memoryview(buffer) for buffer in Buffers(working_set, size_bytes, seed=3).all])
    with _listener(where) as listener:
        print(listener.getsockname()[1] if where == "tcp" else 0, flush=True)
        connection, _ = listener.accept()
    if where == "tcp":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    while asked := connection.recv(_ASK.size, socket.MSG_WAITALL):
        count, piece_bytes = _ASK.unpack(asked)
        pieces = [next(answers)[:piece_bytes] for _ in range(count)]
        if count * piece_bytes <= JOINED_BYTES_MAX:  # a system call costs more than joining the pieces
            connection.sendall(b"".join(pieces))
            continue
        connection.settimeout(None if blocking else TIMEOUT_S)
        for piece in pieces:
            connection.sendall(piece)
        connection.settimeout(None)


def _listener(where: str) -> socket.socket:
    if where == "tcp":
        return socket.create_server(("127.0.0.1", 0))
    return socket.create_server(where, family=socket.AF_UNIX)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), blocking="blocking" in sys.argv[4:])
