"""Record states against explicit causal histories.

The oracle knows every write ever made and, for each, all writes that its author had seen; a replica knows a
set of writes. A write's value is visible exactly where no known write had seen it. It shares nothing with the
code under test.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.clock import Stamp
from kvcomm.errors import Conflict, Corrupt, TooLarge
from kvcomm.version import COUNTER_MAX, ENTRIES_MAX, Dot, VersionVector
from kvcomm.wire.messages import RecordState, Sibling
from l3_shard import dvv

NOTHING = VersionVector()


def values(state: RecordState) -> list[bytes | None]:
    return [sibling.value for sibling in dvv.presented(state).siblings]


@dataclass
class Oracle:
    """Histories of one record on several replicas."""

    seen_by: dict[int, frozenset[int]] = field(default_factory=dict)
    """Write -> all writes that its author had seen."""
    value: dict[int, bytes | None] = field(default_factory=dict)

    def write(self, seen: frozenset[int], value: bytes | None) -> int:
        number = len(self.value)
        self.seen_by[number], self.value[number] = seen, value
        return number

    def visible(self, past: frozenset[int]) -> set[bytes | None]:
        """Of a replica that knows ``past``."""
        overwritten = frozenset().union(*(self.seen_by[write] for write in past))
        return {self.value[write] for write in past - overwritten}


class World:
    """Replicas, their histories, and clients that hold contexts; every step is checked against the oracle."""

    def __init__(self, replicas: str) -> None:
        self.oracle = Oracle()
        self.state = dict.fromkeys(replicas, dvv.EMPTY)
        self.past: dict[str, frozenset[int]] = dict.fromkeys(replicas, frozenset())
        self.number: dict[Dot, int] = {}
        self.stamp = 0
        self.named: set[int] = set()
        """Writes replaced by their own author's next one, by name."""

    def read(self, replica: str) -> tuple[VersionVector, frozenset[int]]:
        return VersionVector.from_wire(self.state[replica].context), self.past[replica]

    def write(
        self,
        replica: str,
        value: bytes | None,
        context: VersionVector,
        seen: frozenset[int],
        own: Dot | None = None,
    ):
        """Returns the context handed back, what its holder counts as seen from then on, and its own write
        where the context does not cover it."""
        self.stamp += 1
        try:
            written = dvv.put(self.state[replica], replica, Stamp(self.stamp), value, context, own)
        except Conflict:
            others = [other for other in values(self.state[replica]) if other != value]
            assert len(others) >= dvv.SIBLINGS_MAX or context.descends(VersionVector.from_wire({replica: 1}))
            return context, seen, own
        known = own is not None and self.number[own] in self.past[replica]
        replaced = frozenset([self.number[own]] if own is not None and known else [])
        self.named |= replaced
        number = self.oracle.write(seen | replaced, value)
        self.number[written.dot] = number
        self.state[replica] = written.state
        self.past[replica] |= seen | {number}
        self.check(replica)
        handed = VersionVector.from_wire(written.context)
        # What the context handed back covers beyond the writer's own knowledge is dead at this replica
        # already: counting it as seen overwrites nothing that is still visible there. The check below would
        # notice if it did.
        covered = {self.number[dot] for dot in self.number if handed.covers(dot)}
        assert not {write for write in covered - seen - {number} if self.is_living(replica, write)}
        assert not (written.own and handed.covers(written.dot))
        return handed, seen | frozenset(covered), written.dot if written.own else None

    def is_living(self, replica: str, number: int) -> bool:
        past = self.past[replica]
        return number in past and not any(number in self.oracle.seen_by[other] for other in past)

    def merge(self, into: str, other: str) -> None:
        self.state[into] = dvv.merge(self.state[into], self.state[other])
        self.past[into] |= self.past[other]
        self.check(into)

    def check(self, replica: str, *, healed: bool = False) -> None:
        """A write that was replaced by name goes where it was named and then by merging; a context that was
        handed on does not tell of it.  So it may be shown for longer, never for less long, until all is
        merged."""
        state = self.state[replica]
        wanted, found = self.oracle.visible(self.past[replica]), {sibling.value for sibling in state.siblings}
        later = set() if healed else {self.oracle.value[write] for write in self.named & self.past[replica]}
        assert wanted <= found <= wanted | later
        assert dvv.alive(state) == bool(found - {None})
        assert dvv.checked(state) == state
        living = [sibling for sibling in state.siblings if sibling.value is not None]
        for name in state.context:
            assert len({sibling.value for sibling in living if sibling.replica == name}) <= dvv.SIBLINGS_MAX

    def heal(self) -> None:
        for _ in range(2):
            for into, other in itertools.permutations(self.state, 2):
                self.merge(into, other)
        assert len({repr(state) for state in self.state.values()}) == 1
        for replica in self.state:
            self.check(replica, healed=True)


def run(seed: int) -> None:
    """One random life of a record: clients with old, new, borrowed and missing contexts; few distinct values,
    so that equal ones meet; deletes; merges in any direction."""
    draw = random.Random(seed)
    world = World("ABC"[: draw.randint(2, 3)])
    names = list(world.state)
    contexts: list[tuple[VersionVector, frozenset[int], Dot | None]] = [(NOTHING, frozenset(), None)]
    alphabet = [b"%d" % index for index in range(draw.choice((2, 4, 40)))]
    for _ in range(draw.randint(3, 30)):
        replica, kind = draw.choice(names), draw.random()
        if kind < 0.3:
            contexts.append((*world.read(replica), None))
        elif kind < 0.75:
            context, seen, own = draw.choice(contexts[-3:] if draw.random() < 0.5 else contexts)
            value = None if draw.random() < 0.15 else draw.choice(alphabet)
            contexts.append(world.write(replica, value, context, seen, own))
        else:
            world.merge(replica, draw.choice(names))
    world.heal()


@pytest.mark.slow
def test_random_histories_are_the_oracles():
    for seed in range(5_000):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(1, 5))
def test_more_random_histories_are_the_oracles(block):
    for seed in range(5_000 * block, 5_000 * (block + 1)):
        run(seed)


def test_some_random_histories_are_the_oracles():
    for seed in range(250):
        run(seed)


def states(seed: int, count: int) -> list[RecordState]:
    """Reachable states of one record, of different replicas at different times."""
    draw = random.Random(seed)
    world, found = World("ABC"), []
    for _ in range(12):
        replica = draw.choice("ABC")
        context, seen = world.read(replica) if draw.random() < 0.6 else (NOTHING, frozenset())
        world.write(replica, draw.choice([b"x", b"y", b"z", None]), context, seen)
        if draw.random() < 0.4:
            world.merge(replica, draw.choice("ABC"))
        found.append(world.state[replica])
    return draw.sample(found, count)


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_merge_is_a_join(seed):
    one, two, three = states(seed, 3)
    assert dvv.merge(one, one) == one
    assert dvv.merge(one, two) == dvv.merge(two, one)
    assert dvv.merge(dvv.merge(one, two), three) == dvv.merge(one, dvv.merge(two, three))
    assert dvv.merge(one, dvv.EMPTY) == dvv.merge(dvv.EMPTY, one) == one


@given(st.integers(0, 10_000))
@settings(max_examples=40)
def test_every_order_of_delivery_ends_in_the_same_state(seed):
    messages = states(seed, 4)
    ends = set()
    for order in itertools.permutations(messages):
        state = dvv.EMPTY
        for message in order:
            state = dvv.merge(state, message)
        ends.add(repr(state))
    assert len(ends) == 1


def write(
    state: RecordState, value: bytes | None, context: dict[str, int], replica: str = "A"
) -> dvv.Written:
    return dvv.put(state, replica, Stamp(1), value, VersionVector.from_wire(context))


def test_a_write_replaces_what_its_author_had_read_and_nothing_else():
    first = write(dvv.EMPTY, b"1", {})
    second = write(first.state, b"2", {})
    assert values(second.state) == [b"1", b"2"]
    assert values(write(second.state, b"3", first.context).state) == [b"2", b"3"]
    assert values(write(second.state, b"3", second.state.context).state) == [b"3"]


def test_the_context_of_a_write_never_covers_a_sibling_its_author_has_not_seen():
    """Two clients write blindly, then each writes again with what it was handed: nothing unread may go."""
    one = write(dvv.EMPTY, b"one", {})
    two = write(one.state, b"two", {})
    again = write(two.state, b"two again", two.context)
    assert b"one" in values(again.state)


def test_two_alternating_writers_stay_at_few_siblings_and_one_entry():
    """Server ids without dots grow to one sibling a write here."""
    state = dvv.EMPTY
    contexts: list[dict[str, int]] = [{}, {}]
    for turn in range(200):
        context = dict(state.context)
        written = write(state, b"%d" % turn, contexts[turn % 2])
        state, contexts[turn % 2] = written.state, context
        assert len(state.siblings) <= 3 and len(state.context) == 1


def test_two_writers_that_never_read_keep_one_value_each():
    """With plain contexts neither could replace its own last write without hiding the other's."""
    handed: list[dict[str, int]] = [{}, {}]
    own: list[Dot | None] = [None, None]
    state = dvv.EMPTY
    draw = random.Random(5)
    for turn in range(200):
        who = draw.randrange(2)
        value, context = b"%d of %d" % (turn, who), VersionVector.from_wire(handed[who])
        written = dvv.put(state, "A", Stamp(turn), value, context, own[who])
        state, handed[who] = written.state, written.context
        own[who] = written.dot if written.own else None
        assert len(state.siblings) <= 2 and len(state.context) == 1


def test_a_value_that_stands_for_an_equal_one_of_somebody_else_is_not_ones_own():
    first = write(dvv.EMPTY, b"same", {})
    second = write(first.state, b"same", {})
    assert second.context == {} and not second.own
    assert write(first.state, b"other", {}).own


def test_equal_values_of_two_replicas_do_not_lose_each_other():
    """The case against collapsing equal siblings in storage: a write that had read only B's copy must not
    take A's.
    """
    at_a, at_b = write(dvv.EMPTY, b"v", {}, "A"), write(dvv.EMPTY, b"v", {}, "B")
    after_b = write(at_b.state, b"w", at_b.context, "C")
    both = dvv.merge(at_a.state, at_b.state)
    assert values(both) == [b"v"]
    assert set(values(dvv.merge(both, after_b.state))) == {b"v", b"w"}
    assert dvv.merge(both, after_b.state) == dvv.merge(at_a.state, after_b.state)


def test_equal_blind_writes_at_one_replica_take_the_room_of_one():
    state = dvv.EMPTY
    for _ in range(1_000):
        state = write(state, b"same", {}).state
    assert len(state.siblings) == 1 and state.context == {"A": 1_000}


def test_a_delete_leaves_a_dated_tombstone_that_survives_old_copies():
    first = write(dvv.EMPTY, b"v", {})
    deleted = dvv.put(first.state, "A", Stamp(77), None, VersionVector.from_wire(first.context)).state
    assert values(deleted) == [] and not dvv.alive(deleted)
    assert deleted.siblings == [Sibling("A", 2, 77, None)]
    assert dvv.merge(deleted, first.state) == deleted


def test_a_value_concurrent_to_a_delete_lives():
    first = write(dvv.EMPTY, b"v", {})
    deleted = write(first.state, None, first.context).state
    beside = write(first.state, b"w", {}, "B").state
    assert values(dvv.merge(deleted, beside)) == [b"w"]


def test_presented_shows_an_equal_value_once_under_its_latest_stamp():
    state = RecordState({"A": 1, "B": 1}, [Sibling("A", 1, 9, b"v"), Sibling("B", 1, 5, b"v")])
    assert dvv.presented(state).siblings == [Sibling("A", 1, 9, b"v")]


def full() -> RecordState:
    state = dvv.EMPTY
    for index in range(dvv.SIBLINGS_MAX):
        state = write(state, b"%d" % index, {}).state
    return state


def test_the_sibling_bound_refuses_and_drops_nothing():
    state = full()
    with pytest.raises(Conflict, match="16 concurrent values"):
        write(state, b"one more", {})
    assert len(values(write(state, b"3", {}).state)) == dvv.SIBLINGS_MAX
    assert values(write(state, b"merged", state.context).state) == [b"merged"]
    assert values(write(state, None, state.context).state) == []
    assert len(values(write(state, None, {}).state)) == dvv.SIBLINGS_MAX


def test_merge_goes_over_the_bound_rather_than_drop():
    at_b = dvv.EMPTY
    for index in range(dvv.SIBLINGS_MAX):
        at_b = write(at_b, b"b%d" % index, {}, "B").state
    merged = dvv.merge(full(), at_b)
    assert len(values(merged)) == 2 * dvv.SIBLINGS_MAX
    with pytest.raises(Conflict):
        write(merged, b"x", {"B": 1})
    assert values(write(merged, b"x", merged.context).state) == [b"x"]


def test_the_values_of_one_record_are_bounded_in_bytes():
    state = dvv.EMPTY
    for index in range(4):
        state = write(state, bytes([index]) * (1 << 20), {}).state
    assert dvv.value_bytes(state) == 4 << 20
    with pytest.raises(TooLarge, match="4194305 bytes"):
        write(state, b"x", {})


def test_a_context_from_another_record_is_refused():
    with pytest.raises(Conflict, match="not read from this record"):
        write(write(dvv.EMPTY, b"v", {}).state, b"w", {"A": 9})


def test_too_many_replica_incarnations_are_refused():
    state = RecordState({f"r{index}": 1 for index in range(ENTRIES_MAX)}, [])
    with pytest.raises(TooLarge):
        write(state, b"v", {})


def test_a_dot_that_names_two_values_is_noticed():
    one, two = write(dvv.EMPTY, b"1", {}).state, write(dvv.EMPTY, b"2", {}).state
    with pytest.raises(Corrupt, match="lost its state"):
        dvv.merge(one, two)


@pytest.mark.parametrize(
    "state",
    [
        RecordState({}, [Sibling("A", 1, 0, b"v")]),
        RecordState({"A": 1}, [Sibling("A", 2, 0, b"v")]),
        RecordState({"A": 2}, [Sibling("A", 2, 0, b"v"), Sibling("A", 2, 0, b"w")]),
        RecordState({"A": 0}, []),
        RecordState({"A": 1}, [Sibling("A", 1, 2**64, b"v")]),
        RecordState({"A": 1}, [Sibling("A", COUNTER_MAX + 1, 0, b"v")]),
        RecordState({f"r{index}": 1 for index in range(ENTRIES_MAX + 1)}, []),
    ],
)
def test_impossible_states_are_recognised(state):
    with pytest.raises(Corrupt):
        dvv.checked(state)


# -- records that were removed for good


def test_a_record_that_was_removed_goes_on_above_the_floor():
    written = dvv.put(dvv.EMPTY, "r", Stamp(1), b"new", VersionVector.from_wire({"r": 7}), floor=7)
    assert written.dot == Dot("r", 8) and written.context == {"r": 8}
    with pytest.raises(Conflict):
        dvv.put(dvv.EMPTY, "r", Stamp(1), b"new", VersionVector.from_wire({"r": 8}), floor=7)
    again = dvv.put(written.state, "r", Stamp(2), b"newer", VersionVector.from_wire({"r": 8}), floor=7)
    assert again.dot == Dot("r", 9) and values(again.state) == [b"newer"]


def test_a_removed_records_next_write_is_not_covered_by_what_others_remember():
    """Without the floor the new dot is one that the tombstone elsewhere, or an old context, covers: lost."""
    old = dvv.put(dvv.EMPTY, "r", Stamp(1), b"old", NOTHING)
    grave = dvv.put(old.state, "r", Stamp(2), None, VersionVector.from_wire(old.context))
    for floor, survives in ((grave.dot.counter, True), (0, False)):
        new = dvv.put(dvv.EMPTY, "r", Stamp(3), b"new", NOTHING, floor=floor)
        assert (values(dvv.merge(grave.state, new.state)) == [b"new"]) is survives
        stale = VersionVector.from_wire(grave.context)
        other = dvv.put(new.state, "other", Stamp(4), b"other", stale)
        assert (b"new" in values(other.state)) is survives
