"""``kvcomm streams inspect``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvcomm.cli.app import app
from kvcomm.cli.streams import BAR_CELLS, _bar
from kvcomm.streams.rollout import Sampling
from kvcomm.streams.rollout_file import write_rollouts
from tests.kvcomm.streams.stories import Story, story

COUNT = 3


@pytest.fixture(params=[False, True], ids=["binary", "json"])
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "rollouts"
    with path.open("wb") as opened:
        write_rollouts(opened, [story(seed) for seed in range(COUNT)], as_json=request.param)
    return path


def inspected(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, ["streams", "inspect", *map(str, arguments)], env={"COLUMNS": "160", "NO_COLOR": "1"}
    )


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_rollout_is_told_as_a_timeline(tmp_path: Path):
    telling = Story(1)
    telling.prompt(20 - telling.session.next_row)
    telling.sample(3, Sampling(0.7, 20, 0.9))
    telling.fill()
    span = telling.session.evict([(4, 8), (12, 20)], archive=True, reason="fifo").span
    telling.sample(2, Sampling(0.0))
    telling.fill()
    telling.session.restore(span)
    telling.session.set_weights(4)
    path = tmp_path / "one"
    with path.open("wb") as opened:
        write_rollouts(opened, [telling.recorder.rollout()])
    result = inspected(path)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    name = span.hex()[:12]
    assert lines[:3] == [
        "rollout story-1",
        "28 rows in blocks of 4: 20 text, 5 sampled, 3 filler",
        "3 events; live slots at most 28, at the end 28",
    ]
    assert "5 samples" in lines[3]
    assert lines[3].endswith("temperature 0.7 top-k 20 top-p 0.9, greedy")
    assert lines[4] == "weights 0 from row 0, 4 from row 28"
    bodies = [line.partition(" █")[0] for line in lines[7:-1]]
    assert bodies == [
        "0 + 20 text, 3 sampled, 1 filler 24",
        f"24 ✂ evict (fifo) 12 rows · rows 4-7 12-19 · slots 4-7 12-19 · archived as {name} 12",
        "24 + 2 sampled, 2 filler 16",
        "28 ↩ restore 12 rows · rows 4-7 12-19 · at slot 0 28",
        "28 ⟳ weights 4 28",
    ]
    assert lines[-1] == "sound"
    assert result.exit_code == 0


def test_several_rollouts_are_listed_and_one_can_be_chosen(file: Path):
    listed = inspected(file)
    assert listed.exit_code == 0
    for seed in range(COUNT):
        assert f"{seed}  story-{seed}" in listed.stdout
    one = inspected(file, "--rollout", 2)
    assert one.stdout.startswith("rollout story-2\n")
    none = inspected(file, "--rollout", COUNT)
    assert none.exit_code == 2
    assert f"no rollout {COUNT}" in none.output


def test_json_says_the_same(file: Path):
    found = document(inspected(file, "--json"))
    assert [each["name"] for each in found["rollouts"]] == [f"story-{seed}" for seed in range(COUNT)]
    (one,) = document(inspected(file, "--json", "--rollout", 1))["rollouts"]
    assert one == found["rollouts"][1]
    rollout = story(1)
    assert (one["row_count"], one["event_count"]) == (rollout.row_count, len(rollout.events))
    assert sum(one["rows"].values()) == rollout.row_count
    assert [each["kind"] for each in one["entries"] if "kind" in each] == [e.kind for e in rollout.events]
    assert found["damage"] == one["damage"] == ""


def test_a_damaged_rollout_is_told_up_to_the_damage_and_ends_with_1(tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    with path.open("wb") as opened:
        write_rollouts(opened, [story(5), story(6)], as_json=True)
    lines = path.read_text().splitlines()
    tree = json.loads(lines[0])
    tree["rollout"]["events"][1]["at_row"] += 1
    path.write_text("\n".join([json.dumps(tree), *lines[1:]]))
    listed = inspected(path)
    assert listed.exit_code == 1
    assert [("damaged" in line) for line in listed.stdout.splitlines()][1:3] == [True, False]
    told = inspected(path, "--rollout", 0)
    assert told.exit_code == 1
    assert "damaged: event 1: " in told.stdout
    assert inspected(path, "--rollout", 1).exit_code == 0
    assert document(inspected(path, "--json"))["rollouts"][0]["damage"].startswith("event 1: ")


def test_a_file_that_was_cut_off_shows_what_is_whole(file: Path):
    file.write_bytes(file.read_bytes()[:-20])
    result = inspected(file)
    assert result.exit_code == 1
    assert f"damaged: rollout {COUNT - 1}: " in result.stdout
    assert f"story-{COUNT - 1}" not in result.stdout
    assert inspected(file, "--rollout", 0).exit_code == 0
    assert inspected(file, "--rollout", COUNT - 1).exit_code == 1


def test_a_file_of_nothing_or_of_something_else(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    empty = inspected(path)
    assert (empty.exit_code, "is empty" in empty.stdout) == (0, True)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    other = inspected(path)
    assert (other.exit_code, "damaged: rollout 0: not a rollout" in other.stdout) == (1, True)
    assert document(inspected(path, "--json")) == {
        "file": str(path), "rollouts": [], "damage": "rollout 0: not a rollout",
    }  # fmt: skip
    assert inspected(tmp_path / "absent").exit_code == 2


def test_a_name_is_text_not_markup(tmp_path: Path):
    telling = Story(1)
    telling.recorder.name = "[bold]x[/]"
    path = tmp_path / "one"
    with path.open("wb") as opened:
        write_rollouts(opened, [telling.recorder.rollout()] * 2)
    assert "[bold]x[/]" in inspected(path).stdout
    assert "rollout [bold]x[/]" in inspected(path, "--rollout", 0).stdout


def test_a_name_or_a_reason_is_no_order_to_the_terminal(tmp_path: Path):
    telling = Story(1)
    telling.recorder.name = "a\x1b]0;owned\x07\nb"
    telling.session.evict([(0, 4)], reason="\x1b[2J")
    path = tmp_path / "one"
    with path.open("wb") as opened:
        write_rollouts(opened, [telling.recorder.rollout()] * 2)
    listed, told = inspected(path), inspected(path, "--rollout", 0)
    assert "\x1b" not in listed.stdout + told.stdout
    assert "rollout a\\x1b]0;owned\\x07\\nb\n" in told.stdout
    assert "(\\x1b[2J)" in told.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_ends_with_the_code_that_it_says(file: Path):
    command = [sys.executable, "-m", "kvcomm.cli", "streams", "inspect", str(file), "--json"]
    sound = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (sound.returncode, sound.stderr) == (0, b"")
    assert len(json.loads(sound.stdout)["rollouts"]) == COUNT
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    damaged = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert damaged.returncode == 1


@pytest.mark.parametrize(("count", "length"), [(0, 0), (1, 1), (50, BAR_CELLS // 2), (100, BAR_CELLS)])
def test_bars_are_as_long_as_what_they_show(count: int, length: int):
    assert len(_bar(count, 100)) == length
    assert _bar(0, 0) == ""
