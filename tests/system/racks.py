"""Nodes that a test starts one by one, each in a rack of its choice, as an operator of several hosts does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvcomm.instance import Instance

STOP_S = 20.0


@contextmanager
def nodes_in_racks(name: str, config: Path, nodes: Sequence[tuple[str, str, str]]) -> Iterator[Instance]:
    """(role, node, rack) each; nobody starts them again.  They end with the context, or with this process."""
    instance = Instance.create(name)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for role, node, rack in nodes:
            command = [sys.executable, "-m", "kvcomm.cli", role, "--instance", name, "--node", node]
            command += ["--rack", rack, "--config", str(config), "--lifeline"]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        yield instance
    finally:
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
        for process in started:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        instance.remove()
