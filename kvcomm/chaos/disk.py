"""``Disk``: what one database of a shard keeps, and what a crash, a full or a failing disk makes of it.

A shard has two, as the shipped one has: its eventual records, and its strong ones, which are always synced.
Each mirrors the contract of ``l3_shard.store``, byte for byte where it can be seen: values are stored as the
store encodes them (the codec comes by constructor), a transaction is all or nothing, and

* policy ``always``: a commit takes time and is durable when it ends.  One that was under way at a crash
  happened or did not, as a whole;
* policies ``interval`` and ``never``: a commit survives ``kill -9`` at once.  A power cut costs the
  database: it is set aside, and the shard starts empty under a new replica id;
* no room: nothing of that transaction was written; a failed sync: nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from kvcomm.chaos.draw import Draw
from kvcomm.wire.messages import RecordState, StrongState

Fsync = Literal["always", "interval", "never"]
Outcome = Literal["durable", "full", "failed"]
S = TypeVar("S", bound=RecordState | StrongState)
Notes = Sequence[tuple[bytes, bytes | None]]
Entry = tuple[int, int]
"""What the index keeps of a record: digest, stamp since which it is dead."""


SWEEP_LEAVES, AUDIT_RECORDS = 4, 4
"""What one sweep or audit takes at most."""


class Audit(NamedTuple):
    """See ``l3_shard.storage.Audited``."""

    looked_count: int
    looked_bytes: int
    total_count: int
    damaged: tuple[bytes, ...]
    lost: tuple[bytes, ...]
    misfiled: tuple[bytes, ...]
    resume: bytes | None


class Part(NamedTuple, Generic[S]):
    """What one order of the machine adds to a transaction."""

    writes: Sequence[tuple[bytes, S]]
    replica: str
    """Of the database with the strong records: its member id."""
    notes: Notes = ()
    """``None`` removes a note."""


_ALIVE_AT = 1
"""Byte of a stored value that says whether a reader finds a value in it; 0 = a tombstone."""


class Disk(Generic[S]):
    """One database.

    Args:
        encode: (key, state) -> stored bytes; ``decode`` is its inverse and raises for damaged ones.
        removes: whether writing this state removes the record.
        entry: (leaf of the Merkle tree, entry of the index) of a record; ``None`` = there is no index.
        damage: the errors that ``decode`` raises.
        later: of two replica ids the one that was drawn later.
        new_replica: draws a replica id that nobody has.
    """

    def __init__(
        self,
        draw: Draw,
        fsync: Fsync,
        *,
        encode: Callable[[bytes, S], bytes],
        decode: Callable[[bytes, bytes], S],
        removes: Callable[[S], bool],
        entry: Callable[[bytes, S], tuple[int, Entry]] | None,
        damage: tuple[type[Exception], ...],
        later: Callable[[str, str], str],
        new_replica: Callable[[], str],
    ) -> None:
        self.fsync: Fsync = fsync
        self.replica = new_replica()
        self.values: dict[bytes, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        self.index: dict[int, dict[bytes, Entry]] = {}
        """By leaf."""
        self.room_bytes: int | None = None
        """Bytes that one commit finds room for: the database uses freed pages again.  ``None`` = any."""
        self.failing = False
        """Whether the next sync fails."""
        self.stalled_until = 0.0
        """What is asked of it takes until then (seconds of the simulation)."""
        self.heard: Callable[[bytes, S], None] = _nobody
        """Hears of every record that is written."""
        self._draw = draw
        self._encode: Callable[[bytes, S], bytes] = encode
        self._decode: Callable[[bytes, bytes], S] = decode
        self._removes: Callable[[S], bool] = removes
        self._entry: Callable[[bytes, S], tuple[int, Entry]] | None = entry
        self._damage = damage
        self._later, self._new_replica = later, new_replica
        self._under_way: list[Part[S]] = []
        self._retired: dict[bytes, list[bytes]] = {}

    # -- what the process does

    def load(self, keys: Sequence[bytes]) -> tuple[tuple[S | None, ...], tuple[bytes, ...]]:
        """(states in the order of ``keys``, keys whose bytes failed verification)."""
        states: list[S | None] = []
        damaged: list[bytes] = []
        for key in keys:
            value = self.values.get(key)
            try:
                states.append(None if value is None else self._decode(key, value))
            except self._damage:
                states.append(None)
                damaged.append(key)
        return tuple(states), tuple(damaged)

    def scan(self, prefix: bytes, after: bytes, limit: int) -> tuple[tuple[bytes, ...], bytes | None]:
        """Living keys in order, and where to go on.  Looks at few of them: scans must be able to resume."""
        looked = [key for key in sorted(self.values) if key.startswith(prefix) and key > after]
        part = looked[: max(2, limit // 2)]
        keys = tuple(key for key in part if self.values[key][_ALIVE_AT : _ALIVE_AT + 1] != b"\x00")[:limit]
        if len(keys) == limit and keys[-1] != part[-1]:
            return keys, keys[-1]
        return keys, part[-1] if len(part) < len(looked) else None

    def survey(self, leaves: Sequence[int]) -> list[list[tuple[bytes, Entry]]]:
        """What the index has of these leaves, in order of the keys."""
        return [sorted(self.index[leaf].items()) if leaf in self.index else [] for leaf in leaves]

    def sweep(
        self, first: int, records: int
    ) -> tuple[list[tuple[int, list[tuple[bytes, Entry]]]], int | None]:
        """The leaves from ``first`` on that have records, and where to go on.  Takes few of them: sweeps
        must be able to resume."""
        held = [leaf for leaf in sorted(self.index) if leaf >= first and self.index[leaf]]
        part = held[: max(1, min(records, SWEEP_LEAVES))]
        leaves = [(leaf, sorted(self.index[leaf].items())) for leaf in part]
        return leaves, held[len(part)] if len(part) < len(held) else None

    def audit(self, resume: bytes, records: int) -> Audit:
        """Verify the next values in order of their keys, the index with them."""
        looked = [key for key in sorted(self.values.keys() | self._indexed()) if key > resume]
        part = looked[: min(records, AUDIT_RECORDS)]
        damaged: list[bytes] = []
        lost: list[bytes] = []
        misfiled: list[bytes] = []
        for key in part:
            (state,), broken = self.load([key])
            if broken:
                damaged.append(key)
            elif state is None:
                lost.append(key)
            elif self._entry is not None:
                leaf, entry = self._entry(key, state)
                if self.index.get(leaf, {}).get(key) != entry:
                    misfiled.append(key)
        size_bytes = sum(len(self.values.get(key, b"")) for key in part)
        goes_on = part[-1] if len(part) < len(looked) else None
        found = tuple(damaged), tuple(lost), tuple(misfiled)
        return Audit(len(part), size_bytes, len(self.values), *found, goes_on)

    def _indexed(self) -> set[bytes]:
        return {key for leaf in self.index.values() for key in leaf}

    def begin(self, batch: Sequence[Part[S]]) -> None:
        """A transaction with everything in ``batch`` is under way; :meth:`commit` ends it."""
        self._under_way = list(batch)

    def commit(self) -> list[Outcome]:
        """End the transaction: what became of each part of the batch."""
        batch, self._under_way = self._under_way, []
        if self.failing:
            self.failing = False
            if self._draw.chance(0.5):
                self._write(batch)
            return ["failed"] * len(batch)
        if self._fits(batch):
            self._write(batch)
            return ["durable"] * len(batch)
        return self.commit_singly(batch)

    def commit_singly(self, batch: Sequence[Part[S]]) -> list[Outcome]:
        """There is no room for all: what there is room for, one after the other."""
        outcomes: list[Outcome] = []
        fitting: list[Part[S]] = []
        for part in batch:
            if self._fits([*fitting, part]):
                fitting.append(part)
                self._write([part])
                outcomes.append("durable")
            else:
                outcomes.append("full")
        return outcomes

    # -- what happens to it

    def crashed(self) -> None:
        """The process was killed."""
        batch, self._under_way = self._under_way, []
        if self._fits(batch) and self._draw.chance(0.5):
            self._write(batch)

    def power_cut(self) -> bool:
        """The machine lost power; whether the records are lost."""
        self.crashed()
        if self.fsync == "always":
            return False
        self.lose()
        return True

    def lose(self) -> None:
        """A new, empty disk; what was on the old one was durable when it was acknowledged."""
        self._under_way = []
        for key, value in self.values.items():
            self._retire(key, value)
        self.values, self.notes, self.index = {}, {}, {}
        self.replica = self._new_replica()

    def flip_bit(self, key: bytes | None = None) -> bytes | None:
        """Damage one record, or this one, and say which; ``None`` = there are none."""
        if not self.values:
            return None
        key = self._draw.choice(sorted(self.values)) if key is None else key
        value = bytearray(self.values[key])
        self._retire(key, bytes(value))
        bit = self._draw.between(8 * 8, 8 * len(value) - 1)
        value[bit // 8] ^= 1 << bit % 8
        self.values[key] = bytes(value)
        return key

    # -- for checkers

    def states(self) -> dict[bytes, S]:
        """Every record that can be read."""
        keys = sorted(self.values)
        found, damaged = self.load(keys)
        return {
            key: state
            for key, state in zip(keys, found, strict=True)
            if state is not None and key not in damaged
        }

    def sound(self) -> bool:
        """Whether all its bytes are."""
        return not self.load(list(self.values))[1]

    def held(self, key: bytes) -> list[S]:
        """What this disk has of a record, and what it had before it was lost or damaged."""
        values = [*self._retired.get(key, ()), *([self.values[key]] if key in self.values else [])]
        states: list[S] = []
        for value in values:
            try:
                states.append(self._decode(key, value))
            except self._damage:
                continue  # its bytes before the damage are among the retired ones
        return states

    def _fits(self, batch: Sequence[Part[S]]) -> bool:
        if self.room_bytes is None:
            return True
        size = sum(len(self._encode(key, state)) for part in batch for key, state in part.writes)
        size += sum(len(value or b"") for part in batch for _, value in part.notes)
        return size <= self.room_bytes

    def _write(self, batch: Sequence[Part[S]]) -> None:
        for part in batch:
            for key, state in part.writes:
                self._put(key, state)
            for note, noted in part.notes:
                self.notes.pop(note, None)
                if noted is not None:
                    self.notes[note] = noted
            self.replica = self._later(self.replica, part.replica)

    def _put(self, key: bytes, state: S) -> None:
        removes = self._removes(state)
        if self._entry is not None:
            leaf, entry = self._entry(key, state)
            self.index.setdefault(leaf, {}).pop(key, None)
            if not removes:
                self.index[leaf][key] = entry
        if not removes:
            self.values[key] = self._encode(key, state)
            self.heard(key, state)
        elif key in self.values:
            self._retire(key, self.values.pop(key))

    def _retire(self, key: bytes, value: bytes) -> None:
        self._retired.setdefault(key, []).append(value)


def _nobody(key: bytes, state: object) -> None:
    """Listens."""
