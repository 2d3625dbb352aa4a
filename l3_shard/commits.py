"""``Commits``: carries out what a shard machine orders from its storage, without holding up the event loop.

Reads are done at once: LMDB answers them from memory maps.  Writes are collected: every ``Persist`` of one
turn of the loop, and everything that comes while a commit is under way, goes into one transaction.  Where a
commit waits for the disk (``fsync: always``) it runs in a worker thread; else it is a memory copy and runs in
the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from kvcomm.machine import Effect, Event
from kvcomm.metrics import Histogram
from l3_shard.replica import later
from l3_shard.storage import (
    Audit,
    Audited,
    Load,
    Loaded,
    Persist,
    Persisted,
    Scan,
    Scanned,
    Survey,
    Surveyed,
    Sweep,
    Swept,
)
from l3_shard.store import DiskFailed, DiskFull, RecordStore
from l3_shard.worker import Worker

_log = logging.getLogger(__name__)


class Commits:
    """For one machine on the running loop.

    Args:
        deliver: takes the events that answer the effects.
        failed: a write or sync went wrong outside any effect; the process must end.
        clock: monotonic seconds, to time the syncs by.
    """

    def __init__(
        self,
        store: RecordStore,
        deliver: Callable[[Event], None],
        failed: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fsync_seconds = Histogram()
        """Each time that records were forced to disk, the write before it included (``fsync: always``)."""
        self._clock = clock
        self._store, self._deliver, self._failed = store, deliver, failed
        self._loop = asyncio.get_running_loop()
        self._worker = Worker("kvcomm-commit")
        self._waiting: list[Persist[Any]] = []
        self._idle = asyncio.Event()
        """Nothing waits, and no commit is under way."""
        self._idle.set()
        self._unsynced = False
        self.disk_full = False
        """Whether the last write was refused for lack of room.  Reads go on, and so do writes once there is
        room."""

    def perform(self, effect: Effect) -> None:
        """Carry out what a shard machine orders from its storage."""
        match effect:
            case Load():
                self._deliver(self._load(effect))
            case Scan():
                self._deliver(self._scan(effect))
            case Survey():  # in a turn of its own: they come in long rows, and requests must get in between
                self._loop.call_soon(lambda: self._deliver(self._survey(effect)))
            case Sweep():
                self._loop.call_soon(lambda: self._deliver(self._sweep(effect)))
            case Audit():
                self._loop.call_soon(lambda: self._deliver(self._audit(effect)))
            case Persist():
                self._waiting.append(effect)
                if self._idle.is_set():  # in a turn of its own, so that all of this turn's are together
                    self._idle.clear()
                    self._loop.call_soon(self._commit)
            case _:
                raise TypeError(f"a shard's storage cannot perform {type(effect).__name__}")

    async def sync_regularly(self, interval_s: float) -> None:
        """Force what was written to the disk, for ever (policy ``interval``)."""
        while True:
            await asyncio.sleep(interval_s)
            if self._unsynced:
                self._unsynced = False
                try:
                    begin = self._clock()
                    await self._worker.run(self._store.sync)
                    self.fsync_seconds.observe(self._clock() - begin)
                except DiskFailed as error:
                    self._failed(error.message)
                    return

    async def idle(self) -> None:
        """Wait until everything that was ordered is through."""
        await self._idle.wait()

    async def close(self) -> None:
        """Finish what was ordered, sync, and close the store.

        Raises:
            DiskFailed: the last sync failed.
        """
        await self.idle()
        try:
            await self._worker.run(self._store.close)
        finally:
            self._worker.close()

    def _commit(self) -> None:
        """Begin a transaction of everything that waits."""
        batch, self._waiting = self._waiting, []
        if self._store.fsync == "always":
            self._worker.start(partial(self._write, batch), partial(self._synced, self._clock()))
            return
        self._unsynced = True
        try:
            outcomes = self._write(batch)
        except Exception as error:
            self._broken(error)
            raise
        self._tell(outcomes)

    def _synced(self, begin: float, outcomes: list[Persisted] | None, error: Exception | None) -> None:
        self.fsync_seconds.observe(self._clock() - begin)
        if outcomes is None:
            self._broken(error)
        else:
            self._tell(outcomes)

    def _broken(self, error: Exception | None) -> None:
        self._idle.set()
        self._failed(f"broken invariant in a commit: {error!r}")

    def _tell(self, outcomes: list[Persisted]) -> None:
        try:
            for outcome in outcomes:
                self._deliver(outcome)
        except Exception as error:
            self._idle.set()
            self._failed(f"broken invariant after a commit: {error!r}")
            raise
        if not self._waiting:
            self._idle.set()
        elif self._store.fsync == "always":
            self._commit()
        else:  # in a turn of its own, for what it is answered with may order the next write at once
            self._loop.call_soon(self._commit)

    def _write(self, batch: list[Persist[Any]]) -> list[Persisted]:
        """One transaction; when there is no room for all, what there is room for."""
        try:
            writes = [write for persist in batch for write in persist.writes]
            notes = [note for persist in batch for note in persist.notes]
            self._store.write(writes, reduce(later, (persist.replica for persist in batch)), notes)
        except DiskFull as error:
            if len(batch) > 1:
                return [outcome for persist in batch for outcome in self._write([persist])]
            self._note_room(error)
            return [Persisted(batch[0].ticket, "full", error.message)]
        except DiskFailed as error:
            return [Persisted(persist.ticket, "failed", error.message) for persist in batch]
        self._note_room(None)
        return [Persisted(persist.ticket) for persist in batch]

    def _note_room(self, error: DiskFull | None) -> None:
        """Tell the operator when it changes, not at every write."""
        if self.disk_full != (error is not None):
            self.disk_full = error is not None
            _log.warning("%s", f"writes are refused: {error}" if error else "there is room again for writes")

    def _load(self, load: Load) -> Loaded[Any]:
        try:
            states, damaged = self._store.load(load.keys)
        except DiskFailed as error:
            return Loaded(load.ticket, (), failure=error.message)
        return Loaded(load.ticket, tuple(states), tuple(damaged))

    def _scan(self, scan: Scan) -> Scanned:
        try:
            keys, resume = self._store.scan(scan.prefix, scan.after, scan.limit)
        except DiskFailed as error:
            return Scanned(scan.ticket, (), None, failure=error.message)
        return Scanned(scan.ticket, tuple(keys), resume)

    def _survey(self, survey: Survey) -> Surveyed:
        try:
            return Surveyed(survey.ticket, tuple(self._store.survey(survey.leaves)))
        except DiskFailed as error:
            return Surveyed(survey.ticket, (), failure=error.message)

    def _sweep(self, sweep: Sweep) -> Swept:
        try:
            leaves, resume = self._store.sweep(sweep.first, sweep.records)
        except DiskFailed as error:
            return Swept(sweep.ticket, (), None, failure=error.message)
        return Swept(sweep.ticket, tuple(leaves), resume)

    def _audit(self, audit: Audit) -> Audited:
        try:
            found = self._store.audit(audit.resume, audit.records, audit.size_bytes)
        except DiskFailed as error:
            return Audited(audit.ticket, 0, 0, 0, (), (), (), None, failure=error.message)
        return Audited(
            audit.ticket,
            found.looked_count,
            found.looked_bytes,
            found.total_count,
            tuple(found.damaged),
            tuple(found.lost),
            tuple(found.misfiled),
            found.resume,
        )
