"""``Purge``: drops, in the background, what this shard does not keep any more.

A copy that an earlier map left here would be a danger: it is not asked when a tombstone is buried, and would
bring the deleted value back when the shard becomes an owner of the record again.  So every shard is made
*clean* after each move, and the next one begins when all are (``controller``)::

    a stable map ──► Sweep (some records) ──► not ours by it? read them, raise the counter floor, durable,
          ▲                │     ▲                drop them ── rest as long as it took ──┐
          │                │     └───────────────────────────────────────────────────────┘
    another map          the end: note "clean for this placement", durable

**Only under a stable map.**  While keys move everybody in both placements keeps them.  And nothing comes back
behind the sweep: no record is written that this shard does not keep (changes look at the ring when they are
applied); what was on its way to the disk when the map came is dropped first, behind that write.

**The floor.**  A record takes its counters with it.  Those that this replica gave out must not be given out
again, see ``l3_shard.tombstones``.

**The note.**  It must not outlive what it says.  A shard that heard of a move, was given records, and was
restarted under the old map again would take itself for clean.  So as long as it is not, every write of
records carries a mark with a *generation* above that of the note, and the note counts only if it is above
the mark; in whatever order the two came to the disk.  A crash anywhere else only begins the pass anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcomm.errors import KVCommError, Refused
from l3_shard import dvv
from l3_shard.merkle import LEAVES
from l3_shard.storage import Sweep, Swept

if TYPE_CHECKING:
    from kvcomm.machine import Ticket
    from kvcomm.wire.messages import RecordState
    from l3_shard.desk import Desk
    from l3_shard.lines import Lines, Local
    from l3_shard.ring import Ring
    from l3_shard.timers import Timers

CLEAN, UNCLEAN = b"clean", b"unclean"
SWEEP_RECORDS = 512
CHUNK_MIN, CHUNK_MAX = 16, 256
"""Records dropped at once."""
CHUNK_BYTES = 1 << 20
"""Values read for that, about."""
RETRY_S = 1.0
_GENERATION_BYTES = 8

Note = tuple[bytes, bytes | None]


class Purge:
    """See the module.

    Args:
        ring: the one in force.
        keeps: whether a stored key is ours to keep by it.
        raise_floor: makes the counter floor as high as these states, durably, and says whether it is.
        above_floor: whether a state has a counter of ours that the floor does not cover.
        save: writes a note and says whether it is durable.
        stored: notes of an earlier life.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines[RecordState],
        timers: Timers,
        *,
        ring: Callable[[], Ring],
        keeps: Callable[[bytes], bool],
        raise_floor: Callable[[Sequence[RecordState], Callable[[bool], None]], None],
        above_floor: Callable[[RecordState], bool],
        save: Callable[[bytes, bytes | None, Callable[[bool], None]], None],
        stored: Mapping[bytes, bytes],
    ) -> None:
        self.dropped_count = 0
        """Records, since start."""
        self.dropped_bytes = 0
        """Their values."""
        self._desk, self._lines, self._timers = desk, lines, timers
        self._ring, self._keeps, self._save = ring, keeps, save
        self._raise_floor, self._above_floor = raise_floor, above_floor
        generation, self._noted = _read(stored.get(CLEAN, b""))
        marked, _ = _read(stored.get(UNCLEAN, b""))
        if marked >= generation:
            self._noted = b""
        self._generation = max(generation, marked)
        self._clean = False
        self._marking = False
        """A write of records has been ordered since we were clean last, with the mark of this generation."""
        self._noting = False
        self._pass = 0
        """Number of the pass; what belongs to another comes too late."""
        self._placement: bytes | None = None
        """That the pass is for; ``None`` = there is none."""
        self._began_with = 0
        self._leaf = 0
        self._sweep: Ticket | None = None
        self._failed = False
        self._chunk = CHUNK_MIN

    @property
    def clean(self) -> bool:
        """Whether this shard has nothing but what it keeps by the map in force, a stable one."""
        return self._clean

    @property
    def left_count(self) -> int:
        """Records to be dropped, about: as many of the leaves to come as of those that were looked at."""
        if self._placement is None or not self._leaf:
            return 0
        dropped = self.dropped_count - self._began_with
        return int(dropped * (LEAVES - self._leaf) / self._leaf)

    @property
    def mean_bytes(self) -> float:
        """Of the values of a record that was dropped."""
        return self.dropped_bytes / self.dropped_count if self.dropped_count else 0.0

    def placed(self) -> None:
        """Another ring is in force."""
        ring = self._ring()
        stable = not ring.moving and bool(ring.names)
        self._clean = stable and self._noted == ring.placement and not self._marking
        if not stable or self._clean or ring.placement != self._placement:
            self._abandon()
        if stable and not self._clean and self._placement is None:
            self._placement = ring.placement
            self._timers.at(self._desk.now, partial(self._begin, self._pass))

    def marks(self) -> tuple[Note, ...]:
        """What every write of records has to carry.  Nothing while the end of a pass is noted: under its map
        nothing is written that we do not keep."""
        if self._clean or self._noting:
            return ()
        if not self._marking:
            self._marking = True
            self._generation += 1
        return ((UNCLEAN, _generation(self._generation)),)

    # -- a pass

    def _abandon(self) -> None:
        self._pass += 1
        self._placement, self._sweep, self._noting = None, None, False

    def _begin(self, number: int) -> None:
        if number != self._pass:
            return
        self._failed, self._leaf, self._began_with = False, 0, self.dropped_count
        foreign = deque(key for key in self._lines.writing() if not self._keeps(key))
        self._drop(number, foreign, partial(self._next, number))

    def _next(self, number: int) -> None:
        if number == self._pass:
            self._sweep = self._desk.ticket()
            self._desk.order(Sweep(self._sweep, self._leaf, SWEEP_RECORDS))

    def swept(self, event: Swept) -> bool:
        """Storage answered a ``Sweep``; False = it is not ours."""
        if event.ticket != self._sweep:
            return False
        self._sweep, number, began_at = None, self._pass, self._desk.now
        self._failed |= bool(event.failure)
        foreign = deque(
            entry.key for _, entries in event.leaves for entry in entries if not self._keeps(entry.key)
        )
        last = event.resume is None or bool(event.failure)
        self._leaf = self._leaf if event.resume is None else event.resume
        found = bool(foreign)

        def over() -> None:
            if last:
                self._over(number)
            elif found:
                self._rest(began_at, partial(self._next, number))
            else:
                self._next(number)

        self._drop(number, foreign, over)
        return True

    def _rest(self, began_at: float, then: Callable[[], None]) -> None:
        now = self._desk.now
        self._timers.at(now + (now - began_at), then)

    def _over(self, number: int) -> None:
        """All that was found is gone: say so, durably, or begin anew."""
        if number != self._pass:
            return
        if self._failed:
            self._again(number)
            return
        assert self._placement is not None
        placement, self._generation = self._placement, self._generation + 1
        self._noting, self._marking = True, False  # a mark from here on is of another generation
        self._noted = b""  # and without one an older note would count again
        note = _generation(self._generation) + placement

        def noted(durable: bool) -> None:
            if number != self._pass:
                return
            self._noting = False
            if durable:
                self._noted, self._clean, self._placement = placement, True, None
            else:
                self._again(number)

        self._save(CLEAN, note, noted)

    def _again(self, number: int) -> None:
        self._timers.at(self._desk.now + RETRY_S, partial(self._begin, number))

    # -- dropping

    def _drop(self, number: int, keys: deque[bytes], then: Callable[[], None]) -> None:
        """One chunk after the other."""
        if number != self._pass:
            return
        if not keys:
            then()
            return
        chunk = [keys.popleft() for _ in range(min(self._chunk, len(keys)))]
        _Chunk(self, chunk, self._desk.now, partial(self._dropped, number, keys, then)).start()

    def _dropped(self, number: int, keys: deque[bytes], then: Callable[[], None], chunk: _Chunk) -> None:
        self._failed |= chunk.failed
        self.dropped_count += chunk.dropped_count
        self.dropped_bytes += chunk.value_bytes
        if chunk.value_bytes > CHUNK_BYTES:
            self._chunk = max(1, self._chunk // 2)
        elif chunk.value_bytes < CHUNK_BYTES // 2:
            self._chunk = min(CHUNK_MAX, 2 * self._chunk)
        if keys:
            self._rest(chunk.began_at, partial(self._drop, number, keys, then))
        else:
            self._drop(number, keys, then)

    # -- what a chunk needs

    def read(self, key: bytes, reader: Callable[[Local[RecordState]], None]) -> None:
        self._lines.read(key, reader, passing=True)

    def raise_floor(self, states: Sequence[RecordState], told: Callable[[bool], None]) -> None:
        self._raise_floor(states, told)

    def change(self, key: bytes, drop: _Drop) -> None:
        self._lines.change(key, drop, mends=True, passing=True)

    def may_go(self, key: bytes, state: RecordState) -> bool:
        """Whether a record that was found foreign still is, and the floor covers what it has become."""
        return not self._ring().moving and not self._keeps(key) and not self._above_floor(state)


class _Chunk:
    """Some records that go together."""

    def __init__(
        self, purge: Purge, keys: Sequence[bytes], began_at: float, done: Callable[[_Chunk], None]
    ) -> None:
        self.began_at = began_at
        self.failed = False
        self.dropped_count = self.value_bytes = 0
        self._purge, self._keys, self._done = purge, keys, done
        self._states: list[RecordState] = []
        self._open_count = len(keys)

    def start(self) -> None:
        for key in self._keys:
            self._purge.read(key, self._read)

    def _read(self, local: Local[RecordState]) -> None:
        self.failed |= bool(local.failure)
        self._states.append(local.state)
        self._open_count -= 1
        if not self._open_count:
            self.value_bytes = sum(map(dvv.value_bytes, self._states))
            self._purge.raise_floor(self._states, self._floored)

    def _floored(self, durable: bool) -> None:
        self._states.clear()
        if not durable:
            self.failed = True
            self._done(self)
            return
        self._open_count = len(self._keys)
        for key in self._keys:
            drop = _Drop(partial(self._purge.may_go, key), self._settled)
            try:
                self._purge.change(key, drop)
            except Refused:  # busy: the next pass drops it
                self._settled(False)

    def _settled(self, dropped: bool) -> None:
        self.dropped_count += dropped
        self.failed |= not dropped
        self._open_count -= 1
        if not self._open_count:
            self._done(self)


class _Drop:
    """A ``Change``: there is no such record here."""

    def __init__(self, may_go: Callable[[RecordState], bool], done: Callable[[bool], None]) -> None:
        self._may_go, self._done, self._goes = may_go, done, False

    def apply(self, state: RecordState) -> RecordState:
        self._goes = self._may_go(state)
        return dvv.EMPTY if self._goes else state

    def durable(self, state: RecordState) -> None:
        self._done(self._goes)

    def failed(self, error: KVCommError) -> None:
        self._done(False)


def _generation(number: int) -> bytes:
    return number.to_bytes(_GENERATION_BYTES, "big")


def _read(note: bytes) -> tuple[int, bytes]:
    """(generation, placement) of a note; zero and nothing where there is none."""
    return int.from_bytes(note[:_GENERATION_BYTES], "big"), note[_GENERATION_BYTES:]
