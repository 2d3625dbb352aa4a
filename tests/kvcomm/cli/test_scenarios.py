"""What ``kvcomm chaos run`` refuses, and how it ends when it is told to."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import typer.testing

from kvcomm.cli.app import app
from kvcomm.cli.scenarios import _ended_in_order, run
from kvcomm.errors import ConfigError, Refused


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_story_by_an_exception_so_that_it_cleans_up(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, _ended_in_order():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_cluster_of_somebodys_is_not_hurt_without_consent() -> None:
    with pytest.raises(Refused, match="--yes"):
        run(["halves"], instance="somebodys")
    with pytest.raises(ConfigError, match="drop tables"):
        run(["halves"], instance="somebodys", yes=True, backend="simulator")


def test_a_file_that_is_no_text_is_a_mistake_in_the_command(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="no text"):
        run([str(mine)], backend="loopback")


def test_a_file_has_its_own_times(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\npromise: ''\nsteps: []\n")
    with pytest.raises(ConfigError, match="--hold"):
        run([str(mine)], backend="loopback", hold=1.0)


def test_an_unknown_scenario_is_told_with_those_there_are() -> None:
    ran = typer.testing.CliRunner().invoke(app, ["chaos", "run", "halfs", "--backend", "loopback"])
    assert ran.exit_code != 0
    assert "halves" in ran.output or "halves" in str(ran.exception)
