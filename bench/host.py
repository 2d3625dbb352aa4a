"""What the numbers were measured on, and how much that machine wavers by itself."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from bench.peers.memory import MEMCPY, memcpy
from bench.scale import Scale, size_name
from bench.timing import Spread, interleave


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


def _memcpy(scale: Scale, size_bytes: int) -> Spread:
    rounds = interleave([memcpy(scale.working_set, size_bytes)], rounds=scale.rounds, turn_s=scale.turn_s)
    return rounds.spread(MEMCPY).scaled(1e6)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
