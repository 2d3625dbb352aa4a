"""``Writing``: coordinates puts: gives each write its dot, makes it durable here, then on enough of the other
replicas.

A write goes through::

    waiting ──apply──► applied ──persisted──► durable here ──► W acknowledgements: done
       │                  │                        │
       │ refused,         │ disk full:             │ too few replicas left, or time is up:
       ▼ time is up       ▼ nothing was written    ▼ outcome_unknown
    not done           not done                 it spreads all the same

**Replacing what is not here.**  A caller may name its last write by its dot alone (see ``l3_shard.dvv``), and
the shard that takes the next one need not be one of those that acknowledged the last.  What this shard has
not seen it first looks for on the other replicas: of the write quorum that has it one answers, unless so many
are away that the new write would not be done either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvcomm.errors import Corrupt, KVCommError, OutcomeUnknown, TooLarge, Unavailable
from kvcomm.machine import Origin
from kvcomm.version import Dot, VersionVector
from kvcomm.wire.messages import (
    Done,
    Failure,
    Message,
    RecordFate,
    RecordFates,
    RecordFetch,
    RecordReplicate,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordVersions,
)
from l3_shard import dvv
from l3_shard.desk import Desk, Request
from l3_shard.lines import Lines

REPLICATE_KEYS_MAX = 1_024
UNMERGEABLE = (Corrupt.code, TooLarge.code)
"""What a replica says of a message with a record that it cannot merge, now or later: it contradicts its own,
or too many replicas wrote it."""

LOOK_SHARE = 0.5
"""Of the time of a request: so long at most the other replicas are asked for what it replaces."""

Accept = Callable[[RecordState, "Draft"], dvv.Written]
"""Gives a write its dot under this shard's replica id."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A write that has passed the edge: stored key, checked bounds, placed by the ring."""

    key: bytes
    value: bytes | None
    context: VersionVector
    own: Dot | None
    others: tuple[str, ...]
    """The replicas beside this one."""
    need: int
    """Acknowledgements that make it done, this shard's own included."""
    delta: bytes | None = None
    """Instead of a value, where siblings are resolved."""

    @property
    def witnesses(self) -> int:
        """So many replicas meet every write quorum."""
        return 2 + len(self.others) - self.need

    def replaces_unseen(self, state: RecordState) -> bool:
        """Whether it names a write that ``state`` has not seen."""
        return self.own is not None and state.context.get(self.own.replica, 0) < self.own.counter

    @property
    def held_bytes(self) -> int:
        return len(self.value or b"") + len(self.delta or b"")


@dataclass(eq=False, slots=True)
class _Put:
    request: Request
    epoch: int
    writes: list[_Write] = field(default_factory=list)
    open_count: int = 0


@dataclass(eq=False, slots=True)
class _Write:
    """A ``Change``."""

    owner: Writing
    put: _Put
    draft: Draft
    written: dvv.Written | None = None
    state: RecordState = dvv.EMPTY
    """What is sent to the other replicas: the record as it became durable with this write."""
    acks: int = 0
    outstanding: int = 0
    """Replicas that may still acknowledge."""
    decided: bool = False
    error: KVCommError | None = None
    trouble: str = ""
    """What the last replica that did not acknowledge said."""
    look: _Look | None = None
    """For the write that it replaces; it was not here."""

    def apply(self, state: RecordState) -> RecordState:
        if self.look is not None:
            state = dvv.merge(state, self.look.found)
        elif self.draft.replaces_unseen(state):
            raise _Unseen("the write that it replaces is looked for")
        self.written = self.owner.accept(state, self.draft)
        return self.written.state

    def durable(self, state: RecordState) -> None:
        self.acks, self.outstanding = 1, len(self.draft.others)
        self.state = state
        self.owner.spread(self)

    def failed(self, error: KVCommError) -> None:
        if isinstance(error, _Unseen):
            self.owner.look(self)
        else:
            self.owner.decide(self, error)


class _Unseen(KVCommError):
    """Nothing is wrong, but the write has to wait."""


@dataclass(eq=False, slots=True)
class _Look:
    """Asks the other replicas for the write that another one replaces."""

    outstanding: int
    found: RecordState = dvv.EMPTY
    """What they have."""
    answers: int = 1
    """Replicas that have said what they have, this one included."""
    over: bool = False


class Writing:
    """Coordinates puts.

    Args:
        place: (epoch, other replicas) of a stored key by the newest map.
        missed: hears (node, keys, answer) of every replica that did not acknowledge: the place for hinted
            handoff.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines[RecordState],
        accept: Accept,
        place: Callable[[bytes], tuple[int, tuple[str, ...]]],
        missed: Callable[[str, Sequence[bytes], Message], None],
    ) -> None:
        self.accept = accept
        self.unknown_count = self.acked_count = 0
        self._desk, self._lines, self._place, self._missed = desk, lines, place, missed
        self._outbox: dict[tuple[str, int], list[_Write]] = {}

    def put(self, origin: Origin, epoch: int, drafts: Sequence[Draft]) -> None:
        """Coordinate one request.

        Raises:
            Refused: the shard is busy.
        """
        request = self._desk.open(origin, len(drafts), sum(draft.held_bytes for draft in drafts))
        put = _Put(request, epoch, open_count=len(drafts))
        put.writes = [_Write(self, put, draft) for draft in drafts]
        request.expire = partial(self._expire, put)
        for write in put.writes:
            try:
                self._lines.change(write.draft.key, write)
            except KVCommError as error:
                self.decide(write, error)

    def look(self, write: _Write) -> None:
        """Ask the other replicas for the write that ``write`` replaces."""
        look = write.look = _Look(len(write.draft.others))
        message = RecordFetch(write.put.epoch, [write.draft.key])
        timeout_s = LOOK_SHARE * self._desk.limits.request_timeout_s
        for node in write.draft.others:
            self._desk.ask(node, message, partial(self._looked, write, look), timeout_s=timeout_s)
        self._settle_look(write, look)

    def _looked(self, write: _Write, look: _Look, answer: Message) -> None:
        look.outstanding -= 1
        if isinstance(answer, RecordStates) and len(answer.states) == 1:
            state = answer.states[0] or dvv.EMPTY
            with suppress(Corrupt, TooLarge):  # one that contradicts another is no answer
                look.found = dvv.merge(look.found, dvv.checked(state))
                look.answers += not answer.degraded
        self._settle_look(write, look)

    def _settle_look(self, write: _Write, look: _Look) -> None:
        """Go on as soon as it is found, or cannot be any more: then it was lost with its disks, or the record
        was removed, and whatever is left of it stays beside the new one."""
        draft = write.draft
        unseen = draft.replaces_unseen(look.found) and look.answers < draft.witnesses
        if look.over or write.decided or (unseen and look.outstanding):
            return
        look.over = True
        if unseen and look.answers < draft.need:
            text = "nothing was written: no replica answers that may have the write that this one replaces"
            self.decide(write, Unavailable(text))
            return
        try:
            self._lines.change(draft.key, write)
        except KVCommError as error:
            self.decide(write, error)

    def spread(self, write: _Write) -> None:
        """``write`` is durable here: send its record to the other replicas at the next flush."""
        for node in write.draft.others:
            self._outbox.setdefault((node, write.put.epoch), []).append(write)
        self._settle(write)

    def flush(self) -> None:
        """One message a peer for everything that became durable together, in pieces of bounded size."""
        outbox, self._outbox = self._outbox, {}
        for (node, epoch), writes in outbox.items():
            for piece in self._pieces(writes):
                self._send(node, epoch, piece)

    def _send(self, node: str, epoch: int, writes: list[_Write]) -> None:
        states: dict[bytes, RecordState] = {}
        for write in writes:  # merged: a write that goes out again may be older than its neighbour
            states[write.draft.key] = dvv.merge(states.get(write.draft.key, dvv.EMPTY), write.state)
        message = RecordReplicate(epoch, list(states), list(states.values()))
        held_bytes = sum(map(dvv.value_bytes, message.states))
        self._desk.ask(node, message, partial(self._answered, node, epoch, writes), held_bytes)

    def _pieces(self, writes: Sequence[_Write]) -> Iterator[list[_Write]]:
        """Writes of one record, durable together or one after the other, are sent and counted as one
        state."""
        piece: list[_Write] = []
        keys: set[bytes] = set()
        size = 0
        for write in writes:
            extra_bytes = 0 if write.draft.key in keys else dvv.value_bytes(write.state)
            if piece and (
                size + extra_bytes > self._desk.limits.message_bytes or len(keys) == REPLICATE_KEYS_MAX
            ):
                yield piece
                piece, size, extra_bytes = [], 0, dvv.value_bytes(write.state)
                keys.clear()
            piece.append(write)
            keys.add(write.draft.key)
            size += extra_bytes
        yield piece

    def _answered(self, node: str, epoch: int, writes: list[_Write], answer: Message) -> None:
        if isinstance(answer, Done):
            self.acked_count += len(writes)
            for write in writes:
                write.acks += 1
                write.outstanding -= 1
                self._settle(write)
            return
        if isinstance(answer, Failure) and answer.code in UNMERGEABLE:
            keys = list(dict.fromkeys(write.draft.key for write in writes))
            if len(keys) > 1:  # one record's trouble is not its neighbours'
                first = set(keys[: len(keys) // 2])
                self._send(node, epoch, [write for write in writes if write.draft.key in first])
                self._send(node, epoch, [write for write in writes if write.draft.key not in first])
                return
        self._missed(node, [write.draft.key for write in writes], answer)
        trouble = f"; {node}: {answer.text}" if isinstance(answer, Failure) else ""
        for write in writes:
            write.trouble = trouble
            if not self._again(node, epoch, write):
                write.outstanding -= 1
                self._settle(write)

    def _again(self, node: str, epoch: int, write: _Write) -> bool:
        """Whether the peer refused for a newer map, which we have by now, and the owners are the same under
        it."""
        now_epoch, others = self._place(write.draft.key)
        if write.decided or now_epoch <= epoch or set(others) != set(write.draft.others):
            return False
        self._outbox.setdefault((node, now_epoch), []).append(write)
        return True

    def _settle(self, write: _Write) -> None:
        need = write.draft.need
        if write.acks >= need:
            self.decide(write, None)
        elif write.acks + write.outstanding < need:
            text = f"only {write.acks} of {need} replicas confirmed the write{write.trouble}"
            self.decide(write, OutcomeUnknown(text))

    def decide(self, write: _Write, error: KVCommError | None) -> None:
        """The fate of one write, for its caller; what comes later changes nothing."""
        if write.decided:
            return
        write.decided, write.error = True, error
        write.put.open_count -= 1
        if not write.put.open_count:
            self._finish(write.put)

    def _expire(self, put: _Put) -> None:
        for write in put.writes:
            if write.decided:
                continue
            looks = write.look is not None and not write.look.over
            if looks or self._lines.withdraw(write.draft.key, write):
                self.decide(write, Unavailable("the shard was too slow; nothing was written"))
            else:
                text = f"{write.acks} of {write.draft.need} replicas confirmed in time{write.trouble}"
                self.decide(write, OutcomeUnknown(text))

    def _finish(self, put: _Put) -> None:
        errors = [write.error for write in put.writes]
        self.unknown_count += any(isinstance(error, OutcomeUnknown) for error in errors)
        if not any(errors):
            answer: Message = RecordVersions([_version(write) for write in put.writes])
        elif len(errors) == 1 and errors[0] is not None:
            answer = Failure(errors[0].code, errors[0].message, errors[0].detail)
        else:
            answer = RecordFates([_fate(write) for write in put.writes])
        self._desk.close(put.request, answer)


def _fate(write: _Write) -> RecordFate:
    if write.error is None:
        return RecordFate(_version(write))
    return RecordFate(None, write.error.code, write.error.message)


def _version(write: _Write) -> RecordVersion:
    assert write.written is not None
    dot = write.written.dot
    return RecordVersion(dot.replica, dot.counter, write.written.context, write.acks, write.written.own)
