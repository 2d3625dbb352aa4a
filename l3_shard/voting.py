"""``Voting``: the acceptor's side of strong records: votes, durable before anybody hears of them.

A vote is a change of the acceptor's state and goes through the record's line like any other
(``l3_shard.lines``), so votes on one record are given one after the other and those that come together share
one sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvcomm.errors import KVCommError, Unavailable
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

    @property
    def floor(self) -> bytes: ...

    @property
    def maps(self) -> tuple[int, ...]: ...

    @property
    def ready(self) -> bool:
        """Whether what it has counts under these maps, see ``l3_shard.dropping``."""
        ...

    @property
    def told(self) -> bytes:
        """The configuration, for those who have another one."""
        ...


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
        """The check comes here, and not only when the vote is asked for: meanwhile the configuration may have
        become another one, or the acceptor have lost its right."""
        self.voting.check(self.message.maps)
        before = acceptor.floored(state, self.voting.floor)
        after = _voted(before, self.message)
        self.granted, self.state = after is not None, after or before
        return state if after is None else after

    def durable(self, state: StrongState) -> None:
        self.then(self.voting.answer(self.message, self.granted, self.state))
        if isinstance(self.message, StrongAccept) and self.granted and acceptor.is_tombstone(state):
            self.voting.deleted(self.message.key)

    def failed(self, error: KVCommError) -> None:
        self.then(_failure(error))


class Voting:
    """One acceptor.  ``then`` gets the vote, or a ``Failure``: no vote was given.

    ``deleted`` hears of each record that it has accepted the deletion of.
    """

    def __init__(
        self, lines: Lines[StrongState], membership: Membership, deleted: Callable[[bytes], None]
    ) -> None:
        self.deleted = deleted
        self._lines, self._membership = lines, membership

    @property
    def floor(self) -> bytes:
        return self._membership.floor

    def check(self, asked: Sequence[int]) -> None:
        """Raises ``Unavailable``: this acceptor does not vote now, or not for a proposer with these maps."""
        if not self._membership.votes:
            raise Unavailable("this shard has lost its strong records and is catching up")
        if tuple(asked) != self._membership.maps:
            maps = f"maps {list(self._membership.maps)} decide here, not {list(asked)}"
            raise Unavailable(f"another configuration: {maps}", self._membership.told)
        if not self._membership.ready:
            text = "this shard is dropping what it knew as an owner of the past; ask again"
            raise Unavailable(text, self._membership.told)

    def vote(self, message: StrongPrepare | StrongAccept, then: Then) -> None:
        """Promise, accept, or only tell (a prepare of no ballot); ``message`` is checked, its key the stored
        one."""
        try:
            self.check(message.maps)
            if message.ballot == NO_BALLOT:
                self._lines.read(message.key, partial(self._told, message, then))
            else:
                self._lines.change(message.key, _Vote(self, message, then))
        except KVCommError as error:
            then(_failure(error))

    def _told(self, message: StrongPrepare | StrongAccept, then: Then, local: Local[StrongState]) -> None:
        if local.failure or local.damaged:
            why = local.failure or "its bytes failed verification"
            then(_failure(Unavailable(f"the record's state here cannot be read: {why}")))
            return
        try:
            self.check(message.maps)
        except KVCommError as error:
            then(_failure(error))
        else:
            then(self.answer(message, True, acceptor.floored(local.state, self.floor)))

    def answer(self, message: StrongPrepare | StrongAccept, granted: bool, state: StrongState) -> Message:
        """A vote, as it is sent.  It names the entries that are known *now*, after it became durable: see
        ``l3_shard.quorum``."""
        entry, entries = self._membership.entry, dict(self._membership.entries)
        if isinstance(message, StrongPrepare):
            return StrongPromised(granted, state, entry, entries, self.floor)
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
