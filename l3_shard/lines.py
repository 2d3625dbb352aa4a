"""``Lines``: one queue a record, so that no change is lost between reading it and writing it back.

Theory of operation.  A record is changed by loading it, applying the change, and persisting the result;
storage takes time, and others want to change the same record meanwhile.  Each record in use has a line::

            read / change                  Loaded                    flush
    (none) ──────────────► loading ──────────────────► at rest ◄───────────────┐
                                                          │  changes wait      │ Persisted: durable = written
                                                          ▼                    │
                                                      applied to a copy ──► persisting  (changes that come now
                                                      wait)

Changes that wait are applied one after the other and persisted *together*: a hot record costs one write a
round trip to the disk, however many change it (group commit), and everything that one ``flush`` applies, over
all records, is one :class:`~l3_shard.storage.Persist`.  Readers see the last durable state and never wait for
a disk.  A line that nobody uses is forgotten; its durable state is kept as long as there is room, so that a
record that is read often is loaded, verified and decoded once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol

from kvcomm.errors import KVCommError, Refused, Unavailable
from kvcomm.machine import Effect, Ticket
from l3_shard.storage import Database, Load, Loaded, Persist, Persisted, S


class Change(Protocol[S]):
    """A read-modify-write of one record."""

    def apply(self, state: S) -> S:
        """The record after the change.  A raised ``KVCommError`` refuses it: the record stays, ``failed`` is
        called.
        """
        ...

    def durable(self, state: S) -> None:
        """The change is on the disk, as a part of ``state``."""
        ...

    def failed(self, error: KVCommError) -> None:
        """The change did not happen."""
        ...


@dataclass(frozen=True, slots=True)
class Local(Generic[S]):
    """What this replica has of a record."""

    state: S
    damaged: bool = False
    """There was a record and its bytes failed verification; ``state`` is what came since, and may lack what
    was lost."""
    failure: str = ""
    """Not empty: the storage could not be read, and why."""


Reader = Callable[[Local[S]], None]
Notes = tuple[tuple[bytes, bytes | None], ...]

TURN_BYTES = 1 << 20
"""A change of a set of 4,000 elements takes 13 ms: 256 in one turn would hold up all others for 3 s."""
DAMAGED_MAX = 65_536
"""Damaged records remembered; over it they are forgotten, and found once more."""


class _Same(Generic[S]):
    """A ``Change`` that changes nothing."""

    def apply(self, state: S) -> S:
        return state

    def durable(self, state: S) -> None:
        """Nobody waits for it."""

    def failed(self, error: KVCommError) -> None:
        """The disk is full or cannot be read: the next pass asks again."""


@dataclass(eq=False, slots=True)
class _Line(Generic[S]):
    written: S
    """What the ``Persist`` in flight holds, while ``writing`` is not empty."""
    local: Local[S] | None = None
    """Last durable state; ``None`` while it is being loaded."""
    readers: list[Reader[S]] = field(default_factory=list)
    waiting: deque[Change[S]] = field(default_factory=deque)
    writing: list[Change[S]] = field(default_factory=list)
    passing: bool = False
    """Only for those who pass over all records: it is not kept for others afterwards."""
    mending: Change[S] | None = None
    """The one of those that wait which may write over damaged bytes."""

    @property
    def idle(self) -> bool:
        return not self.readers and not self.waiting and not self.writing


class Recent(Generic[S]):
    """Durable states of records that are not in use now, the least recently used dropped first."""

    OVERHEAD_BYTES = 1_024
    """Of a state of no values, about."""

    def __init__(self, bytes_max: int, value_bytes: Callable[[S], int]) -> None:
        self._bytes_max, self._value_bytes = bytes_max, value_bytes
        self._held: OrderedDict[bytes, tuple[Local[S], int]] = OrderedDict()
        self.held_bytes = 0

    def get(self, key: bytes) -> Local[S] | None:
        """The state of ``key``, and it counts as used."""
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        return held[0]

    def take(self, key: bytes) -> Local[S] | None:
        """The state of ``key``, which is in use from now on."""
        held = self._held.pop(key, None)
        if held is None:
            return None
        self.held_bytes -= held[1]
        return held[0]

    def keep(self, key: bytes, local: Local[S]) -> None:
        """``key`` is not in use any more."""
        size = self.OVERHEAD_BYTES + self._value_bytes(local.state)
        self._held[key] = (local, size)
        self.held_bytes += size
        while self.held_bytes > self._bytes_max:
            self.held_bytes -= self._held.popitem(last=False)[1][1]

    def check(self) -> None:
        assert self.held_bytes == sum(size for _, size in self._held.values()) <= max(0, self._bytes_max)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held


class Lines(Generic[S]):
    """The records in use of one shard.  ``changes_max`` bounds what may wait for one record,
    ``recent_bytes_max`` what is kept of records that are not in use; ``tickets`` are unused numbers.

    Args:
        empty: the state of a record that is not stored.
        value_bytes: size of what a state holds.
        database: where the records are stored.
        mends: whether a record whose bytes failed verification may be written anew, as if it had been empty.
        turn_bytes: changes of one record are applied in one turn until their results have this size together.
    """

    def __init__(
        self,
        changes_max: int,
        tickets: Iterator[int],
        recent_bytes_max: int = 0,
        *,
        empty: S,
        value_bytes: Callable[[S], int],
        database: Database = "records",
        mends: bool = True,
        turn_bytes: int = TURN_BYTES,
    ) -> None:
        self._empty, self._database, self._mends = empty, database, mends
        self._changes_max, self._turn_bytes, self._value_bytes = changes_max, turn_bytes, value_bytes
        self._recent = Recent(recent_bytes_max, value_bytes)
        self._tickets = tickets
        self._lines: dict[bytes, _Line[S]] = {}
        self._to_load: list[bytes] = []
        self._to_apply: dict[bytes, None] = {}  # an ordered set
        self._loads: dict[Ticket, tuple[bytes, ...]] = {}
        self._persists: dict[Ticket, tuple[bytes, ...]] = {}
        self._damaged: set[bytes] = set()  # found so, and not mended since, whatever was written over it
        self._overwritten: set[bytes] = set()  # of them; their new bytes may be damaged in their turn
        self._to_rewrite: set[bytes] = set()  # to be persisted although nothing changed

    def known(self, key: bytes) -> S | None:
        """The durable state, if it is here."""
        line = self._lines.get(key)
        local = self._recent.get(key) if line is None else line.local
        return None if local is None or local.damaged or local.failure else local.state

    def read(self, key: bytes, reader: Reader[S], *, passing: bool = False) -> None:
        """Call ``reader`` with the durable state, at once if it is known.  ``passing``: the reader goes
        through many records, and what it loads is not kept in memory for the next one."""
        line = self._line(key, passing)
        if line.local is None:
            line.readers.append(reader)
        else:
            reader(line.local)
            self._forget(key, line)

    def change(self, key: bytes, change: Change[S], *, mends: bool = False, passing: bool = False) -> None:
        """Queue a change.  One that ``mends`` is applied to the empty state where the record is damaged, and
        what it makes of it is whole.  ``passing`` as for :meth:`read`.

        Raises:
            Refused: ``changes_max`` changes wait for this record already.
        """
        line = self._line(key, passing)
        if len(line.waiting) >= self._changes_max:
            raise Refused(f"busy: {len(line.waiting)} changes wait for one record; slow down")
        line.waiting.append(change)
        if mends:
            line.mending = change
        if line.local is not None and not line.writing:
            self._to_apply[key] = None

    def withdraw(self, key: bytes, change: Change[S]) -> bool:
        """Take back a change; False = it is being written, or is over."""
        line = self._lines.get(key)
        if line is None or change not in line.waiting:
            return False
        line.waiting.remove(change)
        self._forget(key, line)
        return True

    def loaded(self, event: Loaded[S]) -> list[bytes]:
        """Storage answered a ``Load``; the damaged records that were not known to be.  One that was known is
        news again if it had been written since: what was written is lost too."""
        keys = self._loads.pop(event.ticket)
        damaged = set(event.damaged)
        found = [key for key in event.damaged if self._is_news(key)]
        self._note_damage(found)
        states = event.states if not event.failure else (None,) * len(keys)
        for key, state in zip(keys, states, strict=True):
            line = self._lines[key]
            line.local = Local(state or self._empty, key in damaged or key in self._damaged, event.failure)
            readers, line.readers = line.readers, []
            for reader in readers:
                reader(line.local)
            if line.waiting:
                self._to_apply[key] = None
            self._forget(key, line)
        return found

    def persisted(self, event: Persisted) -> tuple[bytes, ...]:
        """Storage answered a ``Persist``, ``durable`` or ``full``; the records that it was about."""
        keys = self._persists.pop(event.ticket)
        for key in keys:
            line = self._lines[key]
            changes, line.writing = line.writing, []
            mended = line.mending is not None and line.mending in changes
            if mended:
                line.mending = None
            if event.outcome == "durable":
                if mended:
                    self._damaged.discard(key)
                    self._overwritten.discard(key)
                line.local = Local(line.written, key in self._damaged)
                if line.local.damaged:
                    self._overwritten.add(key)
            for change in changes:
                if event.outcome == "durable":
                    change.durable(line.written)
                else:
                    change.failed(Unavailable(f"the disk is full, nothing was written: {event.text}"))
            if line.waiting:
                self._to_apply[key] = None
            self._forget(key, line)
        return keys

    def mend(self, key: bytes) -> None:
        """What a damaged record may have held is in our copy again: its word counts."""
        self._damaged.discard(key)
        self._overwritten.discard(key)
        line = self._lines.get(key)
        if line is not None and line.local is not None and line.local.damaged:
            line.local = Local(line.local.state)

    def rewrite(self, key: bytes) -> None:
        """Persist the record as it is: what lies on the disk beside or in place of it is wrong."""
        line = self._line(key)
        if not line.writing:  # else that write does it
            self._to_rewrite.add(key)
            line.waiting.append(_Same())
            if line.local is not None:
                self._to_apply[key] = None

    def lose(self, key: bytes) -> bool:
        """The record is not on the disk, though it was written; whether that is news.  From now on it counts
        as damaged."""
        line = self._lines.get(key)
        if not self._is_news(key) or (line is not None and (line.local is None or line.writing)):
            return False
        self._note_damage([key])
        self._recent.take(key)
        if line is not None and line.local is not None:
            line.local = Local(line.local.state, damaged=True, failure=line.local.failure)
        return True

    def _is_news(self, key: bytes) -> bool:
        return key not in self._damaged or key in self._overwritten

    def _note_damage(self, keys: list[bytes]) -> None:
        if len(self._damaged) + len(keys) > DAMAGED_MAX:
            self._damaged.clear()
            self._overwritten.clear()
        self._damaged.update(keys)
        self._overwritten.difference_update(keys)

    def damaged(self) -> list[bytes]:
        """Records that were found damaged and are not whole again yet, in order."""
        return sorted(self._damaged)

    def writing(self) -> list[bytes]:
        """Records with a write in flight: a scan may not see them yet."""
        return [key for keys in self._persists.values() for key in keys]

    def awaits(self, ticket: Ticket) -> bool:
        """Whether the answer to this ``Load`` or ``Persist`` is for us."""
        return ticket in self._loads or ticket in self._persists

    @property
    def pending(self) -> bool:
        """Whether ``flush`` has something to do."""
        return bool(self._to_load or self._to_apply)

    def flush(self, replica: str, notes: Callable[[], Notes] = tuple) -> list[Effect]:
        """Order what has come together: one ``Load`` and one ``Persist`` at most.

        ``replica`` is the id that changes applied now were dotted with; ``notes`` go with the ``Persist``.
        """
        effects: list[Effect] = []
        if self._to_load:
            keys, self._to_load = tuple(self._to_load), []
            ticket = self._ticket()
            self._loads[ticket] = keys
            effects.append(Load(ticket, keys, self._database))
        if writes := self._apply():
            ticket = self._ticket()
            self._persists[ticket] = tuple(key for key, _ in writes)
            effects.append(Persist(ticket, writes, replica, self._database, notes()))
        return effects

    def _apply(self) -> tuple[tuple[bytes, S], ...]:
        writes: list[tuple[bytes, S]] = []
        while self._to_apply:
            key = next(iter(self._to_apply))
            del self._to_apply[key]
            line = self._lines.get(key)
            if line is None or line.writing:
                continue
            if self._apply_line(line, key in self._to_rewrite):
                writes.append((key, line.written))
            elif line.waiting:
                self._to_apply[key] = None
            self._to_rewrite.discard(key)
            self._forget(key, line)
        return tuple(writes)

    def _apply_line(self, line: _Line[S], rewrites: bool) -> bool:
        """Apply what waits, as much as a turn takes; whether there is something to persist."""
        assert line.local is not None
        changes, line.waiting = line.waiting, deque()
        blocked = line.local.damaged and not self._mends
        if blocked and line.mending is not None and not line.local.failure:
            others = [change for change in changes if change is not line.mending]
            changes = deque([line.mending])
            for change in others:
                change.failed(Unavailable("nothing was written, the record is being mended"))
        elif line.local.failure or blocked:
            line.mending = None
            why = line.local.failure or "the record's bytes failed verification"
            for change in changes:
                change.failed(Unavailable(f"nothing was written, the disk cannot be read: {why}"))
            return False
        state, accepted, size = line.local.state, [], 0
        while changes and size <= self._turn_bytes:
            change = changes.popleft()
            try:
                state = change.apply(state)
            except KVCommError as error:
                change.failed(error)
            else:
                accepted.append(change)
            size += self._value_bytes(state)
        line.waiting.extendleft(reversed(changes))
        if not accepted or (state == line.local.state and not line.local.damaged and not rewrites):
            line.mending = None
            for change in accepted:
                change.durable(state)
            return False
        line.writing, line.written = accepted, state
        return True

    def _line(self, key: bytes, passing: bool = False) -> _Line[S]:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(self._empty, self._recent.take(key))
            line.passing = passing and line.local is None
            if line.local is None:
                self._to_load.append(key)
        line.passing &= passing
        return line

    def _forget(self, key: bytes, line: _Line[S]) -> None:
        if line.idle and line.local is not None and self._lines.get(key) is line:
            del self._lines[key]
            self._to_apply.pop(key, None)
            if not line.local.damaged and not line.local.failure and not line.passing:
                self._recent.keep(key, line.local)

    def _ticket(self) -> Ticket:
        return Ticket(next(self._tickets))

    def check(self) -> None:
        """Assert the invariants of the drawing above."""
        loading = set(self._to_load).union(*self._loads.values())
        persisting = [key for keys in self._persists.values() for key in keys]
        assert len(persisting) == len(set(persisting)), "two writes of one record in flight"
        for key, line in self._lines.items():
            assert (line.local is None) == (key in loading), f"line {key!r} and its load disagree"
            assert bool(line.writing) == (key in persisting), f"line {key!r} and its write disagree"
            assert not line.readers or line.local is None, f"line {key!r} lets readers wait for nothing"
            assert not line.waiting or line.local is None or line.writing or key in self._to_apply, (
                f"{key!r} is stuck"
            )
            assert len(line.waiting) <= self._changes_max
            assert line.local is None or not line.idle, f"line {key!r} is kept for nobody"
            assert key not in self._recent, f"{key!r} is both in use and not"
        assert self._overwritten <= self._damaged
        assert self._to_rewrite <= self._lines.keys(), "a record is to be written anew and not in use"
        self._recent.check()
        assert set(persisting) <= self._lines.keys() and loading <= self._lines.keys()

    def story(self, key: bytes) -> str:
        """The line of ``key``, for a person."""
        line = self._lines.get(key)
        if line is None:
            return "not in use" if key not in self._recent else f"not in use; durable {self.known(key)}"
        if line.local is None:
            return f"loading; {len(line.readers)} readers and {len(line.waiting)} changes wait"
        flags = " damaged" if line.local.damaged else ""
        changes = f"{len(line.writing)} changes being written, {len(line.waiting)} wait"
        return f"durable{flags} {line.local.state}; {changes}"
