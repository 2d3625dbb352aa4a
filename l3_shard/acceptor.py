"""The acceptor of CASPaxos: what one replica of a strong record remembers, and how it votes (Rystsov 2018,
section 2.2).

A state is the highest ballot promised, and the register accepted last with its ballot::

    prepare(b)      b above the promise: promise it, and tell what was accepted
                    b is the promise: the request came twice, tell again
    accept(b, r)    b at or above the promise: r is accepted under b, and a following ballot may be
                    promised in the same step, which saves the proposer the next prepare (section 2.2.1)
                    b and r are what was voted for last: the request came twice, agree again; not if
                    they were only learned, for the promise may be what bars them
    else            refused, and the promise in the way is told

The caller must have the new state on the disk before it lets anybody hear of the vote: a promise that a crash
takes back lets two proposers both succeed from one register.

A delete accepts a register without a value, a tombstone.  To drop it on a majority while one acceptor still
holds an older value would bring that value back (section 3.1): see ``l3_shard.removing`` for when it may go.
What stands for all that went is the acceptor's *floor*, a ballot: for a record that it does not have it has
promised the floor.
"""

from __future__ import annotations

from itertools import pairwise

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import FENCE_MAX, StrongRegister, StrongState
from l3_shard.ballot import NO_BALLOT, counter_of, round_of

VERSIONS_MAX = 8
"""Versions that a register remembers, one a round: a proposer that lost an answer finds out whether its
changes took effect as long as not more than so many other rounds came after it."""

NOTHING = StrongRegister([], None)
EMPTY = StrongState(NO_BALLOT, NO_BALLOT, NOTHING, True)
"""A record that this acceptor has not heard of."""


def floored(state: StrongState, floor: bytes) -> StrongState:
    """What an acceptor with this floor goes by."""
    return StrongState(floor, NO_BALLOT, NOTHING, True) if state == EMPTY and floor else state


def is_tombstone(state: StrongState) -> bool:
    """Whether the record was deleted, and the acceptor still remembers."""
    return state.accepted != NO_BALLOT and state.register.value is None


def prepare(state: StrongState, ballot: bytes) -> StrongState | None:
    """The state after promising ``ballot``; ``None`` = refused, ``state.promised`` is higher."""
    if ballot < state.promised:
        return None
    return StrongState(ballot, state.accepted, state.register, state.voted)


def accept(
    state: StrongState, ballot: bytes, register: StrongRegister, following: bytes = NO_BALLOT
) -> StrongState | None:
    """The state after accepting ``register`` under ``ballot``; ``None`` = refused, ``state.promised`` is
    higher."""
    if state.voted and ballot == state.accepted and register == state.register:
        return state
    if ballot < state.promised:
        return None
    return StrongState(max(ballot, following), ballot, register, True)


def learn(state: StrongState, other: StrongState) -> StrongState:
    """What an acceptor starts from that lost ``state`` in part or whole and is told what another one has.

    Only for one that does not vote: a voter that takes over a register under a ballot below its promise
    breaks the promise.  And what was learned is no vote: a majority that *has* a register decides nothing, a
    majority that voted for it does.
    """
    promised = max(state.promised, other.promised)
    if other.accepted > state.accepted:
        return StrongState(promised, other.accepted, other.register, False)
    return StrongState(promised, state.accepted, state.register, state.voted)


def changed(register: StrongRegister, version: bytes, value: bytes | None, fence: int = 0) -> StrongRegister:
    """The register after the round whose last change is called ``version``, made under the lease epoch
    ``fence``."""
    versions = [*register.versions, version][-VERSIONS_MAX:]
    return StrongRegister(versions, value, max(register.fence, fence))


def checked(state: StrongState) -> StrongState:
    """``state`` from outside.

    Raises:
        Corrupt: no sequence of votes leads to it.
    """
    versions = state.register.versions
    for code in (state.promised, state.accepted):
        if code != NO_BALLOT:
            counter_of(code)
    rounds = [round_of(version) for version in versions]
    ordered = all(older < newer for older, newer in pairwise(rounds))
    newest = rounds[-1] if rounds else NO_BALLOT
    if not ordered or len(versions) > VERSIONS_MAX or newest > state.accepted or NO_BALLOT in rounds:
        raise Corrupt("not an acceptor's state: its versions are out of order or above what was accepted")
    if not 0 <= state.register.fence <= FENCE_MAX or (state.register.fence and not versions):
        raise Corrupt("not an acceptor's state: no change was made under such a fence")
    if state.accepted > state.promised or (state.register.value is not None and not versions):
        raise Corrupt(
            "not an acceptor's state: it accepted what it had not promised, or a value of no change"
        )
    return state
