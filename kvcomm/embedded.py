"""``Embedded``: a cluster of real processes that lives exactly as long as the process that asked for it.

It is ``kvcomm up`` under a name of its own, tied to us by a pipe: when we end, however we end, the pipe
closes, the supervisor stops its nodes and removes the instance.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

from kvcomm.errors import Unavailable

READY_LINE = b"ready\n"
STOP_DEADLINE_S = 15.0


class Embedded:
    """A running cluster.  Made by :meth:`start`; :meth:`stop` is idempotent and also happens when we die."""

    def __init__(self, process: subprocess.Popen[bytes], instance: str) -> None:
        self._process = process
        self._owner = os.getpid()
        self.instance = instance
        _running.add(self)

    @staticmethod
    def start(instance: str, config: str | Path | None, deadline: float) -> Embedded:
        """Start the cluster and wait until every node serves.

        Raises:
            Unavailable: it did not come up by ``deadline`` (monotonic seconds), with what it printed.
        """
        command = [sys.executable, "-m", "kvcomm.cli", "up", "--instance", instance, "--lifeline"]
        if config is not None:
            command += ["--config", str(config)]
        with tempfile.TemporaryFile() as said:  # not a pipe: nobody reads along while the cluster runs
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True
            )
            embedded = Embedded(process, instance)
            try:
                if _line_arrives(process, deadline):
                    return embedded
            except BaseException:
                embedded.stop()
                raise
            embedded.stop()
            said.seek(0)
            text = said.read()[-4000:].decode(errors="replace").strip()
        raise Unavailable(f"the embedded cluster did not come up: {text or 'it printed nothing'}")

    def stop(self) -> None:
        """Close the pipe and wait for the cluster's end.  In a forked child nothing happens: the cluster is
        its parent's."""
        self.close_pipes()
        if os.getpid() != self._owner:
            return
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its nodes notice the closed pipe by themselves
            self._process.wait()

    def close_pipes(self) -> None:
        """Let go of our ends; the cluster ends when no process holds them any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


_running: weakref.WeakSet[Embedded] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child must not keep its parent's cluster alive by holding a copy of the pipe."""
    for embedded in list(_running):
        embedded.close_pipes()


os.register_at_fork(after_in_child=_forget_in_child)


def _line_arrives(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether the process says that it is ready before it ends or the time is up."""
    assert process.stdout is not None
    said = b""
    poll = select.poll()  # not select.select, which takes no descriptor above 1023
    poll.register(process.stdout, select.POLLIN)
    while not said.endswith(READY_LINE):
        readable = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        chunk = os.read(process.stdout.fileno(), 4096) if readable else b""
        if not chunk:
            return False
        said += chunk
    return True
