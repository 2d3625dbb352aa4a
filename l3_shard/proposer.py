"""``Proposal``: one change of one strong record, from the proposer's side (Rystsov 2018, section 2.2).

::

    read:    peeking ──a quorum accepted the same──► over
                └─else: ``Turn``─┐
                       ┌─────────┘
                       ▼         a quorum promised                  a quorum accepted
    change:       preparing ───────────────────────► accepting ─────────────────────► over
                       ▲   ▲                             ▲ │
                       │   └──refused or too few answers───┘ once more, later (``Again``)
                 begins here, or at ``accepting`` under a ballot that a quorum promised with the last accept

**A proposal can go round more than once, its change may not.**  When an accept fails, some acceptor may have
the changed register all the same, and a later proposer may carry it on.  Registers therefore remember the
ballots of their last changes.  In the next round the proposal looks for its earlier ballots there:

* found: the change has happened; what is left is to confirm the register;
* not found, and the versions reach back to before the first of them: no register that descends from this one
  can ever hold it, so the change may be made again;
* the versions do not reach back so far: nobody can tell, and ``outcome_unknown`` is the truth.

**What did not change is confirmed too.**  A failed or fenced change tells its caller a version; until a
quorum has accepted it, it may still vanish.  An accept of the unchanged register keeps its version, so a read
never makes somebody's ``cas`` fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvcomm.errors import Conflict, Corrupt, Fenced, OutcomeUnknown, Unavailable
from kvcomm.wire.messages import (
    Message,
    StrongAccepted,
    StrongOrder,
    StrongOutcome,
    StrongPromised,
    StrongRegister,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.ballot import NO_BALLOT, Ballots
from l3_shard.quorum import Quorum, Standing, counted

READ = "read"
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
    """A read has met a change under way: it needs a round of its own, in its turn among the record's
    changes."""


@dataclass(frozen=True, slots=True)
class Finished:
    outcome: StrongOutcome


@dataclass(frozen=True, slots=True)
class Promise:
    """A quorum has promised ``ballot`` having accepted ``register``: the next change may begin with its
    accept.  To be used once."""

    ballot: bytes
    register: StrongRegister


Step = Prepare | Accept | Again | Turn | Finished


class Proposal:
    """One change.  The owner sends what the steps say to every node of ``quorum`` and hands in what each
    answered, by the number of the round that it was asked in.

    Args:
        order: a change, or a read (``op`` = ``READ``).
        ballots: of this proposer, shared by all its proposals.
    """

    def __init__(self, order: StrongOrder, quorum: Quorum, ballots: Ballots) -> None:
        self.order, self.quorum = order, quorum
        self.round = 0
        """Grows with each phase; answers to an earlier one are not handed in."""
        self.phase: Phase = "over"
        self.promise: Promise | None = None
        """For the next change of the record, once this one is over."""
        self._ballots = ballots
        self._attempts: list[bytes] = []
        self._ballot = self._following = NO_BALLOT
        self._register = acceptor.NOTHING
        self.looks = order.op == READ
        """The next round only looks."""
        self._outcome: StrongOutcome | None = None  # if a quorum accepts
        self._granted: dict[str, Standing] = {}
        self._states: dict[str, StrongState] = {}
        self._outstanding: dict[str, None] = {}
        self._contended = False

    def begin(self, promise: Promise | None = None) -> Step:
        """Start a round; ``promise`` saves its first half."""
        if self.looks:
            return self._ask("peek", NO_BALLOT)
        if promise is not None:
            self._ballot = promise.ballot
            return self._propose(promise.register)
        return self._ask("prepare", self._ballots.draw())

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
            case StrongAccepted() if self.phase == "accept":
                self._ballots.seen(answer.promised)
            case _:
                return
        if answer.granted:
            self._granted[node] = Standing(answer.entry, answer.entries)
        else:
            self._contended = True

    def given_up(self, why: str) -> StrongOutcome:
        """The truth when there is no time or patience for another round."""
        self.phase = "over"
        if self._attempts:
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
        if chosen:  # and had a later decision been over when we asked, its quorum would have met this one
            return self._finish(_done(newest.register))
        self.phase, self.looks = "over", False  # a slower acceptor might complete it, or be dead
        return Turn()

    def _voted(self, node: str, newest: StrongState) -> bool:
        state = self._states[node]
        return state.voted and state.accepted == newest.accepted

    def _propose(self, register: StrongRegister, *, chosen: bool = False) -> Step:
        """Change what a quorum holds, and have it accepted."""
        again = [version for version in self._attempts if version in register.versions]
        if again:
            outcome, changed = StrongOutcome("", again[-1], None, fence=self.order.fence), register
        elif self._attempts and not _reaches_back(register, self._attempts[0]):
            self.phase = "over"
            return Finished(
                _failed(OutcomeUnknown.code, "the change may have been made, and others after it")
            )
        else:
            outcome, changed = apply(self.order, register, self._ballot)
        if changed == register and chosen:
            self.promise = Promise(self._ballot, register)
            return self._finish(outcome)
        if changed != register:
            self._attempts.append(self._ballot)
        self._outcome, self._register = outcome, changed
        # after a delete nothing is cached: the record's state is to go one day, and with it the promise
        self._following = NO_BALLOT if changed.value is None else self._ballots.draw()
        self._enter("accept")
        return Accept(self._ballot, changed, self._following)

    def _accepted(self) -> Step:
        assert self._outcome is not None
        if self._following != NO_BALLOT:
            self.promise = Promise(self._following, self._register)
        return self._finish(self._outcome)

    def _finish(self, outcome: StrongOutcome) -> Finished:
        self.phase = "over"
        return Finished(outcome)


def apply(
    order: StrongOrder, register: StrongRegister, ballot: bytes
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
            after = acceptor.changed(register, ballot, value, order.fence)
            return StrongOutcome("", after.version, None, fence=after.fence), after
    return _done(register), register


def _expected(order: StrongOrder, register: StrongRegister) -> bool:
    if order.expected == NO_BALLOT:
        return register.value is None
    return order.expected == register.version


def _reaches_back(register: StrongRegister, ballot: bytes) -> bool:
    """Whether the register names all its changes since before ``ballot``."""
    versions = register.versions
    return len(versions) < acceptor.VERSIONS_MAX or versions[0] < ballot


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


def backoff_s(failed_count: int, draw: Jitter) -> float:
    """How long to wait after so many failed rounds (1 = the first): doubling, and drawn from the upper three
    quarters, for two proposers that duel must not meet again and again."""
    ceiling_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failed_count - 1, 16))
    return ceiling_s * (0.25 + 0.75 * draw())
