"""What single classes do, told in short stories; the long ones are in tests/l3_shard/test_resolving.py."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm.clock import Stamp
from kvcomm.errors import Corrupt, Refused, TooLarge
from kvcomm.resolvers import Moment
from kvcomm.resolvers.fields import FIELDS_MAX, FieldsDelta
from kvcomm.resolvers.resolver import INTEGER_MAX
from kvcomm.resolvers.table import COUNTER, MAP, MAXIMUM, MINIMUM, REGISTER, SET
from kvcomm.version import Dot, VersionVector


def moment(
    replica: str, counter: int, seen: dict[str, int] | None = None, known: dict[str, int] | None = None
) -> Moment:
    vector = VersionVector.from_wire
    return Moment(Dot(replica, counter), Stamp(counter), vector(seen or {}), vector(known or {}))


def add(amount: int) -> bytes:
    return COUNTER.encode_delta(amount)


def put(value: bytes = b"", *, field: bytes = b"x") -> bytes:
    return MAP.encode_delta(FieldsDelta({field: value}))


def remove(*fields: bytes) -> bytes:
    return MAP.encode_delta(FieldsDelta({}, list(fields)))


def test_concurrent_adds_are_all_in_the_sum() -> None:
    first = COUNTER.apply([], add(5), moment("A", 1))
    mine = COUNTER.apply([first], add(3), moment("A", 2, {"A": 1}))
    theirs = COUNTER.apply([first], add(-4), moment("B", 1, {"A": 1}))
    assert COUNTER.show([mine, theirs, first]) == 4


def test_a_counter_begun_anew_after_a_delete_is_not_swallowed_by_its_past() -> None:
    """B had not seen the delete and brings A's old entry back: nothing acknowledged may go for it."""
    old = COUNTER.apply([], add(5), moment("A", 1))
    theirs = COUNTER.apply([old], add(1), moment("B", 1, {"A": 1}))
    anew = COUNTER.apply([], add(2), moment("A", 3, {"A": 2}))  # A's second write was the delete
    assert COUNTER.show([anew, theirs]) == 5 + 1 + 2


def test_an_owner_does_not_go_on_with_an_entry_that_may_be_older_than_what_it_wrote() -> None:
    early = COUNTER.apply([], add(2), moment("A", 1))
    carried = COUNTER.apply([early], add(1), moment("B", 1, {"A": 1}))
    late = COUNTER.apply([early], add(5), moment("A", 2, {"A": 1}))
    elsewhere = COUNTER.apply([late], add(10), moment("C", 1, {"A": 2}))
    # A: somebody deletes what it has, then B's sibling comes, with A's entry as it was after the first add.
    anew = COUNTER.apply([carried], add(100), moment("A", 3, {"A": 2, "B": 1, "C": 1}))
    assert COUNTER.show([anew, elsewhere]) == 2 + 1 + 5 + 10 + 100


def test_a_counter_leaves_no_64_bits() -> None:
    full = COUNTER.apply([], add(INTEGER_MAX), moment("A", 1))
    with pytest.raises(Refused, match="64 bits"):
        COUNTER.apply([full], add(1), moment("A", 2, {"A": 1}))
    assert COUNTER.show([COUNTER.apply([full], add(-1), moment("A", 2, {"A": 1}))]) == INTEGER_MAX - 1
    with pytest.raises(ValueError, match="64 bits"):
        add(INTEGER_MAX + 1)


def test_an_add_beats_a_remove_that_had_not_seen_it() -> None:
    both = SET.apply([], put(), moment("A", 1))
    removed = SET.apply([both], remove(b"x"), moment("A", 2, {"A": 1}))
    again = SET.apply([both], put(), moment("B", 1, {"A": 1}))
    assert SET.show([removed]) == frozenset()
    assert SET.show([removed, again]) == {b"x"}
    assert SET.show([SET.apply([removed, again], remove(b"x"), moment("A", 3, {"A": 2, "B": 1}))]) == set()


def test_a_remove_reaches_what_its_author_had_seen_and_its_coordinator_had_not() -> None:
    seen = SET.apply([], put(), moment("A", 1))
    at_b = SET.apply([], remove(b"x"), moment("B", 1, known={"A": 1}))
    assert SET.show([at_b, seen]) == frozenset()
    unseen = SET.apply([seen], put(), moment("A", 2, {"A": 1}))
    assert SET.show([at_b, unseen]) == {b"x"}
    merged = SET.join([at_b, seen])
    assert b"x" not in merged, "the removal has done its work and is not kept"


def test_fields_are_written_by_themselves() -> None:
    first = MAP.apply([], put(b"1", field=b"a"), moment("A", 1))
    mine = MAP.apply([first], put(b"2", field=b"b"), moment("A", 2, {"A": 1}))
    theirs = MAP.apply([first], put(b"3", field=b"c"), moment("B", 1, {"A": 1}))
    assert MAP.show([mine, theirs]) == {"a": b"1", "b": b"2", "c": b"3"}


def test_the_latest_of_concurrent_puts_of_a_field_is_shown_and_an_older_stamp_wins_nothing_causally() -> None:
    one = MAP.apply([], put(b"late"), moment("A", 9))
    two = MAP.apply([], put(b"early"), moment("B", 1))
    assert MAP.show([one, two]) == {"x": b"late"}
    after = MAP.apply([one, two], put(b"after"), moment("B", 2, {"A": 9, "B": 1}))
    assert MAP.show([after, one, two]) == {"x": b"after"}


def test_one_write_with_two_values_is_corrupt() -> None:
    one, two = (MAP.apply([], put(value), moment("A", 1)) for value in (b"1", b"2"))
    with pytest.raises(Corrupt, match="two values"):
        MAP.join([one, two])


@pytest.mark.parametrize(("offered", "largest", "smallest"), [((3, -2, 7), 7, -2), ((1, 1.0), 1.0, 1)])
def test_extremes(offered: tuple[float, ...], largest: float, smallest: float) -> None:
    for resolver, expected in ((MAXIMUM, largest), (MINIMUM, smallest)):
        values = [
            resolver.apply([], resolver.encode_delta(each), moment("A", 1)) for each in (*offered, offered[0])
        ]
        shown = resolver.show(values)
        assert (shown, type(shown)) == (expected, type(expected))


def test_a_negative_zero_is_stored_as_zero() -> None:
    stored = [MAXIMUM.apply([], MAXIMUM.encode_delta(zero), moment("A", 1)) for zero in (0.0, -0.0)]
    assert stored[0] == stored[1]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 2**63, -(2**63) - 1])
def test_numbers_without_order_or_room_are_no_deltas(number: float) -> None:
    with pytest.raises(ValueError, match=r"finite|64 bits|serialize"):
        MAXIMUM.encode_delta(number)


def test_a_later_write_of_a_register_wins_whatever_its_stamp() -> None:
    one = REGISTER.apply([], REGISTER.encode_delta(b"one"), moment("A", 9))
    assert REGISTER.show([REGISTER.apply([one], REGISTER.encode_delta(b"two"), moment("B", 1))]) == b"two"
    two = REGISTER.apply([], REGISTER.encode_delta(b"two"), moment("B", 8))
    assert REGISTER.show([one, two]) == b"one"


@pytest.mark.parametrize(
    ("resolver", "delta"),
    [(COUNTER, b"\xa1x"), (COUNTER, b""), (SET, b"\x05"), (MAXIMUM, b"\xc4\x00"), (REGISTER, b"\x01")],
)
def test_what_is_no_delta_is_refused(resolver: Any, delta: bytes) -> None:
    with pytest.raises(Refused, match="not a change"):
        resolver.apply([], delta, moment("A", 1))


def test_a_delta_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="both added and removed"):
        SET.encode_delta(FieldsDelta({b"x": b""}, [b"x"]))
    with pytest.raises(ValueError, match="no values"):
        SET.encode_delta(FieldsDelta({b"x": b"1"}))
    with pytest.raises(Refused, match="no values"):
        SET.apply([], MAP.encode_delta(FieldsDelta({b"x": b"1"})), moment("A", 1))


def test_a_record_has_a_bounded_number_of_fields_and_can_always_shrink() -> None:
    many = [b"%d" % number for number in range(FIELDS_MAX)]
    full = SET.apply([], SET.encode_delta(FieldsDelta(dict.fromkeys(many, b""))), moment("A", 1))
    with pytest.raises(TooLarge, match="4097 entries"):
        SET.apply([full], put(), moment("A", 2, {"A": 1}))
    other = SET.apply([], put(field=b"other"), moment("B", 1))
    shrunk = SET.apply([full, other], remove(b"7"), moment("A", 2, {"A": 1, "B": 1}))
    assert len(SET.show([shrunk])) == FIELDS_MAX
    with pytest.raises(TooLarge):
        SET.apply([full, other], remove(b"x", b"y"), moment("A", 2, {"A": 1, "B": 1}, {"C": 9}))
    with pytest.raises(ValueError, match="length"):
        SET.encode_delta(FieldsDelta(dict.fromkeys([*many, b"x"], b"")))


def test_names_of_fields_are_text() -> None:
    with pytest.raises(ValueError, match="utf-8"):
        MAP.encode_delta(FieldsDelta({b"\xff": b""}))
    with pytest.raises(Refused, match="utf-8"):
        MAP.apply([], SET.encode_delta(FieldsDelta({}, [b"\xff"])), moment("A", 1))
    written = MAP.apply([], put(b"v", field=b"\x7f"), moment("A", 1))
    with pytest.raises(Corrupt, match="utf-8"):
        MAP.show([written.replace(b"\x7f", b"\xff")])
