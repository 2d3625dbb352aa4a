"""The supervisor's shell: performs the machine's effects with a launcher, the node registry and the control
wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from controller.launcher import Launcher
from controller.supervisor import (
    STARTS_MAX,
    GiveUp,
    HandRing,
    IssueRing,
    KillNode,
    NodeExited,
    NodeSpec,
    NodeUp,
    RingTaken,
    StartNode,
    Supervisor,
)
from kvcomm.errors import KVCommError
from kvcomm.machine import Effect, Event, Tick
from kvcomm.wire.messages import RingMap

REGISTRATION_POLL_S = 0.02


class StartFailed(KVCommError):
    """A node of the cluster cannot be started; the message says which and what it last said."""

    code: ClassVar[str] = "start_failed"


@dataclass(frozen=True, slots=True)
class Registration:
    """Where a started process says it can be reached."""

    address: str
    local_address: str
    control: str


@dataclass(slots=True)
class SupervisorServer:
    """Runs one :class:`Supervisor` until told to stop.

    Args:
        registered: the registration of a node, if the process ``pid`` has made one.
        write_ring: write a map down durably; called before any node hears of it.
        hand_ring: tell the shard behind a control address; ``False`` = it did not take it (now).
    """

    supervisor: Supervisor
    launcher: Launcher
    registered: Callable[[str, int], Registration | None]
    write_ring: Callable[[RingMap], None]
    hand_ring: Callable[[str, RingMap], Awaitable[bool]]
    on_ready: Callable[[], None] = lambda: None
    on_event: Callable[[Event], None] = lambda event: None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _broken: asyncio.Future[None] = field(init=False)
    """Fails with the first error of a callback or background task; the supervisor stops and says why."""
    _stopping: bool = field(default=False, init=False)
    _was_ready: bool = field(default=False, init=False)

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
        if self.supervisor.ready and not self._was_ready:
            self._was_ready = True
            self.on_ready()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartNode():
                self._spawn(self._start(effect.spec))
            case KillNode():
                self.launcher.kill(effect.node)
            case GiveUp():
                said = self.launcher.last_words(effect.node)
                raise StartFailed(
                    f"{effect.node} does not come up (code {effect.code}, {STARTS_MAX} times)"
                    + (f"; it said:\n{said}" if said else "")
                )
            case IssueRing():
                self.write_ring(effect.ring)
            case HandRing():
                self._spawn(self._hand(effect))
            case _:
                raise TypeError(f"cannot perform {type(effect).__name__}")

    async def _start(self, spec: NodeSpec) -> None:
        """Start the process and watch for its registration; its exit ends the watch."""
        gone = asyncio.Event()

        def exited(node: str, code: int) -> None:
            gone.set()
            self._deliver(NodeExited(node, code))

        try:
            pid = await self.launcher.start(spec, exited)
        except OSError as error:
            self._deliver(NodeExited(spec.node, error.errno or 1, str(error)))
            return
        while not gone.is_set():
            found = self.registered(spec.node, pid)
            if found:
                self._deliver(NodeUp(spec.node, found.address, found.local_address, found.control))
                return
            await asyncio.sleep(REGISTRATION_POLL_S)

    async def _hand(self, effect: HandRing) -> None:
        taken = await self.hand_ring(effect.control, effect.ring)
        self._deliver(RingTaken(effect.node, effect.ring.epoch, taken))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
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
