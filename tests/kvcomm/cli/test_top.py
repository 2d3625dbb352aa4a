"""``kvcomm top`` where stdout is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from kvcomm.cli.app import app
from kvcomm.errors import Unavailable
from kvcomm.wire.messages import ClusterView, OperationView
from tests.kvcomm.cli.test_cluster import view

LONG = "4 to 9 shards: " + ", ".join(f"shard-{index}" for index in range(30)) + " join"
OPERATION = OperationView(3, LONG, "done", 1.0, -1.0)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[ClusterView | Unavailable]:
    """What the controllers answer, look by look; then comes Ctrl-C."""
    answers: list[ClusterView | Unavailable] = []

    def ask() -> ClusterView:
        answer = answers.pop(0)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    @contextmanager
    def operators(name: str | None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(view=ask)

    monkeypatch.setattr("kvcomm.cli.operators.operators", operators)
    monkeypatch.setattr("kvcomm.cli.top.time", SimpleNamespace(sleep=sleep))
    return answers


def shown(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "80"})


def test_each_look_is_a_table(looked: list[ClusterView | Unavailable]):
    looked += [view(), Unavailable("no controller answers"), view()]
    result = shown()
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [line.split()[:2] for line in lines if line.startswith("node")] == [["node", "state"]] * 2
    assert "no controller answers" in lines
    assert "\x1b" not in result.stdout


def test_no_line_is_broken(looked: list[ClusterView | Unavailable]):
    looked.append(view(operations=[OPERATION]))
    lines = shown("--once").stdout.splitlines()
    assert any(LONG in line for line in lines)
    assert max(len(line.rstrip()) for line in lines if LONG not in line) < 120


def test_documents_end_with_the_controllers(looked: list[ClusterView | Unavailable]):
    looked += [view(), view(), Unavailable("no controller answers")]
    result = shown("--json")
    assert isinstance(result.exception, Unavailable)
    assert len(result.stdout.splitlines()) == 2
