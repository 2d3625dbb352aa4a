"""``Healing``: an acceptor gets back what damaged bytes have taken from it, record by record.

A record whose stored bytes fail verification has lost a promise and a vote, and the acceptor must not vote on
it from nothing.  On the others it goes on voting.  It gets well as one that has lost its whole disk does, for
these records alone (``l3_shard.entering``):

1. It takes the next entry number, durably: votes that it gave for them before, under the old number, are not
   counted any more where the new one is known.
2. The others note the number, durably, and then tell what they have of these records.
3. When enough have told (``quorum.informed``), what they have together is written in place of the damage, in
   one write, and the acceptor votes again.  A crash before leaves the damage, which is found again.

Where too few others have an answer the record stays as it is: it is ``Unavailable`` here, not forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from kvcomm.wire.messages import Failure, Message, StrongEnter, StrongListed, StrongState
from l3_shard import acceptor
from l3_shard.ballot import NO_BALLOT
from l3_shard.desk import Desk
from l3_shard.entering import MEMBERSHIP_KEY, RETRY_S, TENANT_BYTES, Entering, checked
from l3_shard.lines import Lines
from l3_shard.quorum import informed

KEYS_MAX = 64
"""Records that are healed together; 4,096 wait at most, and what is over is found again by its next vote."""
WAITING_MAX = 4_096


@dataclass(eq=False, slots=True)
class _Heal:
    """A ``Change``."""

    learned: StrongState
    current: Callable[[], bool]
    done: Callable[[KVCommError | None], None]

    def apply(self, state: StrongState) -> StrongState:
        if not self.current():
            raise Unavailable("other maps decide since it was learned")
        return self.learned if state == acceptor.EMPTY else state

    def durable(self, state: StrongState) -> None:
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


@dataclass(eq=False, slots=True)
class _Round:
    """Some damaged records, under one entry."""

    learned: dict[bytes, StrongState]
    maps: tuple[int, ...]
    """What is told under others does not count: it may have been removed since."""
    entry: int = 0
    ready: bool = False
    """The entry is on our disk."""
    told: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)
    asked_at: dict[str, float] = field(default_factory=dict)
    writing: set[bytes] = field(default_factory=set)
    floor: bytes = NO_BALLOT


class Healing:
    """See the module.

    Args:
        epoch: of the newest map.
        refused: hears of every ``Failure`` that a peer answered.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines[StrongState],
        membership: Entering,
        *,
        node: str,
        epoch: Callable[[], int],
        refused: Callable[[Message], None],
    ) -> None:
        self.damaged_count = self.healed_count = 0
        self._desk, self._lines, self._membership = desk, lines, membership
        self._node, self._epoch, self._refused = node, epoch, refused
        self._waiting: dict[bytes, None] = {}
        self._round: _Round | None = None

    def found(self, keys: Sequence[bytes]) -> None:
        """The stored bytes of these records failed verification."""
        for key in keys:
            self.damaged_count += 1
            if key != MEMBERSHIP_KEY and len(self._waiting) < WAITING_MAX:
                self._waiting[key] = None

    def wake(self) -> None:
        """Do what is due."""
        if self._round is None and not self._waiting:
            return
        if not self._membership.votes:  # all that it lacks is learned on the way in
            return
        if self._round is None:
            self._begin()
        elif self._round.ready:
            for node in self._others(self._round):
                if self._due(self._round, node):
                    self._ask(self._round, node)

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        if (self._round is None and not self._waiting) or not self._membership.votes:
            return None
        if self._round is None:
            return self._desk.now
        if not self._round.ready:
            return None
        waits = [
            self._round.asked_at.get(node, float("-inf")) + RETRY_S
            for node in self._others(self._round)
            if node not in self._round.busy and node not in self._round.told
        ]
        return max(self._desk.now, min(waits)) if waits else None

    def _begin(self) -> None:
        """Those that are still damaged: a lost disk may have been filled again meanwhile."""
        keys = [key for key in list(self._waiting)[:KEYS_MAX] if self._has_others(key)]
        for key in list(self._waiting)[:KEYS_MAX]:
            del self._waiting[key]
        if keys:
            round_ = self._round = _Round(dict.fromkeys(keys, acceptor.EMPTY), self._membership.maps)
            round_.entry = self._membership.enter_anew(partial(self._entered, round_))

    def _has_others(self, key: bytes) -> bool:
        return all(len(group) > 1 for group in self._groups(key))

    def _groups(self, key: bytes) -> list[tuple[str, ...]]:
        """Of the record's owners, those that we belong to."""
        known = self._membership.configuration
        assert known is not None, "a voter has one"
        owners = [ring.replicas(key[TENANT_BYTES:]) for ring in known.rings]
        return [group for group in owners if self._node in group]

    def _others(self, round_: _Round) -> list[str]:
        groups = [group for key in round_.learned for group in self._groups(key)]
        return sorted({node for group in groups for node in group} - {self._node})

    def _entered(self, round_: _Round, error: KVCommError | None) -> None:
        if error is None:
            round_.ready = True
        else:  # it was told to nobody; begin again
            self._waiting |= dict.fromkeys(round_.learned)
            self._round = None

    def _due(self, round_: _Round, node: str) -> bool:
        asked_at = round_.asked_at.get(node, float("-inf"))
        waits = node not in round_.busy and node not in round_.told
        return waits and self._desk.now >= asked_at + RETRY_S

    def _ask(self, round_: _Round, node: str) -> None:
        round_.busy.add(node)
        round_.asked_at[node] = self._desk.now
        message = StrongEnter(self._epoch(), self._node, round_.entry, b"", list(round_.learned))
        self._desk.ask(node, message, partial(self._told, round_, node, list(round_.learned)))

    def _told(self, round_: _Round, node: str, asked: list[bytes], answer: Message) -> None:
        round_.busy.discard(node)
        if self._round is not round_:
            return
        if isinstance(answer, Failure):
            self._refused(answer)
            return
        if not isinstance(answer, StrongListed) or answer.settled is None or answer.resume is not None:
            return
        try:
            states = checked(answer)
        except Corrupt:
            return
        told_maps = (answer.settled.epoch, *(ring.epoch for ring in answer.pending))
        if list(answer.keys) != asked or told_maps != self._membership.maps:
            return
        if round_.maps != told_maps:
            self._ask_anew(round_)
            return
        round_.told.add(node)
        round_.floor = max(round_.floor, answer.floor)
        for key, state in zip(answer.keys, states, strict=True):
            if key in round_.learned and key not in round_.writing:
                round_.learned[key] = acceptor.learn(round_.learned[key], state)
        self._write_what_is_known(round_)

    def _write_what_is_known(self, round_: _Round) -> None:
        """The others' floor first: it stands for what they have removed."""
        known = self._membership.configuration
        assert known is not None, "a voter has one"
        for key in list(round_.learned):
            groups = self._groups(key)
            if key not in round_.writing and informed(groups, self._node, round_.told):
                round_.writing.add(key)
                write = partial(self._write, round_, key)
                self._membership.take_up(known, round_.floor, write)

    def _write(self, round_: _Round, key: bytes, error: KVCommError | None) -> None:
        if error is not None:
            round_.writing.discard(key)
            self._ask_anew(round_)
            return
        maps = round_.maps
        current = lambda: self._membership.ready and self._membership.maps == maps  # noqa: E731
        change = _Heal(round_.learned[key], current, partial(self._written, round_, key))
        try:
            self._lines.change(key, change, mends=True)
        except Refused as busy:
            self._written(round_, key, busy)

    def _written(self, round_: _Round, key: bytes, error: KVCommError | None) -> None:
        round_.writing.discard(key)
        if error is not None:
            self._ask_anew(round_)
            return
        self.healed_count += 1
        del round_.learned[key]
        if not round_.learned:
            self._round = None

    def _ask_anew(self, round_: _Round) -> None:
        """For what is left, under the maps of now."""
        round_.told.clear()
        round_.maps = self._membership.maps
        round_.learned.update({key: acceptor.EMPTY for key in round_.learned if key not in round_.writing})

    # -- looking inside

    def story(self) -> str:
        """What is damaged, for a person."""
        if self._round is None:
            return f"{len(self._waiting)} damaged records wait"
        return f"{len(self._round.learned)} damaged records heal as entry {self._round.entry}"
