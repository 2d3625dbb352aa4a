"""``Lru`` against a list that does everything the slow way, and against cachetools."""

from __future__ import annotations

import itertools

import cachetools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import ConfigError
from l1.lru import Lru

NAMES = [bytes([letter]) * 32 for letter in b"abcdefgh"]
CAPACITY = 10

keys = st.sampled_from(NAMES)
operations = st.one_of(
    st.tuples(st.just("get"), keys),
    st.tuples(st.just("get_run"), st.lists(keys, max_size=6)),
    st.tuples(st.just("touch_run"), st.lists(keys, max_size=6)),
    st.tuples(st.just("put"), keys, st.integers(1, CAPACITY + 2)),
    st.tuples(st.just("discard"), keys),
)


class ListLru:
    """The oracle: entries in a list, oldest first; every operation walks it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[tuple[bytes, int, int]] = []  # key, value, weight
        self.hits = self.misses = self.evicted = self.refused = 0

    def get(self, key: bytes) -> int | None:
        for entry in self.entries:
            if entry[0] == key:
                self.entries.remove(entry)
                self.entries.append(entry)
                self.hits += 1
                return entry[1]
        self.misses += 1
        return None

    def get_run(self, run: list[bytes]) -> list[int | None]:
        return [self.get(key) for key in reversed(run)][::-1]

    def touch_run(self, run: list[bytes]) -> None:
        counted = self.hits, self.misses
        self.get_run(run)
        self.hits, self.misses = counted

    def put(self, key: bytes, value: int, weight: int) -> list[int] | None:
        if weight > self.capacity:
            self.refused += 1
            return None
        gone = self.discard(key)
        while sum(entry[2] for entry in self.entries) + weight > self.capacity:
            gone.append(self.entries.pop(0)[1])
            self.evicted += 1
        self.entries.append((key, value, weight))
        return gone

    def discard(self, key: bytes) -> list[int]:
        gone = [entry for entry in self.entries if entry[0] == key]
        self.entries = [entry for entry in self.entries if entry[0] != key]
        return [value for _, value, _ in gone]


@given(st.lists(operations, max_size=60))
def test_it_does_what_a_list_would(steps):
    lru: Lru[int] = Lru(CAPACITY)
    oracle = ListLru(CAPACITY)
    for value, (name, *arguments) in enumerate(steps):
        if name == "put":
            key, weight = arguments
            assert lru.put(key, value, weight) == oracle.put(key, value, weight)
        elif name == "discard":
            gone = lru.discard(*arguments)
            assert ([] if gone is None else [gone]) == oracle.discard(*arguments)
        else:
            assert getattr(lru, name)(*arguments) == getattr(oracle, name)(*arguments)
        assert list(lru) == [key for key, _, _ in oracle.entries], "eviction order"
        assert (lru.hits, lru.misses, lru.evicted, lru.refused) == (
            oracle.hits,
            oracle.misses,
            oracle.evicted,
            oracle.refused,
        )
        lru.check()


@given(
    st.dictionaries(keys, st.integers(1, CAPACITY), min_size=len(NAMES)),
    st.lists(st.tuples(st.booleans(), keys), max_size=80),
)
def test_it_evicts_as_cachetools_does(weights, steps):
    """One weight a key, as blocks have: cachetools makes room for a heavier replacement differently."""
    lru: Lru[bytes] = Lru(CAPACITY)
    theirs: cachetools.LRUCache[bytes, bytes] = cachetools.LRUCache(CAPACITY, getsizeof=weights.__getitem__)
    for is_put, key in steps:
        if is_put:
            lru.put(key, key, weights[key])
            theirs[key] = key
        else:
            assert lru.get(key) == theirs.get(key)
        assert set(lru) == set(theirs)
        assert lru.used_bytes == theirs.currsize
    for key in lru:  # from the oldest on
        assert theirs.popitem()[0] == key


@given(st.integers(1, 8), st.integers(1, 8))
def test_what_is_left_of_a_run_is_a_prefix_of_it(length, room):
    lru: Lru[int] = Lru(room)
    run = NAMES[:length]
    for value, key in enumerate(run):
        lru.put(key, value, 1)
    lru.get_run(run)
    others = (number.to_bytes(2, "big") for number in itertools.count())
    while any(key in lru for key in run):
        here = [key in lru for key in run]
        assert here == sorted(here, reverse=True) or len(run) > room
        lru.put(next(others), -1, 1)


def test_peek_and_contains_leave_no_trace():
    lru: Lru[str] = Lru(2)
    lru.put(b"a", "A", 1)
    lru.put(b"b", "B", 1)
    assert lru.peek(b"a") == "A"
    assert lru.peek(b"c") is None
    assert b"a" in lru
    assert len(lru) == 2
    assert list(lru) == [b"a", b"b"]
    assert (lru.hits, lru.misses) == (0, 0)


def test_heavier_than_everything_is_refused_and_moves_nothing():
    lru: Lru[str] = Lru(4)
    lru.put(b"a", "A", 4)
    assert lru.put(b"b", "B", 5) is None
    assert lru.put(b"a", "A again", 5) is None
    assert lru.peek(b"a") == "A"
    assert lru.refused == 2


def test_no_capacity_holds_nothing():
    lru: Lru[str] = Lru(0)
    assert lru.put(b"a", "A", 1) is None
    assert lru.get(b"a") is None


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="0 turns it off"):
        Lru(-1)
    with pytest.raises(ValueError, match="at least 1 byte"):
        Lru[str](4).put(b"a", "A", 0)
