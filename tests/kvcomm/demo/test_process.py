"""An agent's process from outside: it answers, it fails with a reason, and it always ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcomm.demo.messages import Reconnect, Start
from kvcomm.demo.process import AgentProcess
from kvcomm.errors import KVCommError, Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def becomes_true(condition: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    give_up = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_an_order_that_cannot_be_carried_out_says_why(tmp_path: Path) -> None:
    with AgentProcess("coder", threads=1) as agent:
        agent.send(Start("coder", "no-such-instance", "", "m", str(tmp_path / "nothing")))
        with pytest.raises(KVCommError, match="coder"):
            agent.ready()
    assert is_gone(agent.pid)


def test_an_agent_that_breaks_is_reported_with_its_last_words() -> None:
    with AgentProcess("critic", threads=1) as agent:
        agent.send(Reconnect())  # before Start: our own mistake, so the agent stops
        with pytest.raises(Unavailable, match="the first order is Start"):
            agent.ready()
    assert is_gone(agent.pid)


def test_an_agent_that_does_not_answer_is_given_up() -> None:
    with AgentProcess("critic", threads=1) as agent, pytest.raises(Unavailable, match="in time"):
        agent.ready(deadline_s=0.0)
    assert is_gone(agent.pid)


def test_an_agent_ends_when_its_input_closes() -> None:
    agent = AgentProcess("planner", threads=1)
    try:
        assert agent._process.stdin is not None
        agent._process.stdin.close()  # what the kernel does when we are killed
        assert becomes_true(lambda: agent._process.poll() is not None)
        assert agent._process.returncode == 0
    finally:
        agent.close()


def test_closing_twice_is_closing_once() -> None:
    agent = AgentProcess("planner", threads=1)
    agent.close()
    agent.close()
    with pytest.raises(ProcessLookupError):
        os.kill(agent.pid, 0)
