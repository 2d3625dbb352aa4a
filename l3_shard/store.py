"""``RecordStore``: one shard's records on disk, in LMDB.

Layout of the directory::

    data.mdb, lock.mdb    LMDB: databases "records" (stored key -> value), "index" (leaf of the Merkle tree
                          and key -> digest), "meta" (the replica id), "notes" (see l3_shard.notes)
    owner.msgpack         who used the directory last: fsync policy, boot of the machine, file, and whether
                          it closed
    lock                  held with flock while a process owns the directory
    damage                why the last owner found the database damaged, if it did
    data.mdb.suspect      a database that a power cut or the disk may have damaged, set aside (one at most)

A value describes itself (``l3_shard.envelope``); one that fails verification is reported as damaged and never
served.

**What a crash costs, by fsync policy**

``always``
    Nothing, ever: a write is acknowledged when it is synced.  A commit takes the disk's fsync time (and runs
    in a worker thread; commits that come meanwhile share the next fsync).
``interval``
    Process crash, ``kill -9``: nothing.  Power cut or kernel crash: LMDB without ordered writes may lose more
    than the last interval, so the whole file is set aside, and the shard starts empty under a new replica id
    and is refilled by its peers.
``never``
    As ``interval``; in addition the window has no bound, so peers that lose power together lose together.

**A database that cannot be walked** (cut short, pages damaged) is set aside too, and the shard is refilled
like one with a new disk; it is looked for after every unclean end, see ``l3_shard.walk``.

**The replica id** is stored with the records and kept as long as their last state is certain (see
``l3_shard.replica``). A new one is drawn when the directory is empty, when the database was set aside, and
when it is another file than the one its last owner used: a copy or a restored backup, whose records are kept
but whose counters may be behind; so may those of a database that lacks records which its index has.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lmdb
import msgspec

from kvcomm.clock import Stamp
from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from kvcomm.wire.messages import StrongState
from l3_shard.acceptor import EMPTY
from l3_shard.envelope import HEAD_BYTES, decode_value, encode_body, encode_value
from l3_shard.merkle import encoded_digest, leaf_of
from l3_shard.replica import first_replica, later
from l3_shard.storage import Database, Entry, State
from l3_shard.tombstones import dead_since
from l3_shard.walk import unsound

Fsync = Literal["always", "interval", "never"]

MAP_BYTES_MIN = 64 << 20
SCAN_LOOKED_MAX = 4_096
"""Records that one ``scan`` looks at."""
READERS_MAX = 126
RESERVE_BYTES = 16 << 20
"""Writes are refused when less than this would stay free on the file system."""
WRITE_BYTES = 32 << 10
"""Pages that one write may touch on its way to the root."""

_ENTRY = struct.Struct("<QQ")
"""Of the index: digest, stamp since which the record is dead."""
_REPLICA = b"replica"
_IN_RECORDS, _IN_INDEX = b"r", b"i"
"""What an audit is going through; the key after which it goes on follows."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)

_CONTRADICTIONS = (lmdb.CorruptedError, lmdb.PageNotFoundError)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(Unavailable):
    """There is no room for the write; nothing of it was written.  Free space or raise the store's limit."""

    code = "unavailable"


class DiskFailed(KVCommError):
    """The disk refused a write or a sync: what is on it is unknown, and nothing may be acknowledged any
    more."""


class _Owner(msgspec.Struct, frozen=True):
    """``owner.msgpack``."""

    fsync: str
    boot: str
    inode: int
    device: int
    closed: bool


def _free_bytes(directory: Path) -> int:
    at = os.statvfs(directory)
    return at.f_bavail * at.f_frsize


@dataclass(slots=True)
class Audit:
    """What :meth:`RecordStore.audit` found; see ``l3_shard.storage.Audited``."""

    looked_count: int = 0
    looked_bytes: int = 0
    total_count: int = 0
    damaged: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    misfiled: list[bytes] = field(default_factory=list)
    resume: bytes | None = None


class RecordStore:
    """The records of one shard.  ``write`` and ``sync`` may run in one worker thread while the others run in
    another.

    Args:
        directory: made if missing; owned by this store until :meth:`close`.
        fsync: see the module.
        database: which kind of state it holds.  ``strong`` has its own directory, so that no policy but
            ``always`` ever touches its file, and lists deleted records like others.
        map_bytes_max: the database may grow to this size; then writes raise ``DiskFull``.
        draw: makes the random part of a new replica id.
        boot: names the machine's current boot; a process crash and a power cut are told apart by it.
        free_bytes: room on the file system of a directory.

    Raises:
        Refused: another process owns the directory.
        Unavailable: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fsync: Fsync = "always",
        database: Database = "records",
        map_bytes_max: int = 1 << 40,
        draw: Callable[[], str] = lambda: secrets.token_hex(8),
        boot: str | None = None,
        free_bytes: Callable[[Path], int] = _free_bytes,
    ) -> None:
        self.fsync: Fsync = fsync
        self.damaged_count = 0
        """Records whose bytes failed verification, since start."""
        self._directory, self._database = directory, database
        self._free_bytes = free_bytes
        self._map_bytes_max = max(map_bytes_max, MAP_BYTES_MIN)
        self._boot = _boot() if boot is None else boot
        self._resize = threading.Lock()  # LMDB's map may grow only while nobody in the process reads
        self._closed = self._failed = False
        with _as_unavailable(directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(directory)
        try:
            with _as_unavailable(directory):
                intact = self._set_aside_what_may_be_damaged()
                self._open()
                intact &= self._index_is_whole()
                self._environment.sync(True)  # what a crashed owner had not: from here on it counts as ours
                self.replica = self._replica_of_this_state(draw, intact)
                self._write_owner(closed=False)
        except BaseException:
            os.close(self._lock)
            raise

    def load(self, keys: Sequence[bytes]) -> tuple[list[State | None], list[bytes]]:
        """(states in the order of ``keys``, keys whose bytes failed verification).

        Raises:
            DiskFailed: the database cannot be read.
        """
        states: list[State | None] = []
        damaged: list[bytes] = []
        with self._reading() as transaction:
            for key in keys:
                value = transaction.get(key, db=self._records)
                try:
                    states.append(None if value is None else decode_value(key, bytes(value), self._database))
                except (Corrupt, msgspec.DecodeError):
                    states.append(None)
                    damaged.append(key)
        self.damaged_count += len(damaged)
        return states, damaged

    def write(
        self,
        writes: Sequence[tuple[bytes, State]],
        replica: str,
        notes: Sequence[tuple[bytes, bytes | None]] = (),
    ) -> None:
        """Write records, notes and the replica id, all or nothing, durable as the policy says.  An empty
        state, and a note that is ``None``, is removed.

        Raises:
            DiskFull: no room; nothing was written.
            DiskFailed: a write or sync failed; end the process.
        """
        rows = [_row(key, state) for key, state in writes]
        size = sum(len(row.value or b"") for row in rows) + sum(len(value or b"") for _, value in notes)
        self._check_room(size + WRITE_BYTES * (len(rows) + len(notes)))
        while True:
            try:
                self._commit(rows, replica, notes)
            except lmdb.MapFullError as error:
                self._grow(size, error)
            except lmdb.Error as error:
                failure = _full_or_failed(error)
                if isinstance(failure, DiskFailed):
                    self._note_failure(error)
                raise failure from error
            else:
                self.replica = later(self.replica, replica)
                return

    def sync(self) -> None:
        """Force what was written to the disk (policy ``interval``).

        Raises:
            DiskFailed: it did not get there; end the process.
        """
        try:
            self._environment.sync(True)
        except lmdb.Error as error:
            self._note_failure(error)
            raise DiskFailed(f"fsync failed: {error}") from error

    def scan(self, prefix: bytes, after: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Up to ``limit`` keys of living records that start with ``prefix`` and are above ``after``, in
        order, and where to go on (``None`` = there are no more).  Looks at ``SCAN_LOOKED_MAX`` records at
        most.

        Raises:
            DiskFailed: the database cannot be read.
        """
        keys: list[bytes] = []
        with self._reading() as transaction, transaction.cursor(db=self._records) as cursor:
            found = cursor.set_range(max(prefix, after))
            if found and bytes(cursor.key()) == after:
                found = cursor.next()
            last = after
            for _ in range(SCAN_LOOKED_MAX):
                key = bytes(cursor.key())
                if not found or not key.startswith(prefix):
                    return keys, None
                if len(keys) == limit:
                    return keys, last
                last = key
                # A damaged one is named too: reading it will repair it.
                if bytes(cursor.value()[1:2]) != b"\x00":
                    keys.append(key)
                found = cursor.next()
        return keys, last

    def survey(self, leaves: Sequence[int]) -> list[tuple[Entry, ...]]:
        """All records of each of these leaves, from the index, in order of their keys.

        Raises:
            DiskFailed: the database cannot be read.
        """
        with self._reading() as transaction, transaction.cursor(db=self._index) as cursor:
            return [tuple(_entries(cursor, leaf.to_bytes(2, "big"))) for leaf in leaves]

    def sweep(self, first: int, records: int) -> tuple[list[tuple[int, tuple[Entry, ...]]], int | None]:
        """The leaves from ``first`` on that have records, whole, until there are ``records`` of them, and
        the leaf to go on with (``None`` = there are no more).

        Raises:
            DiskFailed: the database cannot be read.
        """
        leaves: list[tuple[int, tuple[Entry, ...]]] = []
        count = 0
        with self._reading() as transaction, transaction.cursor(db=self._index) as cursor:
            found = cursor.set_range(first.to_bytes(2, "big"))
            while found:
                leaf = bytes(cursor.key()[:2])
                number = int.from_bytes(leaf, "big")
                if count >= records:
                    return leaves, number
                entries = tuple(_entries_here(cursor, leaf))
                leaves.append((number, entries))
                count += len(entries)
                found = bool(cursor.key())
        return leaves, None

    def audit(self, resume: bytes, records: int, size_bytes: int) -> Audit:
        """Verify the next stored records: bytes against their checksum, then against the index; and after
        the last of them the index against the records.

        What is looked at is what a reader would be given now: bytes that the operating system still has in
        memory are not read from the device again.

        Args:
            resume: empty = from the beginning, else where the pass had stopped.

        Raises:
            DiskFailed: the database cannot be read.
        """
        with self._reading() as transaction:
            if resume.startswith(_IN_INDEX):
                audit = self._audit_index(transaction, resume[1:], records)
            else:
                audit = self._audit_records(transaction, resume[1:], records, size_bytes)
            index_count = 0 if self._database == "strong" else transaction.stat(self._index)["entries"]
            audit.total_count = int(transaction.stat(self._records)["entries"] + index_count)
        self.damaged_count += len(audit.damaged)
        return audit

    def _audit_records(
        self, transaction: lmdb.Transaction, after: bytes, records: int, size_bytes: int
    ) -> Audit:
        audit = Audit()
        with transaction.cursor(db=self._records) as cursor:
            found = _after(cursor, after)
            while found and audit.looked_count < records and audit.looked_bytes < size_bytes:
                after, value = bytes(cursor.key()), bytes(cursor.value())
                audit.looked_count += 1
                audit.looked_bytes += len(value)
                try:
                    state = decode_value(after, value, self._database)
                except (Corrupt, msgspec.DecodeError):
                    audit.damaged.append(after)
                else:
                    entry = transaction.get(_index_key(after), db=self._index)
                    if (None if entry is None else bytes(entry)) != _entry(after, state, value[HEAD_BYTES:]):
                        audit.misfiled.append(after)
                found = cursor.next()
        if found:
            audit.resume = _IN_RECORDS + after
        elif self._database != "strong":
            audit.resume = _IN_INDEX
        return audit

    def _audit_index(self, transaction: lmdb.Transaction, after: bytes, records: int) -> Audit:
        """An entry without its record: the record was lost in a way that no checksum shows."""
        audit = Audit()
        with transaction.cursor(db=self._index) as cursor:
            found = _after(cursor, after)
            while found and audit.looked_count < records:
                after = bytes(cursor.key())
                audit.looked_count += 1
                if transaction.get(after[2:], db=self._records) is None:
                    audit.lost.append(after[2:])
                found = cursor.next()
        audit.resume = _IN_INDEX + after if found else None
        return audit

    def notes(self) -> Mapping[bytes, bytes]:
        """All notes that were written.

        Raises:
            DiskFailed: the database cannot be read.
        """
        with self._reading() as transaction, transaction.cursor(db=self._notes) as cursor:
            return {bytes(note): bytes(value) for note, value in cursor}

    def record_count(self) -> int:
        """Records, tombstones included."""
        with self._reading() as transaction:
            return int(transaction.stat(self._records)["entries"])

    def used_bytes(self) -> int:
        """Size of the database file."""
        return (self._directory / "data.mdb").stat().st_size

    def close(self) -> None:
        """Sync, note that the directory was left in order, and let it go.  Idempotent.

        Raises:
            DiskFailed: the last sync failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._failed:  # a sync after one that failed may succeed, and means nothing
                self.sync()
                self._write_owner(closed=True)
        finally:
            self._environment.close()
            os.close(self._lock)

    # -- opening

    def _set_aside_what_may_be_damaged(self) -> bool:
        """Whether the database is the one that its last owner used, with nothing lost."""
        owner, data = self._read_owner(), self._directory / "data.mdb"
        if not data.exists():
            return False
        if owner is not None and owner.closed:
            # If reading it ends this process, the next one must not take it for closed.  All else of the file
            # stays: what is not ours by its inode is not made ours by this.
            self._replace_owner(
                msgspec.structs.replace(owner, fsync=self.fsync, boot=self._boot, closed=False)
            )
        elif why := self._lost_writes(owner) or self._noted_damage() or unsound(self._directory):
            self._set_aside(data, why)
            return False
        at = data.stat()
        return owner is not None and (owner.inode, owner.device) == (at.st_ino, at.st_dev)

    def _lost_writes(self, owner: _Owner | None) -> str:
        """Why its last writes may be missing, others having been there; empty = they are not."""
        same_boot = owner is not None and self._boot != "" and owner.boot == self._boot
        if owner is None or owner.fsync == "always" or same_boot:
            return ""
        return f"the machine ended under fsync: {owner.fsync}, so parts of it may be missing"

    def _noted_damage(self) -> str:
        """Why the last owner found the database damaged, if it did and could still say so."""
        try:
            return (self._directory / "damage").read_text()
        except FileNotFoundError:
            return ""

    def _note_failure(self, error: lmdb.Error) -> None:
        """For the next owner.  A commit that failed to reach the disk left what was there before; but pages
        that contradict each other stay so, and of what was written without syncs (they are in the page cache,
        from where a sync that failed has dropped them) parts may be missing."""
        self._failed = True
        if self.fsync != "always" or isinstance(error, _CONTRADICTIONS):
            with suppress(OSError):  # the disk may take nothing any more
                _replace_durably(self._directory / "damage", f"its last owner met: {error}".encode())

    def _set_aside(self, data: Path, why: str) -> None:
        suspect = self._directory / "data.mdb.suspect"
        data.replace(suspect)
        for beside in ("lock.mdb", "damage"):
            (self._directory / beside).unlink(missing_ok=True)
        _log.warning("%s: %s; it is kept as %s, and the shard starts without it", data, why, suspect.name)

    def _open(self) -> None:
        self._environment = lmdb.open(
            str(self._directory),
            map_size=max(MAP_BYTES_MIN, self._file_bytes()),
            max_dbs=8,
            max_readers=READERS_MAX,
            sync=self.fsync == "always",
            metasync=self.fsync == "always",
            mode=0o600,
        )
        self._records = self._environment.open_db(b"records")
        self._meta = self._environment.open_db(b"meta")
        self._notes = self._environment.open_db(b"notes")
        self._index = self._environment.open_db(b"index")

    def _index_is_whole(self) -> bool:
        """Make it anew where it is not.  A database written before there was an index has none; later both
        are written together, and if they do not match, records may be lost, and their counters with them."""
        if self._database == "strong":
            return True
        with self._reading() as transaction:
            index_count = transaction.stat(self._index)["entries"]
            if index_count == transaction.stat(self._records)["entries"]:
                return True
        self._with_room(self._build_index)
        return bool(index_count == 0)

    def _with_room(self, write: Callable[[], None]) -> None:
        """The map of a database that was just opened ends with its file.  What must be written to use it at
        all may take the map over its largest size."""
        while True:
            try:
                write()
            except lmdb.MapFullError:
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])
            else:
                return

    def _build_index(self) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.drop(self._index, delete=False)
            for key, value in transaction.cursor(db=self._records):
                entry = _ENTRY.pack(0, 0)  # of a damaged one: it differs from every intact copy
                with suppress(Corrupt, msgspec.DecodeError):
                    row = _row(bytes(key), decode_value(bytes(key), bytes(value)))
                    entry = row.entry or entry
                transaction.put(_index_key(bytes(key)), entry, db=self._index)

    def _file_bytes(self) -> int:
        data = self._directory / "data.mdb"
        return data.stat().st_size if data.exists() else 0

    def _replica_of_this_state(self, draw: Callable[[], str], intact: bool) -> str:
        with self._reading() as transaction:
            stored = transaction.get(_REPLICA, db=self._meta)
        if stored is not None and intact:
            return bytes(stored).decode()
        replica = first_replica(draw())
        self._with_room(partial(self._begin_as, replica))
        self._environment.sync(True)
        return replica

    def _begin_as(self, replica: str) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.drop(self._notes, delete=False)  # they speak of another state
            transaction.put(_REPLICA, replica.encode(), db=self._meta)

    def _read_owner(self) -> _Owner | None:
        try:
            return msgspec.msgpack.decode((self._directory / "owner.msgpack").read_bytes(), type=_Owner)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _write_owner(self, *, closed: bool) -> None:
        at = (self._directory / "data.mdb").stat()
        self._replace_owner(_Owner(self.fsync, self._boot, at.st_ino, at.st_dev, closed))

    def _replace_owner(self, owner: _Owner) -> None:
        _replace_durably(self._directory / "owner.msgpack", msgspec.msgpack.encode(owner))

    # -- transactions

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        with self._resize:
            try:
                with self._environment.begin(buffers=True) as transaction:  # a scan copies no values
                    yield transaction
            except lmdb.Error as error:
                raise DiskFailed(f"the record database cannot be read: {error}") from error

    def _commit(
        self, rows: Sequence[_Row], replica: str, notes: Sequence[tuple[bytes, bytes | None]]
    ) -> None:
        with self._environment.begin(write=True) as transaction:
            for row in rows:
                _put(transaction, self._records, row.key, row.value)
                _put(transaction, self._index, row.index_key, row.entry)
            for note, noted in notes:
                _put(transaction, self._notes, note, noted)
            stored = transaction.get(_REPLICA, db=self._meta)
            newest = replica if stored is None else _newest(bytes(stored).decode(), replica)
            transaction.put(_REPLICA, newest.encode(), db=self._meta)

    def _check_room(self, need_bytes: int) -> None:
        """Before LMDB finds out: it reports a write that a full disk cut short as an I/O error."""
        try:
            free_bytes = self._free_bytes(self._directory)
        except OSError as error:
            raise DiskFailed(f"the disk does not say how much room it has: {error}") from error
        if free_bytes < RESERVE_BYTES + 2 * need_bytes:
            raise DiskFull(
                f"{free_bytes} bytes free for {need_bytes} and a reserve of {RESERVE_BYTES}; "
                "free some space on that disk and writes go on by themselves"
            )

    def _grow(self, need_bytes: int, error: lmdb.Error) -> None:
        """Double the map.  Address space costs nothing; the file grows with what is written."""
        with self._resize:
            size = self._environment.info()["map_size"]
            if size >= self._map_bytes_max:
                raise DiskFull(f"the record database has its largest size, {size} bytes: {error}") from error
            self._environment.set_mapsize(min(self._map_bytes_max, max(2 * size, size + 4 * need_bytes)))


class _Row(NamedTuple):
    """One record's write."""

    key: bytes
    value: bytes | None
    index_key: bytes
    entry: bytes | None
    """In the index, where strong records have none: they are not compared."""


def _row(key: bytes, state: State) -> _Row:
    if isinstance(state, StrongState):
        if state == EMPTY:
            return _Row(key, None, _index_key(key), None)
        return _Row(key, encode_value(key, state), _index_key(key), None)
    if not state.context:
        return _Row(key, None, _index_key(key), None)
    body = msgspec.msgpack.encode(state)
    return _Row(key, encode_body(key, state, body), _index_key(key), _entry(key, state, body))


def _entry(key: bytes, state: State, body: bytes) -> bytes | None:
    if isinstance(state, StrongState):
        return None
    return _ENTRY.pack(encoded_digest(key, body), dead_since(state))


def _index_key(key: bytes) -> bytes:
    return leaf_of(key).to_bytes(2, "big") + key


def _put(transaction: lmdb.Transaction, database: Any, key: bytes, value: bytes | None) -> None:
    if value is None:
        transaction.delete(key, db=database)
    else:
        transaction.put(key, value, db=database)


def _after(cursor: lmdb.Cursor, key: bytes) -> bool:
    """Move to the first entry above ``key``; empty = the very first."""
    if not key:
        return bool(cursor.first())
    found = cursor.set_range(key)
    return bool(cursor.next() if found and bytes(cursor.key()) == key else found)


def _entries(cursor: lmdb.Cursor, leaf: bytes) -> Iterator[Entry]:
    if cursor.set_range(leaf):
        yield from _entries_here(cursor, leaf)


def _entries_here(cursor: lmdb.Cursor, leaf: bytes) -> Iterator[Entry]:
    """From where the cursor stands to the end of ``leaf``; it then stands behind, or nowhere."""
    found = True
    while found:
        key = bytes(cursor.key())
        if not key.startswith(leaf):
            return
        digest, dead = _ENTRY.unpack(cursor.value())
        yield Entry(key[2:], digest, Stamp(dead))
        found = cursor.next()


def _newest(stored: str, replica: str) -> str:
    same = stored.partition(".")[0] == replica.partition(".")[0]
    return later(stored, replica) if same else replica


def _full_or_failed(error: lmdb.Error) -> KVCommError:
    """LMDB writes pages before it syncs and names them last: an error that says "no room" came before
    anything counted."""
    if isinstance(error, lmdb.DiskError) or any(os.strerror(number) in str(error) for number in _NO_ROOM):
        return DiskFull(f"no room for the record database: {error}")
    return DiskFailed(f"the record database could not be written: {error}")


def _boot() -> str:
    """Empty where the system does not name its boots: then every unclean start counts as a power cut."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _lock(directory: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Refused(f"another process owns {directory}; two shards cannot share a directory") from None
    return descriptor


def _replace_durably(path: Path, data: bytes) -> None:
    """The file has the old or the new content after any crash."""
    beside = path.with_suffix(".new")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _as_unavailable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"the shard's directory {directory} cannot be used: {error}") from error
    except lmdb.Error as error:
        raise Unavailable(f"the record database in {directory} cannot be opened: {error}") from error
