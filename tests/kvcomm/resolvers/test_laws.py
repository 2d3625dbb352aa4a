"""Joins are commutative, associative and idempotent on all states that can be, and damage is noticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.clock import Stamp
from kvcomm.errors import Corrupt, Refused
from kvcomm.resolvers import RESOLVERS, Moment, Resolver, resolver_of
from kvcomm.resolvers.fields import FieldsDelta, _settled
from kvcomm.resolvers.register import Held
from kvcomm.resolvers.table import COUNTER, MAP, MAXIMUM, MINIMUM, REGISTER, SET
from kvcomm.version import Dot, VersionVector

REPLICAS = ("A", "B", "C")
seeds = st.integers(0, 2**48)
"""Of states: drawing them piece by piece costs ten times as much."""


def vector(draw: Random) -> VersionVector:
    return VersionVector.from_wire({name: draw.randint(1, 4) for name in REPLICAS if draw.random() < 0.7})


def a_counter(draw: Random) -> bytes:
    names = [(draw.choice(REPLICAS), draw.randint(1, 3)) for _ in range(draw.randint(1, 5))]
    return COUNTER._encode({name: (draw.randint(3, 6), draw.randint(-9, 9)) for name in names})


def some_fields(draw: Random, resolver: Any) -> bytes:
    """A write's payload depends on its dot alone; what is held was seen."""
    seen = vector(draw)
    dots = [(replica, counter) for replica, last in seen.entries for counter in range(1, last + 1)]
    held = {
        field: {
            dot: (dot[1] % 2, b"" if resolver is SET else field + b"%d" % dot[1])
            for dot in draw.sample(dots, draw.randint(0, len(dots)))
        }
        for field in (b"x", b"y")
    }
    removed = {field: vector(draw) for field in (b"x", b"y", b"z") if draw.random() < 0.5}
    return resolver._encode(_settled(seen, held, removed))


def a_number(draw: Random, resolver: Any) -> bytes:
    return resolver._encode(draw.choice([draw.randint(-4, 4), draw.randint(-4, 4) / 2, float(2**53), 2**53]))


def a_register(draw: Random) -> bytes:
    held = Held(draw.randint(0, 2), draw.choice(REPLICAS), draw.randint(1, 2), draw.choice([b"", b"v", b"w"]))
    return REGISTER._encode(held)


STATES: dict[str, Callable[[Random], bytes]] = {
    "counter": a_counter,
    "set": partial(some_fields, resolver=SET),
    "map": partial(some_fields, resolver=MAP),
    "max": partial(a_number, resolver=MAXIMUM),
    "min": partial(a_number, resolver=MINIMUM),
    "register": a_register,
}


def test_every_class_is_held_to_the_laws() -> None:
    assert STATES.keys() == RESOLVERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_a_join_is_commutative_associative_and_idempotent(name: str) -> None:
    resolver, states = RESOLVERS[name], STATES[name]

    @given(seeds)
    @settings(max_examples=2_500)
    def holds(seed: int) -> None:
        draw, join = Random(seed), resolver.join
        one, two, three = (states(draw) for _ in range(3))
        assert join([one]) == join([one, one]) == one
        assert join([one, two]) == join([two, one])
        assert join([join([one, two]), three]) == join([one, join([two, three])]) == join([three, two, one])
        assert join([join([one, two]), one]) == join([one, two])
        assert resolver.show([one, two]) == resolver.show([join([one, two])])

    holds()


DELTAS: dict[str, Any] = {
    "counter": -3,
    "set": FieldsDelta({b"x": b""}, [b"y"]),
    "map": FieldsDelta({b"x": b"1"}, [b"y"]),
    "max": 2.5,
    "min": 2,
    "register": b"value",
}
MOMENT = Moment(Dot("A", 7), Stamp(9), VersionVector.from_wire({"A": 6, "B": 6, "C": 6}), VersionVector())


@pytest.mark.parametrize("name", STATES)
def test_a_change_is_an_inflation_and_depends_on_nothing_else(name: str) -> None:
    """The state after it absorbs what it was made of, in any order of joining."""
    resolver, states = RESOLVERS[name], STATES[name]
    delta = resolver.encode_delta(DELTAS[name])

    @given(seeds)
    @settings(max_examples=50)
    def holds(seed: int) -> None:
        draw = Random(seed)
        one, two = states(draw), states(draw)
        after = resolver.apply([one, two], delta, MOMENT)
        assert after == resolver.apply([resolver.join([two, one])], delta, MOMENT)
        if name != "register":  # whose writes replace, and are covered by their context
            assert resolver.join([after, one]) == after

    holds()


@pytest.mark.parametrize("name", STATES)
def test_a_damaged_value_is_corrupt(name: str) -> None:
    resolver = RESOLVERS[name]
    whole = resolver.apply([], resolver.encode_delta(DELTAS[name]), MOMENT)
    assert resolver.join([whole]) == whole
    damaged = [whole[:cut] for cut in range(len(whole))]
    damaged += [whole + b"\x00", b"", b"state", *(other_value(name))]
    for value in damaged:
        with pytest.raises(Corrupt, match=name):
            resolver.join([value])
        with pytest.raises(Corrupt, match=name):
            resolver.show([whole, value])
        with pytest.raises(Corrupt, match=name):
            resolver.apply([value, whole], resolver.encode_delta(DELTAS[name]), MOMENT)


def other_value(name: str) -> list[bytes]:
    return [
        other.apply([], other.encode_delta(DELTAS[other.name]), MOMENT)
        for other in RESOLVERS.values()
        if other.name != name
    ]


@pytest.mark.parametrize("name", STATES)
def test_flipped_bytes_are_corrupt_or_another_canonical_value(name: str) -> None:
    """Never anything else, whatever the byte: checksums are the store's, shapes are ours."""
    resolver = RESOLVERS[name]
    whole = resolver.apply([], resolver.encode_delta(DELTAS[name]), MOMENT)
    corrupt = 0
    for at in range(len(whole)):
        for flip in (0x01, 0x40, 0x80, 0xFF):
            flipped = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
            try:
                assert resolver.join([flipped]) == flipped
            except Corrupt:
                corrupt += 1
    assert corrupt > len(whole)


@pytest.mark.parametrize("name", ["set", "map"])
def test_bytes_that_nest_without_end_are_refused_like_any_others(name: str) -> None:
    """Behind the parts that a delta or state has; the shard that looks at them must not end at it."""
    endless, resolver = b"\x91" * 100_000 + b"\xc0", RESOLVERS[name]
    with pytest.raises(Refused, match="not a change"):
        resolver.apply([], b"\x93\x80\x90" + endless, MOMENT)
    with pytest.raises(Corrupt, match=name):
        resolver.join([name.encode() + b"\x01\x94\x90\x90\x90" + endless])


@pytest.mark.parametrize("name", STATES)
def test_no_bytes_at_all_are_more_than_corrupt(name: str) -> None:
    resolver = RESOLVERS[name]

    @given(st.binary(max_size=40))
    @settings(max_examples=100)
    def holds(body: bytes) -> None:
        value = name.encode() + b"\x01" + body
        with suppress(Corrupt):
            assert resolver.join([value]) == value

    holds()


def test_the_class_is_the_first_part_of_the_name() -> None:
    assert resolver_of(b"counter/tokens/agent-7") is COUNTER
    assert resolver_of(b"max/latency/p99") is MAXIMUM
    for name in (b"state/counter/x", b"context/a/b", b"counters/a/b", b"", b"/counter"):
        assert resolver_of(name) is None


@pytest.mark.parametrize("resolver", RESOLVERS.values(), ids=RESOLVERS)
def test_absent_records_show_as_nothing(resolver: Resolver[Any, Any, Any]) -> None:
    assert resolver.show([]) in (0, None, {}, frozenset())
