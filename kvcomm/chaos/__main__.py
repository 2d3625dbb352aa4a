"""The long run: ``python -m kvcomm.chaos``; see ``scripts/soak``.

Needs what the simulator needs and nothing else: no command line framework, no gRPC, no database.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from kvcomm.chaos.campaign import Summary, Verdict, run_campaign
from kvcomm.chaos.plan import Mode

TOLD_EVERY_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1: a promise was broken."""
    parser = argparse.ArgumentParser(prog="soak", description="Many simulated clusters under drawn faults.")
    parser.add_argument("seeds", nargs="?", type=int, default=10_000, help="worlds in safety mode")
    parser.add_argument("jobs", nargs="?", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--first", type=int, default=0, help="seed of the first: where to go on")
    parser.add_argument("--liveness", type=int, help="worlds in liveness mode; a tenth if not said")
    chosen = parser.parse_args(arguments)
    if chosen.seeds < 0 or chosen.jobs < 1 or chosen.first < 0 or (chosen.liveness or 0) < 0:
        parser.error("numbers of seeds are not negative, and there is at least one process")
    liveness = chosen.seeds // 10 if chosen.liveness is None else chosen.liveness
    failed = _soak("safety", range(chosen.first, chosen.first + chosen.seeds), chosen.jobs)
    failed += _soak("liveness", range(chosen.first, chosen.first + liveness), chosen.jobs)
    return 1 if failed else 0


def _soak(mode: Mode, seeds: Sequence[int], jobs: int) -> int:
    """How many seeds broke something."""
    if not seeds:
        return 0
    begin = told = time.monotonic()
    soon = Summary()

    def heard(verdict: Verdict) -> None:
        nonlocal told
        soon.add(verdict)
        if verdict.violations:
            sys.stdout.write(verdict.report())
        if time.monotonic() - told >= TOLD_EVERY_S:
            told = time.monotonic()
            sys.stdout.write(f"{mode} up to seed {verdict.seed}: {soon.text()}\n")
        sys.stdout.flush()

    summary = run_campaign(seeds, mode, jobs, heard)
    wall_h = (time.monotonic() - begin) / 3600
    sys.stdout.write(
        f"{mode}, seeds {seeds[0]} to {seeds[-1]}, {jobs} processes, {wall_h:.2f} hours: {summary.text()}\n"
    )
    sys.stdout.flush()
    return len(summary.failed)


if __name__ == "__main__":
    sys.exit(main())
