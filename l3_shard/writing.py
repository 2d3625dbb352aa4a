"""``Writing``: coordinates puts: gives each write its dot, makes it durable here, then on enough of the other
keepers.

A write goes through::

    waiting ──apply──► applied ──persisted──► durable here, placed ──► W acks of each group: done
       │                  │                        │          ▲
       │ refused,         │ disk full:             │          └── a keeper says that the epoch is over
       ▼ time is up       ▼ nothing was written    │ too few keepers left, or time is up:
    not done           not done                    ▼ outcome_unknown: it spreads all the same

**A write is placed when it is durable here**, by the ring of that moment, and not when it was asked for.
Whoever compares itself with us under a newer ring (``l3_shard.comparing``) sees all that was durable before
we took that ring; what is durable later goes to the owners by the newer ring.  A keeper acknowledges by the
same rule: if it has taken another ring before the write is on its disk, it says so, and the write is placed
again, made durable here again (our copy may have been dropped meanwhile) and sent to everybody again.

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

from kvcomm.errors import Corrupt, KVCommError, OutcomeUnknown, StaleEpoch, TooLarge, Unavailable
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
    RingMap,
    RingOffer,
    RingTaken,
)
from l3_shard import dvv
from l3_shard.desk import Desk, Request
from l3_shard.lines import Lines
from l3_shard.place import Place
from l3_shard.ring import decode_map

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
    """A write that has passed the edge: stored key, checked bounds."""

    key: bytes
    value: bytes | None
    context: VersionVector
    own: Dot | None
    delta: bytes | None = None
    """Instead of a value, where siblings are resolved."""

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
    place: Place
    """By the ring of when it was asked for, then of when it was durable here."""
    written: dvv.Written | None = None
    state: RecordState = dvv.EMPTY
    """What is sent to the other keepers: the record as it became durable with this write."""
    round: int = 0
    """How often it was placed; answers to an earlier round do not count."""
    acks: set[str] = field(default_factory=set)
    """Who has it on disk."""
    outstanding: set[str] = field(default_factory=set)
    """Who may still acknowledge."""
    decided: bool = False
    error: KVCommError | None = None
    trouble: str = ""
    """What the last keeper that did not acknowledge said."""
    look: _Look | None = None
    """For the write that it replaces; it was not here."""

    def apply(self, state: RecordState) -> RecordState:
        if not self.owner.place(self.draft.key).ours:
            raise Unavailable("nothing was written: the record has other owners by now")
        if self.round:
            return dvv.merge(state, self.state)
        if self.look is not None:
            state = dvv.merge(state, self.look.found)
        elif self.draft.replaces_unseen(state):
            raise _Unseen("the write that it replaces is looked for")
        self.written = self.owner.accept(state, self.draft)
        return self.written.state

    def durable(self, state: RecordState) -> None:
        self.state = state
        self.owner.spread(self, have=True)

    def failed(self, error: KVCommError) -> None:
        if isinstance(error, _Unseen):
            self.owner.look(self)
        elif self.round:  # the others may still be enough
            self.owner.spread(self, have=False)
        else:
            self.owner.decide(self, error)


class _Unseen(KVCommError):
    """Nothing is wrong, but the write has to wait."""


@dataclass(eq=False, slots=True)
class _Look:
    """Asks the other keepers for the write that another one replaces."""

    outstanding: int
    answered: set[str]
    """Who has said what it has, this shard included."""
    found: RecordState = dvv.EMPTY
    """What they have."""
    over: bool = False


_Sent = tuple[_Write, int]
"""A write, and the round that it was sent in."""


class Writing:
    """Coordinates puts.

    Args:
        place: of a stored key by the newest map.
        newest: that map.
        refused: hears every answer of a keeper that did not acknowledge: it may bring a newer map.
        missed: hears (node, keys) of every keeper that did not and is not asked again: the place for hinted
            handoff.
    """

    def __init__(
        self,
        node: str,
        desk: Desk,
        lines: Lines[RecordState],
        accept: Accept,
        *,
        place: Callable[[bytes], Place],
        newest: Callable[[], RingMap],
        refused: Callable[[Message], None],
        missed: Callable[[str, Sequence[bytes]], None],
    ) -> None:
        self.accept, self.place = accept, place
        self.unknown_count = self.acked_count = self.replaced_count = 0
        self._node, self._desk, self._lines = node, desk, lines
        self._newest, self._refused, self._missed = newest, refused, missed
        self._outbox: dict[tuple[str, int], list[_Sent]] = {}

    def put(self, origin: Origin, epoch: int, drafts: Sequence[Draft]) -> None:
        """Coordinate one request.

        Raises:
            Refused: the shard is busy.
        """
        request = self._desk.open(origin, len(drafts), sum(draft.held_bytes for draft in drafts))
        put = _Put(request, epoch, open_count=len(drafts))
        put.writes = [_Write(self, put, draft, self.place(draft.key)) for draft in drafts]
        request.expire = partial(self._expire, put)
        for write in put.writes:
            try:
                self._lines.change(write.draft.key, write)
            except KVCommError as error:
                self.decide(write, error)

    def look(self, write: _Write) -> None:
        """Ask the other keepers for the write that ``write`` replaces."""
        write.place = self.place(write.draft.key)
        look = write.look = _Look(len(write.place.others), {self._node})
        message = RecordFetch(write.place.epoch, [write.draft.key])
        timeout_s = LOOK_SHARE * self._desk.limits.request_timeout_s
        for node in write.place.others:
            self._desk.ask(node, message, partial(self._looked, write, look, node), timeout_s=timeout_s)
        self._settle_look(write, look)

    def _looked(self, write: _Write, look: _Look, node: str, answer: Message) -> None:
        look.outstanding -= 1
        if isinstance(answer, RecordStates) and len(answer.states) == 1:
            state = answer.states[0] or dvv.EMPTY
            with suppress(Corrupt, TooLarge):  # one that contradicts another is no answer
                look.found = dvv.merge(look.found, dvv.checked(state))
                if not answer.degraded:
                    look.answered.add(node)
        self._settle_look(write, look)

    def _settle_look(self, write: _Write, look: _Look) -> None:
        """Go on as soon as it is found, or cannot be any more: then it was lost with its disks, or the record
        was removed, and whatever is left of it stays beside the new one."""
        draft = write.draft
        unseen = draft.replaces_unseen(look.found) and not write.place.meets_writes(look.answered)
        if look.over or write.decided or (unseen and look.outstanding):
            return
        look.over = True
        if unseen and not write.place.could_write(look.answered):
            text = "nothing was written: no replica answers that may have the write that this one replaces"
            self.decide(write, Unavailable(text))
            return
        try:
            self._lines.change(draft.key, write)
        except KVCommError as error:
            self.decide(write, error)

    def spread(self, write: _Write, *, have: bool) -> None:
        """``write`` is durable here, if we ``have`` it: place it, and send its record to the other keepers at
        the next flush."""
        write.place = place = self.place(write.draft.key)
        write.round += 1
        write.acks = {self._node} if have else set()
        write.outstanding = set(place.others)
        for node in place.others:
            self._post(node, write)
        self._settle(write)

    def _post(self, node: str, write: _Write) -> None:
        self._outbox.setdefault((node, write.place.epoch), []).append((write, write.round))

    def flush(self) -> None:
        """One message a peer for everything that became durable together, in pieces of bounded size."""
        outbox, self._outbox = self._outbox, {}
        for (node, epoch), sent in outbox.items():
            for piece in self._pieces(sent):
                self._send(node, epoch, piece)

    def _send(self, node: str, epoch: int, sent: list[_Sent]) -> None:
        states: dict[bytes, RecordState] = {}
        for write, _ in sent:  # merged: a write that goes out again may be older than its neighbour
            states[write.draft.key] = dvv.merge(states.get(write.draft.key, dvv.EMPTY), write.state)
        message = RecordReplicate(epoch, list(states), list(states.values()))
        held_bytes = sum(map(dvv.value_bytes, message.states))
        self._desk.ask(node, message, partial(self._answered, node, epoch, sent), held_bytes)

    def _pieces(self, sent: Sequence[_Sent]) -> Iterator[list[_Sent]]:
        """Writes of one record, durable together or one after the other, are sent and counted as one
        state."""
        piece: list[_Sent] = []
        keys: set[bytes] = set()
        size = 0
        for write, round_ in sent:
            extra_bytes = 0 if write.draft.key in keys else dvv.value_bytes(write.state)
            if piece and (
                size + extra_bytes > self._desk.limits.message_bytes or len(keys) == REPLICATE_KEYS_MAX
            ):
                yield piece
                piece, size, extra_bytes = [], 0, dvv.value_bytes(write.state)
                keys.clear()
            piece.append((write, round_))
            keys.add(write.draft.key)
            size += extra_bytes
        yield piece

    def _answered(self, node: str, epoch: int, sent: list[_Sent], answer: Message) -> None:
        if isinstance(answer, Done):
            self.acked_count += len(sent)
            for write, round_ in sent:
                if write.round == round_:
                    write.acks.add(node)
                    write.outstanding.discard(node)
                    self._settle(write)
            return
        if isinstance(answer, Failure) and answer.code in UNMERGEABLE:
            keys = list(dict.fromkeys(write.draft.key for write, _ in sent))
            if len(keys) > 1:  # one record's trouble is not its neighbours'
                first = set(keys[: len(keys) // 2])
                self._send(node, epoch, [each for each in sent if each[0].draft.key in first])
                self._send(node, epoch, [each for each in sent if each[0].draft.key not in first])
                return
        self._refused(answer)
        if isinstance(answer, Failure) and answer.code == StaleEpoch.code:
            self._stale(node, epoch, sent, answer)
        else:
            self._give_up(node, sent, answer)

    def _give_up(self, node: str, sent: list[_Sent], answer: Message) -> None:
        """``node`` does not acknowledge these."""
        self._missed(node, [write.draft.key for write, _ in sent])
        trouble = f"; {node}: {answer.text}" if isinstance(answer, Failure) else ""
        for write, round_ in sent:
            if write.round == round_:
                write.trouble = trouble
                write.outstanding.discard(node)
                self._settle(write)

    def _stale(self, node: str, epoch: int, sent: list[_Sent], answer: Failure) -> None:
        """``node`` has another ring: a newer one, which we have taken up by now, or an older one by which it
        does not keep the record yet."""
        if _is_older(answer.detail, epoch):
            offer = RingOffer(self._newest())
            self._desk.ask(node, offer, partial(self._offered, node, epoch, sent, answer))
            return
        rest = [each for each in sent if not self._again(node, epoch, *each)]
        if rest:
            self._give_up(node, rest, answer)

    def _offered(self, node: str, epoch: int, sent: list[_Sent], refusal: Failure, answer: Message) -> None:
        if not isinstance(answer, RingTaken) or answer.epoch < epoch:
            self._give_up(node, sent, refusal)
            return
        for write, round_ in sent:
            if write.round == round_:
                self._post(node, write)

    def _again(self, node: str, epoch: int, write: _Write, round_: int) -> bool:
        """Whether the write is sent again, or need not be: ``node`` refused it for a newer map."""
        if write.round != round_:
            return True  # it is on its way again already
        now = self.place(write.draft.key)
        if write.decided or now.epoch <= epoch:
            return False
        if now.continues(write.place):
            write.place = now
            self._post(node, write)
            return True
        self.replaced_count += 1
        write.round += 1
        write.acks, write.outstanding = set(), set()
        if not now.ours:
            self.spread(write, have=False)
            return True
        try:
            self._lines.change(write.draft.key, write)
        except KVCommError:
            self.spread(write, have=False)
        return True

    def _settle(self, write: _Write) -> None:
        lacks = write.place.lacks(write.acks)
        if lacks is None:
            self.decide(write, None)
        elif not write.place.done(write.acks | write.outstanding):
            text = f"only {lacks[0]} of {lacks[1]} replicas confirmed the write{write.trouble}"
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
            if not write.round and (looks or self._lines.withdraw(write.draft.key, write)):
                self.decide(write, Unavailable("the shard was too slow; nothing was written"))
            else:
                count, need = write.place.lacks(write.acks) or (len(write.acks), len(write.acks))
                text = f"{count} of {need} replicas confirmed in time{write.trouble}"
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
    return RecordVersion(dot.replica, dot.counter, write.written.context, len(write.acks), write.written.own)


def _is_older(detail: bytes, epoch: int) -> bool:
    """Whether a ``stale_epoch`` failure tells a map older than ``epoch``."""
    try:
        return decode_map(detail).epoch < epoch
    except Corrupt:
        return False
