"""``run_controller``: the role shell of a controller process: the metadata group's member, the lease, and the
machine that decides (``controller.controller``), behind one data wire.

::

    Heartbeat, orders, ClusterGet ──► Controller ──► RingOffer to shards, where their heartbeats came from
    strong records of the group   ──► Metadata   ◄── Recall, Note: under the fence of the lease
                                      Leadership ──► Led, Deposed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.advising import Advising
from controller.controller import Controller, Deposed, Follows, Led, Note, Noted, Publish, Recall, Recalled
from controller.hotkeys import HotKeys, HotOptions
from controller.hotshell import HotShell
from controller.leadership import Leadership, tenure_of
from controller.metadata import Metadata
from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import KVCommError, Refused
from kvcomm.machine import ConnectionId, Effect, Origin, Ticket
from kvcomm.runtime import Runtime
from kvcomm.serve import DataServer, ReplyFunction
from kvcomm.wire.messages import (
    AffinityGet,
    CancelOrder,
    ClusterGet,
    Done,
    DrainOrder,
    Heartbeat,
    HotGet,
    HotReport,
    Message,
    MoveOrder,
    RebalanceOrder,
    RingMap,
    ScaleOrder,
)
from l3_shard.store import DiskFailed

RELEASE_S = 0.5
"""Of an orderly end: who cannot be told in this time waits until the lease has run out."""
CONTROL_MESSAGES = (Heartbeat, ClusterGet, ScaleOrder, DrainOrder, MoveOrder, RebalanceOrder, CancelOrder)
"""What the machine answers; everything else is the metadata group's."""

_log = logging.getLogger(__name__)


class ControllerStopped(KVCommError):
    """The controller ended itself: a broken promise is worse than an absent process."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """What a controller process is made of."""

    members: Sequence[str]
    """All controllers."""
    directory: Path
    """Of this member's records."""
    locate: Callable[[str], str]
    """Where a controller is to be called."""
    dial: Callable[[Heartbeat], str]
    """Where the node that sent this is to be called."""
    publish: Callable[[RingMap], None]
    """Tell this host's instance; may block."""
    hot: HotOptions = field(default_factory=HotOptions)
    """When a key is hot."""
    lease_s: float = 6.0
    request_timeout_s: float = 2.0
    connect_timeout_s: float = 1.0


@dataclass(frozen=True, slots=True)
class RunningController:
    """What the composition root registers and exports.  Call all of it in the loop's thread."""

    addresses: list[str]
    server: DataServer
    metadata: Metadata
    machine: Controller
    shell: Shell

    @property
    def term(self) -> int:
        """Epoch of the lease that this controller holds; 0 = it does not lead."""
        return self.shell.term


async def run_controller(
    machine: Controller,
    settings: ControllerSettings,
    *,
    instance: str,
    incarnation: Incarnation,
    credentials: Credentials,
    addresses: Sequence[str],
    stop: asyncio.Event,
    ready: Callable[[RunningController], None] = lambda running: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Serve until ``stop`` is set.

    Args:
        ready: called once, when the data wire listens.

    Raises:
        Refused: an address is in use, or another process owns the directory.
        Unavailable: the directory cannot be used.
        ControllerStopped: the disk failed or an invariant broke; the message says which.
    """
    ending = _Ending(stop)
    node = machine.node
    metadata = await Metadata.open(
        node,
        settings.members,
        settings.directory,
        credentials=credentials,
        incarnation=incarnation,
        locate=settings.locate,
        on_stop=ending.end,
        timeout_s=settings.request_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        clock=clock,
    )
    shell = Shell(machine, metadata, settings, incarnation, ending.end)
    server = DataServer(
        ControllerService(shell, credentials.tenant_digest(NODE_TENANT)),
        node=node,
        role="controller",
        instance=instance,
        incarnation=incarnation,
        credentials=credentials,
    )
    try:
        bound = await server.start(addresses)
        shell.start()
        ready(RunningController(bound, server, metadata, machine, shell))
        await stop.wait()
        await shell.step_down()
        if not ending.reason:  # else nothing is answered any more
            await server.leave()
    finally:
        await shell.close()
        await server.close()
        try:
            await metadata.close()
        except DiskFailed:
            if not ending.reason:
                raise  # else it is the same failure once more, and less than what we know
    if ending.reason:
        raise ControllerStopped(ending.reason)


class _Ending:
    """Why the controller ended itself, if it did."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.stop, self.reason = stop, ""

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.stop.set()


@dataclass(eq=False, slots=True)
class _Publisher:
    """Tells the newest map, one at a time, in a thread: it is a synced file."""

    publish: Callable[[RingMap], None]
    _newest: RingMap | None = None
    _running: bool = False

    async def tell(self, ring: RingMap) -> None:
        self._newest = ring
        if self._running:
            return
        self._running = True
        try:
            while self._newest is not None:
                ring, self._newest = self._newest, None
                await asyncio.to_thread(self.publish, ring)
        finally:
            self._running = False


class Shell:
    """Drives the machine: performs its effects, and tells it of the lease."""

    def __init__(
        self,
        machine: Controller,
        metadata: Metadata,
        settings: ControllerSettings,
        incarnation: Incarnation,
        on_stop: Callable[[str], None],
    ) -> None:
        self.metadata = metadata
        self.term = 0
        self._machine, self._settings, self._on_stop = machine, settings, on_stop
        self.runtime = Runtime(
            machine,
            clock=metadata.records.clock,
            peers=metadata.records.peers,
            resolve=self._resolve,
            perform=self._perform,
            on_stop=on_stop,
        )
        self.leadership = Leadership(
            metadata,
            tenure_of(machine.node, incarnation, settings.lease_s),
            led=self._led,
            deposed=self._deposed,
            follows=lambda leader, term: self.runtime.deliver(Follows(leader, term)),
        )
        self._publisher = _Publisher(settings.publish)
        self.hot = HotShell(
            machine.node,
            HotKeys(settings.hot),
            metadata.records.peers,
            ring=lambda: machine.ring,
            leads=lambda: self.term > 0,
            resolve=self._resolve,
        )
        self.advising = Advising()
        self._leading: asyncio.Future[None] | None = None
        self._recalling: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Future[None]] = set()

    def start(self) -> None:
        self._leading = self._spawn(self._lead())
        self._spawn(self.hot.run())

    def received(self, origin: Origin, message: Message, reply: ReplyFunction) -> None:
        self.runtime.received(origin, message, reply)

    def reported(self, report: HotReport) -> None:
        self.hot.heard(report)
        self.advising.heard(report, self.metadata.records.clock())

    def advise(self, question: AffinityGet, reply: ReplyFunction) -> None:
        self._spawn(self._advise(question, reply))

    async def _advise(self, question: AffinityGet, reply: ReplyFunction) -> None:
        reply(await self.advising.answer(question, self._machine.racks, self.metadata.records.clock()))

    async def step_down(self) -> None:
        """Stop leading, so that another may at once."""
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
        if self.term:
            self._deposed()
            await self.leadership.release(RELEASE_S)

    async def close(self) -> None:
        self.runtime.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def epoch(self) -> int:
        """Of the newest map that this controller knows."""
        return self._machine.epoch

    async def _lead(self) -> None:
        await self.metadata.wait_for_vote()
        await self.leadership.run()

    def _led(self, term: int, until: float) -> None:
        self.term = term
        self.runtime.deliver(Led(term, until))

    def _deposed(self) -> None:
        self.term = 0
        self.runtime.deliver(Deposed())

    def _resolve(self, node: str) -> str:
        beat = self._machine.beat(node)
        if beat is None:
            raise KeyError(node)
        return self._settings.dial(beat)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Recall():
                if self._recalling is not None:
                    self._recalling.cancel()  # the machine has asked anew
                self._recalling = self._spawn(self._recall(effect.ticket))
            case Note():
                self._spawn(self._note(effect))
            case Publish():
                self._spawn(self._publisher.tell(effect.ring))
            case _:
                raise TypeError(f"cannot perform {type(effect).__name__}")

    async def _recall(self, ticket: Ticket) -> None:
        found = await self.leadership.recall()
        if found is not None:
            self.runtime.deliver(Recalled(ticket, found.ring, found.plan))

    async def _note(self, effect: Note) -> None:
        outcome = await self.leadership.note(effect.name, effect.value)
        self.runtime.deliver(Noted(effect.ticket, outcome))

    def _spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Future[None]) -> None:
        """A bug in one of them must not stay unheard."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a controller's task broke", exc_info=error)
            self._on_stop(f"a controller's task broke: {error!r}")


@dataclass(frozen=True, slots=True)
class ControllerService:
    """A ``kvcomm.serve.Service``: what the machine answers to the machine, everything else to the group's
    member.  Only the cluster's own nodes are answered."""

    shell: Shell
    cluster: bytes
    """Tenant digest of the cluster's own nodes."""
    messages: frozenset[type[Message]] = field(default_factory=lambda: frozenset(CONTROL_MESSAGES))

    def welcome(self, origin: Origin) -> tuple[str, int]:
        return "", self.shell.epoch()

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        raise Refused(f"{type(message).__name__} takes no payload")

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        if origin.tenant != self.cluster:
            raise Refused("a controller answers the cluster's own nodes only; ask a shard")
        if isinstance(message, HotReport):
            self.shell.reported(message)
            reply(Done())
        elif isinstance(message, HotGet):
            reply(self.shell.hot.view())
        elif isinstance(message, AffinityGet):
            self.shell.advise(message, reply)
        elif type(message) in self.messages:
            self.shell.received(origin, message, reply)
        else:
            self.shell.metadata.records.runtime.received(origin, message, reply)

    def closed(self, connection: ConnectionId) -> None:
        self.shell.runtime.disconnected(connection)
        self.shell.metadata.records.runtime.disconnected(connection)
