from itertools import combinations

import pytest

from l3_shard.quorum import Quorum, Standing, informed, majority

FIRST = Standing(1, {})


def quorum_of(*groups: str) -> Quorum:
    return Quorum(tuple(tuple(group) for group in dict.fromkeys(groups)))


def standings(nodes: str) -> dict[str, Standing]:
    return dict.fromkeys(nodes, FIRST)


def test_a_majority_of_the_owners_is_needed():
    quorum = quorum_of("abc")
    assert quorum.groups == (("a", "b", "c"),) and quorum.nodes == ("a", "b", "c")
    assert (
        quorum.met(standings("ac")) and not quorum.met(standings("a")) and not quorum.met(standings("axyz"))
    )
    assert quorum.possible(standings("a"), "b") and not quorum.possible({}, "a")


def test_other_owners_need_both_majorities():
    quorum = quorum_of("abc", "cde")
    assert quorum.nodes == ("a", "b", "c", "d", "e")
    assert not quorum.met(standings("abc")) and not quorum.met(standings("cde"))
    assert quorum.met(standings("bcd"))
    assert not quorum.possible(standings("a"), "de")


@pytest.mark.parametrize("owners", ["abc", "bcd", "cde", "abcde", "a"])
def test_whatever_the_owners_became_all_quorums_meet(owners):
    old, new = quorum_of("abc"), quorum_of("abc", owners)
    nodes = sorted({*old.nodes, *new.nodes})
    groups = [set(some) for n in range(len(nodes) + 1) for some in combinations(nodes, n)]
    for one in groups:
        for two in groups:
            if old.met(dict.fromkeys(one, FIRST)) and new.met(dict.fromkeys(two, FIRST)):
                assert one & two


def test_a_vote_from_before_an_entry_does_not_count():
    quorum = quorum_of("xyz")
    assert quorum.met({"x": Standing(1, {}), "y": Standing(1, {})})
    assert not quorum.met({"x": Standing(1, {}), "y": Standing(1, {"x": 2})})
    assert quorum.met({"x": Standing(2, {}), "y": Standing(1, {"x": 2})})
    assert quorum.met({"x": Standing(3, {}), "y": Standing(1, {"x": 2}), "z": Standing(1, {"x": 3})})
    assert quorum.possible({"y": Standing(1, {"x": 2})}, "xz")


@pytest.mark.parametrize("size", range(2, 8))
def test_who_lost_its_state_is_informed_when_every_decision_with_its_vote_had_a_witness(size):
    nodes = "abcdefg"[:size]
    for count in range(size):
        for told in combinations(nodes[1:], count):
            decisions = [set(rest) for rest in combinations(nodes[1:], majority(nodes) - 1)]
            witnessed = all(rest & set(told) for rest in decisions)
            assert informed([tuple(nodes)], "a", told) == witnessed, (size, told)


def test_being_informed_is_a_matter_of_each_group_and_of_ones_own_only():
    assert informed([("a", "b", "c"), ("c", "d", "e")], "a", ["b", "c"])
    assert not informed([("a", "b", "c"), ("a", "d", "e")], "a", ["b", "c"])
    assert not informed([("a",)], "a", ["b", "c"]), "alone: what is lost is lost"
    assert Quorum((("a",),)).met(standings("a"))
