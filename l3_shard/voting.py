"""``Voting``: the acceptor's side of strong records: votes, durable before anybody hears of them.

A vote is a change of the acceptor's state and goes through the record's line like any other
(``l3_shard.lines``), so votes on one record are given one after the other and those that come together share
one sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvcomm.errors import KVCommError, Refused, Unavailable
from kvcomm.wire.messages import (
    Failure,
    Message,
    StrongAccept,
    StrongAccepted,
    StrongPrepare,
    StrongPromised,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.ballot import NO_BALLOT, counter_of
from l3_shard.lines import Lines, Local

Then = Callable[[Message], None]


class Membership(Protocol):
    """Whether this acceptor may vote, and what its answers say of it."""

    @property
    def votes(self) -> bool: ...

    @property
    def entry(self) -> int: ...

    @property
    def entries(self) -> dict[str, int]: ...


@dataclass(eq=False, slots=True)
class _Vote:
    """A ``Change``."""

    voting: Voting
    message: StrongPrepare | StrongAccept
    then: Then
    granted: bool = False
    state: StrongState = acceptor.EMPTY
    """After this vote; later ones of the same write may have gone on from it."""

    def apply(self, state: StrongState) -> StrongState:
        after = _voted(state, self.message)
        self.granted, self.state = after is not None, after or state
        return self.state

    def durable(self, state: StrongState) -> None:
        self.then(self.voting.answer(self.message, self.granted, self.state))

    def failed(self, error: KVCommError) -> None:
        self.then(_failure(error))


class Voting:
    """One acceptor.  ``then`` gets the vote, or a ``Failure``: no vote was given."""

    def __init__(self, lines: Lines[StrongState], membership: Membership) -> None:
        self._lines, self._membership = lines, membership

    def vote(self, message: StrongPrepare | StrongAccept, then: Then) -> None:
        """Promise, accept, or only tell (a prepare of no ballot); ``message`` is checked, its key the stored
        one."""
        if not self._membership.votes:
            then(_failure(Unavailable("this shard has lost its strong records and is catching up")))
        elif message.ballot == NO_BALLOT:
            self._lines.read(message.key, partial(self._told, message, then))
        else:
            try:
                self._lines.change(message.key, _Vote(self, message, then))
            except Refused as error:
                then(_failure(error))

    def _told(self, message: StrongPrepare | StrongAccept, then: Then, local: Local[StrongState]) -> None:
        if local.failure or local.damaged:
            why = local.failure or "its bytes failed verification"
            then(_failure(Unavailable(f"the record's state here cannot be read: {why}")))
        else:
            then(self.answer(message, True, local.state))

    def answer(self, message: StrongPrepare | StrongAccept, granted: bool, state: StrongState) -> Message:
        """A vote, as it is sent.  It names the entries that are known *now*, after it became durable: see
        ``l3_shard.quorum``."""
        entry, entries = self._membership.entry, dict(self._membership.entries)
        if isinstance(message, StrongPrepare):
            return StrongPromised(granted, state, entry, entries)
        return StrongAccepted(granted, state.promised, entry, entries)


def _voted(state: StrongState, message: StrongPrepare | StrongAccept) -> StrongState | None:
    if isinstance(message, StrongPrepare):
        return acceptor.prepare(state, message.ballot)
    return acceptor.accept(state, message.ballot, message.register, message.following)


def check(message: StrongPrepare | StrongAccept) -> None:
    """Raises ``Corrupt``: no proposer asks for this."""
    if isinstance(message, StrongAccept):
        promised = max(message.ballot, message.following)
        acceptor.checked(StrongState(promised, message.ballot, message.register, True))
        counter_of(message.ballot)
    elif message.ballot != NO_BALLOT:
        counter_of(message.ballot)


def _failure(error: KVCommError) -> Failure:
    return Failure(error.code, error.message, error.detail)
