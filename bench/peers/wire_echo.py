"""The floor under a request on the data wire: the same frames to a process that does nothing, and back.

A client and a ``DataServer`` over a unix socket, as an agent and a shard are; what is measured beside it is
what the service does more.  Run as a module it is the server, which ends when its standard input closes, so
also when the benchmark dies.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.timing import Call
from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.machine import ConnectionId, Origin
from kvcomm.rpc import Connection, Identity
from kvcomm.serve import DataServer, ReplyFunction, run
from kvcomm.wire.messages import Done, Message, RecordPut, RecordWrite

WIRE_ECHO = "echo on the data wire"
DEADLINE_S = 30.0
_SECRET = bytes(32)


@contextmanager
def wire_echo(directory: Path, key: bytes, value: bytes) -> Iterator[Call]:
    """Send a put of one record to a process that says that it is done."""
    address = f"unix://{directory}/wire.sock"
    command = [sys.executable, "-m", "bench.peers.wire_echo", address]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    with server, server.stdin:  # closing it ends the server, leaving ``server`` waits for that
        if server.stdout.readline() != "ready\n":
            raise ConnectionError("the echo server did not come up")
        identity = Identity(Credentials(_SECRET).token(NODE_TENANT), Incarnation(3))
        connection = Connection.open(address, identity, time.monotonic() + DEADLINE_S)
        try:
            put = RecordPut(1, [RecordWrite(key, value, {})])
            yield Call(WIRE_ECHO, lambda: connection.call(put, deadline=time.monotonic() + DEADLINE_S))
        finally:
            connection.close()


class _Echo:
    """A ``kvcomm.serve.Service``."""

    def welcome(self, origin: Origin) -> tuple[str, int]:
        return "", 1

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        return None

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        reply(Done())

    def closed(self, connection: ConnectionId) -> None:
        """Nothing is kept for it."""


async def _serve(address: str) -> None:
    server = DataServer(
        _Echo(),
        node="echo",
        role="shard",
        instance="bench",
        incarnation=Incarnation(5),
        credentials=Credentials(_SECRET),
    )
    await server.start([address])
    print("ready", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    await server.close()


if __name__ == "__main__":
    run(_serve(sys.argv[1]))
