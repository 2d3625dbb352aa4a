"""docs/rollouts.md says what was recorded, and names only what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the examples compute with torch")
pytest.importorskip("transformers", reason="the examples train a transformers model")

from examples.rollouts.recall import CHANCE
from examples.rollouts.tables import recall_table, training_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/rollouts.md"


def recorded(name: str) -> list[dict[str, Any]]:
    path = ROOT / f"docs/plots/rollouts-{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text()


def test_the_tables_are_those_of_the_recorded_runs(text):
    assert training_table(recorded("train")) in text
    assert recall_table(recorded("recall")) in text


def test_a_table_of_other_numbers_would_be_noticed(text):
    records = recorded("recall")
    records[0]["recall"] = 0.5
    assert recall_table(records) not in text


def test_what_the_page_claims_was_recorded():
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for record in recorded("train"):
        by_arm.setdefault(record["arm"], []).append(record)
        assert record["mismatch_nats"] < 1e-12
        if record["cut_count"]:
            assert record["forgetful_nats"] > 1e7 * record["mismatch_nats"]
    last = {arm: sum(each["recall"] for each in records[-5:]) / 5 for arm, records in by_arm.items()}
    assert last["KV-streams"] > 0.9
    assert last["full context"] > 0.6
    assert last["re-prefill"] < 0.25, "guessing one of eight"
    for record in recorded("recall"):
        assert record["recall"] > 0.99 if record["knowable"] else record["recall"] < 2 * CHANCE, record


def test_its_pictures_pages_and_modules_are_there(text):
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (PAGE.parent / target).exists(), target
    for path in re.findall(r"`((?:kvcomm|examples|tests)/[\w/]+(?:\.py)?)/?`", text):
        assert (ROOT / path).exists(), path
    names = re.search(r"meant to be read:([^.]+)\.", text, re.DOTALL)
    assert names is not None
    for name in re.findall(r"`(\w+)`", names[1]):
        assert (ROOT / f"examples/rollouts/{name}.py").exists(), name
