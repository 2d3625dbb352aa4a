"""Which keepers are enough, against every set of them."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from l3_shard.place import Groups, Place, place_of
from l3_shard.ring import Ring
from tests.l3_shard.cluster import ring_map
from tests.l3_shard.moving_world import transition

GROUPS: list[Groups] = [(("a", "b", "c"),), (("a", "b", "c"), ("c", "d", "e")), (("a",), ("b", "a"))]


def subsets(nodes: str) -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(nodes, count) for count in range(len(nodes) + 1)))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("write_quorum", [1, 2, 3])
def test_a_write_is_done_where_each_group_has_a_quorum_and_met_where_no_quorum_can_hide(
    groups: Groups, write_quorum: int
) -> None:
    place = Place("a", 1, groups, groups[0], ("b", "c"), write_quorum)
    need = min(write_quorum, len(groups[0]))
    for nodes in subsets("abcde"):
        done = all(len({*group} & {*nodes}) >= min(write_quorum, len(group)) for group in groups)
        assert place.done(nodes) == done == (place.lacks(nodes) is None)
        hidden = [quorum for quorum in combinations(groups[0], need) if not {*quorum} & {*nodes}]
        assert place.meets_writes(nodes) == (not hidden)
        assert place.could_write(nodes) == (len({*groups[0]} & {*nodes}) >= need)


def test_what_a_write_lacks_is_told_of_the_first_group_that_lacks_it() -> None:
    place = Place("a", 1, (("a", "b", "c"), ("d", "e", "f")), ("a", "b", "c"), tuple("bcdef"), 2)
    assert place.lacks({"a", "b", "d"}) == (1, 2)
    assert place.lacks(set()) == (0, 2)


def test_nobody_is_not_enough() -> None:
    assert not Place("a", 1, ((),), (), (), 2).done(())


@pytest.mark.parametrize("stage", ["copy", "serve"])
def test_the_old_group_is_the_one_that_the_record_comes_from(stage: str) -> None:
    ring = Ring(transition("abc", "def", stage, 7))
    place = place_of(ring, "d", ring.write_groups(b"k"))
    assert set(place.old) == set("abc") and place.ours and place.gained and place.epoch == 7
    assert set(place.others) == set("abcef")
    assert not place_of(ring, "a", ring.write_groups(b"k")).gained
    assert not place_of(ring, "x", ring.write_groups(b"k")).ours


def test_stages_and_epochs_place_alike_and_other_owners_do_not() -> None:
    copy, serve = (Ring(transition("abc", "abd", stage, 2)) for stage in ("copy", "serve"))
    places = [place_of(ring, "a", ring.write_groups(b"k")) for ring in (copy, serve)]
    assert places[0].alike(places[1])
    plain = Ring(ring_map("abc"))
    assert not places[0].alike(place_of(plain, "a", plain.write_groups(b"k")))
