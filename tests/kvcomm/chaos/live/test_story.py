"""Who comes back of those that were hurt, and what of a killed story the next one removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcomm.chaos.live import cluster
from kvcomm.chaos.live.story import _Story
from kvcomm.chaos.scenario import LEADER, Pause, Resume, Scenario
from kvcomm.instance import Instance, NodeRecord, process_start_time


def test_the_leader_that_was_paused_goes_on_though_another_one_leads_and_others_are_down() -> None:
    nobody: Any = None
    story = _Story(nobody, Scenario("x", "", []), lambda line: None)
    leaders = iter(["n2", "n3"])
    story._leader = lambda: next(leaders)  # type: ignore[method-assign]
    story._broken["down n4 shard"] = frozenset()
    assert story._node(Pause(at_s=1, node=LEADER, part="controller")) == "n2"
    assert story._node(Resume(at_s=2, node=LEADER, part="controller")) == "n2"


@pytest.mark.slow
def test_a_paused_process_of_a_killed_story_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMM_RUNTIME_DIR", str(tmp_path / "run"))
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    instance = Instance.create(f"chaos-{gone.pid}-00")
    node = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        started = process_start_time(node.pid)
        assert started is not None
        instance.register(
            NodeRecord(
                node="shard-0", role="shard", pid=node.pid, pid_start_time=started, addresses=[],
                control="", metrics="", incarnation=1, region="",
            )
        )  # fmt: skip
        os.kill(node.pid, signal.SIGSTOP)
        assert node.stdin is not None
        node.stdin.close()  # as the end of its story does
        cluster._sweep()
        assert node.wait(10) == 1
        cluster._sweep()
        assert Instance.list() == []
    finally:
        node.kill()
        node.wait()
