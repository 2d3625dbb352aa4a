"""``python -m examples.rollouts`` from end to end, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples compute with torch")
pytest.importorskip("transformers", reason="the examples train a transformers model")
pytest.importorskip("matplotlib", reason="the examples draw with matplotlib")

from examples.rollouts.__main__ import main
from examples.rollouts.pictures import draw_recall

PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_a_quick_training_leaves_numbers_and_a_picture(tmp_path: Path, threads_one):
    assert main(["train", "--quick", "--steps", "2", "--out", str(tmp_path)]) == 0
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    by_arm = {name: [each for each in records if each["arm"] == name] for name in (
        "full context", "KV-streams", "re-prefill",
    )}  # fmt: skip
    assert [len(each) for each in by_arm.values()] == [2, 2, 2]
    for record in records:
        assert record["mismatch_nats"] < 1e-9, "the replay is the generation, with new weights each step"
        assert 0 <= record["reward"] <= 1
        assert record["entropy_nats"] > 0
        assert record["weights_version"] == record["lessons"] + record["step"]
    full, cut, again = (each[0] for each in by_arm.values())
    assert cut["cut_count"] == cut["conversations"]
    assert cut["forgetful_nats"] > 1e6 * cut["mismatch_nats"]
    assert full["cut_count"] == again["cut_count"] == 0
    assert full["rows_fed"] == cut["rows_fed"] == again["rows_fed"] - again["rows_again"]
    assert cut["slots_most"] < full["slots_most"]
    picture = (tmp_path / "train.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 10_000


def test_a_training_without_lessons_begins_with_the_first_weights(tmp_path: Path, threads_one):
    assert main(["train", "--quick", "--steps", "1", "--lessons", "0", "--out", str(tmp_path)]) == 0
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [(each["lessons"], each["weights_version"]) for each in records] == [(0, 0)] * 3
    assert all(each["mismatch_nats"] < 1e-9 for each in records)


def test_the_bars_of_a_recall_are_drawn(tmp_path: Path):
    records = [
        {"condition": "KV-streams, 4 kept", "recall": 1.0, "chance": 0.0625},
        {"condition": "re-prefill, 4 kept", "recall": 0.05, "chance": 0.0625},
    ]
    draw_recall(records, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes().startswith(PNG)
