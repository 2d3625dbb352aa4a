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
from l3_shard.merkle import MerkleTree, leaf_of
from l3_shard.storage import Entry, Survey, Surveyed, Sweep, Swept

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

    def look(self, effect: Survey | Sweep) -> Surveyed | Swept:
        if isinstance(effect, Sweep):
            return self.sweep(effect)
        return self.survey(effect)

    def sweep(self, sweep: Sweep) -> Swept:
        """Three leaves at a time."""
        by_leaf: dict[int, list[Entry]] = {}
        for key, entry in sorted(self.records.items()):
            by_leaf.setdefault(leaf_of(key), []).append(entry)
        left = [(leaf, tuple(entries)) for leaf, entries in sorted(by_leaf.items()) if leaf >= sweep.first]
        return Swept(sweep.ticket, tuple(left[:3]), left[3][0] if left[3:] else None)

    def survey(self, survey: Survey) -> Surveyed:
        leaves = [
            tuple(entry for key, entry in sorted(self.records.items()) if leaf_of(key) == leaf)
            for leaf in survey.leaves
        ]
        return Surveyed(survey.ticket, tuple(leaves))

    def surveys(self) -> list[Survey | Sweep]:
        effects = self.desk.take()
        assert all(isinstance(effect, Survey | Sweep) for effect in effects)
        return [effect for effect in effects if isinstance(effect, Survey | Sweep)]

    def tell(self, event: Surveyed | Swept) -> None:
        if isinstance(event, Swept):
            self.forest.swept(event)
        else:
            self.forest.surveyed(event)
        self.forest.check()

    def settle(self) -> None:
        done: list[bool] = []
        self.forest.settle(done.append)
        while surveys := self.surveys():
            for survey in surveys:
                self.tell(self.look(survey))
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


def planted(store: Store) -> None:
    """The first sweep is over."""
    store.settle()


def test_a_new_forest_sweeps_once_over_what_there_is_and_not_before_somebody_asks():
    store = Store()
    store.records = {b"ab/%d" % number: Entry(b"ab/%d" % number, 7, Stamp(0)) for number in range(8)}
    assert store.surveys() == []
    done: list[bool] = []
    store.forest.settle(done.append)
    firsts: list[int] = []
    while sweeps := store.surveys():
        (sweep,) = sweeps
        assert isinstance(sweep, Sweep) and not done
        firsts.append(sweep.first)
        store.tell(store.look(sweep))
    assert done == [True] and firsts[0] == 0 and len(firsts) == 3 and firsts == sorted(firsts)
    assert store.forest.tree("b").root == store.expected("b").root != MerkleTree().root


def test_what_is_written_before_the_sweep_comes_by_needs_no_survey_and_behind_it_one():
    store = Store()
    store.records = {b"ab/%d" % number: Entry(b"ab/%d" % number, 7, Stamp(0)) for number in range(5)}
    first, *_, last = sorted(store.records, key=leaf_of)
    done: list[bool] = []
    store.forest.settle(done.append)
    (sweep,) = store.surveys()
    swept = store.look(sweep)
    store.write(first, 8)  # overtakes what was read
    store.tell(swept)
    store.write(last, 8)  # the sweep has yet to come by
    (sweep,) = store.surveys()
    store.tell(store.look(sweep))
    assert done == [True] and store.forest.tree("b").root != store.expected("b").root
    store.write(last, 9)
    store.forest.settle(done.append)
    (survey,) = store.surveys()
    assert isinstance(survey, Survey) and survey.leaves == (leaf_of(first), leaf_of(last))
    store.tell(store.look(survey))
    assert store.forest.tree("b").root == store.expected("b").root and done == [True, True]


def test_a_sweep_that_cannot_be_done_is_told_and_goes_on_where_it_was():
    store = Store()
    store.records = {b"ab/%d" % number: Entry(b"ab/%d" % number, 7, Stamp(0)) for number in range(5)}
    done: list[bool] = []
    store.forest.settle(done.append)
    (sweep,) = store.surveys()
    store.tell(store.look(sweep))
    (sweep,) = store.surveys()
    assert isinstance(sweep, Sweep) and sweep.first > 0
    store.tell(Swept(sweep.ticket, (), None, failure="EIO"))
    assert done == [False] and store.forest.failed_count == 1 and store.surveys() == []
    store.settle()
    assert store.forest.tree("b").root == store.expected("b").root


def test_after_a_new_placement_nothing_that_was_read_before_counts():
    """A record may be gone when the new sweep comes by; its digest would stay for ever."""
    store = Store()
    planted(store)
    store.write(b"ab/k", 1)
    waiting: list[bool] = []
    store.forest.settle(waiting.append)
    (survey,) = store.surveys()
    before = store.look(survey)
    store.forest.mark_all()
    del store.records[b"ab/k"]
    store.forest.mark(b"ab/k")
    store.tell(before)
    for sweep in store.surveys():
        store.tell(store.look(sweep))
    assert waiting == [True]
    store.settle()
    assert store.forest.tree("b").root == store.expected("b").root == MerkleTree().root


def test_settled_means_that_what_was_marked_is_seen_and_what_comes_later_is_not_waited_for():
    store = Store()
    planted(store)
    store.write(b"ab/k", 1)
    done: list[str] = []
    store.forest.settle(lambda read: done.append("first"))
    (survey,) = store.surveys()
    before = store.look(survey)
    store.write(b"ab/k", 2)  # overtakes the survey
    store.forest.settle(lambda read: done.append("second"))
    store.tell(before)
    assert done == ["first"]
    (survey,) = store.surveys()
    store.tell(store.look(survey))
    assert done == ["first", "second"]
    assert store.forest.tree("b").root == store.expected("b").root


def test_an_unreadable_store_is_told_and_tried_again():
    store = Store()
    planted(store)
    store.write(b"ab/k", 1)
    done: list[bool] = []
    store.forest.settle(done.append)
    (survey,) = store.surveys()
    store.tell(Surveyed(survey.ticket, (), failure="EIO"))
    assert done == [False] and store.forest.failed_count == 1 and store.surveys() == []
    store.settle()
    assert store.forest.tree("b").root == store.expected("b").root


def test_old_tombstones_are_known_to_the_first_replica():
    store = Store()
    planted(store)
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
    answers: list[Surveyed | Swept] = []
    for key, digest, ask, answer in steps:
        if digest == 9:
            store.forest.mark_all()
        store.write(key, digest)
        if ask:
            store.forest.settle(lambda read: None)
        answers += [store.look(survey) for survey in store.surveys()]
        if answer and answers:
            store.tell(answers.pop(0))
            answers += [store.look(survey) for survey in store.surveys()]
        store.forest.check()
    while answers:
        store.tell(answers.pop(0))
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
    planted(store)
    for number in range(50):
        store.write(b"abc/%d" % number, 1)
    store.settle()
    assert len(made) == 2
