"""``Embedded``: a cluster of real processes that lives exactly as long as the process that asked for it.

It is ``kvcomm up`` under a name of its own, tied to us by a pipe: when we end, however we end, the pipe closes, the
supervisor stops its nodes and removes the instance.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from pathlib import Path

from kvcomm.errors import Unavailable

READY_LINE = b"ready\n"
STOP_DEADLINE_S = 15.0


class Embedded:
    """A running cluster.  Made by :meth:`start`; :meth:`stop` is idempotent and also happens when we die."""

    def __init__(self, process: subprocess.Popen[bytes], instance: str) -> None:
        self._process = process
        self.instance = instance

    @staticmethod
    def start(instance: str, config: str | Path | None, deadline: float) -> Embedded:
        """Start the cluster and wait until every node serves.

        Raises:
            Unavailable: it did not come up by ``deadline`` (monotonic seconds), with what it printed.
        """
        command = [sys.executable, "-m", "kvcomm.cli", "up", "--instance", instance, "--lifeline"]
        if config is not None:
            command += ["--config", str(config)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        embedded = Embedded(process, instance)
        if not _line_arrives(process, deadline):
            text = embedded._give_up()
            raise Unavailable(f"the embedded cluster did not come up: {text or 'it printed nothing'}")
        return embedded

    def stop(self) -> None:
        """Close the pipe and wait for the cluster's end."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its nodes notice the closed pipe by themselves
            self._process.wait()

    def _give_up(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        assert self._process.stderr is not None
        text = self._process.stderr.read().decode(errors="replace").strip()
        self.stop()
        return text[-4000:]


def _line_arrives(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether the process says that it is ready before it ends or the time is up."""
    assert process.stdout is not None
    said = b""
    while not said.endswith(READY_LINE):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        chunk = process.stdout.read1(4096) if readable else b""  # type: ignore[attr-defined]
        if not chunk:
            return False
        said += chunk
    return True
