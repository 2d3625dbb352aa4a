"""Trees follow the store, whatever is written while it is surveyed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.clock import Stamp
from kvcomm.machine import Ticket
from l3_shard.desk import Desk, ShardLimits
from l3_shard.forest import Forest
from l3_shard.merkle import LEAVES, MerkleTree, leaf_of
from l3_shard.storage import Entry, Survey, Surveyed

ME = "a"


class Store:
    """An index, and a forest over it."""

    def __init__(self) -> None:
        self.records: dict[bytes, Entry] = {}
        self.desk = Desk(ShardLimits(), (number for number in count(1)))
        self.forest = Forest(ME, self.desk, self.replicas)

    @staticmethod
    def replicas(key: bytes) -> Sequence[str]:
        """``ab...`` is kept by a and b, a first."""
        return list(key.partition(b"/")[0].decode())

    def write(self, key: bytes, digest: int, dead_since: int = 0) -> None:
        self.records[key] = Entry(key, digest, Stamp(dead_since))
        self.forest.mark(key)

    def look(self, survey: Survey) -> Surveyed:
        leaves = [
            tuple(entry for key, entry in sorted(self.records.items()) if leaf_of(key) == leaf)
            for leaf in survey.leaves
        ]
        return Surveyed(survey.ticket, tuple(leaves))

    def surveys(self) -> list[Survey]:
        effects = self.desk.take()
        assert all(isinstance(effect, Survey) for effect in effects)
        return [effect for effect in effects if isinstance(effect, Survey)]

    def settle(self) -> None:
        done: list[bool] = []
        self.forest.settle(done.append)
        while surveys := self.surveys():
            for survey in surveys:
                self.forest.surveyed(self.look(survey))
                self.forest.check()
        assert done == [True]

    def expected(self, node: str) -> MerkleTree:
        tree = MerkleTree()
        sums: dict[int, int] = {}
        for key, entry in self.records.items():
            if node in self.replicas(key) and ME in self.replicas(key):
                sums[leaf_of(key)] = (sums.get(leaf_of(key), 0) + entry.digest) % 2**64
        for leaf, digest in sums.items():
            tree.update(leaf, digest)
        return tree


def small(store: Store) -> None:
    """Only leaves in use are surveyed, or each test would survey 65,536."""
    store.forest._marked.clear()


def test_a_new_forest_surveys_everything_once_somebody_asks():
    store = Store()
    store.records[b"ab/k"] = Entry(b"ab/k", 7, Stamp(0))
    assert store.surveys() == []
    done: list[bool] = []
    store.forest.settle(done.append)
    leaves: list[int] = []
    while surveys := store.surveys():
        (survey,) = surveys
        leaves += survey.leaves
        assert not done
        store.forest.surveyed(store.look(survey))
    assert done == [True] and leaves == list(range(LEAVES))
    assert store.forest.tree("b").root == store.expected("b").root != MerkleTree().root


def test_settled_means_that_what_was_marked_is_seen_and_what_comes_later_is_not_waited_for():
    store = Store()
    small(store)
    store.write(b"ab/k", 1)
    done: list[str] = []
    store.forest.settle(lambda read: done.append("first"))
    (survey,) = store.surveys()
    before = store.look(survey)
    store.write(b"ab/k", 2)  # overtakes the survey
    store.forest.settle(lambda read: done.append("second"))
    store.forest.surveyed(before)
    assert done == ["first"]
    (survey,) = store.surveys()
    store.forest.surveyed(store.look(survey))
    assert done == ["first", "second"]
    assert store.forest.tree("b").root == store.expected("b").root


def test_an_unreadable_store_is_told_and_tried_again():
    store = Store()
    small(store)
    store.write(b"ab/k", 1)
    done: list[bool] = []
    store.forest.settle(done.append)
    (survey,) = store.surveys()
    store.forest.surveyed(Surveyed(survey.ticket, (), failure="EIO"))
    assert done == [False] and store.forest.failed_count == 1 and store.surveys() == []
    store.settle()
    assert store.forest.tree("b").root == store.expected("b").root


def test_old_tombstones_are_known_to_the_first_replica():
    store = Store()
    small(store)
    store.write(b"ab/mine", 1, dead_since=50)
    store.write(b"ba/theirs", 1, dead_since=50)
    store.write(b"ab/alive", 1)
    store.settle()
    assert store.forest.dead_before(Stamp(50)) == []
    assert store.forest.dead_before(Stamp(51)) == [leaf_of(b"ab/mine")]
    store.write(b"ab/mine", 2)
    store.settle()
    assert store.forest.dead_before(Stamp(99)) == []


def test_only_shared_records_are_named():
    store = Store()
    entries = [Entry(key, 1, Stamp(0)) for key in (b"ab/1", b"ac/1", b"bca/1")]
    assert [entry.key for entry in store.forest.shared(entries, "c")] == [b"ac/1", b"bca/1"]


KEYS = [b"%s/%d" % (place, number) for place in (b"ab", b"bac", b"ca", b"a") for number in range(6)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 9), st.booleans(), st.booleans())))
def test_after_settling_every_tree_is_the_one_made_anew(steps: list[tuple[bytes, int, bool, bool]]):
    store = Store()
    small(store)
    answers: list[Surveyed] = []
    for key, digest, ask, answer in steps:
        store.write(key, digest)
        if ask:
            store.forest.settle(lambda read: None)
        answers += [store.look(survey) for survey in store.surveys()]
        if answer and answers:
            store.forest.surveyed(answers.pop(0))
            answers += [store.look(survey) for survey in store.surveys()]
        store.forest.check()
    while answers:
        store.forest.surveyed(answers.pop(0))
        answers += [store.look(survey) for survey in store.surveys()]
    store.settle()
    for node in "bc":
        assert store.forest.tree(node).root == store.expected(node).root


def test_a_survey_that_nobody_ordered_is_our_own_mistake():
    with pytest.raises(KeyError):
        Store().forest.surveyed(Surveyed(Ticket(99), ()))


def test_a_tree_is_made_once_a_neighbour(monkeypatch: pytest.MonkeyPatch):
    """One a record was a hundred times too slow."""
    made: list[MerkleTree] = []

    def counted() -> MerkleTree:
        made.append(MerkleTree())
        return made[-1]

    monkeypatch.setattr("l3_shard.forest.MerkleTree", counted)
    store = Store()
    small(store)
    for number in range(50):
        store.write(b"abc/%d" % number, 1)
    store.settle()
    assert len(made) == 2
