"""Resolved records on several replicas against explicit causal histories.

The oracle knows every write, what its coordinator and its author had seen, and for sets and maps keeps a
tombstone for every write of a field that anybody replaced or removed.  It shares nothing with the code under
test.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest

from kvcomm.clock import Stamp
from kvcomm.errors import Conflict, Corrupt, Refused, TooLarge
from kvcomm.resolvers import RESOLVERS
from kvcomm.resolvers.fields import FieldsDelta
from kvcomm.resolvers.table import COUNTER, MAP, MAXIMUM, REGISTER, SET
from kvcomm.version import Dot, VersionVector
from kvcomm.wire.messages import VALUE_BYTES_MAX, RecordState, Sibling
from l3_shard import dvv
from l3_shard.resolving import resolve

NOTHING = VersionVector()
Past = frozenset[int]


@dataclass(frozen=True)
class Content:
    """What a write knows: the living (field, write) pairs, and those that must not live."""

    living: frozenset[tuple[bytes, int]] = frozenset()
    dead: frozenset[tuple[bytes, int]] = frozenset()

    def join(self, other: Content) -> Content:
        dead = self.dead | other.dead
        return Content((self.living | other.living) - dead, dead)


@dataclass(frozen=True)
class Event:
    """One write.  ``content`` is ``None`` for a delete of the record."""

    overwrites: Past
    content: Content | None
    amount: Any
    """Of the delta: a number, the bytes put, per field."""
    order: tuple[int, str, int]
    """Stamp, replica, counter."""


class World:
    """Replicas of one record of a class; clients that hold contexts; every step is checked."""

    def __init__(self, kind: str, names: str, draw: random.Random) -> None:
        self.resolver, self.draw = RESOLVERS[kind], draw
        self.ids = {name: f"{name}1" for name in names}
        self.state = dict.fromkeys(names, dvv.EMPTY)
        self.past: dict[str, Past] = dict.fromkeys(names, frozenset())
        self.events: list[Event] = []
        self.known: list[tuple[VersionVector, Past]] = [(NOTHING, frozenset())]
        self.stamps = dict.fromkeys(names, 0)

    # -- the oracle

    def living(self, past: Past) -> list[Event]:
        gone = frozenset().union(*(self.events[number].overwrites for number in past))
        return [self.events[number] for number in sorted(past - gone)]

    def content(self, past: Past) -> Content:
        contents = [event.content for event in self.living(past) if event.content is not None]
        return reduce(Content.join, contents, Content())

    def expected(self, past: Past) -> Any:
        kind, content = self.resolver.name, self.content(past)
        amounts = [(self.events[number].amount[field], field, number) for field, number in content.living]
        if kind == "counter":
            return sum(amount for amount, _, _ in amounts)
        if kind in ("max", "min"):
            return (max if kind == "max" else min)((amount for amount, _, _ in amounts), default=None)
        if kind == "set":
            return {field for _, field, _ in amounts}
        if kind == "register":
            values = [(event.order, event.amount[b""]) for event in self.living(past) if event.content]
            return max(values, default=(None, None))[1]
        shown: dict[str, bytes] = {}
        for amount, field, _ in sorted(amounts, key=lambda each: self.events[each[2]].order):
            shown[field.decode()] = amount
        return shown

    def after(self, replica: str, puts: dict[bytes, Any], removes: list[bytes], known: Past) -> Content:
        past, number, kind = self.past[replica], len(self.events), self.resolver.name
        before = self.content(past)
        if kind == "register":
            return Content(frozenset({(b"", number)}))
        if kind not in ("set", "map"):
            return Content(before.living | {(b"", number)})
        # What this replica has seen and does not live, and what it or its caller saw of these fields.
        dead = {(field, write) for write in past for field in self.events[write].amount or ()} - before.living
        dead |= {
            (field, write)
            for write in past | known
            for field in self.events[write].amount or ()
            if field in puts or field in removes
        }
        living = (before.living - dead) | {(field, number) for field in puts}
        return Content(frozenset(living), frozenset(dead) | before.dead)

    # -- steps

    def change(self, replica: str) -> None:
        draw, kind = self.draw, self.resolver.name
        vector, known = draw.choice(self.known[-4:])
        puts: dict[bytes, Any] = {b"": draw.randint(-5, 5)}
        removes: list[bytes] = []
        if kind == "register":
            puts = {b"": b"%d" % len(self.events)}
        elif kind in ("set", "map"):
            fields = draw.sample([b"x", b"y", b"z"], draw.randint(1, 2))
            removes = [field for field in fields if draw.random() < 0.4]
            value = b"" if kind == "set" else b"%d" % len(self.events)
            puts = {field: value for field in fields if field not in removes}
        delta: Any = FieldsDelta(puts, removes) if kind in ("set", "map") else puts[b""]
        encoded = self.resolver.encode_delta(delta)
        content = self.after(replica, puts, removes, known)
        overwrites = self.past[replica] | (known if kind == "register" else frozenset())
        self.write(replica, encoded, vector, overwrites, content, puts)

    def delete(self, replica: str) -> None:
        vector, known = self.draw.choice(self.known[-4:])
        self.write(replica, None, vector, self.past[replica] | known, None, {})

    def write(
        self,
        replica: str,
        delta: bytes | None,
        vector: VersionVector,
        overwrites: Past,
        content: Content | None,
        amount: dict[bytes, Any],
    ) -> None:
        self.stamps[replica] = max([self.stamps[replica], *self._stamps(replica)]) + 1
        stamp = Stamp(self.stamps[replica])
        try:
            written = resolve(self.resolver, self.state[replica], self.ids[replica], stamp, delta, vector)
        except Conflict:  # the client had seen what this replica, under another id, has lost
            assert vector.counter(self.ids[replica]) > self.state[replica].context.get(self.ids[replica], 0)
            return
        number, dot = len(self.events), written.dot
        self.events.append(Event(overwrites, content, amount, (stamp, dot.replica, dot.counter)))
        self.state[replica] = written.state
        self.past[replica] |= overwrites | {number}
        handed = VersionVector.from_wire(written.context)
        assert handed.covers(dot)
        self.known.append((handed, self.past[replica]))
        self.check(replica)

    def _stamps(self, replica: str) -> list[int]:
        return [sibling.hlc for sibling in self.state[replica].siblings]

    def read(self, replica: str) -> None:
        self.known.append((VersionVector.from_wire(self.state[replica].context), self.past[replica]))

    def merge(self, into: str, other: str) -> None:
        self.state[into] = dvv.merge(self.state[into], self.state[other])
        self.past[into] |= self.past[other]
        self.check(into)

    def lose_disk(self, replica: str) -> None:
        """Under a new id, as after any loss of state."""
        self.ids[replica] = f"{replica}{int(self.ids[replica][1:]) + 1}"
        self.state[replica], self.past[replica] = dvv.EMPTY, frozenset()

    def check(self, replica: str) -> None:
        state = self.state[replica]
        assert self.resolver.show(dvv.living_values(state)) == self.expected(self.past[replica])
        assert dvv.checked(state) == state
        assert len(state.siblings) <= len(state.context)

    def heal(self) -> None:
        for _ in range(2):
            for into, other in itertools.permutations(self.state, 2):
                self.merge(into, other)
        assert len({repr(state) for state in self.state.values()}) == 1


def run(kind: str, seed: int) -> None:
    """One random life of a record: changes with old and new contexts, deletes, merges, and a disk that is
    lost once what it had is elsewhere."""
    draw = random.Random(f"{kind} {seed}")
    world = World(kind, "ABCD"[: draw.randint(2, 4)], draw)
    names = list(world.state)
    steps, weights = ("read", "delete", "change", "merge", "lose"), (3, draw.choice((0, 2, 6)), 8, 6, 1)
    for step in draw.choices(steps, weights, k=draw.randint(3, 40)):
        replica, other = draw.sample(names, 2)
        if step == "read":
            world.read(replica)
        elif step == "delete":
            world.delete(replica)
        elif step == "change":
            world.change(replica)
        elif step == "merge":
            world.merge(replica, other)
        else:
            world.merge(other, replica)
            world.lose_disk(replica)
    world.heal()


@pytest.mark.parametrize("kind", RESOLVERS)
def test_some_random_lives_are_the_oracles(kind: str) -> None:
    for seed in range(25):
        run(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESOLVERS)
def test_random_lives_are_the_oracles(kind: str) -> None:
    for seed in range(1_000):
        run(kind, seed)


@pytest.mark.slow
def test_nothing_acknowledged_is_missing_from_a_sum() -> None:
    """Without deletes there is an oracle that needs no history: a running total."""
    for seed in range(300):
        draw = random.Random(seed)
        states, total = dict.fromkeys("ABC", dvv.EMPTY), 0
        for step in range(draw.randint(1, 60)):
            name = draw.choice("ABC")
            if draw.random() < 0.6:
                amount = draw.randint(-1_000, 1_000)
                delta = COUNTER.encode_delta(amount)
                written = resolve(COUNTER, states[name], name, Stamp(step + 1), delta, NOTHING)
                states[name], total = written.state, total + amount
            else:
                states[name] = dvv.merge(states[name], states[draw.choice("ABC")])
        whole = reduce(dvv.merge, states.values())
        assert COUNTER.show(dvv.living_values(whole)) == total


def put(state: RecordState, replica: str, stamp: int, resolver: Any, delta: Any, **more: Any) -> RecordState:
    encoded = resolver.encode_delta(delta)
    return resolve(resolver, state, replica, Stamp(stamp), encoded, NOTHING, **more).state


def test_the_sibling_bound_is_not_reached_by_coordinators_however_many_there_were() -> None:
    """Forty incarnations wrote without having heard of each other; the next write joins them all."""
    apart = [put(dvv.EMPTY, f"r{number:02}", 1, COUNTER, 1) for number in range(40)]
    whole = reduce(dvv.merge, apart)
    assert len(whole.siblings) == 40 > dvv.SIBLINGS_MAX
    after = put(whole, "r00", 2, COUNTER, 1)
    assert len(after.siblings) == 1
    assert COUNTER.show(dvv.living_values(after)) == 41


def test_a_write_after_removed_tombstones_reuses_no_entry() -> None:
    """The counters of removed records live on as a floor."""
    after = put(dvv.EMPTY, "A", 1, COUNTER, 3, floor=7)
    assert after.context == {"A": 8}
    assert COUNTER.show(dvv.living_values(put(after, "A", 2, COUNTER, 4, floor=7))) == 7


def test_a_context_of_another_record_is_a_conflict() -> None:
    delta = SET.encode_delta(FieldsDelta({b"x": b""}))
    with pytest.raises(Conflict, match="not read from this record"):
        resolve(SET, dvv.EMPTY, "A", Stamp(1), delta, VersionVector.from_wire({"A": 1}))


def test_a_corrupt_sibling_stops_changes_and_a_delete_clears_it() -> None:
    damaged = RecordState({"B": 1}, [Sibling("B", 1, 1, b"counter\x01nonsense")])
    with pytest.raises(Corrupt, match="counter"):
        put(damaged, "A", 2, COUNTER, 1)
    cleared = resolve(COUNTER, damaged, "A", Stamp(2), None, NOTHING).state
    assert not dvv.alive(cleared)
    assert COUNTER.show(dvv.living_values(put(cleared, "A", 3, COUNTER, 1))) == 1


def test_what_is_no_delta_is_refused() -> None:
    with pytest.raises(Refused, match="not a change"):
        resolve(MAXIMUM, dvv.EMPTY, "A", Stamp(1), b"\xc0", NOTHING)


def test_a_value_over_its_bound_may_only_shrink() -> None:
    def fields(resolver: Any, state: RecordState, replica: str, **fields: Any) -> RecordState:
        return put(state, replica, 1, resolver, FieldsDelta(**fields))

    half = bytes(VALUE_BYTES_MAX // 2 + 100)
    one = fields(MAP, dvv.EMPTY, "A", put={b"a": half})
    with pytest.raises(TooLarge, match="remove some"):
        fields(MAP, one, "A", put={b"b": half})
    both = dvv.merge(one, fields(MAP, dvv.EMPTY, "B", put={b"b": half, b"c": b"1"}))
    with pytest.raises(TooLarge, match="remove some"):
        fields(MAP, both, "A", put={b"d": b"1"})
    shrunk = fields(MAP, both, "A", remove=[b"c"])
    assert MAP.show(dvv.living_values(shrunk)).keys() == {"a", "b"}
    assert MAP.show(dvv.living_values(fields(MAP, shrunk, "A", remove=[b"a"]))).keys() == {"b"}


def test_a_register_replaces_what_its_author_saw_elsewhere() -> None:
    at_a = put(dvv.EMPTY, "A", 9, REGISTER, b"first")
    known = VersionVector.from_wire(at_a.context)
    at_b = resolve(REGISTER, dvv.EMPTY, "B", Stamp(1), REGISTER.encode_delta(b"second"), known).state
    assert REGISTER.show(dvv.living_values(dvv.merge(at_a, at_b))) == b"second"


def test_a_check_hears_of_the_change_before_it_is_made() -> None:
    heard: list[Any] = []
    before = put(dvv.EMPTY, "A", 1, COUNTER, 3)
    put(before, "A", 2, COUNTER, 4, check=lambda *change: heard.append(change))
    [(delta, held, value)] = heard
    assert (COUNTER.delta(delta), COUNTER.show(held), COUNTER.show([value])) == (4, 3, 7)
    assert resolve(COUNTER, before, "A", Stamp(2), None, NOTHING).dot == Dot("A", 2)
