"""``FieldMap`` and ``FieldSet``: many small values in one record, each written by itself; a set is a map
whose fields have no values.

State (an observed-remove map without tombstones; ORSWOT [Bieniusa et al. 2012])::

    seen      everything that its coordinator had seen of the record
    fields    field -> the writes that put it and were not replaced, each under its dot
    removed   field -> writes that somebody removed who had seen more than the coordinator

A write of a field lives in a join if no side has seen it without holding it, and no side has removed it.
That makes the add win: a remove names the writes that it had seen, and a concurrent one is not among them.

``removed`` is for a client that read the field at one coordinator and removes it at another that has not
heard of it yet: the write comes later, and must not live then.  An entry goes as soon as ``seen`` says the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

import msgspec

from kvcomm.errors import Corrupt, TooLarge
from kvcomm.resolvers.resolver import Moment, Resolver
from kvcomm.version import VersionVector

V = TypeVar("V")

Dot = tuple[str, int]
Held = tuple[int, bytes]
"""Stamp and value of one write."""
_Pairs = list[tuple[str, int]]
_Writes = list[tuple[int, int, int, bytes]]

FIELDS_MAX = 4_096
"""Fields of one record, removals that are waited for included: a write decodes and encodes all of them, about
2 µs each, while its shard does nothing else.  Concurrent writers may pass it together; then nothing can be
added until some are removed."""

NOTHING = VersionVector()
NO_WRITES: dict[Dot, Held] = {}


class FieldsDelta(msgspec.Struct, frozen=True, array_like=True):
    """Fields to put and to remove; none in both."""

    put: Annotated[dict[bytes, bytes], msgspec.Meta(max_length=FIELDS_MAX)] = {}
    remove: Annotated[list[bytes], msgspec.Meta(max_length=FIELDS_MAX)] = []


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    seen: _Pairs
    fields: list[tuple[bytes, _Writes]]
    """A write is (index of its replica in ``seen``, counter, stamp, value): names of replicas are long."""
    removed: list[tuple[bytes, _Pairs]]


@dataclass(frozen=True, slots=True)
class Fields:
    seen: VersionVector
    fields: Mapping[bytes, Mapping[Dot, Held]]
    removed: Mapping[bytes, VersionVector]

    @property
    def count(self) -> int:
        return len(self.fields) + len(self.removed)

    def living(self, field: bytes, other: Fields) -> dict[Dot, Held]:
        """Our writes of ``field`` that ``other`` has as well, or has not seen."""
        held = other.fields.get(field, NO_WRITES)
        return {
            dot: write
            for dot, write in self.fields.get(field, NO_WRITES).items()
            if dot in held or other.seen.counter(dot[0]) < dot[1]
        }


class _FieldRecords(Resolver[Fields, FieldsDelta, V]):
    def __init__(self, name: str) -> None:
        super().__init__(name, _Stored, FieldsDelta)

    def _load(self, stored: object) -> Fields:
        wire = cast("_Stored", stored)
        seen = VersionVector.from_wire(dict(wire.seen))
        names = [replica for replica, _ in wire.seen]
        fields: dict[bytes, dict[Dot, Held]] = {}
        for field, writes in wire.fields:
            fields[field] = {}
            for index, counter, stamp, value in writes:
                if not (
                    0 <= index < len(names) and 0 < counter <= wire.seen[index][1] and 0 <= stamp < 2**64
                ):
                    raise ValueError("a write cannot be")
                fields[field][names[index], counter] = stamp, value
        removed = {field: VersionVector.from_wire(dict(pairs)) for field, pairs in wire.removed}
        return _settled(seen, fields, removed)

    def _store(self, state: Fields) -> object:
        index = {replica: index for index, (replica, _) in enumerate(state.seen.entries)}
        return _Stored(
            list(state.seen.entries),
            [
                (field, sorted((index[dot[0]], dot[1], *write) for dot, write in state.fields[field].items()))
                for field in sorted(state.fields)
            ],
            [(field, list(state.removed[field].entries)) for field in sorted(state.removed)],
        )

    def _merge(self, one: Fields, two: Fields) -> Fields:
        fields: dict[bytes, dict[Dot, Held]] = {}
        for field in {**one.fields, **two.fields}:
            mine, theirs = one.living(field, two), two.living(field, one)
            if any(mine[dot] != theirs[dot] for dot in mine.keys() & theirs.keys()):
                raise Corrupt(f"two values of one write of a {self.name} record: a replica kept a lost id")
            fields[field] = mine | theirs
        removed = {
            field: one.removed.get(field, NOTHING).merge(two.removed.get(field, NOTHING))
            for field in {**one.removed, **two.removed}
        }
        return _settled(one.seen.merge(two.seen), fields, removed)

    def _change(self, state: Fields | None, delta: FieldsDelta, moment: Moment) -> Fields:
        state = state or Fields(NOTHING, {}, {})
        fields, removed = dict(state.fields), dict(state.removed)
        for field in [*delta.put, *delta.remove]:
            fields.pop(field, None)
            removed[field] = removed.get(field, NOTHING).merge(moment.known)
        dot = (moment.dot.replica, moment.dot.counter)
        fields |= {field: {dot: (int(moment.stamp), value)} for field, value in delta.put.items()}
        # What the record has seen and the state does not hold was deleted with a whole record: it stays away.
        after = _settled(state.seen.merge(moment.seen).including(moment.dot), fields, removed)
        if FIELDS_MAX < after.count > state.count:
            raise TooLarge(
                f"the {self.name} record would have {after.count} entries, the most are {FIELDS_MAX}"
            )
        return after

    def _check_delta(self, delta: FieldsDelta) -> None:
        if both := sorted(delta.put.keys() & set(delta.remove)):
            raise ValueError(f"{both[0]!r} is both added and removed")


class FieldMap(_FieldRecords[dict[str, bytes]]):
    """Fields are UTF-8 text.  Shown as field -> value: of concurrent puts of one field that with the latest
    stamp."""

    def _show(self, state: Fields | None) -> dict[str, bytes]:
        fields = {} if state is None else state.fields
        try:
            return {
                field.decode(): max((stamp, dot, value) for dot, (stamp, value) in fields[field].items())[2]
                for field in sorted(fields)
            }
        except UnicodeDecodeError as error:
            raise Corrupt(f"not the value of a {self.name} record: {error}") from error

    def _check_delta(self, delta: FieldsDelta) -> None:
        super()._check_delta(delta)
        for field in [*delta.put, *delta.remove]:
            field.decode()


class FieldSet(_FieldRecords[frozenset[bytes]]):
    """Shown as the set of its elements."""

    def _show(self, state: Fields | None) -> frozenset[bytes]:
        return frozenset() if state is None else frozenset(state.fields)

    def _check_delta(self, delta: FieldsDelta) -> None:
        super()._check_delta(delta)
        if any(delta.put.values()):
            raise ValueError("elements of a set have no values")


def _settled(
    seen: VersionVector,
    fields: Mapping[bytes, Mapping[Dot, Held]],
    removed: Mapping[bytes, VersionVector],
) -> Fields:
    """The one form of a state: no removed writes, no empty fields, no removals that ``seen`` says already."""
    living = {
        field: {dot: write for dot, write in writes.items() if removed[field].counter(dot[0]) < dot[1]}
        if field in removed
        else writes
        for field, writes in fields.items()
    }
    ahead = {
        field: VersionVector(
            tuple(
                (replica, counter) for replica, counter in vector.entries if counter > seen.counter(replica)
            )
        )
        for field, vector in removed.items()
    }
    return Fields(
        seen,
        {field: writes for field, writes in living.items() if writes},
        {field: vector for field, vector in ahead.items() if vector.entries},
    )
