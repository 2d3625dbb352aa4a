"""``AgentProcess``: the demo's side of one agent."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import TypeVar

import msgspec

from kvcomm.demo.messages import Order, Read, Ready, Reconnect, Reply, Row, Trouble
from kvcomm.errors import KVCommError, Unavailable

R = TypeVar("R", Ready, Row)

START_DEADLINE_S = 300.0
READ_DEADLINE_S = 600.0
_END_DEADLINE_S = 5.0
_OTHER_CLUSTER = {"KVCOMM_ADDRESS", "KVCOMM_INSTANCE", "KVCOMM_TOKEN", "KVCOMM_CONFIG"}
_REPLY_BYTES_MAX = 1 << 20
_STDERR_TAIL_BYTES = 2000


class AgentProcess:
    """Starts at once; ends with the ``with`` block, with ``close``, or when this process dies."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        # A session of its own: Ctrl-C reaches us alone, and we end the agents in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvcomm.demo.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
            env=_environment(threads),
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, order: Order) -> None:
        """Give an order without waiting for the reply.  Raises ``Unavailable`` if the agent is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone("is gone") from None

    def ready(self, deadline_s: float = START_DEADLINE_S) -> Ready:
        """The reply to ``Start`` or ``Reconnect``."""
        return self._reply(Ready, deadline_s)

    def reconnect(self) -> Ready:
        self.send(Reconnect())
        return self.ready()

    def read(self, order: Read) -> Row:
        """Raises ``KVCommError`` if the agent could not, ``Unavailable`` if it is gone or takes too long."""
        self.send(order)
        return self._reply(Row, READ_DEADLINE_S)

    def close(self) -> None:
        """End the agent: closed input first, then a signal.  Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reply(self, kind: type[R], deadline_s: float) -> R:
        reply: Reply = msgspec.json.decode(self._line(time.monotonic() + deadline_s), type=Reply)
        if isinstance(reply, Trouble):
            raise KVCommError(f"agent {self.name}: {reply.message}")
        assert isinstance(reply, kind), f"agent {self.name} answered {type(reply).__name__}"
        return reply

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if len(self._buffer) > _REPLY_BYTES_MAX:
                raise self._gone("answers without an end")
            wait_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], wait_s)[0]:
                raise self._gone("does not answer in time")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._gone("ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _gone(self, what: str) -> Unavailable:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _STDERR_TAIL_BYTES))
        tail = self._said.read().decode(errors="replace").strip()
        return Unavailable(f"agent {self.name} {what}{': ' if tail else ''}{tail}")


def _environment(threads: int) -> dict[str, str]:
    """Agents compute in turn, so each may have all cores, but must not spin on them while it waits.

    Which cluster they join is in their orders, not in what the user's shell says of another one.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_CLUSTER}
    return inherited | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
