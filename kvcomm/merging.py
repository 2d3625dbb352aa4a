"""The blocking faces of resolved records: ``kv.counter``, ``kv.set``, ``kv.map``, ``kv.maximum``,
``kv.minimum`` and ``kv.register``.

``kvcomm.resolvers`` says what becomes of concurrent writes, ``kvcomm.mergeplane`` what calls raise.  A write
needs no read before, returns once it is durable on a write quorum, and never leaves siblings to the caller.
After ``OutcomeUnknown`` an add to a counter may have been counted; everything else may simply be done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvcomm.deadline import DEADLINE_S
from kvcomm.mergeplane import Merged
from kvcomm.operations import Operations
from kvcomm.resolvers import Resolver
from kvcomm.resolvers.counter import Entries
from kvcomm.resolvers.extreme import Number
from kvcomm.resolvers.fields import Fields, FieldsDelta
from kvcomm.resolvers.register import Held

if TYPE_CHECKING:
    from kvcomm.client import Client

S = TypeVar("S")
D = TypeVar("D")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Resolved(Generic[S, D, V]):
    """What all classes have in common."""

    _client: Client
    _operations: Operations
    _resolver: Resolver[S, D, V]
    name: str

    def get(self, key: str, *, deadline_s: float = DEADLINE_S) -> Merged[V]:
        """The value, all siblings joined.  Raises ``Unavailable``, ``Corrupt``."""
        return self.get_many([key], deadline_s=deadline_s)[key]

    def get_many(self, keys: Sequence[str], *, deadline_s: float = DEADLINE_S) -> dict[str, Merged[V]]:
        """Many keys in one round trip a shard."""
        steps = self._operations.merging().get(self._resolver, self.name, keys)
        return dict(zip(keys, self._client.run(steps, deadline_s), strict=True))

    def delete(self, key: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Delete what this client and the coordinating shard have seen.  A write that had not heard of it
        survives, *with all that it was based on*."""
        steps = self._operations.merging().delete(self._resolver, self.name, [key])
        self._client.run(steps, deadline_s)

    def keys(self, *, deadline_s: float = DEADLINE_S) -> list[str]:
        """The keys that exist under this name."""
        return self._client.run(self._operations.merging().keys(self._resolver, self.name), deadline_s)

    def _change(self, deltas: Mapping[str, D], deadline_s: float) -> None:
        steps = self._operations.merging().change(self._resolver, self.name, list(deltas.items()))
        self._client.run(steps, deadline_s)


@dataclass(frozen=True, slots=True)
class Counter(_Resolved[Entries, int, int]):
    """Sums: every acknowledged add is counted once, whichever side of a split took it.  Absent: 0."""

    def add(self, key: str, amount: int = 1, *, deadline_s: float = DEADLINE_S) -> None:
        """Add a whole number, also a negative one.

        Raises ``OutcomeUnknown``: it may have been counted, and adding again may count it twice; ``Refused``:
        the sum of what one shard took would leave 64 bits.
        """
        self.add_many({key: amount}, deadline_s=deadline_s)

    def add_many(self, amounts: Mapping[str, int], *, deadline_s: float = DEADLINE_S) -> None:
        """Many keys in one round trip a shard; each by itself, not a transaction."""
        self._change(amounts, deadline_s)


@dataclass(frozen=True, slots=True)
class ElementSet(_Resolved[Fields, FieldsDelta, frozenset[bytes]]):
    """Sets of byte strings: union; an add beats a remove that had not seen it.  Absent: empty.

    A set is one record, rewritten by every change: at most ``FIELDS_MAX`` elements and ``VALUE_BYTES_MAX``
    bytes, ``TooLarge`` beyond.
    """

    def add(self, key: str, *elements: bytes, deadline_s: float = DEADLINE_S) -> None:
        """Add elements; present ones stay."""
        self.add_many({key: elements}, deadline_s=deadline_s)

    def add_many(self, elements: Mapping[str, Iterable[bytes]], *, deadline_s: float = DEADLINE_S) -> None:
        """Many keys in one round trip a shard; each by itself, not a transaction."""
        deltas = {key: FieldsDelta(dict.fromkeys(each, b"")) for key, each in elements.items()}
        self._change(deltas, deadline_s)

    def remove(self, key: str, *elements: bytes, deadline_s: float = DEADLINE_S) -> None:
        """Remove elements as far as this client or the coordinating shard has seen them added."""
        self.remove_many({key: elements}, deadline_s=deadline_s)

    def remove_many(self, elements: Mapping[str, Iterable[bytes]], *, deadline_s: float = DEADLINE_S) -> None:
        """Many keys in one round trip a shard; each by itself, not a transaction."""
        self._change({key: FieldsDelta({}, list(each)) for key, each in elements.items()}, deadline_s)


@dataclass(frozen=True, slots=True)
class FieldMap(_Resolved[Fields, FieldsDelta, dict[str, bytes]]):
    """Maps whose fields are written by themselves: concurrent puts of different fields both live.  Of
    concurrent puts of one field the latest stamp is shown and **the others are lost**; a put beats a remove
    that had not seen it.  Absent: empty.

    A map is one record, rewritten by every change: at most ``FIELDS_MAX`` fields and ``VALUE_BYTES_MAX``
    bytes, ``TooLarge`` beyond.
    """

    def put(self, key: str, field: str, value: bytes, *, deadline_s: float = DEADLINE_S) -> None:
        """Put one field; the others stay."""
        self.put_many({key: {field: value}}, deadline_s=deadline_s)

    def put_many(self, fields: Mapping[str, Mapping[str, bytes]], *, deadline_s: float = DEADLINE_S) -> None:
        """Fields of many keys in one round trip a shard: those of one key together, each key by itself."""
        deltas = {
            key: FieldsDelta({field.encode(): value for field, value in each.items()})
            for key, each in fields.items()
        }
        self._change(deltas, deadline_s)

    def remove(self, key: str, *fields: str, deadline_s: float = DEADLINE_S) -> None:
        """Remove fields as far as this client or the coordinating shard has seen them put."""
        self.remove_many({key: fields}, deadline_s=deadline_s)

    def remove_many(self, fields: Mapping[str, Iterable[str]], *, deadline_s: float = DEADLINE_S) -> None:
        """Fields of many keys in one round trip a shard: those of one key together, each key by itself."""
        deltas = {key: FieldsDelta({}, [field.encode() for field in each]) for key, each in fields.items()}
        self._change(deltas, deadline_s)


@dataclass(frozen=True, slots=True)
class Extreme(_Resolved[Number, Number, Number | None]):
    """The largest (``kv.maximum``) or smallest (``kv.minimum``) number that was offered.  Absent:
    ``None``."""

    def offer(self, key: str, number: Number, *, deadline_s: float = DEADLINE_S) -> None:
        """Offer an ``int`` within 64 bits or a finite ``float``.  Raises ``ValueError`` for any other."""
        self.offer_many({key: number}, deadline_s=deadline_s)

    def offer_many(self, numbers: Mapping[str, Number], *, deadline_s: float = DEADLINE_S) -> None:
        """Many keys in one round trip a shard; each by itself, not a transaction."""
        self._change(numbers, deadline_s)


@dataclass(frozen=True, slots=True)
class Register(_Resolved[Held, bytes, bytes | None]):
    """Values of which the last written is shown.  **Lossy**: of concurrent writes only the one with the
    latest stamp (hybrid logical time, then replica) is kept, though all were acknowledged.  Use ``kv.state``
    where none may be lost.  Absent: ``None``."""

    def put(self, key: str, value: bytes, *, deadline_s: float = DEADLINE_S) -> None:
        """Write, whatever was there."""
        self.put_many({key: value}, deadline_s=deadline_s)

    def put_many(self, items: Mapping[str, bytes], *, deadline_s: float = DEADLINE_S) -> None:
        """Many keys in one round trip a shard; each by itself, not a transaction."""
        self._change(items, deadline_s)
