"""What the service costs before it does anything: the time to import it, and the memory of idle processes."""

from __future__ import annotations

import subprocess
import sys

from bench.report import Report, Row
from bench.scale import Scale
from bench.service import service, status_of
from bench.timing import Spread

HEAVY = (
    "torch",
    "transformers",
    "grpc",
    "ray",
    "vllm",
    "numpy",
    "yaml",
    "prometheus_client",
    "l2_rdma",
    "asyncio",
)
"""Modules that ``import kvcomm`` need not load."""
IMPORT_MS_MAX, RESIDENT_MIB_MAX = 150.0, 80.0
_IMPORT = f"""
import sys, time
begin = time.perf_counter()
import kvcomm
print(time.perf_counter() - begin)
print(*[name for name in {HEAVY} if name in sys.modules])
"""


def run(scale: Scale) -> Report:
    report = Report("footprint", "Footprint")
    _import_time(scale, report)
    _resident(report)
    return report


def _import_time(scale: Scale, report: Report) -> None:
    """In fresh processes; the files are in the page cache after the first, which is not counted."""
    shown = [
        subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()
        for _ in range(scale.processes + 1)
    ]
    seconds = Spread.of([float(lines[0]) for lines in shown[1:]])
    report.rows.append(Row("import kvcomm", "", seconds.scaled(1e6)))
    report.claim("import kvcomm", "<=", IMPORT_MS_MAX, "ms", seconds.scaled(1e3))
    loaded = shown[0][1].split()
    absent = [name for name in HEAVY if name not in loaded]
    report.notes.append(
        f"`import kvcomm` does not load {', '.join(absent)}"
        + (f"; it does load {', '.join(loaded)}." if loaded else ".")
    )


def _resident(report: Report) -> None:
    """Of each server process just after the start.  Shared memory is the region, and not counted."""
    with service() as running:
        for role in ("pool", "shard"):
            resident = [_private_mib(node.pid) for node in running.instance.nodes() if node.role == role]
            spread = Spread.of(resident)
            report.claim(f"idle {role}, beyond its region", "<=", RESIDENT_MIB_MAX, "MiB", spread)


def _private_mib(pid: int) -> float:
    """Anonymous and file-backed resident memory: what ``ps`` calls RSS, less shared memory."""
    status = status_of(pid)
    return sum(int(status[part].split()[0]) for part in ("RssAnon", "RssFile")) / 1024
