"""``LocalLauncher``: node processes as subprocesses of this one.

Every child has a pipe from us as its standard input and ends itself when that pipe closes, so no node
outlives its supervisor, whatever kills it.  Children write their output to one log file each.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvcomm.wire.messages import NodePlan

STOP_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL when the cluster stops."""
LAST_WORDS_BYTES_MAX = 2000


class Launcher(Protocol):
    """How node processes are started; the exit of each is reported once."""

    async def start(self, plan: NodePlan, exited: Callable[[str, int], None]) -> int:
        """Start the node; its pid.  ``exited(node, code)`` is called in the event loop when it has ended.

        Raises ``OSError`` when the process cannot be started.
        """
        ...

    def terminate(self, node: str) -> None:
        """Ask it to end."""
        ...

    def kill(self, node: str) -> None: ...

    async def stop(self) -> None:
        """End every node: politely, then not."""
        ...

    def last_words(self, node: str) -> str:
        """The end of what the node's newest process has printed; empty where it printed nothing."""
        ...


@dataclass(slots=True)
class LocalLauncher:
    """Starts ``command(plan)`` with output appended to ``log_directory/<node>.log``."""

    command: Callable[[NodePlan], Sequence[str]]
    log_directory: Path
    _running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict, init=False)
    _log_starts: dict[str, int] = field(default_factory=dict, init=False)
    """Where in its log the newest process of a node begins."""
    _watchers: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def start(self, plan: NodePlan, exited: Callable[[str, int], None]) -> int:
        with self.log_path(plan.node).open("ab") as log:
            self._log_starts[plan.node] = log.seek(0, os.SEEK_END)
            process = await asyncio.create_subprocess_exec(
                *self.command(plan),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal is for us to pass on, in order
            )
        self._running[plan.node] = process
        watcher = asyncio.ensure_future(self._watch(plan.node, process, exited))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return process.pid

    def terminate(self, node: str) -> None:
        self._signal(self._running.get(node), signal.SIGTERM)

    def kill(self, node: str) -> None:
        self._signal(self._running.get(node), signal.SIGKILL)

    async def stop(self) -> None:
        for process in self._running.values():
            self._signal(process, signal.SIGTERM)
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=STOP_GRACE_S)
        for process in self._running.values():
            self._signal(process, signal.SIGKILL)
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=STOP_GRACE_S)

    def last_words(self, node: str) -> str:
        try:
            with self.log_path(node).open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_starts.get(node, end), end - LAST_WORDS_BYTES_MAX))
                return log.read(LAST_WORDS_BYTES_MAX).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def log_path(self, node: str) -> Path:
        return self.log_directory / f"{node}.log"

    async def _watch(
        self, node: str, process: asyncio.subprocess.Process, exited: Callable[[str, int], None]
    ) -> None:
        code = await process.wait()
        if self._running.get(node) is process:
            del self._running[node]
        exited(node, code)

    @staticmethod
    def _signal(process: asyncio.subprocess.Process | None, number: signal.Signals) -> None:
        if process is not None and process.returncode is None:
            try:
                process.send_signal(number)
            except ProcessLookupError:
                return  # it ended by itself in between
