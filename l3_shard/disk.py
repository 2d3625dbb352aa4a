"""``BlockDisk``: a shard's disk tier, the ``kvcomm.blockstore.Depot`` beneath its region.

Theory of operation.  The region is the write buffer: what is published there is queued here by its key alone,
and one thread writes one block after the other from its slot, which a lease keeps for so long.  A block that
is evicted before its turn came was not written, and is counted; so a burst costs memory for keys, never for
copies, and no put waits for the disk::

    publish ─► waiting keys ─► lease ─► thread: remove victims, write, rename ─► index
    get, not in the region ─► thread: read, verify ─► reply; perhaps into the region
    copies of other shards for which the region has no room ─► thread: write, rename ─► index

A copy that is read goes into the region where there is room that nobody uses, and by evicting others only
when it is read a second time: going once through a disk larger than memory evicts nothing (as SIEVE keeps
what is read twice).

Everything that decides is in ``DiskIndex`` and ``DiskHealth``; here are the threads and timers.  Whatever a
disk does, the caller has an answer within ``read_timeout_s``: a miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from kvcomm.block import BlockHeader, BlockKey
from kvcomm.blockstore import ANY_TENANT, BlockStore, DepotUsage, Lease
from kvcomm.errors import Corrupt, Unavailable
from kvcomm.wire.messages import BlockItem, Want
from l3_shard.diskfiles import BlockFiles, Found
from l3_shard.diskhealth import DiskHealth
from l3_shard.diskindex import DiskEntry, DiskIndex
from l3_shard.diskthreads import DiskThreads

T = TypeVar("T")

READ_TIMEOUT_S = 1.0
"""Below what clients give a request, so that a stalled disk costs a miss and not a shard."""
WRITE_TIMEOUT_S = 5.0
READ_THREADS = 4
READS_MAX = 64
READ_BYTES_MAX = 128 << 20
"""Of copies that are being read: what is over is a miss."""
WAITING_MAX = 65_536
"""Keys that wait to be written; the oldest is dropped for one more."""
GIVEN_MAX = 64
"""Copies that are to be kept and are not written yet; one more is refused."""
FLUSH_S = 1.0
"""At the end, for what waits to be written."""
CLOSE_TIMEOUT_S = 2.0
"""For the write under way; with what is before it, less than a launcher waits until it kills."""
OPEN_TIMEOUT_S = 10.0
ADOPTED_AT_ONCE = 512
"""Files that were found are taken up so many at a time, 4 ms; requests go in between."""

_HOLDER = -1
"""No connection has this number."""
_log = logging.getLogger(__name__)


class Files(Protocol):
    """What is asked of the disk; see ``BlockFiles``."""

    def write(self, key: BlockKey, copy: memoryview) -> None: ...

    def read(self, key: BlockKey, copy_bytes: int) -> memoryview: ...

    def remove(self, key: BlockKey) -> None: ...

    def scan(self) -> Found: ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Recall:
    """One ``recall`` that is not answered."""

    done: Callable[[Mapping[BlockKey, memoryview]], None]
    open: set[BlockKey] = field(default_factory=set)
    copies: dict[BlockKey, memoryview] = field(default_factory=dict)

    def take(self, key: BlockKey, copy: memoryview | None) -> None:
        self.open.discard(key)
        if copy is not None:
            self.copies[key] = copy
        if not self.open:
            self.done(self.copies)


@dataclass(eq=False, slots=True)
class _Read:
    """One file that is being read, for everybody who wants it."""

    entry: DiskEntry
    timer: asyncio.TimerHandle
    waiting: list[_Recall] = field(default_factory=list)
    use: bool = False
    """Somebody reads it who counts."""
    overdue: bool = False


@dataclass(eq=False, slots=True)
class _Write:
    entry: DiskEntry
    lease: Lease | None
    """Of a copy that is above."""
    done: Callable[[bool], None]
    timer: asyncio.TimerHandle
    overdue: bool = False
    unwanted: bool = False
    """It was dropped meanwhile."""

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


@dataclass(frozen=True, slots=True)
class _Given:
    """A copy that is not above."""

    key: BlockKey
    copy: memoryview
    done: Callable[[bool], None]


class BlockDisk:
    """Belongs to one event loop, which must run when it is made."""

    def __init__(
        self,
        files: Files,
        capacity_bytes: int,
        store: BlockStore,
        clock: Callable[[], float],
        *,
        read_timeout_s: float = READ_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self._files, self._store, self._clock = files, store, clock
        self._read_timeout_s, self._write_timeout_s = read_timeout_s, write_timeout_s
        self._loop = asyncio.get_running_loop()
        self._index = DiskIndex(capacity_bytes)
        self._health = DiskHealth()
        self._writer = DiskThreads(1, "kvcomm-disk-write")
        self._readers = DiskThreads(READ_THREADS, "kvcomm-disk-read")
        # In order; taking the first of a long plain dict passes over all that were taken before.
        self._waiting: OrderedDict[BlockKey, None] = OrderedDict()
        self._given: deque[_Given] = deque()
        self._write: _Write | None = None
        self._reads: dict[BlockKey, _Read] = {}
        self._reading_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._written_count = self._read_count = self._promoted_count = 0
        self._dropped_count = self._damaged_count = self._busy_count = 0
        self._heard: Callable[[BlockKey, bytes], None] = _nobody
        self._submit(self._writer, files.scan, self._scanned)

    def watch(self, heard: Callable[[BlockKey, bytes], None]) -> None:
        """Call with the key and the tenant of each block that comes here not through the store above, before
        it becomes visible."""
        self._heard = heard

    # -- Depot

    def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]:
        reads = self._health.reads
        return [reads and self._index.find(key, tenant) is not None for key in keys]

    def stored(self, keys: Sequence[BlockKey]) -> None:
        if self._health.state == "off":
            self._dropped_count += len(keys)
            return
        for key in keys:
            self._waiting[key] = None
        while len(self._waiting) > WAITING_MAX:
            self._waiting.popitem(last=False)
            self._dropped_count += 1
        self._pump()

    def keep(self, key: BlockKey, copy: memoryview, done: Callable[[bool], None]) -> None:
        if self._closed or len(self._given) == GIVEN_MAX or not self._health.writes(self._clock()):
            done(False)
            return
        self._given.append(_Given(key, copy, done))
        self._pump()

    def drop(self, keys: Sequence[BlockKey], done: Callable[[], None]) -> None:
        for key in keys:
            self._waiting.pop(key, None)
            if self._write is not None and self._write.entry.key == key:
                self._write.unwanted = True
            if self._index.remove(key) is not None:
                self._remove(key)
        self._submit(self._writer, _nothing, lambda _: done())  # in turn: after those removals
        self._note_idle()

    def recall(
        self,
        keys: Sequence[BlockKey],
        tenant: bytes,
        done: Callable[[Mapping[BlockKey, memoryview]], None],
        *,
        use: bool = True,
    ) -> None:
        recall = _Recall(done)
        for key in dict.fromkeys(keys):
            entry = self._index.find(key, tenant) if self._health.reads else None
            read = None if entry is None else self._reading(entry)
            if read is not None:
                recall.open.add(key)
                read.waiting.append(recall)
                read.use = read.use or use
        if not recall.open:
            done({})

    def quarantine(self, keys: Sequence[BlockKey], tenant: bytes) -> None:
        self.recall(keys, tenant, lambda _: None, use=False)  # reading verifies

    def listing(self, after: bytes, limit: int) -> list[BlockItem]:
        return self._index.listing(after, limit) if self._health.reads else []

    def usage(self) -> DepotUsage:
        return DepotUsage(
            self._health.state,
            self._index.capacity_bytes,
            self._index.used_bytes,
            len(self._index),
            len(self._waiting) + (self._write is not None),
            self._written_count,
            self._read_count,
            self._promoted_count,
            self._index.evicted_count,
            self._dropped_count,
            self._damaged_count,
            self._health.error_count,
            self._busy_count,
        )

    # -- life

    async def settled(self) -> None:
        """Wait until nothing is to be written; for a disk that takes nothing, as long as that lasts."""
        await self._idle.wait()

    async def close(self) -> None:
        """Write what waits, for a moment, finish the write under way and let go of the directory.
        Idempotent."""
        if self._health.writes(self._clock()):
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._idle.wait()
        self._drop_waiting()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._write is not None:
                    self._note_idle()
                    await self._idle.wait()
        self._closed = True
        reads, self._reads = self._reads, {}
        for key, read in reads.items():
            read.timer.cancel()
            for recall in read.waiting:
                recall.take(key, None)
        if self._retry is not None:
            self._retry.cancel()
        if self._write is not None:  # the disk is stuck: its thread has the slot's memory until it wakes up
            _log.error("the disk did not finish a write in %g s", CLOSE_TIMEOUT_S)
            self._write.timer.cancel()
            self._write.release()
        for threads in (self._writer, self._readers):
            threads.close()
        self._files.close()

    def _scanned(self, scanning: Future[Found]) -> None:
        try:
            found = scanning.result()
        except OSError as error:
            _log.error("the disk tier is off: its directory cannot be read: %s", error)
            self._health.give_up()
            self._drop_waiting()
            return
        self._damaged_count += found.damaged_count
        if found.damaged_count or found.part_count:
            _log.warning(
                "removed %d damaged and %d unfinished block files", found.damaged_count, found.part_count
            )
        self._adopt(iter(found.entries))

    def _adopt(self, entries: Iterator[DiskEntry]) -> None:
        """Take up some of what was found, evict some of what is too much, and go on later."""
        if self._closed:
            return
        some = list(islice(entries, ADOPTED_AT_ONCE))
        for entry in some:
            self._heard(entry.key, entry.tenant)
            self._index.add(entry)
        victims = [] if some else self._index.shrink(ADOPTED_AT_ONCE)
        for victim in victims:
            self._remove(victim.key)
        if some or victims:
            self._loop.call_soon(self._adopt, entries)
            return
        self._health.opened()
        self._pump()

    # -- writing

    def _pump(self) -> None:
        """Start the next write, if it is time."""
        while self._write is None and (self._waiting or self._given) and not self._closed:
            if not self._health.writes(self._clock()):
                self._refuse_given()
                self._wait_for_room()
                break
            if self._given:  # first: somebody waits for it
                self._begin_given(self._given.popleft())
                continue
            key, _ = self._waiting.popitem(last=False)
            if key not in self._index:
                self._begin(key)
        self._note_idle()

    def _begin(self, key: BlockKey) -> None:
        lease = self._store.lease(key, ANY_TENANT, use=False)
        entry = None if lease is None else _entry_of(key, lease.copy)
        victims = None if entry is None else self._index.promise(entry.copy_bytes)
        if lease is None or entry is None or victims is None:
            self._dropped_count += 1
            if lease is not None:
                lease.release()
            return
        for victim in victims:
            self._remove(victim.key)
        self._begin_write(entry, lease.copy, lease, _unheard)

    def _begin_given(self, given: _Given) -> None:
        if given.key in self._index:
            given.done(True)
            return
        entry = _entry_of(given.key, given.copy)
        if entry is None or self._index.promise(entry.copy_bytes, evict=False) is None:
            given.done(False)
            return
        self._begin_write(entry, given.copy, None, given.done)

    def _begin_write(
        self, entry: DiskEntry, copy: memoryview, lease: Lease | None, done: Callable[[bool], None]
    ) -> None:
        timer = self._loop.call_later(self._write_timeout_s, self._write_overdue)
        self._write = _Write(entry, lease, done, timer)
        self._submit(self._writer, partial(self._files.write, entry.key, copy), self._wrote)

    def _refuse_given(self) -> None:
        given, self._given = self._given, deque()
        for each in given:
            each.done(False)

    def _wrote(self, writing: Future[None]) -> None:
        write, self._write = self._write, None
        if write is None:
            return  # closed meanwhile
        write.release()
        write.timer.cancel()
        if write.overdue:
            self._health.came()
        kept = False
        try:
            writing.result()
        except OSError as error:
            self._index.not_kept(write.entry.copy_bytes)
            self._dropped_count += 1
            self._failed(error)
        else:
            kept = self._written(write)
        write.done(kept)
        self._pump()

    def _written(self, write: _Write) -> bool:
        """Whether the file that is there now is to stay."""
        self._written_count += 1
        self._health.wrote()
        if write.unwanted:
            self._index.not_kept(write.entry.copy_bytes)
            self._remove(write.entry.key)
        else:
            if write.lease is None:
                self._heard(write.entry.key, write.entry.tenant)
            self._index.kept(write.entry)
        return not write.unwanted

    def _write_overdue(self) -> None:
        assert self._write is not None
        self._write.overdue = True
        self._health.overdue()

    def _wait_for_room(self) -> None:
        at = self._health.retry_at()
        if at is not None and self._retry is None:
            self._retry = self._loop.call_later(max(0.0, at - self._clock()), self._look_again)

    def _look_again(self) -> None:
        self._retry = None
        self._pump()

    def _drop_waiting(self) -> None:
        self._dropped_count += len(self._waiting)
        self._waiting.clear()
        self._refuse_given()
        self._note_idle()

    def _note_idle(self) -> None:
        if self._write is None and not self._waiting and not self._given:
            self._idle.set()
        else:
            self._idle.clear()

    # -- reading

    def _reading(self, entry: DiskEntry) -> _Read | None:
        """The read of a file, begun if need be; ``None`` = there is too much to do."""
        read = self._reads.get(entry.key)
        if read is not None:
            return None if read.overdue else read
        if len(self._reads) >= READS_MAX or self._reading_bytes + entry.copy_bytes > READ_BYTES_MAX:
            self._busy_count += 1
            return None
        read = _Read(entry, self._loop.call_later(self._read_timeout_s, self._read_overdue, entry.key))
        self._reads[entry.key] = read
        self._reading_bytes += entry.copy_bytes
        call = partial(self._files.read, entry.key, entry.copy_bytes)
        self._submit(self._readers, call, partial(self._was_read, read))
        return read

    def _was_read(self, read: _Read, reading: Future[memoryview]) -> None:
        if self._closed:
            return
        entry, copy = read.entry, None
        del self._reads[entry.key]
        self._reading_bytes -= entry.copy_bytes
        read.timer.cancel()
        if read.overdue:
            self._health.came()
        try:
            copy = reading.result()
        except FileNotFoundError:  # evicted while it waited for a thread, or removed by a person
            if self._index.find(entry.key, ANY_TENANT) is entry:
                self._index.remove(entry.key)
        except Corrupt as error:
            _log.warning("a block file is dropped: %s", error.message)
            self._damaged_count += 1
            self._drop(entry)
        except OSError as error:
            self._drop(entry)
            self._failed(error)
        except MemoryError:
            self._busy_count += 1
        else:
            self._read_count += 1
            if read.use:
                self._promote(entry, copy)
        for recall in read.waiting:
            recall.take(entry.key, copy)
        self._pump()

    def _read_overdue(self, key: BlockKey) -> None:
        read = self._reads[key]
        read.overdue = True
        self._health.overdue()
        waiting, read.waiting = read.waiting, []
        self._busy_count += 1
        for recall in waiting:
            recall.take(key, None)

    def _promote(self, entry: DiskEntry, copy: memoryview) -> None:
        if entry.key not in self._index:
            return  # dropped while it was read
        again, now = self._index.touch(entry.key), self._clock()
        want = Want(entry.key, entry.copy_bytes)
        (grant,) = self._store.reserve([want], _HOLDER, ANY_TENANT, now, evict=again)
        if grant.status == "granted":
            self._store.extent(grant.token)[:] = copy
            outcome = self._store.publish([grant.token], _HOLDER, now, verify=False)
            self._promoted_count += outcome == ["published"]

    # -- the disk

    def _drop(self, entry: DiskEntry) -> None:
        """Forget a file that cannot be served, unless it was evicted meanwhile and another one written."""
        if self._index.find(entry.key, ANY_TENANT) is entry:
            self._index.remove(entry.key)
            self._remove(entry.key)

    def _remove(self, key: BlockKey) -> None:
        """In the writer's thread: a later write of the same key must come after it."""
        self._submit(self._writer, partial(self._files.remove, key), self._removed)

    def _removed(self, removing: Future[None]) -> None:
        try:
            removing.result()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if self._health.failed(error.errno, self._clock()):
            _log.error("the disk tier is off, after too many errors; the last one: %s", error)
            self._drop_waiting()

    def _submit(self, threads: DiskThreads, call: Callable[[], T], done: Callable[[Future[T]], None]) -> None:
        def tell(future: Future[T]) -> None:
            if not future.cancelled():
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    self._loop.call_soon_threadsafe(done, future)

        threads.submit(call).add_done_callback(tell)


async def _opened(directory: Path, fsync: bool) -> BlockFiles:
    opening = DiskThreads(1, "kvcomm-disk-open")
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            return await asyncio.wrap_future(opening.submit(partial(BlockFiles, directory, fsync=fsync)))
    except TimeoutError as error:
        raise Unavailable(f"{directory}: the disk did not answer in {OPEN_TIMEOUT_S:g} s") from error
    finally:
        opening.close()


def _nothing() -> None:
    """Of a thread that is to tell how far it has come."""


def _nobody(_key: BlockKey, _tenant: bytes) -> None:
    """Nobody wants to hear it."""


def _unheard(_kept: bool) -> None:
    """Nobody waits for this write."""


def _entry_of(key: BlockKey, copy: memoryview) -> DiskEntry | None:
    """``None``: memory has damaged its header, so there is nothing worth a file."""
    try:
        header = BlockHeader.unpack(copy)
    except Corrupt:
        return None
    return DiskEntry(key, header.parent, header.tenant, copy.nbytes)


@asynccontextmanager
async def block_disk(
    directory: Path, capacity_bytes: int, store: BlockStore, *, fsync: bool, clock: Callable[[], float]
) -> AsyncIterator[BlockDisk]:
    """A disk tier for as long as the context lasts.  What its directory holds is found out meanwhile.

    Raises:
        ConfigError: the directory cannot be used.
        Refused: another process owns it.
        Unavailable: the disk does not answer.
    """
    files = await _opened(directory, fsync)
    disk = BlockDisk(files, capacity_bytes, store, clock)
    try:
        yield disk
    finally:
        await disk.close()
