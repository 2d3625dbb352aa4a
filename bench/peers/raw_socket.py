"""The floor under a block service over TCP: two processes, one blocking socket, no protocol to speak of.

The client sends eight bytes, "send me so many"; the server answers with exactly so many.  Run as a module it
is the server, which ends when its standard input closes, so also when the benchmark dies.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

from bench.peers.memory import Buffers
from bench.timing import Call

RAW_SOCKET = "raw TCP socket"
TIMEOUT_S = 30.0
_ASK = struct.Struct("<Q")


@contextmanager
def raw_socket(working_set: int, size_bytes: int) -> Iterator[Call]:
    """Fetch ``size_bytes`` from the other process into memory that is there already."""
    command = [sys.executable, "-m", "bench.peers.raw_socket", str(working_set), str(size_bytes)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    view = memoryview(Buffers(1, size_bytes).all[0])
    with server, server.stdin:  # closing it ends the server, leaving ``server`` waits for that
        address = ("127.0.0.1", int(server.stdout.readline()))
        with socket.create_connection(address, TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def fetch() -> None:
                connection.sendall(_ASK.pack(size_bytes))
                have = 0
                while have < size_bytes:
                    received = connection.recv_into(view[have:])
                    if not received:
                        raise ConnectionError("the raw socket's server is gone")
                    have += received

            yield Call(RAW_SOCKET, fetch)


def _serve(working_set: int, size_bytes: int) -> None:
    answers = cycle([memoryview(buffer) for buffer in Buffers(working_set, size_bytes, seed=3).all])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := connection.recv(_ASK.size, socket.MSG_WAITALL):
        connection.sendall(next(answers)[: _ASK.unpack(asked)[0]])


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _serve(int(sys.argv[1]), int(sys.argv[2]))
