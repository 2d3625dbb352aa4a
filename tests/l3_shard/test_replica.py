"""Replica ids."""

import pytest

from l3_shard.replica import first_replica, later, successor


def test_successors_keep_the_drawn_part_and_count():
    first = first_replica("0123abcd")
    assert [first, successor(first), successor(successor(first))] == [
        "0123abcd.1",
        "0123abcd.2",
        "0123abcd.3",
    ]


def test_the_later_of_two_is_the_successor_in_any_order():
    ninth = "0123abcd.9"
    assert later(ninth, successor(ninth)) == later(successor(ninth), ninth) == "0123abcd.10"


@pytest.mark.parametrize("drawn", ["", "short", "with space", "x" * 49, "dotted.id", "ümlaut00"])
def test_what_cannot_be_an_id_is_refused(drawn):
    with pytest.raises(ValueError, match="8 to 48"):
        first_replica(drawn)
