"""The demo's verdict: what fails it, and what the JSON document says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvcomm.demo.messages import Row
from kvcomm.demo.report import Report

ROW = Row(
    agent="coder",
    step="the shared text",
    shared_tokens=1600,
    token_count=1610,
    fetched_tokens={"l1": 0, "l2": 1600, "l3": 0},
    fetched_bytes=1600 * 46080,
    prefilled_tokens=10,
    published_blocks=0,
    first_token_s=0.2,
    fetch_s=0.1,
    prefill_first_token_s=4.0,
    tokens_equal=True,
    logprob_difference=1e-5,
    refused_copies=0,
    text=" Paris",
    l2_reads={"shm": 0, "tcp": 100},
)
FIRST = msgspec.structs.replace(
    ROW,
    agent="planner",
    fetched_tokens={"l1": 0, "l2": 0, "l3": 0},
    fetched_bytes=0,
    first_token_s=4.1,
    tokens_equal=None,
    logprob_difference=None,
    l2_reads={},
)
FROM_L3 = msgspec.structs.replace(
    ROW, fetched_tokens={"l1": 0, "l2": 0, "l3": 1600}, first_token_s=0.5, l2_reads={"shm": 0, "tcp": 0}
)


def report(*rows: Row, **changes: Any) -> Report:
    settings: dict[str, Any] = {
        "model": "m",
        "text_source": "s",
        "context_tokens": 1600,
        "block_tokens": 16,
        "block_bytes": 737280,
        "rows": rows or (FIRST, ROW, FROM_L3),
        "pool_restart_s": 0.3,
        "damaged_copies": None,
    }
    return Report(**settings | changes)


def test_a_good_run() -> None:
    good = report()
    assert good.problems() == []
    document = json.loads(json.dumps(good.document()))
    assert document["ok"] is True and document["tokens_equal"] is True
    assert document["hits"] == {"l1": 0, "l2": 1600, "l3": 1600}
    assert document["speed_up"] == pytest.approx(
        8
    )  # the smaller one; the planner, who fetched nothing, has none
    assert [row["speed_up"] for row in document["agents"]] == [None, pytest.approx(20), pytest.approx(8)]
    assert document["max_logprob_difference"] == 1e-5


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ((ROW, msgspec.structs.replace(FROM_L3, tokens_equal=False)), {}, "another text"),
        ((ROW, msgspec.structs.replace(FROM_L3, logprob_difference=0.5)), {}, "log-probabilities"),
        ((ROW, msgspec.structs.replace(FROM_L3, trouble="unavailable: gone")), {}, "unavailable: gone"),
        ((FIRST, ROW), {}, "nothing was fetched from L3"),
        ((FIRST, FROM_L3), {}, "nothing was fetched from L2"),
        ((ROW, FROM_L3), {"transport": "shm"}, "100 blocks came from the pool through tcp, not through shm"),
        ((ROW, FROM_L3), {"transport": "shm"}, "nothing came from the pool through shm"),
        ((ROW, FROM_L3), {"damaged_copies": 0}, "no copy was found"),
        ((ROW, FROM_L3), {"damaged_copies": 300}, "were not refused"),
        ((ROW, msgspec.structs.replace(FROM_L3, refused_copies=1)), {}, "nobody damaged"),
    ],
)
def test_what_fails_a_run(rows: tuple[Row, ...], changes: dict[str, Any], words: str) -> None:
    failed = report(*rows, **changes)
    assert any(words in problem for problem in failed.problems())
    assert failed.document()["ok"] is False


def test_the_transport_that_was_asked_for_is_the_one_that_was_used() -> None:
    asked = report(transport="tcp")
    assert asked.problems() == []
    assert asked.document()["transport"] == "tcp" and asked.document()["l2_reads"] == {"tcp": 100}
    assert report().document()["transport"] is None


def test_damage_that_is_refused_is_no_problem() -> None:
    refusing = msgspec.structs.replace(FIRST, refused_copies=200)
    assert report(ROW, FROM_L3, refusing, damaged_copies=300).problems() == []


def test_the_table_names_agents_and_problems() -> None:
    console = Console(width=110)
    with console.capture() as captured:
        report(FIRST, ROW).show(console)
    text = captured.get()
    assert "planner" in text and "20.0x" in text and "FAILED: nothing was fetched from L3" in text
