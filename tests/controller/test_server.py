"""The supervisor's shell over a fake launcher: what it performs, and that nothing goes wrong in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from controller import supervisor as machine
from controller.server import Registration, StartFailed, SupervisorServer
from controller.supervisor import STARTS_MAX, NodeExited, NodeSpec, RingRules, Supervisor
from kvcomm.machine import Event
from kvcomm.wire.messages import RingMap

SPECS = [NodeSpec("pool-0", "pool", "r0"), NodeSpec("shard-0", "shard", "r0")]
RULES = RingRules(replicas=1, write_quorum=1, read_quorum=1, block_copies=1)
PATIENCE_S = 10.0


@dataclass
class FakeLauncher:
    """Processes that live until told otherwise; ``dying`` ones end with this code as soon as they started."""

    dying: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    stopped: bool = False
    starting: asyncio.Event | None = None
    """Starts hang until they are cancelled, and this is set when one does."""
    exits: dict[str, Callable[[str, int], None]] = field(default_factory=dict)

    async def start(self, spec: NodeSpec, exited: Callable[[str, int], None]) -> int:
        assert not self.stopped, "a process was started after the end"
        self.started.append(spec.node)
        if self.starting is not None:
            self.starting.set()
            await asyncio.get_running_loop().create_future()
        if spec.node in self.missing:
            raise FileNotFoundError(2, "No such file or directory", "python")
        self.exits[spec.node] = exited
        if spec.node in self.dying:
            asyncio.get_running_loop().call_soon(exited, spec.node, self.dying[spec.node])
        return len(self.started)

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
        self.rings: list[RingMap] = []
        self.handed: list[tuple[str, int]] = []
        self.refusals = 0
        self.events: list[Event] = []
        self.stop = asyncio.Event()
        self.changed = asyncio.Event()
        self.ready = asyncio.Event()
        self.server = SupervisorServer(
            Supervisor(SPECS, RULES),
            launcher,
            registered=self._registered,
            write_ring=self.rings.append,
            hand_ring=self._hand,
            on_ready=self.ready.set,
            on_event=self._event,
        )

    def _registered(self, node: str, pid: int) -> Registration | None:
        if node in self.silent or node in self.launcher.dying:
            return None
        return Registration(f"tcp://127.0.0.1:{pid}", f"unix:///{node}", f"{node}:{pid}")

    async def _hand(self, control: str, ring: RingMap) -> bool:
        self.handed.append((control, ring.epoch))
        self.refusals -= 1
        return self.refusals < 0

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
    monkeypatch.setattr(machine, "RETRY_S", 0.01)


def test_a_cluster_is_started_told_its_ring_and_stopped() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        world.refusals = 2
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()
        assert sorted(world.launcher.started) == ["pool-0", "shard-0"]
        assert [ring.epoch for ring in world.rings] == [1]
        assert [epoch for _, epoch in world.handed] == [1, 1, 1], "until the shard has taken it"
        assert all(control.startswith("shard-0") for control, _ in world.handed)
        world.stop.set()
        await running
        assert world.launcher.stopped

    run(story())


def test_a_node_that_ends_is_started_again_under_a_new_epoch() -> None:
    async def story() -> None:
        world = World(FakeLauncher())
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()
        for lives in range(1, STARTS_MAX + 3):
            world.launcher.exits["shard-0"]("shard-0", 1)
            await world.until(lambda: len(world.rings) == lives + 1)  # noqa: B023 - awaited in this turn
        assert not running.done(), "a cluster that was ready is never given up"
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


def test_a_ring_that_cannot_be_written_down_ends_the_supervisor_with_the_reason() -> None:
    """Also where it happens in the launcher's callback, whose exceptions nobody awaits."""

    async def story() -> None:
        world = World(FakeLauncher())
        running = asyncio.create_task(world.server.run(world.stop))
        await world.ready.wait()

        def full(ring: RingMap) -> None:
            raise OSError(28, "No space left on device")

        world.server.write_ring = full
        world.launcher.exits["shard-0"]("shard-0", 1)
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
