"""The life of an embedded cluster's process, with small programs in the place of ``kvcomm up``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcomm import embedded
from kvcomm.embedded import Embedded
from kvcomm.errors import Unavailable

pytestmark = pytest.mark.processes

UNTIL_CLOSED = "sys.stdin.buffer.read()"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The program that is started instead, in the first place of the list."""
    text = [f"print('ready', flush=True); {UNTIL_CLOSED}"]
    real = subprocess.Popen
    made: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = real([sys.executable, "-c", f"import os, sys, time; {text[0]}"], **options)
        made.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    yield text
    for process in made:
        process.kill()
        process.wait()


def start(within_s: float = 30) -> Embedded:
    return Embedded.start("embedded-test", None, time.monotonic() + within_s)


def test_it_lives_until_it_is_stopped(program: list[str]) -> None:
    cluster = start()
    assert cluster._process.poll() is None
    cluster.stop()
    assert cluster._process.returncode == 0
    cluster.stop()


def test_two_in_one_process_do_not_keep_each_other_alive(program: list[str]) -> None:
    one, other = start(), start()
    one.stop()
    assert one._process.returncode == 0
    assert other._process.poll() is None
    other.stop()
    assert other._process.returncode == 0


def test_what_it_said_is_told_when_it_does_not_come_up(program: list[str]) -> None:
    program[0] = "sys.exit('no shared memory left')"
    with pytest.raises(Unavailable, match="no shared memory left"):
        start()


def test_one_that_hangs_is_ended_at_the_deadline(program: list[str]) -> None:
    program[0] = UNTIL_CLOSED
    with pytest.raises(Unavailable, match="did not come up"):
        start(within_s=0.05)


def test_one_that_does_not_want_to_end_is_killed(program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_DEADLINE_S", 0.05)
    program[0] = "print('ready', flush=True); time.sleep(60)"
    cluster = start()
    cluster.stop()
    assert cluster._process.returncode == -signal.SIGKILL


def test_an_interrupted_start_leaves_no_process(program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], deadline: float) -> bool:
        made.append(process)
        raise KeyboardInterrupt

    program[0] = UNTIL_CLOSED
    monkeypatch.setattr(embedded, "_line_arrives", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert made[0].returncode == 0


def test_a_forked_child_neither_stops_the_cluster_nor_keeps_it_alive(program: list[str]) -> None:
    cluster = start()
    go_on, wait = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(wait)
            os.read(go_on, 1)  # lives on until the parent has stopped its cluster
            cluster.stop()  # as a copied client would
            code = 0
        finally:
            os._exit(code)
    os.close(go_on)
    try:
        assert cluster._process.poll() is None
        cluster.stop()
        assert cluster._process.returncode == 0, "killed: the child's copy of the pipe kept it alive"
    finally:
        os.close(wait)
        assert os.waitpid(child, 0)[1] == 0
