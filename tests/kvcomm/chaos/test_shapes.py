"""Shapes cut what they say, and sides are those who are still together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.chaos.draw import Draw
from kvcomm.chaos.shapes import SHAPES, cuts_of, draw_shape, sides
from kvcomm.errors import ConfigError

NODES = ["n1", "n2", "n3", "n4", "n5"]


def test_halves_leave_two_sides() -> None:
    cuts = cuts_of("halves", [["n1", "n2"], ["n3", "n4", "n5"]], NODES)
    assert len(cuts) == 12
    assert sides(NODES, cuts) == (("n1", "n2"), ("n3", "n4", "n5"))


def test_three_groups_none_of_which_hears_another() -> None:
    cuts = cuts_of("halves", [["n1"], ["n2", "n3"], ["n4", "n5"]], NODES)
    assert sides(NODES, cuts) == (("n1",), ("n2", "n3"), ("n4", "n5"))


def test_isolated_nodes_do_not_hear_each_other_either() -> None:
    cuts = cuts_of("isolate", [["n1", "n2"]], NODES)
    assert sides(NODES, cuts) == (("n1",), ("n2",), ("n3", "n4", "n5"))


def test_a_bridge_and_a_ring_have_no_sides() -> None:
    alone = tuple((node,) for node in NODES)
    assert sides(NODES, cuts_of("bridge", [["n1", "n2"], ["n3"], ["n4", "n5"]], NODES)) == alone
    ring = cuts_of("ring", [], NODES)
    assert sides(NODES, ring) == alone
    assert all(sum(pair[0] == node for pair in ring) == 2 for node in NODES)


def test_one_way_cuts_one_direction() -> None:
    cuts = cuts_of("one-way", [["n2"], ["n1", "n3"]], NODES)
    assert cuts == {("n2", "n1"), ("n2", "n3")}
    assert sides(NODES, cuts) == tuple((node,) for node in NODES)


def test_nothing_cut_is_one_side() -> None:
    assert sides(NODES, ()) == (tuple(NODES),)


@pytest.mark.parametrize(
    ("shape", "groups", "complaint"),
    [
        ("halves", [["n1"]], "none hears another"),
        ("ring", [["n1"]], "no groups"),
        ("bridge", [["n1"], [], ["n2"]], "middle"),
        ("isolate", [["n9"]], "nodes are n1"),
        ("halves", [["n1"], ["n1", "n2"]], "each once"),
    ],
)
def test_groups_that_make_no_sense_are_refused(shape: str, groups: list[list[str]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        cuts_of(shape, groups, NODES)  # type: ignore[arg-type]


@given(st.integers(0, 2**32), st.integers(2, 9))
def test_a_drawn_shape_cuts_something_and_is_drawn_again(seed: int, count: int) -> None:
    nodes = [f"n{index}" for index in range(1, count + 1)]
    drawn = draw_shape(Draw(seed), nodes)
    assert drawn == draw_shape(Draw(seed), nodes)
    assert drawn.shape in SHAPES
    if count >= 4:  # a ring or a bridge of less cuts nothing or has an empty side
        cuts = cuts_of(drawn.shape, drawn.groups, nodes)
        assert cuts
        assert all(a != b for a, b in cuts)
