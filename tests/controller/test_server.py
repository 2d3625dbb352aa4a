"""The supervisor's shell over a fake launcher: what it performs, and that nothing goes wrong in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from controller import supervisor as machine
from controller.server import StartFailed, SupervisorServer
from controller.supervisor import STARTS_MAX, NodeExited, Supervisor
from kvcomm.machine import Event
from kvcomm.wire.messages import NodePlan

PLAN = [NodePlan("pool-0", "pool", "r0"), NodePlan("shard-0", "shard", "r0")]
PATIENCE_S = 10.0


@dataclass
class FakeLauncher:
    """Processes that live until told otherwise; ``dying`` ones end with this code as soon as they started."""

    dying: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    stopped: bool = False
    starting: asyncio.Event | None = None
    """Starts hang until they are cancelled, and this is set when one does."""
    exits: dict[str, Callable[[str, int], None]] = field(default_factory=dict)

    async def start(self, plan: NodePlan, exited: Callable[[str, int], None]) -> int:
        assert not self.stopped, "a process was started after the end"
        self.started.append(plan.node)
        if self.starting is not None:
            self.starting.set()
            await asyncio.get_running_loop().create_future()
        if plan.node in self.missing:
            raise FileNotFoundError(2, "No such file or directory", "python")
        self.exits[plan.node] = exited
        if plan.node in self.dying:
            asyncio.get_running_loop().call_soon(exited, plan.node, self.dying[plan.node])
        return len(self.started)

    def terminate(self, node: str) -> None:
        self.asked.append(node)
        self.exits[node](node, 0)

    def kill(self, node: str) -> None:
        self.killed.append(node)
        self.exits[node](node, -9)

    async def stop(self) -> None:
        self.stopped = True

    def last_words(self, node: str) -> str:
        return f"{node} said why"


class World:
    """One supervisor's surroundings."""

    def __init__(self, launcher: FakeLauncher) -> None:
        self.launcher = launcher
        self.silent: set[str] = set()
        self.looks = 0
        """How often it was asked whether the cluster serves."""
        self.serves_after = 0
        self.events: list[Event] = []
        self.stop = asyncio.Event()
        self.changed = asyncio.Event()
        self.ready = asyncio.Event()
        self.server = SupervisorServer(
            Supervisor(PLAN),
            launcher,
            registered=self._registered,
            serves=self._serves,
            on_ready=self.ready.set,
            on_event=self._event,
        )

    def _registered(self, node: str, pid: int) -> bool:
        return node not in self.silent and node not in self.launcher.dying

    async def _serves(self, plan: Sequence[NodePlan]) -> bool:
        assert list(plan) == list(self.server.supervisor.plan)
        self.looks += 1
        return self.looks > self.serves_after

    def _event(self, event: Event) -> None:
        self.events.append(event)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await story

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BACKOFF_MAX_S", 0.01)


def test_a_cluster_is_started_looked_at_until_it_serves_and_stopped() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        world.serves_after = 2
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()
        assert sorted(world.launcher.started) == ["pool-0", "shard-0"]
        assert world.looks == 3
        assert world.server.supervisor.served
        world.stop.set()
        await running
        assert world.launcher.stopped

    run(story())


def test_nobody_looks_whether_it_serves_before_all_nodes_are_up() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        world.silent.add("shard-0")
        running = asyncio.create_task(world.server.run(world.stop))
        await world.until(lambda: len(world.events) > 1)  # the pool is up
        assert world.looks == 0
        world.silent.clear()
        await world.ready.wait()
        world.stop.set()
        await running

    run(story())


def test_a_plan_is_followed() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()
        more = NodePlan("shard-1", "shard", "r0")
        world.server.follow([*PLAN, more])
        await world.until(lambda: world.server.supervisor.all_up)
        assert world.launcher.started.count("shard-1") == 1
        seen = len(world.events)
        world.server.follow([*PLAN, more])
        assert len(world.events) == seen, "nothing new"
        world.server.follow(PLAN)
        assert world.launcher.asked == ["shard-1"]
        assert world.server.supervisor.running == ["pool-0", "shard-0"]
        world.stop.set()
        await running

    run(story())


def test_a_node_that_ends_is_started_again_however_often() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()
        for lives in range(1, STARTS_MAX + 3):
            world.launcher.exits["shard-0"]("shard-0", 1)
            await world.until(lambda: world.launcher.started.count("shard-0") == lives + 1)  # noqa: B023
            await world.until(lambda: world.server.supervisor.all_up)
        assert not running.done(), "a cluster that has served is never given up"
        world.stop.set()
        await running

    run(story())


def test_a_node_that_never_comes_up_is_given_up_and_says_why() -> None:
    async def story() -> None:
        world = World(FakeLauncher(dying={"shard-0": 2}))
        with pytest.raises(StartFailed, match=r"(?s)shard-0 .*code 2.*shard-0 said why"):
            await world.server.run(world.stop)
        assert world.launcher.started.count("shard-0") == STARTS_MAX
        assert world.launcher.stopped, "the nodes that did come up are ended"

    run(story())


def test_a_process_that_cannot_be_made_is_told_in_words() -> None:
    async def story() -> None:
        world = World(FakeLauncher(missing={"pool-0"}))
        with pytest.raises(StartFailed, match="pool-0"):
            await world.server.run(world.stop)
        exits = [event for event in world.events if isinstance(event, NodeExited)]
        assert all("No such file" in event.reason for event in exits)
        assert len(exits) == STARTS_MAX

    run(story())


def test_a_node_that_does_not_register_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "START_TIMEOUT_S", 0.05)

    async def story() -> None:
        world = World(FakeLauncher())
        world.silent.add("shard-0")
        running = asyncio.create_task(world.server.run(world.stop))
        await world.until(lambda: world.launcher.started.count("shard-0") == 2)
        assert set(world.launcher.killed) == {"shard-0"}
        world.silent.clear()
        await world.ready.wait()
        world.stop.set()
        await running

    run(story())


def test_what_breaks_beside_it_ends_the_supervisor_with_the_reason() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()

        async def broken() -> None:
            raise OSError(28, "No space left on device")

        asyncio.create_task(broken()).add_done_callback(world.server.watch)
        with pytest.raises(OSError, match="No space"):
            await running
        assert world.launcher.stopped

    run(story())


def test_an_exit_that_cannot_be_handled_is_not_swallowed() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()

        def broken(event: Event) -> None:
            raise OSError(32, "Broken pipe")

        world.server.on_event = broken
        world.launcher.exits["pool-0"]("pool-0", 1)
        with pytest.raises(OSError, match="Broken pipe"):
            await running

    run(story())


def test_no_process_is_started_after_the_end() -> None:
    async def story() -> None:
        world = World(FakeLauncher(starting=asyncio.Event()))
        running = asyncio.create_task(world.server.run(world.stop))
        assert world.launcher.starting is not None
        await world.launcher.starting.wait()
        world.stop.set()
        await running
        assert world.launcher.stopped
        assert not world.server._tasks

    run(story())
