"""The whole demonstration, with a tiny model: processes, a killed pool, damaged copies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvcomm.demo.conversation import TRACES_VARIABLE
from tests.models import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]

DEADLINE_S = 240.0


@pytest.fixture
def command(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))  # no trace there: the built-in conversation
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    options = ["--model", str(folder), "--context-tokens", "400", "--new-tokens", "6"]
    return [sys.executable, "-m", "kvcomm.cli", "demo", *options]


def test_every_agent_gets_the_right_text_and_notices_damage(command: list[str]) -> None:
    done = subprocess.run(
        [*command, "--json", "--corrupt"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout)
    assert document["ok"] is True and document["problems"] == [] and document["tokens_equal"] is True
    assert document["max_logprob_difference"] < 1e-3
    planner, coder, critic, after_restart, damaged = document["agents"]
    assert planner["fetched_tokens"] == {"l1": 0, "l2": 0, "l3": 0} and planner["tokens_equal"] is None
    assert coder["fetched_tokens"] == {"l1": 0, "l2": 400, "l3": 0} and coder["tokens_equal"] is True
    assert critic["fetched_tokens"]["l2"] > 400  # what the planner wrote, too
    assert after_restart["fetched_tokens"]["l3"] >= 400 and after_restart["fetched_tokens"]["l2"] == 0
    assert damaged["fetched_tokens"] == {"l1": 0, "l2": 0, "l3": 0} and damaged["refused_copies"] > 0
    assert damaged["tokens_equal"] is True and damaged["text"] == critic["text"]
    assert document["damaged_copies"] > 50  # 25 blocks of the text in the pool and in the shards, and more
    assert "planner reads the shared text" in done.stderr


def test_every_block_comes_through_the_transport_that_is_asked_for(
    command: list[str], tmp_path: Path
) -> None:
    """From a rack, all pools of which are killed on the way."""
    config = tmp_path / "rack.yaml"
    config.write_text("cache: {l1_size: 64MB, l2_size: 64MB, l3_size: 64MB}\ncluster: {pools: 2}\n")
    done = subprocess.run(
        [*command, "--json", "--transport", "tcp", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads(done.stdout)
    assert document["ok"] is True and document["transport"] == "tcp"
    assert list(document["l2_reads"]) == ["tcp"] and document["l2_reads"]["tcp"] >= 50


def test_a_transport_that_the_pool_cannot_offer_is_told_before_anything_is_read(command: list[str]) -> None:
    done = subprocess.run(
        [*command, "--transport", "cuda"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode != 0
    assert "cannot offer cuda" in done.stderr and "planner reads" not in done.stderr


def test_an_interrupt_leaves_no_process(command: list[str]) -> None:
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "starting 3 agents" in line:
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) >= 8  # three agents, the supervisor, a pool, three shards
        os.kill(demo.pid, signal.SIGINT)
        demo.communicate(timeout=60)
        assert demo.returncode not in (0, None)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.communicate()


def test_a_demo_that_is_killed_leaves_no_process(command: list[str]) -> None:
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "planner reads" in line:
                break
        children = psutil.Process(demo.pid).children(recursive=True)
    finally:
        demo.kill()
        demo.communicate()
    began = time.monotonic()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [], f"still there after {time.monotonic() - began:.0f} s"
