"""Real processes, small ones."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest

from controller.launcher import LAST_WORDS_BYTES_MAX, LocalLauncher
from kvcomm.wire.messages import NodePlan

pytestmark = pytest.mark.processes

PLAN = NodePlan("pool-0", "pool", "r0")


def test_last_words_are_those_of_the_newest_process_only(tmp_path: Path) -> None:
    programs = ["print('an old story')", "import sys; sys.exit('x' * 5000 + ' no shared memory')", ""]
    told: list[tuple[int, str]] = []

    async def story() -> None:
        for _ in range(3):
            ended: asyncio.Queue[int] = asyncio.Queue()
            await launcher.start(PLAN, partial(_exited, ended))
            told.append((await asyncio.wait_for(ended.get(), 30), launcher.last_words("pool-0")))

    launcher = LocalLauncher(lambda plan: [sys.executable, "-c", programs.pop(0)], tmp_path)
    asyncio.run(story())
    assert told[0] == (0, "an old story")
    assert told[1][0] == 1
    assert told[1][1].endswith("no shared memory")
    assert len(told[1][1]) <= LAST_WORDS_BYTES_MAX
    assert told[2] == (0, "")
    assert launcher.last_words("shard-9") == ""
    assert "an old story" in launcher.log_path("pool-0").read_text(), "older runs are kept"


def _exited(ended: asyncio.Queue[int], node: str, code: int) -> None:
    assert node == PLAN.node
    ended.put_nowait(code)


def test_a_node_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    polite = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print(1, flush=True)"
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    programs = [f"{polite}; time.sleep(60)", f"{stubborn}; time.sleep(60)"]
    codes: list[int] = []

    async def life(kill: bool) -> None:
        ended: asyncio.Queue[int] = asyncio.Queue()
        await launcher.start(PLAN, partial(_exited, ended))
        while not launcher.last_words("pool-0"):
            await asyncio.sleep(0.01)
        launcher.terminate("pool-0")
        if kill:
            launcher.kill("pool-0")
        codes.append(await asyncio.wait_for(ended.get(), 30))

    async def story() -> None:
        launcher.terminate("pool-0")  # there is none yet
        await life(kill=False)
        await life(kill=True)

    launcher = LocalLauncher(lambda plan: [sys.executable, "-c", programs.pop(0)], tmp_path)
    asyncio.run(story())
    assert codes == [7, -9]
