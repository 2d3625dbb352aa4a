"""Keys in order, page by page, against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from kvcomm.block import BlockKey
from kvcomm.shelves import KeyShelves

KEYS = st.binary(min_size=1, max_size=3).map(BlockKey)


@given(added=st.lists(KEYS), dropped=st.lists(KEYS), after=st.binary(max_size=3))
def test_the_rest_of_the_list_comes_in_order(added, dropped, after):
    shelves = KeyShelves()
    for key in added:
        shelves.add(key)
    for key in dropped:
        shelves.discard(key)
    left = sorted(set(added) - set(dropped))
    assert list(shelves.after(b"")) == left
    assert list(shelves.after(after)) == [key for key in left if key > after]
