"""What the package costs before it does anything: the time to import it, and the memory of idle processes."""

from __future__ import annotations

import subprocess
import sys

from bench.report import Report, Row
from bench.scale import Scale
from bench.timing import Spread

HEAVY = ("torch", "transformers", "grpc", "ray", "vllm", "numpy", "yaml", "prometheus_client")
"""Modules that ``import kvcomm`` must not load."""
_IMPORT = """
import sys, time
begin = time.perf_counter()
import kvcomm
print(time.perf_counter() - begin)
print(*[name for name in {heavy} if name in sys.modules])
"""
IMPORT_MS_MAX = 150.0


def run(scale: Scale) -> Report:
    report = Report("footprint", "Footprint")
    _import_time(scale, report)
    return report


def _import_time(scale: Scale, report: Report) -> None:
    """In fresh processes; the files are in the page cache after the first, which is not counted."""
    program = _IMPORT.format(heavy=HEAVY)
    shown = [
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()
        for _ in range(scale.processes + 1)
    ]
    seconds = Spread.of([float(lines[0]) for lines in shown[1:]])
    report.rows.append(Row("import kvcomm", "", seconds.scaled(1e6)))
    report.claim("import kvcomm", "<=", IMPORT_MS_MAX, "ms", seconds.scaled(1e3))
    loaded = shown[0][1].split()
    report.notes.append(
        f"`import kvcomm` loads none of {', '.join(HEAVY)}." if not loaded else f"It loads {loaded}."
    )
