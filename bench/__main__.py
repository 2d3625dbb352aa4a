"""``python -m bench [case ...] [--smoke] [--patience S] [--json FILE] [--merge FILE ...] [--write-docs]``:
run and report.

Every case runs in a process of its own, so that none of them finds another's memory, threads or imports.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.cases import CASES
from bench.document import BEGIN, DOCUMENT, begin, rendered, written_into
from bench.host import Host, wait_for_quiet
from bench.report import Report, from_json, to_json
from bench.scale import FULL, SMOKE

CASE_DEADLINE_S = 540.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status is 0 if every case ran, whatever it measured: a busy machine is no broken build."""
    options = _options(arguments)
    if options.into:  # this is the process of one case
        report = _run(options.cases[0], smoke=options.smoke)
        Path(options.into).write_bytes(to_json([report]))
        return 0
    wait_for_quiet(options.patience)
    host = Host.measured(SMOKE if options.smoke else FULL)
    reports = []
    for case in options.cases or CASES:
        wait_for_quiet(options.patience)
        reports.append(_run_apart(case, smoke=options.smoke))
    if options.machine:
        reports = [report.of(options.machine) for report in reports]
    for recorded in options.merge:
        reports += from_json(Path(recorded).read_bytes())
    text = rendered(host, reports)
    print(text)
    if options.json:
        Path(options.json).write_bytes(to_json(reports))
    if options.write_docs:
        marker = begin(f"bench --section {options.section}") if options.section else BEGIN
        DOCUMENT.write_text(written_into(DOCUMENT.read_text(), text, marker))
    return int(any(report.broken for report in reports))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="case", help=", ".join(CASES))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="also write the reports there")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {DOCUMENT.name}")
    parser.add_argument("--section", metavar="NAME", help="which part of it, instead of the one of all cases")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="S",
        help="wait so long for a quiet machine before each case",
    )
    parser.add_argument("--machine", metavar="NAME", help="say with everything that it is of this machine")
    parser.add_argument(
        "--merge", nargs="*", default=[], metavar="FILE", help="reports recorded on other machines (--json)"
    )
    parser.add_argument("--into", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _run(case: str, *, smoke: bool) -> Report:
    run = importlib.import_module(f"bench.cases.{case}").run
    report = run(SMOKE if smoke else FULL)
    assert isinstance(report, Report)
    return report


def _run_apart(case: str, *, smoke: bool) -> Report:
    print(f"{case} ...", file=sys.stderr, flush=True)
    with tempfile.NamedTemporaryFile() as result:
        command = [sys.executable, "-m", "bench", case, "--into", result.name, *["--smoke"] * smoke]
        try:
            done = subprocess.run(command, timeout=CASE_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return Report.failed(case, f"it took more than {CASE_DEADLINE_S:.0f} s")
        if done.returncode:
            return Report.failed(case, f"it ended with status {done.returncode}")
        (report,) = from_json(Path(result.name).read_bytes())
        return report


if __name__ == "__main__":
    sys.exit(main())
