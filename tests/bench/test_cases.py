"""Every case runs, at sizes that say nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases import CASES
from bench.report import from_json

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_a_case_measures_something_and_leaves_nothing(case: str, tmp_path: Path):
    result = tmp_path / "report.json"
    command = [sys.executable, "-m", "bench", case, "--smoke", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = from_json(result.read_bytes())
    assert report.name == case and not report.broken
    assert report.claims or report.skipped, "a case that claims nothing and misses nothing measured nothing"
    assert "### Targets" in done.stdout
    assert json.loads(result.read_text())[0]["title"]


def test_an_unknown_case_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "bench", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "nothing" in done.stderr
