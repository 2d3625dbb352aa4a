"""``RecordProcess``: the records of one shard as a running process: machine, stores, clock and peers.

What a shard has beside its blocks, and all that a member of the controllers' metadata group has
(``controller.metadata``).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.machine import Effect, Event, Machine, Tick
from kvcomm.metrics import Histogram
from kvcomm.rpc import Identity
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.runtime import Runtime
from kvcomm.validators import Validators
from kvcomm.wire.messages import RingMap
from l3_shard.commits import Commits
from l3_shard.desk import ShardLimits
from l3_shard.peers import WatchOptions
from l3_shard.repair import RepairCounts, RepairOptions
from l3_shard.ring import Ring
from l3_shard.scrub import ScrubCounts
from l3_shard.shard import RingChanged, Shard, WallAdjusted
from l3_shard.storage import Audit, Database, Load, Persist, Scan
from l3_shard.store import Fsync, RecordStore
from l3_shard.strong import StrongIdentity

WALL_INTERVAL_S = 60.0
"""How often the machine hears what the wall clock shows."""


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What a shard's records are made of."""

    directory: Path
    fsync: Fsync = "always"
    """What a power cut may cost; see ``l3_shard.store``."""
    fsync_interval_s: float = 0.05
    map_bytes_max: int = 1 << 40
    """The record database may grow to this size."""
    limits: ShardLimits = field(default_factory=ShardLimits)
    connect_timeout_s: float = 1.0
    repair: RepairOptions = field(default_factory=RepairOptions)
    validators: Validators = field(default_factory=Validators)
    watch: WatchOptions = field(default_factory=WatchOptions)


class RecordProcess:
    """Made by :meth:`open`; ended by :meth:`close`.  All of it belongs to the loop that it was opened in."""

    def __init__(
        self,
        machine: Shard,
        stores: tuple[RecordStore, RecordStore],
        options: RecordOptions,
        identity: Identity,
        resolve: Callable[[str], str],
        on_stop: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Use :meth:`open`."""
        self.machine = machine
        self.ring_listeners: list[Callable[[], None]] = []
        """Called in a turn of their own when the machine has taken up another map, from wherever it came."""
        self.store, strong_store = stores
        self.clock = clock
        self.peers = AsyncPeers(identity, connect_timeout_s=options.connect_timeout_s, clock=clock)
        self.runtime = Runtime(
            _RingWatch(machine, self._ring_changed),
            clock=clock,
            peers=self.peers,
            resolve=resolve,
            perform=self._perform,
            on_stop=on_stop,
        )
        self._commits = Commits(self.store, self.runtime.deliver, on_stop, clock)
        self._strong_commits = Commits(strong_store, self.runtime.deliver, on_stop, clock)
        self._tasks = [asyncio.create_task(self._follow_wall())]
        self.runtime.deliver(Tick())  # the machine reads its membership and begins to repair
        if options.fsync == "interval":
            self._tasks.append(asyncio.create_task(self._commits.sync_regularly(options.fsync_interval_s)))

    @staticmethod
    async def open(
        node: str,
        ring_map: RingMap,
        options: RecordOptions,
        *,
        credentials: Credentials,
        incarnation: Incarnation,
        resolve: Callable[[Shard, str], str],
        on_stop: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> RecordProcess:
        """Open the stores and begin.

        Args:
            ring_map: the map to start with; epoch 0 = none is known yet.
            resolve: where a shard is to be called, of the machine that asks.
            on_stop: the process must end, and why.

        Raises:
            Refused: another process owns the directory.
            Unavailable: it cannot be used.
        """
        store = await asyncio.to_thread(
            RecordStore, options.directory, fsync=options.fsync, map_bytes_max=options.map_bytes_max
        )
        try:
            strong_store = await asyncio.to_thread(_open_strong, options)
        except BaseException:
            store.close()
            raise
        try:
            machine = Shard(
                node,
                store.replica,
                ring_map,
                node_tenant=credentials.tenant_digest(NODE_TENANT),
                origin_ms=_origin_ms(clock),
                limits=options.limits,
                repair=options.repair,
                notes=store.notes(),
                strong=StrongIdentity(
                    strong_store.replica, incarnation, random.random, notes=strong_store.notes()
                ),
                validators=options.validators,
                watch=options.watch,
            )
        except BaseException:
            store.close()
            strong_store.close()
            raise
        identity = Identity(credentials.token(NODE_TENANT), incarnation)
        return RecordProcess(
            machine,
            (store, strong_store),
            options,
            identity,
            lambda peer: resolve(machine, peer),
            on_stop,
            clock,
        )

    def epoch(self) -> int:
        return self.machine.ring.epoch

    def ring(self) -> RingMap:
        """The newest map that the machine works by for good, whatever happens to this process."""
        return self.machine.taken.to_map()

    def adopt(self, ring_map: RingMap) -> int:
        """Offer a map; the epoch that the machine works by afterwards."""
        self.runtime.deliver(RingChanged(ring_map))
        return self.epoch()

    @property
    def fsync_seconds(self) -> Histogram:
        return self._commits.fsync_seconds

    @property
    def disk_full(self) -> bool:
        """Whether the last write was refused for lack of room."""
        return self._commits.disk_full or self._strong_commits.disk_full

    def repair_counts(self) -> RepairCounts:
        counts = self.machine.repair_counts()
        assert counts is not None, "it was made with repair"
        return counts

    def scrub_counts(self) -> Mapping[Database, ScrubCounts]:
        return self.machine.scrub_counts()

    async def close(self) -> None:
        """Finish the commits under way and close the stores.

        Raises:
            DiskFailed: the last sync failed.
        """
        self.runtime.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        try:
            await self._commits.close()
        finally:
            await self._strong_commits.close()

    def _perform(self, effect: Effect) -> None:
        strong = isinstance(effect, Load | Persist | Scan | Audit) and effect.database == "strong"
        (self._strong_commits if strong else self._commits).perform(effect)

    def _ring_changed(self) -> None:
        for listener in self.ring_listeners:
            asyncio.get_running_loop().call_soon(listener)

    async def _follow_wall(self) -> None:
        while True:
            await asyncio.sleep(WALL_INTERVAL_S)
            self.runtime.deliver(WallAdjusted(_origin_ms(self.clock)))


class _RingWatch(Machine):
    """A shard machine whose owner hears when it has taken up another map: from a controller, an operator,
    or from another shard that knew it already."""

    def __init__(self, machine: Shard, changed: Callable[[], None]) -> None:
        self._machine, self._changed = machine, changed
        self._rings: tuple[Ring, Ring] = (machine.ring, machine.taken)

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = self._machine.handle(event, now)
        rings = (self._machine.ring, self._machine.taken)
        if rings[0] is not self._rings[0] or rings[1] is not self._rings[1]:
            self._rings = rings
            self._changed()
        return effects

    def deadline(self) -> float | None:
        return self._machine.deadline()

    def check(self) -> None:
        self._machine.check()

    def story(self, key: bytes) -> str:
        return self._machine.story(key)


def _open_strong(options: RecordOptions) -> RecordStore:
    """Every write is synced, whatever the policy for the rest: a promise or vote that a power cut takes back
    could undo what a majority has decided."""
    return RecordStore(
        options.directory / "strong", fsync="always", database="strong", map_bytes_max=options.map_bytes_max
    )


def _origin_ms(clock: Callable[[], float]) -> int:
    return int((time.time() - clock()) * 1_000)
