"""docs/streams.md: its examples run as they stand, and the tests and commands that it names are there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvcomm.client import Client
from kvcomm.rpc import Peers
from kvcomm.streams.rollout_codec import from_json
from tests.kvcomm.streams.clusters import Cluster
from tests.kvcomm.test_client import IDENTITY

PAGE = Path(__file__).resolve().parents[3] / "docs/streams.md"

TEMPLATE = (
    "{% for each in messages %}<s>{{ each['role'] }} {{ each['content'] }}</s> {% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def client() -> Client:
    operations = Cluster().operations()
    return Client(operations, Peers(IDENTITY), operations.metrics.snapshot, lambda: None)


@pytest.mark.slow
@pytest.mark.model
def test_the_examples_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tests.models import stream_model, tiny_tokenizer

    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    names: dict[str, Any] = {"model": stream_model("llama gqa"), "tokenizer": tokenizer, "kv": client()}
    for example in examples("python"):
        exec(compile(example, str(PAGE), "exec"), names)
    rollout = names["rollout"]
    assert [event.kind for event in rollout.events] == ["evict"] * len(rollout.events)
    assert len(rollout.events) >= 2, "the example shows cuts"
    assert names["session"].events[: len(rollout.events)] == list(rollout.events)
    assert names["event"].kind == "restore"
    metrics = names["numbers"]
    assert metrics['kvcomm_streams_events_total{kind="evict"}'] == len(rollout.events) + 1
    assert metrics['kvcomm_streams_mismatch_kl{over="mean"}'] > 0
    if target := os.environ.get("KVCOMM_DOCS_ROLLOUTS"):  # to write what the page shows of `inspect`
        shutil.copy(tmp_path / "rollouts.kvr", target)


def test_the_json_is_a_sound_rollout() -> None:
    (shown,) = examples("json")
    rollout = from_json(shown.encode())
    rollout.visibility()
    assert rollout.events[0].ranges == ((4, 8),)
    assert [(each.query_row, each.token) for each in rollout.samples] == [(7, 61), (8, 7), (9, 2)]


def test_the_page_names_only_what_there_is() -> None:
    text = PAGE.read_text()
    for module in set(re.findall(r"`(kvcomm(?:\.\w+)+)`", text)):
        path = PAGE.parents[1] / (module.replace(".", "/") + ".py")
        attribute = PAGE.parents[1] / (module.rpartition(".")[0].replace(".", "/") + ".py")
        assert path.exists() or attribute.exists(), module
    for page in re.findall(r"\]\((\w+\.md)\)", text):
        assert (PAGE.parent / page).exists(), page
