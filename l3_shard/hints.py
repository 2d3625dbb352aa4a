"""``Hints``: which record which replica missed, kept by whoever coordinated the write until it has been told
(hinted handoff: Dynamo, SOSP 2007).

**A hint names a record, not a value.**  The coordinator is a replica itself and has the record in its own
store, so what is handed on later is the state that it has *then*: it contains the write that was missed,
under its original dot, or has seen what replaced it.  A thousand missed writes of one record are one hint of
its key's size, and an old hint can bring back nothing that its own coordinator does not hold any more.

**A hint is no acknowledgement.**  It lies on the disk that the coordinator's own acknowledgement stands for
already; counting it towards W (a *sloppy quorum*) would call a write with one copy safe.

Bounded in bytes and age.  At the bound a new hint is refused and counted, never data dropped: comparing the
replicas (``l3_shard.comparing``) finds what no hint tells, only at the price of a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
from xxhash import xxh3_128_digest

PREFIX = b"hint/"
OVERHEAD_BYTES = 256
"""Memory of a hint beside its key, about."""

Save = Callable[[bytes, bytes | None], None]
"""Makes a note durable some time soon, or (``None``) removes it."""


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    node: str
    key: bytes
    since_ms: int


@dataclass(frozen=True, slots=True)
class Hint:
    """A record that a node missed."""

    key: bytes
    since_ms: int
    """Wall clock of the first miss that was not handed on since: it has to outlive the process."""
    serial: int
    """Tells a hint from a later one for the same record: handing on the first must not settle the second."""


@dataclass(slots=True)
class HintCounts:
    """What became of hints since start."""

    kept: int = 0
    refused: int = 0
    """Not kept: the bound was reached."""
    delivered: int = 0
    expired: int = 0
    void: int = 0
    """The node does not keep the record any more or cannot merge it, or it could not be read here."""


class Hints:
    """Hints of one coordinator, by node.

    Args:
        bytes_max: of keys and bookkeeping.
        age_s: older ones are given up; must be below the age at which tombstones may go.
        save: makes each durable.
        stored: notes of an earlier life, those of :data:`PREFIX` count.
    """

    def __init__(self, bytes_max: int, age_s: float, save: Save, stored: Mapping[bytes, bytes]) -> None:
        self.counts = HintCounts()
        self.handed: Callable[[str, int], None] = _unheard
        """Hears to whom how many were handed on."""
        self.held_bytes = 0
        self._bytes_max, self._age_ms, self._save = bytes_max, int(age_s * 1_000), save
        self._by_node: dict[str, dict[bytes, Hint]] = {}
        self._serial = 0
        for was in sorted(self._read(stored), key=lambda was: (was.since_ms, was.node, was.key)):
            self._insert(was.node, was.key, was.since_ms)

    def _read(self, notes: Mapping[bytes, bytes]) -> list[_Stored]:
        """Without those that rotted on the disk: comparing finds what they told of, and a shard that ended at
        one could never start again."""
        decoder = msgspec.msgpack.Decoder(_Stored)
        found: list[_Stored] = []
        for note, value in list(notes.items()):
            if note.startswith(PREFIX):
                try:
                    found.append(decoder.decode(value))
                except msgspec.DecodeError:
                    self._save(note, None)
        return found

    def __len__(self) -> int:
        return sum(map(len, self._by_node.values()))

    @property
    def nodes(self) -> Sequence[str]:
        """Those that missed something, sorted."""
        return sorted(self._by_node)

    def add(self, node: str, key: bytes, now_ms: int) -> bool:
        """``node`` missed ``key``; whether the hint was kept."""
        standing = self._by_node.get(node, {}).get(key)
        if standing is not None:
            self._insert(node, key, standing.since_ms)
            return True
        if self.held_bytes + _bytes(key) > self._bytes_max:
            self.counts.refused += 1
            return False
        self._insert(node, key, now_ms)
        self.counts.kept += 1
        self._save(_note(node, key), msgspec.msgpack.encode(_Stored(node, key, now_ms)))
        return True

    def oldest(self, node: str, count: int) -> list[Hint]:
        """Up to ``count`` hints for ``node``, those that came first."""
        return list(islice(self._by_node.get(node, {}).values(), count))

    def delivered(self, node: str, hints: Sequence[Hint]) -> None:
        """``node`` has them."""
        count = self._settle(node, hints)
        self.counts.delivered += count
        self.handed(node, count)

    def void(self, node: str, hints: Sequence[Hint]) -> None:
        """There is nothing to hand on."""
        self.counts.void += self._settle(node, hints)

    def expire(self, now_ms: int) -> None:
        """Give up those that are too old.  Looks at the oldest of each node only: they are in order of age
        but for wall clocks that were set."""
        for node in self.nodes:
            self.counts.expired += self._settle(node, list(self._first_old(node, now_ms)))

    def _first_old(self, node: str, now_ms: int) -> Iterator[Hint]:
        for hint in self._by_node[node].values():
            if now_ms - hint.since_ms <= self._age_ms:
                return
            yield hint

    def _insert(self, node: str, key: bytes, since_ms: int) -> None:
        hints = self._by_node.setdefault(node, {})
        self._serial += 1
        self.held_bytes += 0 if key in hints else _bytes(key)
        hints[key] = Hint(key, since_ms, self._serial)  # a standing one keeps its place

    def _settle(self, node: str, hints: Sequence[Hint]) -> int:
        standing = self._by_node.get(node, {})
        gone = [hint for hint in hints if standing.get(hint.key) == hint]
        for hint in gone:
            del standing[hint.key]
            self.held_bytes -= _bytes(hint.key)
            self._save(_note(node, hint.key), None)
        if not standing:
            self._by_node.pop(node, None)
        return len(gone)

    def check(self) -> None:
        """Assert the bound and the sums."""
        keys = [key for hints in self._by_node.values() for key in hints]
        assert self.held_bytes == sum(map(_bytes, keys))
        assert all(self._by_node.values()), "a node without hints is not listed"


def _unheard(_node: str, _count: int) -> None:
    """Nobody counts them."""


def _bytes(key: bytes) -> int:
    return len(key) + OVERHEAD_BYTES


def _note(node: str, key: bytes) -> bytes:
    """Hashed: a node's name and a record's key together do not fit the store's keys."""
    name = node.encode()
    return PREFIX + xxh3_128_digest(len(name).to_bytes(2, "little") + name + key)
