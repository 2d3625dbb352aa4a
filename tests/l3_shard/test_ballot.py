import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import Corrupt
from l3_shard.ballot import NO_BALLOT, STEPS_MAX, Ballot, BallotError, Ballots, round_of, version_of

NAMES = st.text(min_size=1, max_size=4).filter(lambda name: "\0" not in name)
BALLOTS = st.builds(
    Ballot, st.integers(1, 300) | st.integers(2**62, 2**63 - 1), NAMES, st.integers(0, 2**64 - 1)
)


@given(BALLOTS, BALLOTS)
def test_codes_order_as_ballots_do(one, two):
    assert (one.code < two.code) == (one < two) and (one.code == two.code) == (one == two)
    assert Ballot.from_code(one.code) == one and one.code > NO_BALLOT


@pytest.mark.parametrize(
    ("counter", "node", "incarnation"),
    [(0, "a", 1), (2**63, "a", 1), (1, "", 1), (1, "a\0", 1), (1, "a", 2**64)],
)
def test_impossible_ballots_are_refused(counter, node, incarnation):
    with pytest.raises(BallotError):
        Ballot(counter, node, incarnation)


@given(st.binary(max_size=30))
def test_other_bytes_are_no_ballot(code):
    try:
        ballot = Ballot.from_code(code)
    except Corrupt:
        return
    assert ballot.code == code


def test_a_proposer_never_gives_a_ballot_out_twice_and_overtakes_what_it_saw():
    ballots = Ballots("a", 1)
    first, second = ballots.draw(), ballots.draw()
    assert first < second
    ballots.seen(Ballot(70, "z", 9).code)
    ballots.seen(Ballot(5, "z", 9).code)
    ballots.seen(NO_BALLOT)
    assert ballots.draw() > Ballot(70, "z", 9).code


def test_a_restarted_proposer_does_not_reuse_a_ballot():
    """It has forgotten its counter; its incarnation is another."""
    before, after = Ballots("a", 1), Ballots("a", 2)
    assert {before.draw() for _ in range(9)}.isdisjoint({after.draw() for _ in range(9)})


@given(BALLOTS, BALLOTS, st.integers(0, STEPS_MAX - 1), st.integers(0, STEPS_MAX - 1))
def test_versions_of_a_round_lie_between_its_ballot_and_the_next_one(one, two, step, other):
    version = version_of(one.code, step)
    assert round_of(version) == one.code and version >= one.code
    if one < two:
        assert version < two.code
    assert (version == version_of(one.code, other)) == (step == other)


@given(st.binary(max_size=30))
def test_other_bytes_are_no_version(version):
    try:
        code = round_of(version)
    except Corrupt:
        return
    assert version == code or (version[:-1] == code and 0 < version[-1] < STEPS_MAX)
