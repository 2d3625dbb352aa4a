from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from kvcomm.sieve import Sieve


def nobody(_item):
    return False


def take_mark(marked, item):
    taken = item in marked
    marked.discard(item)
    return taken


def everybody(_item):
    return True


def evict_all(sieve, marks=()):
    marked, order = set(marks), []
    while (victim := sieve.victim(partial(take_mark, marked), everybody)) is not None:
        sieve.remove(victim)
        order.append(victim)
    return order


def sieve_of(*items):
    sieve: Sieve = Sieve()
    for item in items:
        sieve.add(item)
    return sieve


def test_without_hits_the_oldest_goes_first():
    assert evict_all(sieve_of("a", "b", "c")) == ["a", "b", "c"]


def test_a_marked_item_survives_one_round_where_it_stands():
    assert evict_all(sieve_of("a", "b", "c", "d"), marks="a") == ["b", "c", "d", "a"]


def test_new_items_are_not_asked_before_the_hand_comes_round():
    """The difference between SIEVE and a second-chance queue."""
    sieve = sieve_of("a", "b", "c")
    assert sieve.victim(lambda item: item == "a", everybody) == "b"
    sieve.remove("b")
    sieve.add("d")

    assert evict_all(sieve) == ["c", "d", "a"]


def test_a_parent_that_became_a_leaf_is_asked_next():
    sieve = sieve_of("a", "b", "c")
    assert sieve.victim(nobody, everybody) == "a"
    sieve.remove("a")
    sieve.add_at_hand("parent")

    assert evict_all(sieve) == ["parent", "b", "c"]


def test_what_cannot_go_is_passed_over_and_keeps_its_mark():
    asked = []

    def take(item):
        asked.append(item)
        return False

    sieve = sieve_of("pinned", "b")
    assert sieve.victim(take, lambda item: item != "pinned") == "b"
    assert asked == ["b"]


def test_nobody_can_go():
    assert sieve_of("a", "b").victim(nobody, nobody) is None
    assert Sieve().victim(nobody, everybody) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "hand", "remove", "victim"]), st.integers(0, 12), st.integers(0, 4095)
        ),
        max_size=80,
    )
)
def test_the_links_agree_with_a_list(steps):
    """Oracle: a Python list and an index for the hand."""
    sieve: Sieve = Sieve()
    items: list[int] = []
    hand = 0
    for action, item, marks in steps:
        if action == "add" and item not in items:
            sieve.add(item)
            items.append(item)
        elif action == "hand" and item not in items:
            sieve.add_at_hand(item)
            hand = hand if hand < len(items) else 0
            items.insert(hand, item)
        elif action == "remove" and item in items:
            sieve.remove(item)
            at = items.index(item)
            items.remove(item)
            hand -= at < hand
        elif action == "victim":
            marked = {number for number in range(12) if marks >> number & 1}
            other = set(marked)
            expected, hand = _victim(items, hand, other)
            assert sieve.victim(partial(take_mark, marked), everybody) == expected
            assert marked == other
        hand = hand if hand < len(items) else 0
        assert list(sieve) == items
        assert all(item in sieve for item in items)
        assert len(sieve) == len(items)


def _victim(items, hand, marked):
    for _ in range(2 * len(items)):
        hand = hand if hand < len(items) else 0
        if items[hand] not in marked:
            return items[hand], hand
        marked.remove(items[hand])
        hand += 1
    return None, hand
