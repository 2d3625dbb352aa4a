"""``python -m tests.system.staged``: the shipped ``kvcomm`` processes with a test's hand inside.

The commands are those of ``kvcomm``.  What is staged stands in the directory that ``KVCOMM_TEST_STAGE`` names
(``lab.Stage`` writes it): environment variables for one node's processes, the machine's boot, and *crash
points*.  A crash point is a step at the border of the shard machine, where everything that it hears comes in
and everything that it orders goes out, so nothing of it is in the shipped code::

    received StrongAccept     before the machine has seen the request
    before persist accept     nothing is on the disk yet; kinds: records, promise, accept, membership
    persisted accept          it is on the disk, and the machine does not know yet
    before ask RecordReplicate, after ask RecordReplicate
    before reply Done         decided, and the caller does not know yet
    after reply Done          the answer has been handed to the kernel

At its point the process ends by ``SIGKILL``, once: the point is taken off the stage just before.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvcomm.machine import Answered, AskPeer, Effect, Event, Received, Reply
from l3_shard.entering import MEMBERSHIP_KEY
from l3_shard.shard import Shard
from l3_shard.storage import Persist, Persisted

STAGE_VARIABLE = "KVCOMM_TEST_STAGE"
RESTART_BACKOFF_S = 0.5
"""Of a node that keeps ending: most ends here are meant."""
START_TIMEOUT_S = 60.0
"""Machines that run tests are busy."""
WALL_INTERVAL_S = 0.2
"""A shard looks at the wall clock once a minute: too seldom for a test."""


class Stage:
    """The directory; written by the test, read by the processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def boot(self) -> Path:
        """The file that stands for the kernel's name of this boot."""
        return self.directory / "boot"

    def point(self, node: str) -> Path:
        """The file that holds the node's crash point and how often it is passed: ``2 received Hello``."""
        return self.directory / f"{node}.point"

    def variables(self, node: str) -> Path:
        """The file with the node's environment variables, one ``NAME=value`` a line."""
        return self.directory / f"{node}.env"

    def environment(self, node: str) -> list[str]:
        path = self.variables(node)
        return path.read_text().split("\n") if path.exists() else []


class CrashPoint:
    """Counts the steps of one process, and ends it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: dict[str, int] = {}
        self._script = ""

    def reach(self, step: str) -> None:
        script = self._path.read_text() if self._path.exists() else ""
        if script != self._script:
            self._script, self._passed = script, {}
        if not script:
            return
        passes, _, wanted = script.partition(" ")
        if step != wanted:
            return
        self._passed[step] = self._passed.get(step, 0) + 1
        if self._passed[step] > int(passes):
            self._path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class StagedShard(Shard):
    """A ``Shard`` that tells a crash point of every step."""

    crash_point: CrashPoint

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._accepted: dict[bytes, bytes] = {}
        self._kinds: dict[int, str] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        if step := self._step_in(event):
            self.crash_point.reach(step)
        return _Orders(self, super().handle(event, now))

    def _step_in(self, event: Event) -> str:
        match event:
            case Received():
                return f"received {type(event.message).__name__}"
            case Answered():
                return f"answered {type(event.message).__name__}"
            case Persisted() if event.outcome == "durable":
                return f"persisted {self._kinds.pop(event.ticket)}"
        return ""

    def step_out(self, effect: Effect) -> str:
        match effect:
            case Reply():
                return f"reply {type(effect.message).__name__}"
            case AskPeer():
                return f"ask {type(effect.message).__name__}"
            case Persist():
                kind = self._kinds[effect.ticket] = self._kind(effect)
                return f"persist {kind}"
        return ""

    def _kind(self, effect: Persist[Any]) -> str:
        """An accept changes what was accepted last, a promise does not."""
        if effect.database == "records":
            return "records"
        kind = "promise"
        for key, state in effect.writes:
            if key == MEMBERSHIP_KEY:
                return "membership"
            if self._accepted.get(key, b"") != state.accepted:
                kind = "accept"
            self._accepted[key] = state.accepted
        return kind


class _Orders(list[Effect]):
    """Effects that are done as they are taken: when the next one is asked for, this one is done."""

    def __init__(self, shard: StagedShard, effects: Sequence[Effect]) -> None:
        super().__init__(effects)
        self._shard = shard

    def __iter__(self) -> Iterator[Effect]:
        for effect in super().__iter__():
            step = self._shard.step_out(effect)
            self._shard.crash_point.reach(f"before {step}")
            yield effect
            self._shard.crash_point.reach(f"after {step}")


def _stage_up(stage: Stage) -> None:
    """Have the supervisor start staged nodes."""
    up: Any = importlib.import_module("kvcomm.cli.up")
    supervisor: Any = importlib.import_module("controller.supervisor")
    shipped = up._command

    def command(cluster: Any, plan: Any, config: Path) -> list[str]:
        python, m, module, *arguments = shipped(cluster, plan, config)
        assert (m, module) == ("-m", "kvcomm.cli"), "nodes are started another way now"
        return ["env", *stage.environment(plan.node), python, "-m", "tests.system.staged", *arguments]

    up._command = command
    supervisor.BACKOFF_MAX_S = RESTART_BACKOFF_S
    supervisor.START_TIMEOUT_S = START_TIMEOUT_S


def _stage_shard(stage: Stage, node: str) -> None:
    process: Any = importlib.import_module("l3_shard.process")
    store: Any = importlib.import_module("l3_shard.store")
    StagedShard.crash_point = CrashPoint(stage.point(node))
    process.Shard = StagedShard
    process.WALL_INTERVAL_S = WALL_INTERVAL_S
    store._BOOT_ID = stage.boot


def main() -> None:
    from kvcomm.cli import main as shipped

    stage = Stage(Path(os.environ[STAGE_VARIABLE]))
    if sys.argv[1] == "up":
        _stage_up(stage)
    elif sys.argv[1] == "shard":
        _stage_shard(stage, sys.argv[sys.argv.index("--node") + 1])
    shipped()


if __name__ == "__main__":
    main()
