"""``kvcomm demo`` around the story: exit code, output, what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
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


def test_the_only_transport_is_in_the_configuration_of_everybody(tmp_path: Path) -> None:
    named = tmp_path / "named.yaml"
    named.write_text("network: {request_timeout: 3s, transports: [shm]}\ncluster: {shards: 2}\n")
    written = story.configuration(story.Options(config=named, transport="tcp"))
    assert yaml.safe_load(written) == {
        "network": {"request_timeout": "3s", "transports": ["tcp"]},
        "cluster": {"shards": 2},
    }
    assert story.configuration(story.Options(config=named)) == named.read_text()
    default = yaml.safe_load(story.configuration(story.Options(transport="verbs")))
    assert default["network"] == {"transports": ["verbs"]} and default["cache"]["l2_size"] == "1GB"


def test_a_mistake_in_the_configuration_is_told_by_its_name(tmp_path: Path) -> None:
    missing, wrong = tmp_path / "missing.yaml", tmp_path / "wrong.yaml"
    wrong.write_text("network: [tcp]\n")
    for named in (missing, wrong):
        with pytest.raises(ConfigError, match=str(named)):
            story.configuration(story.Options(config=named, transport="tcp"))


def test_a_transport_that_does_not_exist_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "tell", lambda options, say: report(transport=options.transport))
    assert CliRunner().invoke(app, ["demo", "--transport", "tcp"]).exit_code == 0
    done = CliRunner().invoke(app, ["demo", "--transport", "pigeon"])
    assert isinstance(done.exception, ConfigError) and "shm, cuda, verbs, tcp" in str(done.exception)
