"""Version vectors against sets of dots: the dumb oracle is the set of all writes that a vector covers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import TooLarge
from kvcomm.version import COUNTER_MAX, ENTRIES_MAX, Dot, VersionError, VersionVector

wire = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4))
vectors = wire.map(VersionVector.from_wire)
DOTS = [Dot(replica, counter) for replica in "abcde" for counter in range(1, 6)]


def seen(vector: VersionVector) -> set[Dot]:
    return {Dot(replica, counter) for replica, last in vector.entries for counter in range(1, last + 1)}


@given(vectors)
def test_covers_is_membership(vector):
    assert {dot for dot in DOTS if vector.covers(dot)} == seen(vector)


@given(vectors, vectors)
def test_relations_are_those_of_the_sets(one, two):
    assert one.descends(two) == (seen(one) >= seen(two))
    assert one.concurrent(two) == (not seen(one) >= seen(two) and not seen(two) >= seen(one))
    assert seen(one.merge(two)) == seen(one) | seen(two)


@given(vectors, vectors, vectors)
def test_merge_is_a_join(one, two, three):
    assert one.merge(two) == two.merge(one)
    assert one.merge(one) == one
    assert one.merge(two).merge(three) == one.merge(two.merge(three))


@given(wire)
def test_wire_form_is_canonical(dots):
    vector = VersionVector.from_wire(dots)
    assert vector.to_wire() == dots
    assert list(vector.to_wire()) == sorted(dots)
    assert VersionVector.from_wire(dict(reversed(dots.items()))) == vector


@given(vectors, st.sampled_from(DOTS))
def test_including_covers_the_dot_and_all_before(vector, dot):
    grown = vector.including(dot)
    assert grown.covers(dot) and grown.descends(vector)
    assert grown.counter(dot.replica) == max(vector.counter(dot.replica), dot.counter)


@given(vectors, vectors)
def test_canonical_order_is_total(one, two):
    assert (one < two) + (two < one) + (one == two) == 1


@pytest.mark.parametrize("dots", [{"": 1}, {"a": 0}, {"a": -1}, {"a": COUNTER_MAX + 1}, {"x" * 65: 1}])
def test_impossible_vectors_are_refused(dots):
    with pytest.raises(VersionError):
        VersionVector.from_wire(dots)


def test_impossible_dot_is_refused():
    with pytest.raises(VersionError):
        Dot("a", 0)


def test_too_many_replicas_are_refused_not_truncated():
    full = VersionVector.from_wire({f"r{index}": 1 for index in range(ENTRIES_MAX)})
    with pytest.raises(TooLarge):
        VersionVector.from_wire({**full.to_wire(), "one more": 1})
    with pytest.raises(TooLarge):
        full.merge(VersionVector.from_wire({"one more": 1}))
