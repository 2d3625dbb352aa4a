"""The text that the demo's agents share."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvcomm.demo.conversation import CONVERSATION, TRACE, TRACES_VARIABLE, shared_text


def write_trace(folder: Path, prompts: list[str]) -> None:
    path = folder / TRACE
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        for prompt in prompts:
            file.write(json.dumps({"input": prompt, "output": "", "session_id": "s"}) + "\n")


def test_the_first_long_prompt_of_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(tmp_path, ["short", "a" * 9000, "b" * 9000])
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))
    assert shared_text().text == "a" * 9000


@pytest.mark.parametrize("prompts", [None, ["short"]])
def test_without_one_the_agents_read_our_own(
    prompts: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if prompts is not None:
        write_trace(tmp_path, prompts)
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))
    found = shared_text()
    assert found.source == "built-in conversation" and len(found.text) > 6000
    assert {role for role, _ in CONVERSATION} == {"system", "user", "planner", "coder", "critic"}
