"""``Reading``: coordinates gets: our own durable state, merged with those of other replicas until R have
answered.

With a read quorum of 1 nobody else is asked, unless our own copy is damaged, unreadable or absent: a shard
whose disk was replaced has none of what it acknowledged, so what it lacks is looked for where every write
quorum has left a copy.  When too few answer in time, what there is goes out marked ``degraded``.  Whatever an
answer teaches us is merged into our own copy.

A caller may say what the answer must have seen at least (read your writes, monotonic reads).  Where our copy
has not, the others are asked too, and all of them are waited for if need be.  If every replica has answered
and nobody has seen it, it is gone everywhere: the record was deleted, and its tombstone removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvcomm.errors import Corrupt, KVCommError, TooLarge, Unavailable
from kvcomm.machine import Origin
from kvcomm.wire.messages import Dots, Message, RecordFetch, RecordState, RecordStates
from l3_shard import dvv
from l3_shard.desk import Desk, Request
from l3_shard.lines import Lines, Local

NOTHING: Dots = {}


class Query(NamedTuple):
    """A key to read, placed by the ring."""

    key: bytes
    others: tuple[str, ...]
    """The replicas beside this one."""
    need: int
    """Answers that make it not degraded, this shard's own included."""
    wide: int
    """Answers that meet every write quorum: needed when ours cannot be relied on."""
    witness: bool = True
    """Whether our own word counts as one: not while a new store has yet to learn what its predecessor
    knew, nor if we are none of those that the record is read from, or are not ready to be."""
    least: Dots = NOTHING
    """What the caller has seen or written already: an answer that has not is never given silently."""


@dataclass(eq=False, slots=True)
class _Get:
    request: Request
    epoch: int
    records: list[_Record] = field(default_factory=list)
    open_count: int = 0


@dataclass(eq=False, slots=True)
class _Record:
    get: _Get
    query: Query
    need: int
    asked: bool = False
    state: RecordState = dvv.EMPTY
    own: RecordState | None = None
    """Ours, once it is known and intact."""
    damaged: bool = False
    answer_count: int = 0
    outstanding: int = 1
    """Answers that may still come, our own first."""
    decided: bool = False

    @property
    def covered(self) -> bool:
        return covers(self.state.context, self.query.least)

    @property
    def degraded(self) -> bool:
        """Whether somebody may know more."""
        everybody = 1 + len(self.query.others)
        return self.answer_count < self.need or (not self.covered and self.answer_count < everybody)


class Reading:
    """``repair(key, state, mends)`` merges into our own copy, which is whole again if it ``mends``;
    ``refused(answer)`` hears of every peer that did not answer; ``stale(epoch)`` is what callers are told
    whose ``epoch`` is over, ``None`` = it is not.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines[RecordState],
        repair: Callable[[bytes, RecordState, bool], None],
        refused: Callable[[Message], None],
        stale: Callable[[int], KVCommError | None],
    ) -> None:
        self.degraded_count = 0
        self.contradiction_count = 0
        """States that contradict another replica's."""
        self._desk, self._lines, self._repair, self._refused = desk, lines, repair, refused
        self._stale = stale

    def get(self, origin: Origin, epoch: int, queries: Sequence[Query]) -> None:
        """Coordinate one request.

        Raises:
            Refused: the shard is busy.
        """
        known = self._known(queries)
        if known is not None:
            self._desk.reply(origin, self._answer(known, degraded=False))
            return
        request = self._desk.open(origin, len(queries))
        get = _Get(request, epoch, open_count=len(queries))
        get.records = [_Record(get, query, query.need) for query in queries]
        request.expire = partial(self._expire, get)
        if wide := [record for record in get.records if record.need > 1]:
            self._ask(get, wide)
        for record in get.records:
            self._lines.read(record.query.key, partial(self._own, record))

    def _known(self, queries: Sequence[Query]) -> list[RecordState] | None:
        """The states, if our own word is enough for all of them and we have it here: most gets are such."""
        states: list[RecordState] = []
        for query in queries:
            state = self._lines.known(query.key) if query.need <= 1 and query.witness else None
            if state is None or not (state.context or query.wide <= 1):
                return None
            if query.least and not covers(state.context, query.least):
                return None
            states.append(state)
        return states

    def _ask(self, get: _Get, records: Sequence[_Record]) -> None:
        """Ask every other replica of each record: the slow and the dead must not hold up the quorum."""
        by_node: dict[str, list[_Record]] = {}
        for record in records:
            record.asked = True
            record.outstanding += len(record.query.others)
            for node in record.query.others:
                by_node.setdefault(node, []).append(record)
        for node, theirs in by_node.items():
            message = RecordFetch(get.epoch, [record.query.key for record in theirs])
            self._desk.ask(node, message, partial(self._answered, theirs))

    def _own(self, record: _Record, local: Local[RecordState]) -> None:
        record.outstanding -= 1
        record.damaged = local.damaged
        if not local.damaged and not local.failure:
            record.own = local.state
        if not local.failure:
            self._learn(record, local.state, counts=record.query.witness and not local.damaged)
        if record.own is None or not record.own.context or not record.query.witness:
            record.need = max(record.need, record.query.wide)
        lacking = record.answer_count < record.need or not record.covered
        if lacking and not record.asked and not record.decided:
            self._ask(record.get, [record])
        self._settle(record)

    def _answered(self, records: list[_Record], answer: Message) -> None:
        usable = (
            isinstance(answer, RecordStates)
            and len(answer.states) == len(records)
            and all(state is None or is_sound(state) for state in answer.states)
        )
        if not usable:
            self._refused(answer)
        for index, record in enumerate(records):
            record.outstanding -= 1
            if isinstance(answer, RecordStates) and usable:
                self._learn(record, answer.states[index] or dvv.EMPTY, counts=not answer.degraded)
            self._settle(record)

    def _learn(self, record: _Record, state: RecordState, *, counts: bool = True) -> None:
        """A state that cannot be, or contradicts another, is no answer: the quorum decides whether the rest
        suffices."""
        try:
            record.state = dvv.merge(record.state, state)
        except (Corrupt, TooLarge):
            self.contradiction_count += 1
        else:
            record.answer_count += counts

    def _settle(self, record: _Record) -> None:
        enough = record.answer_count >= record.need and record.covered
        if not record.decided and (enough or not record.outstanding):
            self._decide(record)

    def _decide(self, record: _Record) -> None:
        record.decided = True
        if record.damaged:
            if record.answer_count >= record.need:  # else the damage, which later reads must notice, stays
                self._repair(record.query.key, record.state, True)
        elif record.own is not None and record.own != record.state:
            self._repair(record.query.key, record.state, False)
        record.get.open_count -= 1
        if not record.get.open_count:
            self._finish(record.get)

    def _expire(self, get: _Get) -> None:
        for record in get.records:
            if not record.decided:
                self._decide(record)

    def _finish(self, get: _Get) -> None:
        self._desk.close(get.request, self._verdict(get))

    def _verdict(self, get: _Get) -> Message | KVCommError:
        degraded = any(record.degraded for record in get.records)
        if degraded and (stale := self._stale(get.epoch)) is not None:
            return stale
        if not all(record.answer_count or record.state.context for record in get.records):
            return Unavailable("no replica could read the record; retry later")
        return self._answer([record.state for record in get.records], degraded)

    def _answer(self, found: Sequence[RecordState], degraded: bool) -> Message | KVCommError:
        states = [dvv.presented(state) if state.context else None for state in found]
        size = sum([dvv.value_bytes(state) for state in states if state is not None])
        if len(states) > 1 and size > self._desk.limits.message_bytes:
            return TooLarge(f"{size} bytes of values do not fit one answer; split the batch")
        self.degraded_count += degraded
        return RecordStates(states, degraded)


def covers(context: Dots, least: Dots) -> bool:
    """Whether ``context`` has seen everything that ``least`` has."""
    return all(context.get(replica, 0) >= counter for replica, counter in least.items())


def is_sound(state: RecordState) -> bool:
    """Whether a peer's state can be, and is in its canonical form."""
    try:
        return dvv.checked(state) == state
    except Corrupt:
        return False
