"""Votes of one acceptor, and the paper's warning about removal."""

import pytest

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import StrongRegister, StrongState
from l3_shard import acceptor
from l3_shard.acceptor import EMPTY, NOTHING, VERSIONS_MAX
from l3_shard.ballot import NO_BALLOT, Ballot

B1, B2, B3, B4 = (Ballot(counter, "p", 1).code for counter in (1, 2, 3, 4))
ONE, TWO = StrongRegister([B1], b"1"), StrongRegister([B1, B2], b"2")


def accepted(*votes: tuple[bytes, StrongRegister]) -> StrongState:
    state = EMPTY
    for ballot, register in votes:
        after = acceptor.accept(state, ballot, register)
        assert after is not None
        state = after
    return state


def test_a_promise_bars_smaller_ballots():
    promised = acceptor.prepare(EMPTY, B2)
    assert promised == StrongState(B2, NO_BALLOT, NOTHING, True)
    assert acceptor.prepare(promised, B1) is None and acceptor.accept(promised, B1, ONE) is None
    assert acceptor.prepare(promised, B2) == promised, "the same request came twice"
    assert acceptor.accept(promised, B2, ONE) == StrongState(B2, B2, ONE, True)
    assert acceptor.accept(promised, B3, ONE) == StrongState(B3, B3, ONE, True)


def test_an_accept_may_promise_the_next_ballot_and_comes_twice_without_harm():
    state = acceptor.accept(EMPTY, B1, ONE, B3)
    assert state == StrongState(B3, B1, ONE, True)
    assert acceptor.accept(state, B1, ONE, B3) is state
    assert acceptor.accept(state, B2, TWO) is None
    after = acceptor.accept(state, B3, TWO)
    assert after is not None and acceptor.accept(after, B1, ONE, B3) is None, "an old accept changes nothing"


def test_what_was_learned_is_no_vote_and_never_lowers_anything():
    mine = StrongState(B3, B1, ONE, True)
    assert acceptor.learn(mine, StrongState(B2, B2, TWO, True)) == StrongState(B3, B2, TWO, False)
    assert acceptor.learn(mine, EMPTY) == mine
    assert acceptor.learn(EMPTY, mine) == StrongState(B3, B1, ONE, False)


def test_what_was_only_learned_is_voted_for_under_the_promise_alone():
    learned = acceptor.learn(EMPTY, StrongState(B1, B1, ONE, True))
    assert acceptor.accept(learned, B1, ONE) == StrongState(B1, B1, ONE, True)
    promised = acceptor.prepare(learned, B2)
    assert promised is not None and acceptor.accept(promised, B1, ONE) is None


def test_a_register_remembers_its_last_versions():
    register = NOTHING
    for counter in range(1, VERSIONS_MAX + 4):
        register = acceptor.changed(register, Ballot(counter, "p", 1).code, b"v")
    assert (
        len(register.versions) == VERSIONS_MAX and register.version == Ballot(VERSIONS_MAX + 3, "p", 1).code
    )


@pytest.mark.parametrize(
    "state",
    [
        StrongState(B1, B2, TWO, True),
        StrongState(B1, B1, TWO, True),
        StrongState(B2, B2, StrongRegister([B2, B1], b"v"), True),
        StrongState(B2, B2, StrongRegister([], b"v"), True),
        StrongState(b"no ballot", NO_BALLOT, NOTHING, True),
    ],
)
def test_impossible_states_are_refused(state):
    with pytest.raises(Corrupt):
        acceptor.checked(state)
    assert acceptor.checked(accepted((B2, TWO))) == StrongState(B2, B2, TWO, True)


def test_dropping_the_state_of_a_deleted_record_would_revive_an_old_value():
    """Why tombstones are kept.  A has accepted 42, B and C a later delete: a majority without B's and C's
    states finds 42 to be the newest."""
    deleted = StrongRegister([B2, B3], None)
    a, b = accepted((B2, StrongRegister([B2], b"42"))), accepted((B3, deleted))
    newest = max((a, b), key=lambda state: state.accepted)
    assert newest.register.value is None
    dropped = max((a, EMPTY), key=lambda state: state.accepted)
    assert dropped.register.value == b"42"
