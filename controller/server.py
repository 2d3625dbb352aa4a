"""The supervisor's shell: performs the machine's effects with a launcher and the node registry, and looks
whether the cluster serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from controller.launcher import Launcher
from controller.supervisor import (
    STARTS_MAX,
    ClusterServes,
    GiveUp,
    KillNode,
    NodeExited,
    NodeUp,
    PlanChanged,
    StartNode,
    StopNode,
    Supervisor,
)
from kvcomm.errors import KVCommError
from kvcomm.machine import Effect, Event, Tick
from kvcomm.wire.messages import NodePlan

REGISTRATION_POLL_S = 0.02
SERVING_POLL_S = 0.02


class StartFailed(KVCommError):
    """A node of the cluster cannot be started; the message says which and what it last said."""

    code: ClassVar[str] = "start_failed"


@dataclass(slots=True)
class SupervisorServer:
    """Runs one :class:`Supervisor` until told to stop.

    Args:
        registered: whether the process ``pid`` of a node has registered.
        serves: whether a map has been issued and all nodes work by it; asked until it is so.
        on_ready: called once, then.
        on_change: called when a process was started or has come up or ended.
    """

    supervisor: Supervisor
    launcher: Launcher
    registered: Callable[[str, int], bool]
    serves: Callable[[Sequence[NodePlan]], Awaitable[bool]]
    on_ready: Callable[[], None] = lambda: None
    on_change: Callable[[], None] = lambda: None
    on_event: Callable[[Event], None] = lambda event: None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _broken: asyncio.Future[None] = field(init=False)
    """Fails with the first error of a callback or background task; the supervisor stops and says why."""
    _stopping: bool = field(default=False, init=False)
    _looking: bool = field(default=False, init=False)
    """Somebody asks whether the cluster serves."""

    async def run(self, stop: asyncio.Event) -> None:
        """Start the cluster and keep it; returns when ``stop`` is set and every node has ended.

        Raises:
            StartFailed: a node does not come up.
        """
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        self._broken = asyncio.get_running_loop().create_future()
        self._deliver(Tick())
        try:
            await asyncio.wait({stopped, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
        finally:
            self._stopping = True
            stopped.cancel()
            self._broken.cancel()
            if self._timer:
                self._timer.cancel()
            for task in self._tasks:  # first: one of them may be starting a process
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)  # their errors went into _broken
            await self.launcher.stop()

    def follow(self, plan: Sequence[NodePlan]) -> None:
        """This is what is to run from now on."""
        if list(plan) != list(self.supervisor.plan):
            self._deliver(PlanChanged(plan))

    def _deliver(self, event: Event) -> None:
        """Also called from timers and from the launcher, where nobody would hear of an exception."""
        if self._stopping:
            return
        try:
            self._handle(event)
        except Exception as error:
            self._fail(error)

    def _handle(self, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        effects = self.supervisor.handle(event, now)
        self.on_event(event)
        for effect in effects:
            self._perform(effect)
        self._set_timer()
        if effects or not isinstance(event, Tick):
            self.on_change()
        if self.supervisor.all_up and not self.supervisor.served and not self._looking:
            self._looking = True
            self._spawn(self._look())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartNode():
                self._spawn(self._start(effect.plan))
            case StopNode():
                self.launcher.terminate(effect.node)
            case KillNode():
                self.launcher.kill(effect.node)
            case GiveUp():
                said = self.launcher.last_words(effect.node)
                raise StartFailed(
                    f"{effect.node} does not come up (code {effect.code}, {STARTS_MAX} times)"
                    + (f"; it said:\n{said}" if said else "")
                )
            case _:
                raise TypeError(f"cannot perform {type(effect).__name__}")

    async def _start(self, plan: NodePlan) -> None:
        """Start the process and watch for its registration; its exit ends the watch."""
        gone = asyncio.Event()

        def exited(node: str, code: int) -> None:
            gone.set()
            self._deliver(NodeExited(node, code))

        try:
            pid = await self.launcher.start(plan, exited)
        except OSError as error:
            self._deliver(NodeExited(plan.node, error.errno or 1, str(error)))
            return
        while not gone.is_set():
            if self.registered(plan.node, pid):
                self._deliver(NodeUp(plan.node))
                return
            await asyncio.sleep(REGISTRATION_POLL_S)

    async def _look(self) -> None:
        """Until the cluster serves, or one of its nodes has ended again."""
        try:
            while self.supervisor.all_up and not self.supervisor.served:
                if await self.serves(self.supervisor.plan):
                    self._deliver(ClusterServes())
                    self.on_ready()
                else:
                    await asyncio.sleep(SERVING_POLL_S)
        finally:
            self._looking = False

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.watch(task)

    def watch(self, task: asyncio.Task[None]) -> None:
        """A task that has ended: if it broke, everything ends, and it is said why."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        due = self.supervisor.deadline()
        if due is not None:
            self._timer = asyncio.get_running_loop().call_at(due, self._deliver, Tick())
