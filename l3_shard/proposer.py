"""``Proposal``: one round of changes of one strong record, from the proposer's side (Rystsov 2018, section
2.2).

::

    look:    peeking ──a quorum accepted the same──► over
                └─else: ``Turn``: it joins the changes
                                 a quorum promised                  a quorum accepted
    change:       preparing ───────────────────────► accepting ─────────────────────► over
                       ▲   ▲                             ▲ │
                       │   └──refused or too few answers───┘ once more, later (``Again``)
                 begins here, or at ``accepting`` under a ballot that a quorum promised with the last accept

**Many changes, one round.**  The orders of a proposal are applied one after the other to the register that
the round found, each to what the one before it made, and only the last register is accepted: all of them take
effect at one moment, in this order, and cost one round together.  Each has its outcome and its version
(``ballot.version_of``); nobody ever sees a register between two of them.

**A proposal can go round more than once, its changes may not.**  When an accept fails, some acceptor may have
the changed register all the same, and a later proposer may carry it on.  Registers therefore remember the
versions of their last rounds.  In the next round the proposal looks for its earlier ballots there:

* found: the changes have happened, with the outcomes that they had in that round; what is left is to confirm
  the register;
* not found, and the versions reach back to before the first of them: no register that descends from this one
  can ever hold them, so they may be made again;
* the versions do not reach back so far, or the record may have been deleted and removed since (``floor``):
  nobody can tell, and ``outcome_unknown`` is the truth.

**What did not change is confirmed too.**  A failed or fenced change tells its caller a version; until a
quorum has accepted it, it may still vanish.  An accept of the unchanged register keeps its version, so a read
never makes somebody's ``cas`` fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvcomm.errors import Conflict, Corrupt, Fenced, OutcomeUnknown, Unavailable
from kvcomm.wire.messages import (
    Failure,
    Message,
    StrongAccepted,
    StrongOrder,
    StrongOutcome,
    StrongPromised,
    StrongRegister,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.ballot import NO_BALLOT, STEPS_MAX, Ballots, round_of, version_of
from l3_shard.quorum import Quorum, Standing, counted

READ = "read"
CONFIRM = "confirm"
"""Have every quorum that is possible now know what the record holds; see ``l3_shard.settling``."""
OPS = ("put", "cas", "delete")

Phase = Literal["peek", "prepare", "accept", "over"]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Ask all acceptors to promise ``ballot``; ``NO_BALLOT`` = only to tell what they have."""

    ballot: bytes


@dataclass(frozen=True, slots=True)
class Accept:
    """Ask all acceptors to accept."""

    ballot: bytes
    register: StrongRegister
    following: bytes


@dataclass(frozen=True, slots=True)
class Again:
    """This round has failed: begin another, after a while."""

    contended: bool
    """Another proposer was in the way; else too few acceptors answered."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A look has met a change under way: it needs a round, in its turn among the record's changes."""


@dataclass(frozen=True, slots=True)
class Finished:
    outcomes: tuple[StrongOutcome, ...]
    """One an order."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A quorum has promised ``ballot`` having accepted ``register``: the next change may begin with its
    accept.  To be used once."""

    ballot: bytes
    register: StrongRegister


Step = Prepare | Accept | Again | Turn | Finished


class Proposal:
    """Changes of one record.  The owner sends what the steps say to every node of ``quorum`` and hands in
    what each answered, by the number of the round that it was asked in.

    Args:
        orders: at most ``STEPS_MAX``.
        ballots: of this proposer, shared by all its proposals.
        looks: only look, which is enough for a read as long as nothing is under way.
    """

    def __init__(
        self, orders: Sequence[StrongOrder], quorum: Quorum, ballots: Ballots, *, looks: bool = False
    ) -> None:
        assert 0 < len(orders) <= STEPS_MAX
        self.orders, self.quorum = tuple(orders), quorum
        self.round = 0
        """Grows with each phase; answers to an earlier one are not handed in."""
        self.phase: Phase = "over"
        self.promise: Promise | None = None
        """For the next round on the record, once this proposal is over."""
        self.looks = looks
        self.rival = NO_BALLOT
        """The last ballot that was in the way."""
        self._ballots = ballots
        self._attempts: dict[bytes, tuple[StrongOutcome, ...]] = {}
        """What each round would have told, by its ballot."""
        self._made: set[int] = set()
        """Orders that some attempt changed the register for."""
        self._dropped: set[int] = set()
        self._ballot = self._following = NO_BALLOT
        self._register = acceptor.NOTHING
        self._outcomes: tuple[StrongOutcome, ...] = ()  # if a quorum accepts
        self._granted: dict[str, Standing] = {}
        self._states: dict[str, StrongState] = {}
        self._floor = NO_BALLOT
        self._outstanding: dict[str, None] = {}
        self._contended = False

    @property
    def attempted(self) -> bool:
        """Whether a changed register was ever sent out."""
        return bool(self._attempts)

    def begin(self, promise: Promise | None = None) -> Step:
        """Start a round; ``promise`` saves its first half."""
        if self.looks:
            return self._ask("peek", NO_BALLOT)
        if promise is not None:
            assert not self._attempts, "a promise says nothing of what was removed"
            self._ballot = promise.ballot
            return self._propose(promise.register)
        return self._ask("prepare", self._ballots.draw())

    def possible_without(self, nodes: Collection[str]) -> bool:
        """Whether this round can end well before any of these answers."""
        return self.quorum.possible(self._granted, self._outstanding.keys() - nodes)

    def drop(self, index: int) -> None:
        """Nobody waits for this order any more: later rounds leave it out."""
        self._dropped.add(index)

    def heard(self, node: str, answer: Message) -> Step | None:
        """``node`` answered the round's question, with a ``Failure`` too; ``None`` = wait for others."""
        if self.phase == "over":
            return None
        self._outstanding.pop(node, None)
        with suppress(Corrupt):  # an answer that cannot be is none
            self._take(node, answer)
        if self.quorum.met(self._granted):
            if self.phase == "accept":
                return self._accepted()
            return self._told()
        if self.quorum.possible(self._granted, self._outstanding):
            return None
        self.phase = "over"
        return Again(self._contended)

    def _take(self, node: str, answer: Message) -> None:
        match answer:
            case StrongPromised() if self.phase in ("peek", "prepare"):
                state = acceptor.checked(answer.state)
                self._ballots.seen(state.promised)
                self._states[node] = state
                self._floor = max(self._floor, answer.floor)
            case StrongAccepted() if self.phase == "accept":
                self._ballots.seen(answer.promised)
            case Failure() if answer.detail:  # it has another configuration, which is being cleared up
                self._contended = True
                return
            case _:
                return
        if answer.granted:
            self._granted[node] = Standing(answer.entry, answer.entries)
        else:
            self._contended = True
            promised = answer.promised if isinstance(answer, StrongAccepted) else answer.state.promised
            self.rival = max(self.rival, promised)

    def given_up(self, why: str) -> tuple[StrongOutcome, ...]:
        """The truth when there is no time or patience for another round."""
        self.phase = "over"
        return tuple(self.left(index, why) for index in range(len(self.orders)))

    def left(self, index: int, why: str) -> StrongOutcome:
        """The truth for one order when nobody waits for more."""
        if index in self._made:
            return _failed(OutcomeUnknown.code, f"{why}; the change may have been made")
        return _failed(Unavailable.code, f"{why}; nothing was changed")

    def _ask(self, phase: Phase, ballot: bytes) -> Prepare:
        self._ballot = ballot
        self._enter(phase)
        return Prepare(ballot)

    def _enter(self, phase: Phase) -> None:
        self.phase, self._contended = phase, False
        self.round += 1
        self._granted.clear()
        self._states.clear()
        self._outstanding = dict.fromkeys(self.quorum.nodes)

    def _told(self) -> Step:
        """A quorum has told what it accepted last."""
        voters = counted(self._granted)
        newest = max((self._states[node] for node in voters), key=lambda state: state.accepted)
        chosen = self.quorum.met({node: self._granted[node] for node in voters if self._voted(node, newest)})
        if self.phase == "prepare":
            return self._propose(newest.register, chosen=chosen)
        if chosen and (self.orders[0].op != CONFIRM or self._alike(voters)):
            # had a later decision been over when we asked, its quorum would have met this one
            return self._finish((_done(newest.register),))
        self.phase = "over"  # a slower acceptor might complete it, or be dead
        return Turn()

    def _alike(self, voters: Sequence[str]) -> bool:
        """Whether they have promised the same too: else some have a promise that the others must learn of."""
        first = self._states[voters[0]]
        return all(self._states[node] == first for node in voters)

    def _voted(self, node: str, newest: StrongState) -> bool:
        state = self._states[node]
        return state.voted and state.accepted == newest.accepted

    def _propose(self, register: StrongRegister, *, chosen: bool = False) -> Step:
        """Change what a quorum holds, and have it accepted."""
        rounds = {round_of(version) for version in register.versions}
        found = [ballot for ballot in self._attempts if ballot in rounds]
        if found:
            outcomes, changed = self._attempts[found[-1]], register
        elif self._attempts and not _reaches_back(register, next(iter(self._attempts)), self._floor):
            return Finished(self.given_up("too much has changed since"))
        else:
            outcomes, changed = self._apply_all(register)
        if changed == register and chosen:
            self.promise = Promise(self._ballot, register)
            return self._finish(outcomes)
        if changed != register:
            self._attempts[self._ballot] = outcomes
        self._outcomes, self._register = outcomes, changed
        # after a delete nothing is cached: the record's state is to go, and with it the promise
        kept = changed.value is not None and self.orders[0].op != CONFIRM
        self._following = self._ballots.draw() if kept else NO_BALLOT
        self._enter("accept")
        return Accept(self._ballot, changed, self._following)

    def _apply_all(self, register: StrongRegister) -> tuple[tuple[StrongOutcome, ...], StrongRegister]:
        """One after the other; the register remembers one version of the round, the last."""
        outcomes: list[StrongOutcome] = []
        state, step = register, 0
        for index, order in enumerate(self.orders):
            if index in self._dropped:
                outcomes.append(_failed(Unavailable.code, "nobody waited for it any more"))
                continue
            outcome, after = apply(order, state, version_of(self._ballot, step))
            outcomes.append(outcome)
            if after != state:
                state, step = after, step + 1
                self._made.add(index)
        if step:
            state = acceptor.changed(register, state.version, state.value, state.fence)
        return tuple(outcomes), state

    def _accepted(self) -> Step:
        if self._following != NO_BALLOT:
            self.promise = Promise(self._following, self._register)
        return self._finish(self._outcomes)

    def _finish(self, outcomes: tuple[StrongOutcome, ...]) -> Finished:
        self.phase = "over"
        return Finished(outcomes)


def apply(
    order: StrongOrder, register: StrongRegister, version: bytes
) -> tuple[StrongOutcome, StrongRegister]:
    """What ``order`` makes of a register, and what its caller is told if that is accepted.

    The fence stands in the register, so it is a majority that refuses the change of an earlier lease epoch,
    whatever the shard that coordinates it remembers.  A record that was ever changed under a lease takes no
    change without one: who writes past the lease does not know that there is one.
    """
    match order.op:
        case "put" | "cas" | "delete" if order.fence < register.fence:
            text = (
                f"the record was changed under lease epoch {register.fence}, this is {order.fence or 'none'}"
            )
            return _found(Fenced.code, register, text), register
        case "cas" if not _expected(order, register):
            text = "the record has another version than the one named; read it and decide again"
            return _found(Conflict.code, register, text), register
        case "put" | "cas" | "delete":
            value = None if order.op == "delete" else order.value
            if value is None and register.value is None and order.fence == register.fence:
                return _done(register), register  # nothing to delete
            after = acceptor.changed(register, version, value, order.fence)
            return StrongOutcome("", after.version, None, fence=after.fence), after
    return _done(register), register


def _expected(order: StrongOrder, register: StrongRegister) -> bool:
    if order.expected == NO_BALLOT:
        return register.value is None
    return order.expected == register.version


def _reaches_back(register: StrongRegister, ballot: bytes, floor: bytes) -> bool:
    """Whether the register names all its rounds since before ``ballot``."""
    versions = register.versions
    if versions and versions[0] < ballot:
        return True
    return len(versions) < acceptor.VERSIONS_MAX and floor < ballot


def _done(register: StrongRegister) -> StrongOutcome:
    return _found("", register)


def _found(code: str, register: StrongRegister, text: str = "") -> StrongOutcome:
    return StrongOutcome(code, register.version, register.value, text, register.fence)


def _failed(code: str, text: str) -> StrongOutcome:
    return StrongOutcome(code, b"", None, text)


Jitter = Callable[[], float]
"""Draws from [0, 1)."""

BACKOFF_FIRST_S = 0.005
BACKOFF_MAX_S = 0.25


def backoff_s(failed_count: int, draw: Jitter, phase_s: float = 0.0) -> float:
    """How long to wait after so many failed rounds (1 = the first): doubling, and drawn from the upper three
    quarters, for two proposers that duel must not meet again and again.

    Who was in the way has its promises and needs about ``phase_s``, what a phase takes here, to have its
    register accepted: who comes back sooner makes it fail in turn.  So the wait is also not below half to
    one and a half times that, divided by the failures: who has given way again and again comes back sooner
    than one that was just served.
    """
    ceiling_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failed_count - 1, 16))
    drawn = draw()
    return max(ceiling_s * (0.25 + 0.75 * drawn), phase_s * (0.5 + drawn) / failed_count)
