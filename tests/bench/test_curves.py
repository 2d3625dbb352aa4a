"""Curves: what is under way at once, what survives JSON, what stands in the tables, and that it all runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import curves
from bench.curves import IN_FLIGHT_MAX, RUN_BYTES_MAX, SIZES, in_flight
from bench.sections import Point, Section, from_json, tables, to_json
from bench.sources import Way
from bench.timing import Call, Spread

ROOT = Path(__file__).parents[2]
WAYS = {
    "memcpy": ["memcpy"],
    "socket": ["raw TCP socket"],
    "unix-socket": ["raw unix socket"],
    "redis": ["Redis GET, unix", "Redis GET, tcp"],
    "mooncake": ["Mooncake get, tcp"],
    "bare-verbs": ["bare pyverbs READ"],
    "view": ["KVCOMM shm view, no copy"],
    "shm": ["KVCOMM shm read"],
    "tcp": ["KVCOMM tcp read", "KVCOMM tcp get"],
    "verbs": ["KVCOMM verbs read", "KVCOMM verbs get"],
    "cuda": ["KVCOMM cuda read", "KVCOMM cuda get", "KVCOMM cuda to a GPU"],
}
"""Of each source."""


def section(machine: str = "here") -> Section:
    points = [
        Point("memcpy", 64, Spread(1, 2, 3), Spread(4, 5, 6)),
        Point("memcpy", 1024, Spread(2, 3, 4), Spread(5, 6, 7)),
        Point("a view", 1024, Spread(7, 8, 9), None),
    ]
    return Section(machine, "a machine", points, {"theirs": "not installed"})


def test_runs_are_bounded_in_number_and_in_bytes():
    assert (SIZES[0], SIZES[-1]) == (64, 16 << 20)
    for size in SIZES:
        items = in_flight(size)
        assert 1 <= items <= IN_FLIGHT_MAX
        assert items == 1 or items * size <= RUN_BYTES_MAX


def test_sections_survive_json():
    assert from_json(to_json([section(), section("there")])) == [section(), section("there")]


def test_tables_show_each_way_at_each_size():
    text = tables([section()])
    assert "### here" in text and "| | 64 B | 1 KiB |" in text
    assert "| memcpy | 2 | 3 |" in text and "| a view |  | 8 |" in text
    assert "| memcpy | 5 | 6 |" in text
    assert text.count("a view") == 1, "a way without a bandwidth is not in the second table"
    assert "Not run: theirs (not installed)." in text


def test_a_slow_clock_is_read_once_for_several_reads(monkeypatch: pytest.MonkeyPatch):
    way = Way("a", Call("a", lambda: None), Call("b", lambda: None))
    monkeypatch.setattr(curves, "clock_cost_s", lambda: 20e-6)
    slow = curves._in_a_row(way)
    assert isinstance(slow.one, Call) and slow.one.items == curves.IN_A_ROW and slow.run == way.run
    monkeypatch.setattr(curves, "clock_cost_s", lambda: 50e-9)
    assert curves._in_a_row(way) is way


def test_sections_are_merged_and_machines_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("here", "there"):
        (tmp_path / name).write_bytes(to_json([section(name)]))
    into = tmp_path / "all.json"
    both = ["--no-run", "--merge", str(tmp_path / "here"), str(tmp_path / "there")]
    assert curves.main([*both, "--json", str(into)]) == 0
    assert [found.machine for found in from_json(into.read_bytes())] == ["here", "there"]
    assert "### here" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--machine"):
        curves.main([*both, str(tmp_path / "here")])


def test_what_a_gpu_machine_recorded_becomes_a_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    times = {
        "us": {"plain": 10, "channel": 20, "fetch": 15.5},
        "gbps": {"plain": 300, "channel": 200, "fetch": 250},
    }
    recorded = {
        "machine": {"gpu": "G1", "pool_gpu": 1, "driver": 1}, "rounds": 7,
        "fetch": [{"size_mib": 2, "count": 64, "pipelined": times, "single": times}],
    }  # fmt: skip
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(recorded))
    assert curves.main(["--no-run", "--merge", str(file)]) == 0
    shown = capsys.readouterr().out
    assert (
        "### two G1" in shown
        and "| KVCOMM cuda read | 20 |" in shown
        and "| KVCOMM cuda fetch | 250 |" in shown
    )


@pytest.mark.slow
@pytest.mark.processes
def test_every_source_gives_its_curves_or_a_reason(tmp_path: Path):
    from bench.sources import SOURCES

    result = tmp_path / "curves.json"
    command = [sys.executable, "-m", "bench.curves", "--smoke", "--machine", "m", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    [found] = from_json(result.read_bytes())
    assert found.machine == "m" and found.sizes() == list(curves.SMOKE_SIZES)
    assert set(WAYS) == set(SOURCES)
    expected = {way for source, ways in WAYS.items() if source not in found.skipped for way in ways}
    assert set(found.ways()) == expected
    assert set(found.skipped).isdisjoint({"memcpy", "socket", "unix-socket", "view", "shm", "tcp"})
    assert all(found.skipped.values())
    assert len(found.points) == len(expected) * len(curves.SMOKE_SIZES)
    assert {point.way for point in found.points if point.gb_s is None} == {"KVCOMM shm view, no copy"}
