"""``kvcomm demo`` around the story: exit code, output, what is missing."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvcomm.cli import demo as command
from kvcomm.cli.app import app
from kvcomm.demo import story
from kvcomm.demo.report import Report
from kvcomm.errors import ConfigError
from tests.kvcomm.demo.test_report import ROW, report


@pytest.mark.parametrize(("result", "code"), [(report(), 0), (report(ROW), 1)], ids=["good", "without L3"])
def test_the_exit_code_is_the_verdict(result: Report, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "tell", lambda options, say: result)
    done = CliRunner().invoke(app, ["demo", "--json"])
    assert done.exit_code == code
    assert json.loads(done.stdout) == result.document()


def test_options_reach_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[story.Options] = []

    def tell(options: story.Options, say: story.Say) -> Report:
        seen.append(options)
        say("working")
        return report()

    monkeypatch.setattr(story, "tell", tell)
    done = CliRunner().invoke(app, ["demo", "--corrupt", "--context-tokens", "128", "--new-tokens", "3"])
    assert done.exit_code == 0 and "planner" in done.stdout
    assert "working" in done.stderr and "working" not in done.stdout
    assert seen == [story.Options(128, 3, corrupt=True)]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["demo"])
    assert isinstance(done.exception, ConfigError) and "kvcomm[demo]" in str(done.exception)
