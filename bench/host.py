"""What the numbers were measured on, and how much that machine wavers by itself."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from bench.peers.memory import MEMCPY, memcpy
from bench.scale import Scale, size_name
from bench.timing import Spread, interleave

BUSY_MAX, QUIET_S, POLL_S = 0.15, 3.0, 0.5


@dataclass(frozen=True, slots=True)
class Host:
    """The machine during a run."""

    processor: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    load: float
    memcpy: dict[str, Spread]
    """Microseconds of one copy, by size: what spreads here is the machine's doing, not ours."""

    @staticmethod
    def measured(scale: Scale) -> Host:
        return Host(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30),
            kernel=platform.release().split("-")[0],
            python=platform.python_version(),
            load=os.getloadavg()[0],
            memcpy={size_name(size): _memcpy(scale, size) for size in (scale.block_bytes, scale.large_bytes)},
        )

    def described(self) -> str:
        """For the report."""
        text = (
            f"{self.cores} cores of {self.processor}, {self.memory_gib:.0f} GiB, Linux {self.kernel}, "
            f"CPython {self.python}; load average {self.load:.1f} at the start."
        )
        wavers = "; ".join(
            f"{size}: median {spread.median:,.0f} µs, p10 {spread.p10:,.0f}, p90 {spread.p90:,.0f}"
            for size, spread in self.memcpy.items()
        )
        return f"{text}\n\nA plain memory copy on it, before anything else ran: {wavers}."


def wait_for_quiet(patience_s: float) -> bool:
    """Wait until others use less than :data:`BUSY_MAX` of the processors, for :data:`QUIET_S` on end.

    False if ``patience_s`` passed first: the measurement goes on all the same, and its load average tells.
    """
    deadline, quiet_since = time.monotonic() + patience_s, time.monotonic()
    before = _processor_ticks()
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        after = _processor_ticks()
        busy = 1 - (after[1] - before[1]) / max(1, after[0] - before[0])
        before = after
        if busy > BUSY_MAX:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since >= QUIET_S:
            return True
    return False


def _processor_ticks() -> tuple[int, int]:
    """(all, idle) since boot, over all processors."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _memcpy(scale: Scale, size_bytes: int) -> Spread:
    rounds = interleave([memcpy(scale.working_set, size_bytes)], rounds=scale.rounds, turn_s=scale.turn_s)
    return rounds.spread(MEMCPY).scaled(1e6)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
