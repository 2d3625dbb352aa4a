from hypothesis import given
from hypothesis import strategies as st

from l2_rdma.hazards import HazardRange, HazardTable


def make_table(count=32, locked=lambda first, count: False):
    words = memoryview(bytearray(8 * count)).cast("Q")
    return HazardTable(words, locked), words


def test_ranges_do_not_overlap_and_nobody_takes_more_than_a_share():
    table, _ = make_table(42)

    assert [table.open(holder, 100) for holder in range(10)] == [
        *[HazardRange(5 * holder, 5) for holder in range(8)],
        HazardRange(40, 2),
        None,
    ]
    assert table.client_count == 9
    table.check()


def test_one_range_a_connection():
    table, _ = make_table()

    assert table.open(1, 4) is not None
    assert table.open(1, 4) is None
    assert table.open(2, 0) is None


def test_pins_count_whoever_set_them():
    table, words = make_table()
    table.open(1, 4)
    words[2] = 8192

    assert table.pinned() == {8192}


def test_a_dead_clients_pins_are_dropped():
    table, words = make_table()
    table.open(1, 4)
    words[0], words[3] = 4096, 8192

    table.release(1)
    assert table.pinned() == {4096, 8192}, "not before its process is known to be gone"
    table.sweep()

    assert table.pinned() == frozenset()
    assert table.open(2, 16) == HazardRange(0, 4)


def test_pins_of_a_living_process_outlive_its_connection():
    alive = {(0, 4)}
    table, words = make_table(locked=lambda first, count: (first, count) in alive)
    table.open(1, 4)
    words[0] = 4096
    table.release(1)
    table.sweep()

    assert table.pinned() == {4096}
    assert table.open(2, 16) == HazardRange(4, 4), "its words are nobody else's"

    alive.clear()
    table.sweep()
    assert table.pinned() == frozenset()
    assert table.open(3, 16) == HazardRange(0, 4)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9), st.booleans()), max_size=40))
def test_no_word_ever_has_two_owners(steps):
    table, _ = make_table(24)
    for holder, count, close in steps:
        if close:
            table.release(holder)
            table.sweep()
        else:
            table.open(holder, count)
        table.check()
