"""``Removing``: takes the remains of deleted records away, in the background.

A deleted record leaves a tombstone on a majority of its owners.  To drop it there while another owner still
has an older value, or may yet accept one, would bring that value back (Rystsov 2018, section 3.1).  The paper
has the tombstone accepted by all owners, then raises the age and the counter of every proposer, and only then
removes.  Here acceptors keep a *floor* instead, a ballot, durable: whatever an acceptor does not have it has
promised the floor for.  It takes the part of the ages, and nobody has to know who the proposers are.

1. Every owner is asked.  It must hold this very tombstone, or nothing of the record and a floor at or above
   it.  One that has something older is brought up to date (a record is *confirmed*), and asked again later.
2. ``StrongRemove`` goes to all, with a floor at or above all that any of them has promised for the record.
   Each raises its own floor, durably, and then drops the tombstone if that is still all that it has.

**Why nothing comes back.**  Once all owners have answered, every value older than the tombstone is gone, and
what is still on its way carries a ballot below the tombstone's.  An owner with the tombstone has promised
more than that; one without it has a floor that is as high.  So it stays whoever drops it when, and an owner
that was away keeps its tombstone, which hides nothing but itself.

**Why no version comes twice.**  A ballot is unique, and a proposer's next one for the record is above the
floor: that is the promise it meets.  A proposer that looks for its own earlier round in a record that was
removed and made anew is told the floor as well, and says ``outcome_unknown`` where its round may have been
below (``proposer._reaches_back``).

An owner that loses its disk takes the floors of the others over before it votes, and one that comes back with
an old database forgets what none of them lists (``l3_shard.entering``).  The rate is bounded, and a tombstone
is left alone for a while: most are written over.

**When the owners change.**  Only the owners are asked.  A shard that was one under an earlier map may still
have an older value; it drops that before it can vote on the record again, whatever it slept through
(``l3_shard.dropping``).  That argument needs all owners to be at one settled map and nothing else, so nothing
is removed while another map is pending.

**Limit.**  A tombstone of a record that was changed under a lease stays, for its fence does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import isinf

from kvcomm.errors import Corrupt, KVCommError, Refused, TooLarge, Unavailable
from kvcomm.machine import Origin, Ticket
from kvcomm.wire.messages import (
    Done,
    Failure,
    Message,
    StrongOutcome,
    StrongPrepare,
    StrongPromised,
    StrongRemove,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.ballot import NO_BALLOT, counter_of
from l3_shard.desk import Desk
from l3_shard.entering import FIRST_EPOCH, MEMBERSHIP_KEY, TENANT_BYTES, Entering
from l3_shard.lines import Lines, Local
from l3_shard.quorum import Quorum, Standing, counted
from l3_shard.storage import Scan, Scanned
from l3_shard.voting import Voting

AGE_S = 60.0
"""A tombstone is left alone for so long."""
BATCH_RECORDS = 64
BATCH_INTERVAL_S = 1.0
"""A batch takes at least so long: the bound of the rate."""
SWEEP_INTERVAL_S = 3_600.0
"""All records are looked through so often, for tombstones that are not remembered here."""
SWEEP_KEYS = 256
NOTICED_MAX = 65_536

Confirm = Callable[[bytes, Callable[[StrongOutcome], None]], None]


@dataclass(eq=False, slots=True)
class _Remove:
    """A ``Change``: drop the tombstone that was accepted under ``accepted``, or a promise without anything
    accepted: the floor stands for both."""

    accepted: bytes
    membership: Entering
    done: Callable[[KVCommError | None], None]
    removed: bool = False

    def apply(self, state: StrongState) -> StrongState:
        only_promised = state.accepted == NO_BALLOT and state.promised != NO_BALLOT
        held = only_promised or (state.accepted == self.accepted and _may_go(state))
        self.removed = held and state.promised <= self.membership.floor
        return acceptor.EMPTY if self.removed else state

    def durable(self, state: StrongState) -> None:
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


@dataclass(eq=False, slots=True)
class _Case:
    """One deleted record, and what its owners have of it."""

    key: bytes
    quorum: Quorum
    states: dict[str, StrongState] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)


class Removing:
    """See the module.

    Args:
        confirm: starts to confirm one record; raises ``KVCommError`` when that cannot begin.
        quorum: of a stored key; raises ``KVCommError`` when this shard may not coordinate it.
        epoch: of the newest map.
        refused: hears of every ``Failure`` that a peer answered, and which peer.
        age_s: how long a tombstone is left alone; infinity = for ever.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines[StrongState],
        membership: Entering,
        voting: Voting,
        confirm: Confirm,
        *,
        node: str,
        quorum: Callable[[bytes], Quorum],
        epoch: Callable[[], int],
        refused: Callable[[str, Message], None],
        age_s: float = AGE_S,
    ) -> None:
        self.removed_count = 0
        """Tombstones dropped here, since start."""
        self._desk, self._lines, self._membership = desk, lines, membership
        self._voting, self._confirm = voting, confirm
        self._node, self._quorum, self._epoch, self._refused = node, quorum, epoch, refused
        self._age_s = age_s
        self._noticed: set[bytes] = set()
        """Deleted records to be looked at."""
        self._due: list[tuple[float, bytes]] = []
        """When; a heap."""
        self._open_count = 0
        """Questions of the batch under way."""
        self._next_at = 0.0
        self._sweep_at: float | None = None
        self._sweep_after = b""
        self._swept_epoch = FIRST_EPOCH
        """Of the settled map whose records are looked through."""
        self._sweep: Ticket | None = None

    def deleted(self, key: bytes) -> None:
        """This acceptor has accepted the record's deletion.  The first of the owners sees to it, the others
        a while later, if it is still there."""
        known = self._membership.configuration
        owners = () if known is None else known.settled.replicas(key[TENANT_BYTES:])
        rank = owners.index(self._node) if self._node in owners else len(owners)
        self._notice(key, self._age_s * (1 + rank / 2))

    def _notice(self, key: bytes, wait_s: float) -> None:
        if key not in self._noticed and len(self._noticed) < NOTICED_MAX and not isinf(self._age_s):
            self._noticed.add(key)
            heappush(self._due, (self._desk.now + wait_s, key))

    def wake(self) -> None:
        """Do what is due."""
        now, known = self._desk.now, self._membership.configuration
        if known is not None and known.settled.epoch != self._swept_epoch:  # new owners, who remember nothing
            self._swept_epoch, self._sweep_at, self._sweep_after = known.settled.epoch, None, b""
        sweeps = self._sweep is None and (self._sweep_at is None or now >= self._sweep_at)
        begins = bool(self._due) and self._due[0][0] <= now and now >= self._next_at and not self._open_count
        if not (sweeps or begins) or isinf(self._age_s) or not self._membership.votes:
            return
        assert known is not None, "a voter has one"
        if known.pending or (known.settled.epoch != FIRST_EPOCH and not known.origin):
            self._next_at = now + BATCH_INTERVAL_S
            self._sweep_at = max(self._sweep_at or now, self._next_at)
            return
        if self._sweep_at is None:
            self._sweep_at = now + self._age_s
        elif sweeps:
            self._sweep = self._desk.ticket()
            self._desk.order(Scan(self._sweep, b"", self._sweep_after, SWEEP_KEYS, "strong"))
        if begins:
            self._begin()

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        if not self._membership.votes or self._sweep_at is None:
            return None
        waits = [] if self._sweep is not None else [self._sweep_at]
        if self._due and not self._open_count:
            waits.append(max(self._next_at, self._due[0][0]))
        return max(self._desk.now, min(waits)) if waits else None

    # -- a batch

    def _begin(self) -> None:
        """What is still deleted, as far as we know."""
        keys: list[bytes] = []
        while self._due and self._due[0][0] <= self._desk.now and len(keys) < BATCH_RECORDS:
            keys.append(heappop(self._due)[1])
        if not keys:
            return
        self._noticed.difference_update(keys)
        self._next_at = self._desk.now + BATCH_INTERVAL_S
        cases: list[_Case] = []
        self._open_count = 1 + len(keys)
        for key in keys:
            self._lines.read(key, partial(self._looked, key, cases))
        self._read_all(cases)

    def _looked(self, key: bytes, cases: list[_Case], local: Local[StrongState]) -> None:
        if not local.damaged and not local.failure and _may_go(local.state):
            try:
                cases.append(_Case(key, self._quorum(key)))
            except KVCommError:
                self._notice(key, self._age_s)
        self._read_all(cases)

    def _read_all(self, cases: list[_Case]) -> None:
        self._open_count -= 1
        if not self._open_count:
            self._ask_all(cases)

    def _ask_all(self, cases: list[_Case]) -> None:
        self._open_count = 1 + sum(len(case.quorum.nodes) for case in cases)
        for case in cases:
            self._ask(case, partial(self._count_down, cases))
        self._count_down(cases)

    def _ask(self, case: _Case, over: Callable[[], None]) -> None:
        message = StrongPrepare(self._epoch(), case.key, NO_BALLOT, list(case.quorum.maps))
        for node in case.quorum.nodes:
            then = partial(self._told, case, node, over)
            if node == self._node:
                self._voting.vote(message, then)
            else:
                self._desk.ask(node, message, then)

    def _told(self, case: _Case, node: str, over: Callable[[], None], answer: Message) -> None:
        try:
            if isinstance(answer, StrongPromised):
                case.states[node] = acceptor.checked(answer.state)
                case.standings[node] = Standing(answer.entry, answer.entries)
            elif isinstance(answer, Failure):
                self._refused(node, answer)
        except Corrupt:
            case.states.pop(node, None)
        over()

    def _count_down(self, cases: list[_Case]) -> None:
        self._open_count -= 1
        if not self._open_count:
            self._judge(cases)

    def _judge(self, cases: list[_Case]) -> None:
        ready: list[_Case] = []
        for case in cases:
            match verdict(case):
                case "remove":
                    ready.append(case)
                case "confirm":
                    self._notice(case.key, self._age_s)
                    self._bring_up(case.key)
                case "later":
                    self._notice(case.key, self._age_s)
        by_owners: dict[Quorum, list[_Case]] = {}
        for case in ready:
            by_owners.setdefault(case.quorum, []).append(case)
        for quorum, theirs in by_owners.items():
            self._order(quorum, theirs)

    def _bring_up(self, key: bytes) -> None:
        try:
            self._confirm(key, lambda outcome: None)
        except KVCommError:
            return  # later, with the next look at it

    def _order(self, quorum: Quorum, cases: list[_Case]) -> None:
        if quorum.maps != self._membership.maps:
            return  # an owner of the new ones may lack the floor
        floor = max(state.promised for case in cases for state in case.states.values())
        keys = [case.key for case in cases]
        accepted = [max(state.accepted for state in case.states.values()) for case in cases]
        message = StrongRemove(self._epoch(), list(quorum.maps), keys, accepted, floor)
        for node in quorum.nodes:
            if node == self._node:
                self._drop(message, lambda error: None)
            else:
                self._desk.ask(node, message, partial(self._removed, node))

    def _removed(self, node: str, answer: Message) -> None:
        """An owner that did not hear of it keeps its tombstone, and sees to that itself."""
        if isinstance(answer, Failure):
            self._refused(node, answer)

    # -- the acceptor's side

    def remove(self, origin: Origin, message: StrongRemove) -> None:
        """Another owner has found out that all have these tombstones.

        Raises:
            Unavailable: this acceptor does not vote now, or has another configuration.
            Corrupt: nobody asks that.
        """
        if not message.keys or len(message.keys) != len(message.accepted):
            raise Corrupt("a removal names records and a ballot of each")
        if len(message.keys) > BATCH_RECORDS:
            raise TooLarge(f"at most {BATCH_RECORDS} records are removed at once")
        for code in (message.floor, *message.accepted):
            counter_of(code)
        self._voting.check(message.maps)
        request = self._desk.open(origin, len(message.keys))
        request.expire = partial(self._desk.close, request, Unavailable("the disk was too slow"))

        def done(error: KVCommError | None) -> None:
            if request.open:
                self._desk.close(request, error or Done())

        self._drop(message, done)

    def _drop(self, message: StrongRemove, done: Callable[[KVCommError | None], None]) -> None:
        """The floor first, for a crash in between must leave one of the two."""
        known = self._membership.configuration
        assert known is not None, "a voter has one"
        self._membership.take_up(known, message.floor, partial(self._drop_each, message, done))

    def _drop_each(
        self,
        message: StrongRemove,
        done: Callable[[KVCommError | None], None],
        error: KVCommError | None,
    ) -> None:
        if error is not None:
            done(error)
            return
        open_count = len(message.keys)
        failed: KVCommError | None = None

        def dropped(change: _Remove, error: KVCommError | None) -> None:
            nonlocal open_count, failed
            open_count, failed = open_count - 1, failed or error
            self.removed_count += error is None and change.removed
            if not open_count:
                done(failed)

        for key, accepted in zip(message.keys, message.accepted, strict=True):
            change = _Remove(accepted, self._membership, lambda error: None)
            change.done = partial(dropped, change)
            try:
                self._lines.change(key, change)
            except Refused as busy:
                change.done(busy)

    # -- tombstones that nobody remembers

    def scanned(self, event: Scanned) -> bool:
        """Storage answered a ``Scan``; False = it is not ours."""
        if event.ticket != self._sweep:
            return False
        self._sweep, now = None, self._desk.now
        keys = [key for key in event.keys if key != MEMBERSHIP_KEY]
        for key in keys:
            self._lines.read(key, partial(self._look, key))
        if event.resume is None or event.failure:
            self._sweep_after, self._sweep_at = b"", now + SWEEP_INTERVAL_S
        else:
            self._sweep_after, self._sweep_at = event.resume, now + BATCH_INTERVAL_S
        return True

    def _look(self, key: bytes, local: Local[StrongState]) -> None:
        if not local.damaged and not local.failure and _may_go(local.state):
            self._notice(key, 0.0)

    # -- looking inside

    def story(self) -> str:
        """What waits, for a person."""
        return f"{len(self._due)} deleted records wait, {self.removed_count} were removed"


def _may_go(state: StrongState) -> bool:
    """Whether this is all that is left of a record.  One that was changed under a lease keeps the lease's
    epoch, below which nobody may ever change it again."""
    return acceptor.is_tombstone(state) and not state.register.fence


def verdict(case: _Case) -> str:
    """``remove``; ``confirm``: some owner is behind; ``later``: not all answered; ``drop``: it has a value
    again, or is gone."""
    nodes = case.quorum.nodes
    newest = max((state for state in case.states.values()), key=lambda state: state.accepted, default=None)
    if newest is None or len(counted(case.standings)) < len(nodes):
        return "later"
    if not _may_go(newest):
        return "drop"
    if all(_is_over(state, newest.accepted) for state in case.states.values()):
        return "remove"
    return "confirm"


def _is_over(state: StrongState, tombstone: bytes) -> bool:
    """Whether this owner can never again have anything older than the tombstone."""
    if state.accepted == NO_BALLOT:
        return state.promised >= tombstone
    return state.accepted == tombstone
