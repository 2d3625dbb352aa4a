"""Proposals by literal answers."""

from kvcomm.wire.messages import (
    Failure,
    StrongAccepted,
    StrongOrder,
    StrongOutcome,
    StrongPromised,
    StrongRegister,
    StrongState,
)
from l3_shard.acceptor import EMPTY, NOTHING, VERSIONS_MAX
from l3_shard.ballot import NO_BALLOT, Ballot, Ballots, version_of
from l3_shard.proposer import (
    BACKOFF_MAX_S,
    Accept,
    Again,
    Finished,
    Prepare,
    Promise,
    Proposal,
    Turn,
    backoff_s,
)
from l3_shard.quorum import Quorum

OWNERS = Quorum((tuple("abc"),))
PUT = StrongOrder(b"k", "put", b"", b"v")
READ = StrongOrder(b"k", "read")
DEAD = Failure("unavailable", "dead")


def mine(counter: int) -> bytes:
    return Ballot(counter, "a", 1).code


def theirs(counter: int) -> bytes:
    return Ballot(counter, "b", 1).code


def proposal(order: StrongOrder = PUT) -> Proposal:
    return Proposal([order], OWNERS, Ballots("a", 1), looks=order.op == "read")


def promised(ballot: bytes, state: StrongState = EMPTY) -> StrongPromised:
    return StrongPromised(
        True, StrongState(max(ballot, state.promised), state.accepted, state.register, state.voted), 1, {}
    )


def refused(seen: bytes) -> StrongPromised:
    return StrongPromised(False, StrongState(seen, NO_BALLOT, NOTHING, True), 1, {})


def held(ballot: bytes, value: bytes | None, *versions: bytes) -> StrongState:
    return StrongState(ballot, ballot, StrongRegister(list(versions or [ballot]), value), True)


def agreed(yes: bool = True, seen: bytes = NO_BALLOT) -> StrongAccepted:
    return StrongAccepted(yes, seen, 1, {})


def test_a_put_prepares_then_has_its_register_accepted():
    put = proposal()
    assert put.begin() == Prepare(mine(1))
    assert put.heard("a", promised(mine(1))) is None
    register = StrongRegister([mine(1)], b"v")
    assert put.heard("c", promised(mine(1))) == Accept(mine(1), register, mine(2))
    assert put.heard("c", agreed()) is None
    assert put.heard("b", agreed()) == Finished((StrongOutcome("", mine(1), None),))
    assert put.promise == Promise(mine(2), register)


def test_a_kept_promise_saves_the_first_round_trip():
    put = proposal()
    before = StrongRegister([theirs(1)], b"old")
    step = put.begin(Promise(mine(7), before))
    assert isinstance(step, Accept) and step.ballot == mine(7)
    assert step.register == StrongRegister([theirs(1), mine(7)], b"v")


def test_a_delete_leaves_no_promise_to_be_kept():
    """The record's state is to be removed one day; a cached ballot would bring the old register back."""
    delete = proposal(StrongOrder(b"k", "delete"))
    delete.begin()
    delete.heard("a", promised(mine(1), held(theirs(1), b"x")))
    step = delete.heard("b", promised(mine(1), held(theirs(1), b"x")))
    assert step == Accept(mine(1), StrongRegister([theirs(1), mine(1)], None), NO_BALLOT)
    delete.heard("a", agreed())
    assert isinstance(delete.heard("b", agreed()), Finished) and delete.promise is None


def test_a_refused_round_is_repeated_above_the_ballot_in_the_way():
    put = proposal()
    put.begin()
    assert put.heard("a", promised(mine(1))) is None
    assert put.heard("b", refused(theirs(9))) is None
    assert put.heard("c", refused(theirs(9))) == Again(contended=True)
    assert put.begin() == Prepare(mine(10))


def test_too_few_answers_are_told_apart_from_contention_and_nothing_was_changed():
    put = proposal()
    put.begin()
    put.heard("a", promised(mine(1)))
    assert put.heard("b", DEAD) is None
    assert put.heard("c", DEAD) == Again(contended=False)
    assert put.given_up("no majority")[0].code == "unavailable"


def test_a_change_that_was_sent_out_is_unknown_when_it_is_given_up():
    put = proposal()
    put.begin()
    put.heard("a", promised(mine(1)))
    put.heard("b", promised(mine(1)))
    assert put.given_up("time is up")[0].code == "outcome_unknown"


def stuck(order: StrongOrder = PUT) -> Proposal:
    """Accepted by itself only, and begins anew."""
    put = proposal(order)
    put.begin()
    put.heard("a", promised(mine(1)))
    put.heard("b", promised(mine(1)))
    put.heard("a", agreed())
    put.heard("b", agreed(False, theirs(5)))
    assert put.heard("c", agreed(False, theirs(5))) == Again(contended=True)
    assert put.begin() == Prepare(mine(6))
    return put


def test_a_change_that_has_happened_meanwhile_is_confirmed_and_not_made_again():
    put = stuck()
    carried_on = held(theirs(5), b"theirs", mine(1), theirs(5))
    put.heard("b", promised(mine(6), EMPTY))
    step = put.heard("c", promised(mine(6), carried_on))
    assert step == Accept(mine(6), carried_on.register, mine(7)), "the register stays as it is"
    put.heard("b", agreed())
    assert put.heard("c", agreed()) == Finished((StrongOutcome("", mine(1), None),))


def test_a_change_that_cannot_have_happened_is_made_again():
    put = stuck()
    put.heard("b", promised(mine(6), held(theirs(5), b"theirs")))
    step = put.heard("c", promised(mine(6), held(theirs(5), b"theirs")))
    assert isinstance(step, Accept) and step.register == StrongRegister([theirs(5), mine(6)], b"v")


def test_a_change_that_nobody_can_tell_of_any_more_is_unknown():
    put = stuck()
    versions = [theirs(counter) for counter in range(2, 2 + VERSIONS_MAX)]
    far = held(theirs(9), b"theirs", *versions)
    put.heard("b", promised(mine(6), far))
    step = put.heard("c", promised(mine(6), far))
    assert isinstance(step, Finished) and step.outcomes[0].code == "outcome_unknown"


def test_a_failed_cas_is_confirmed_before_it_is_told():
    """What only a minority has accepted may vanish again: nobody must hear of it."""
    cas = proposal(StrongOrder(b"k", "cas", theirs(3), b"v"))
    cas.begin()
    cas.heard("a", promised(mine(1), EMPTY))
    step = cas.heard("b", promised(mine(1), held(theirs(1), b"x")))
    assert step == Accept(mine(1), StrongRegister([theirs(1)], b"x"), mine(2)), "its version stays"
    cas.heard("a", agreed())
    done = cas.heard("b", agreed())
    assert isinstance(done, Finished)
    assert (done.outcomes[0].code, done.outcomes[0].version, done.outcomes[0].value) == (
        "conflict",
        theirs(1),
        b"x",
    )


def test_a_failed_cas_against_a_decided_register_is_told_at_once():
    cas = proposal(StrongOrder(b"k", "cas", theirs(3), b"v"))
    cas.begin()
    cas.heard("a", promised(mine(1), held(theirs(1), b"x")))
    done = cas.heard("b", promised(mine(1), held(theirs(1), b"x")))
    assert isinstance(done, Finished) and done.outcomes[0].code == "conflict"
    assert cas.promise == Promise(mine(1), StrongRegister([theirs(1)], b"x"))


def test_a_read_only_looks_where_a_quorum_has_accepted_the_same():
    read = proposal(READ)
    assert read.begin() == Prepare(NO_BALLOT)
    assert read.heard("a", promised(NO_BALLOT, held(theirs(2), b"x"))) is None
    done = read.heard("c", promised(NO_BALLOT, held(theirs(2), b"x")))
    assert done == Finished((StrongOutcome("", theirs(2), b"x"),))


def test_a_read_that_meets_a_change_under_way_takes_its_turn():
    read = proposal(READ)
    read.begin()
    read.heard("a", promised(NO_BALLOT, held(theirs(2), b"x")))
    assert read.heard("c", promised(NO_BALLOT, held(theirs(3), b"y"))) == Turn()
    assert read.heard("b", promised(NO_BALLOT, held(theirs(3), b"y"))) is None, "it is over with that round"


def test_changes_of_one_round_follow_each_other_and_are_accepted_at_once():
    orders = [
        StrongOrder(b"k", "cas", b"", b"1"),
        StrongOrder(b"k", "cas", b"", b"2"),
        StrongOrder(b"k", "put", b"", b"3"),
        READ,
        StrongOrder(b"k", "delete"),
        StrongOrder(b"k", "put", b"", b"4"),
    ]
    batch = Proposal(orders, OWNERS, Ballots("a", 1))
    batch.begin()
    batch.heard("a", promised(mine(1)))
    step = batch.heard("b", promised(mine(1)))
    last = version_of(mine(1), 3)
    assert step == Accept(mine(1), StrongRegister([last], b"4"), mine(2)), "one version a round is remembered"
    batch.heard("a", agreed())
    end = batch.heard("b", agreed())
    assert isinstance(end, Finished)
    told = [(outcome.code, outcome.version, outcome.value) for outcome in end.outcomes]
    assert told == [
        ("", mine(1), None),
        ("conflict", mine(1), b"1"),
        ("", version_of(mine(1), 1), None),
        ("", version_of(mine(1), 1), b"3"),
        ("", version_of(mine(1), 2), None),
        ("", last, None),
    ]
    assert sorted({version for _, version, _ in told}) == [
        mine(1),
        *(version_of(mine(1), n) for n in (1, 2, 3)),
    ]


def test_each_change_of_a_round_that_has_happened_keeps_its_first_outcome():
    """The round got through with the help of others; made again, its second order would succeed."""
    orders = [StrongOrder(b"k", "cas", b"", b"1"), StrongOrder(b"k", "cas", b"", b"2")]
    batch = Proposal(orders, OWNERS, Ballots("a", 1))
    batch.begin()
    batch.heard("a", promised(mine(1)))
    batch.heard("b", promised(mine(1)))
    batch.heard("a", agreed())
    batch.heard("b", agreed(False, theirs(5)))
    assert batch.heard("c", agreed(False, theirs(5))) == Again(contended=True)
    batch.begin()
    deleted = held(theirs(5), None, mine(1), theirs(5))
    batch.heard("b", promised(mine(6), deleted))
    end = batch.heard(
        "c", promised(mine(6), deleted)
    )  # a quorum has accepted the same: nothing is left to do
    assert isinstance(end, Finished) and [outcome.code for outcome in end.outcomes] == ["", "conflict"]


def test_an_order_that_nobody_waits_for_is_left_out_of_the_next_round():
    batch = Proposal([PUT, StrongOrder(b"k", "put", b"", b"w")], OWNERS, Ballots("a", 1))
    batch.begin()
    assert batch.left(0, "late").code == "unavailable"
    batch.drop(0)
    batch.heard("a", promised(mine(1)))
    step = batch.heard("b", promised(mine(1)))
    assert isinstance(step, Accept) and step.register == StrongRegister([mine(1)], b"w")
    assert batch.left(0, "late").code == "unavailable" and batch.left(1, "late").code == "outcome_unknown"


def test_a_change_whose_record_may_have_been_removed_since_is_unknown():
    put = stuck()
    gone = StrongState(mine(6), NO_BALLOT, NOTHING, True)
    put.heard("b", StrongPromised(True, gone, 1, {}, theirs(5)))
    end = put.heard("c", StrongPromised(True, gone, 1, {}, NO_BALLOT))
    assert isinstance(end, Finished) and end.outcomes[0].code == "outcome_unknown"


def test_a_change_above_all_that_was_removed_may_be_made_again():
    put = stuck()
    gone = StrongState(mine(6), NO_BALLOT, NOTHING, True)
    answer = StrongPromised(True, gone, 1, {}, Ballot(1, "A", 1).code)
    assert put.heard("b", answer) is None
    assert isinstance(put.heard("c", answer), Accept)


def test_a_record_is_confirmed_without_writing_where_all_is_alike():
    def confirm() -> Proposal:
        looking = Proposal([StrongOrder(b"k", "confirm")], OWNERS, Ballots("a", 1), looks=True)
        looking.begin()
        looking.heard("a", promised(NO_BALLOT, held(theirs(2), b"x")))
        return looking

    same, more = (
        held(theirs(2), b"x"),
        StrongState(theirs(9), theirs(2), held(theirs(2), b"x").register, True),
    )
    assert isinstance(confirm().heard("b", promised(NO_BALLOT, same)), Finished)
    assert confirm().heard("b", promised(NO_BALLOT, more)) == Turn(), "a promise that not all know of"


def test_what_acceptors_learned_from_each_other_decides_nothing():
    """x was told y's register after it had lost its own; their majority has it, and nobody had decided it."""
    state = held(theirs(2), b"x")
    learned = StrongState(state.promised, state.accepted, state.register, False)
    read = proposal(READ)
    read.begin()
    read.heard("a", promised(NO_BALLOT, learned))
    assert read.heard("c", promised(NO_BALLOT, state)) == Turn()


def test_a_vote_of_an_acceptor_that_lost_its_state_does_not_count():
    put = proposal()
    put.begin()
    put.heard("a", promised(mine(1)))
    assert put.heard("b", StrongPromised(True, promised(mine(1)).state, 1, {"a": 2})) is None
    assert put.heard("c", promised(mine(1))) is not None


def test_an_answer_that_cannot_be_is_no_answer():
    put = proposal()
    put.begin()
    put.heard("a", promised(mine(1)))
    assert put.heard("b", promised(mine(1), StrongState(b"x", b"y", NOTHING, True))) is None
    assert put.heard("c", DEAD) == Again(contended=False)


def test_creating_needs_no_value_and_a_deleted_one_is_none():
    for state, code in ((EMPTY, ""), (held(theirs(1), None), ""), (held(theirs(1), b"x"), "conflict")):
        cas = proposal(StrongOrder(b"k", "cas", b"", b"v"))
        cas.begin()
        cas.heard("a", promised(mine(1), state))
        step = cas.heard("b", promised(mine(1), state))
        assert isinstance(step, Finished if code else Accept), step


def test_the_wait_doubles_up_to_a_bound_and_is_drawn():
    assert backoff_s(1, lambda: 0.0) < backoff_s(1, lambda: 0.99) <= backoff_s(2, lambda: 0.99)
    assert backoff_s(40, lambda: 0.999) <= BACKOFF_MAX_S


def test_who_was_in_the_way_gets_the_time_of_a_phase():
    assert backoff_s(1, lambda: 0.0, 0.4) == 0.2 < backoff_s(1, lambda: 0.5, 0.4) == 0.4
    assert backoff_s(1, lambda: 0.5, 1e-6) == backoff_s(1, lambda: 0.5)


def test_who_failed_more_often_waits_a_smaller_part_of_it():
    waits = [backoff_s(count, lambda: 0.5, 4.0) for count in (1, 2, 3, 4)]
    assert waits == sorted(waits, reverse=True) and waits[0] == 4 * waits[3]
