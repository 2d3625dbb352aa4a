"""``Quotas``: processes that get a part of a core's time, by the kernel's CPU bandwidth control.

Each limited group of processes is a control group of its own at the top of the hierarchy, version 1 or 2.
When the limit is lifted they go back to where they were.  Needs root; ``missing`` says what is not there.  A
group's name holds the number of the process that made it: what a killed one left behind is removed by the
next.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvcomm.errors import Unavailable

PREFIX = "kvchaos"
PERIOD_US = 100_000
"""Of accounting, the kernel's usual one: with 10 % a process runs 10 ms and then stands still for 90."""
QUOTA_MIN_US = 1_000
"""The kernel takes no less."""
_LEFT = re.compile(rf"{PREFIX}-(\d+)-[a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where groups are made."""

    top: Path
    unified: bool
    """Version 2."""

    def set(self, group: Path, percent: float) -> None:
        quota_us = max(QUOTA_MIN_US, round(percent / 100 * PERIOD_US))
        if self.unified:
            _write(group / "cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            _write(group / "cpu.cfs_period_us", str(PERIOD_US))
            _write(group / "cpu.cfs_quota_us", str(quota_us))

    def group_of(self, pid: int) -> Path:
        """Where a process is now.  Raises ``Unavailable``: it is gone."""
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError as error:
            raise Unavailable(f"process {pid}: {error}") from error
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if ("cpu" in controllers.split(",")) if not self.unified else controllers == "":
                return self.top / path.removeprefix("/")
        return self.top


@cache
def missing() -> str:
    """Why processor time cannot be limited here; empty = it can."""
    if os.geteuid() != 0:
        return "limiting processor time needs root"
    try:
        quotas = Quotas()
        try:
            quotas.limit("try", [], 50.0)
        finally:
            quotas.close()
    except Unavailable as error:
        return f"processor time cannot be limited here: {error.message}"
    return ""


class Quotas:
    """The limits of one story; nothing is made before the first."""

    def __init__(self) -> None:
        self._hierarchy: Hierarchy | None = None
        self._groups: dict[str, Path] = {}
        self._from: dict[int, Path] = {}
        """Where each process was before."""

    def limit(self, name: str, pids: Sequence[int], percent: float) -> None:
        """Give these processes ``percent`` of one core together, in place of any other limit of this name.

        Raises:
            Unavailable: the kernel does not let us.
        """
        hierarchy = self._hierarchy = self._hierarchy or _hierarchy()
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = hierarchy.top / f"{PREFIX}-{os.getpid()}-{name}"
            try:
                group.mkdir(exist_ok=True)
            except OSError as error:
                del self._groups[name]
                raise Unavailable(f"no control group can be made: {error}") from error
        hierarchy.set(group, percent)
        for pid in pids:
            if pid not in self._from:
                self._from[pid] = hierarchy.group_of(pid)
            _write(group / "cgroup.procs", str(pid))

    def lift(self, name: str) -> None:
        """Let them have all that there is.  A name without a limit is fine."""
        group = self._groups.pop(name, None)
        if group is not None:
            _dissolve(group, self._from)

    def close(self) -> None:
        """Lift every limit.  Idempotent."""
        for name in list(self._groups):
            self.lift(name)


def _dissolve(group: Path, homes: dict[int, Path]) -> None:
    """Processes that have ended are in no group."""
    with suppress(OSError):
        for line in (group / "cgroup.procs").read_text().split():
            with suppress(Unavailable):
                _write(homes.pop(int(line), group.parent) / "cgroup.procs", line)
        group.rmdir()


def _hierarchy() -> Hierarchy:
    """Also removes what killed stories left there."""
    hierarchy = _find(Path("/proc/self/mountinfo").read_text())
    for path in hierarchy.top.glob(f"{PREFIX}-*"):
        found = _LEFT.fullmatch(path.name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            _dissolve(path, {})
    return hierarchy


def _find(mounts: str) -> Hierarchy:
    """Raises ``Unavailable``: no hierarchy of control groups limits processor time."""
    unified: Path | None = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        where, (kind, _, options) = Path(before.split()[4]), after.split(" ", 2)
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(where, unified=False)
        if kind == "cgroup2":
            unified = where
    if unified is None:
        raise Unavailable("no control groups are mounted")
    try:
        if "cpu" not in (unified / "cgroup.subtree_control").read_text().split():
            (unified / "cgroup.subtree_control").write_text("+cpu")
    except OSError as error:
        raise Unavailable(f"{unified} has no cpu controller: {error}") from error
    return Hierarchy(unified, unified=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise Unavailable(f"{path}: {error}") from error
