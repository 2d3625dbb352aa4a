"""Dotted version vector sets: what one record's replicated state is, and how it changes (Preguiça et al.
2012, Almeida et al. 2014).

A state is ``context`` (everything that was ever seen) and ``siblings`` (the writes not overwritten yet, each
under the dot that its coordinator gave it).  A write replaces exactly the siblings that its caller's context
covers::

    put      siblings that the caller had not read stay; the new one stands beside them
    merge    a sibling goes only if the other side has seen its dot and no longer holds it
    delete   a put of ``None``: the dot stays as a tombstone, its stamp is the age of the delete

``merge`` is commutative, associative and idempotent, so replicas that saw the same writes hold equal states,
whatever the order of delivery; states are kept canonical, so equal states encode to equal bytes.

**Equal values.**  Most concurrent writers of a cache record write the same thing.  Dropping one of two equal
siblings would be wrong: a third write that replaced only the kept one would take the other one's value with
it.  But dots *of one replica* are seen in order, so whoever has seen the newer has seen the older: among
equal values of one replica the newest dot alone decides whether the value lives, and only it is stored.
Readers are shown each value once (:func:`presented`).

**Writers that do not read.**  A context says "all writes of a replica up to here", so a writer that is
handed one after a blind write cannot be told of its own write alone while an unseen one of the same replica
lives; with contexts only, two such writers would add a sibling a write up to the bound.  Therefore a put may
also name its author's last dot.  It replaces that sibling where it is held, and reaches other replicas by
merging.

**Bound.**  ``put`` refuses to make more than ``SIBLINGS_MAX`` distinct values; ``merge`` never refuses and
never drops.  A merged state can therefore hold more, but at most ``SIBLINGS_MAX`` a replica incarnation: when
a replica gave out its newest living dot, it held all its older living ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.clock import Stamp
from kvcomm.errors import Conflict, Corrupt, TooLarge
from kvcomm.version import COUNTER_MAX, Dot, VersionError, VersionVector, joined
from kvcomm.wire.messages import Dots, RecordState, Sibling

SIBLINGS_MAX = 16
RECORD_BYTES_MAX = 4 << 20
"""Distinct values of one record together, as far as ``put`` decides; keeps a merged state below the wire's
bound.
"""

EMPTY = RecordState({}, [])
"""A record that nobody has written."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a put did."""

    state: RecordState
    dot: Dot
    context: Dots
    """For the caller's next put: covers what it had read and, where that hides nobody else's value, its own
    write.

    It is *not* the state's context: that covers siblings which this caller has never seen, and handing it out
    would let the next put erase them unread.
    """
    own: bool
    """``context`` does not cover the write, and its author's next put may name its dot instead.  Not so when
    its value stands for an equal one that its author has not seen."""


def put(
    state: RecordState,
    replica: str,
    stamp: Stamp,
    value: bytes | None,
    context: VersionVector,
    own: Dot | None = None,
    floor: int = 0,
) -> Written:
    """Accept a write at ``replica``; ``value`` ``None`` deletes what ``context`` covers.

    Args:
        replica: id of the replica incarnation that accepts the write and holds ``state``.
        context: what the writer had read; empty = nothing, so the write is concurrent to all others.
        own: the writer's last write, replaced too if it is here; where it is not, it stays concurrent (so
            ``l3_shard.writing`` looks for it first).
        floor: largest counter of ``replica`` in any record that was removed (see ``l3_shard.tombstones``):
            this may have been one of them, and its dots must not be given out again.

    Raises:
        Conflict: the record has ``SIBLINGS_MAX`` other values already, or ``context`` cannot come from this
        record. TooLarge: the record's values together would be over ``RECORD_BYTES_MAX``, or too many
        replicas wrote it.
    """
    read = context.to_wire()
    dot = next_dot(state.context.get(replica, 0), replica, read.get(replica, 0), floor)
    kept = [
        sibling
        for sibling in state.siblings
        if read.get(sibling.replica, 0) < sibling.counter
        and (own is None or own.counter != sibling.counter or own.replica != sibling.replica)
    ]
    siblings = _canonical([*kept, Sibling(replica, dot.counter, stamp, value)])
    if value is not None:
        _check_bounds(siblings)
    after = RecordState(joined(state.context, read, {replica: dot.counter}), siblings)
    unseen = [sibling.value for sibling in kept if sibling.replica == replica]
    handed = read if unseen else joined(read, {replica: dot.counter})
    return Written(after, dot, handed, bool(unseen) and value not in unseen)


def next_dot(seen: int, replica: str, read: int, floor: int = 0) -> Dot:
    """The dot that :func:`put` gives a write of a record that has seen the dots of ``replica`` up to
    ``seen``, by somebody who had seen those up to ``read``.

    Raises:
        Conflict: that cannot come from this record.
    """
    last = max(seen, floor)
    if read > last:
        raise Conflict("the context was not read from this record; read the record and put with its context")
    if last == COUNTER_MAX:
        raise Conflict(
            "a context with an impossible counter was written to this record; delete or abandon it"
        )
    return Dot(replica, last + 1)


def merge(one: RecordState, two: RecordState) -> RecordState:
    """What a replica knows that has seen everything that either has.

    Raises:
        Corrupt: one dot stands for two values: a replica lost its state and kept its id.
        TooLarge: too many replica incarnations wrote this record.
    """
    if one == two or not two.context:
        return one
    if not one.context or _extends(two, one):
        return two
    if _extends(one, two):
        return one
    seen_one, seen_two = VersionVector.from_wire(one.context), VersionVector.from_wire(two.context)
    held_one = {_dot(sibling): sibling for sibling in one.siblings}
    held_two = {_dot(sibling): sibling for sibling in two.siblings}
    for dot in held_one.keys() & held_two.keys():
        if held_one[dot] != held_two[dot]:
            raise Corrupt(f"{dot} names two writes: a replica lost its state and kept its id")
    survivors = [held for dot, held in held_one.items() if dot in held_two or not seen_two.covers(dot)]
    survivors += [held for dot, held in held_two.items() if dot not in held_one and not seen_one.covers(dot)]
    return RecordState(joined(one.context, two.context), _canonical(survivors))


def _extends(newer: RecordState, older: RecordState) -> bool:
    """Whether ``newer`` is the merge of both, seen without making it: it has seen everything that ``older``
    has, and holds nothing that ``older`` has seen replaced.  Nearly every merge is such a one."""
    seen = newer.context
    for replica, counter in older.context.items():
        if seen.get(replica, 0) < counter:
            return False
    for sibling in newer.siblings:
        if older.context.get(sibling.replica, 0) >= sibling.counter and sibling not in older.siblings:
            return False
    return True


def presented(state: RecordState) -> RecordState:
    """As a reader is shown it: no tombstones, every value once (under its latest stamp), in the order of the
    dots.
    """
    if len(state.siblings) == 1 and state.siblings[0].value is not None:
        return state
    by_value: dict[bytes, Sibling] = {}
    for sibling in state.siblings:
        if sibling.value is not None:
            best = by_value.get(sibling.value)
            if best is None or _age(sibling) > _age(best):
                by_value[sibling.value] = sibling
    return RecordState(state.context, sorted(by_value.values(), key=_order))


def alive(state: RecordState) -> bool:
    """Whether a reader finds a value."""
    return any(sibling.value is not None for sibling in state.siblings)


def living_values(state: RecordState) -> list[bytes]:
    """Values of the siblings that are no deletes, in the order of the dots."""
    return [sibling.value for sibling in state.siblings if sibling.value is not None]


def value_bytes(state: RecordState) -> int:
    """Bytes of all values, as stored and sent."""
    return sum([len(sibling.value) for sibling in state.siblings if sibling.value is not None])


def checked(state: RecordState) -> RecordState:
    """``state`` from outside, made canonical.

    Raises:
        Corrupt: no sequence of writes and merges leads to it.
    """
    try:
        context = VersionVector.from_wire(state.context).to_wire()
    except (VersionError, TooLarge) as error:
        raise Corrupt(f"not a record state: {error}") from error
    dots = {(sibling.replica, sibling.counter) for sibling in state.siblings}
    if len(dots) != len(state.siblings) or not all(0 < n <= context.get(name, 0) for name, n in dots):
        raise Corrupt("not a record state: a sibling's dot repeats or is not in the context")
    for sibling in state.siblings:
        if not 0 <= sibling.hlc < 2**64:
            raise Corrupt("not a record state: a stamp has more than 64 bits")
    return RecordState(context, _canonical(state.siblings))


def _canonical(siblings: list[Sibling]) -> list[Sibling]:
    """Sorted by dot; of one replica's equal values only the newest."""
    if len(siblings) < 2:
        return siblings
    newest: dict[tuple[str, bytes | None], Sibling] = {}
    for sibling in siblings:
        rival = newest.get((sibling.replica, sibling.value))
        if rival is None or rival.counter < sibling.counter:
            newest[sibling.replica, sibling.value] = sibling
    return sorted(newest.values(), key=_order)


def _check_bounds(siblings: list[Sibling]) -> None:
    values = {sibling.value for sibling in siblings if sibling.value is not None}
    if len(values) > SIBLINGS_MAX:
        raise Conflict(
            f"the record has {len(values) - 1} concurrent values (limit {SIBLINGS_MAX}); "
            "read it, merge the values and put the result with the context that was read"
        )
    if (size := sum(map(len, values))) > RECORD_BYTES_MAX:
        raise TooLarge(
            f"the record's concurrent values would be {size} bytes (limit {RECORD_BYTES_MAX}); merge them"
        )


def _dot(sibling: Sibling) -> Dot:
    return Dot(sibling.replica, sibling.counter)


def _order(sibling: Sibling) -> tuple[str, int]:
    return sibling.replica, sibling.counter


def _age(sibling: Sibling) -> tuple[int, tuple[str, int]]:
    return sibling.hlc, _order(sibling)
