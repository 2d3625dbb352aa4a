"""What clients send for resolved records, and how they show what comes back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from kvcomm import aiomerging
from kvcomm import merging as merging_faces
from kvcomm.clock import Stamp
from kvcomm.errors import Corrupt, TooLarge
from kvcomm.mergeplane import MergePlane
from kvcomm.resolvers import RESOLVERS, Moment, Resolver
from kvcomm.resolvers.fields import FieldsDelta
from kvcomm.resolvers.table import COUNTER, MAP, MAXIMUM, REGISTER, SET
from kvcomm.steps import Steps
from kvcomm.tier import RecordAnswer
from kvcomm.version import Dot, VersionVector
from kvcomm.wire.messages import VALUE_BYTES_MAX, RecordVersion, RecordWrite
from tests.kvcomm.test_blockplane import run
from tests.kvcomm.test_stateplane import FakeRecords, plane


def value(resolver: Resolver[Any, Any, Any], delta: Any, replica: str = "A") -> bytes:
    moment = Moment(Dot(replica, 1), Stamp(1), VersionVector(), VersionVector())
    return resolver.apply([], resolver.encode_delta(delta), moment)


def merging(records: FakeRecords) -> MergePlane:
    return MergePlane(plane(records))


def test_siblings_are_joined_when_they_are_read() -> None:
    siblings = (value(COUNTER, 3, "A"), value(COUNTER, 4, "B"))
    records = FakeRecords({b"counter/n/k": RecordAnswer(siblings, {"A": 1, "B": 1}, True)})
    found, absent = run(merging(records).get(COUNTER, "n", ["k", "other"]))
    assert (found.value, found.context, found.degraded) == (7, {"A": 1, "B": 1}, True)
    assert (absent.value, absent.context, absent.degraded) == (0, {}, False)


def test_a_value_of_another_class_is_corrupt() -> None:
    records = FakeRecords({b"set/n/k": RecordAnswer((value(COUNTER, 3),), {"A": 1}, False)})
    with pytest.raises(Corrupt, match="set record"):
        run(merging(records).get(SET, "n", ["k"]))


def test_what_was_last_seen_goes_along_only_where_it_matters() -> None:
    """An element read here may be removed at a coordinator that has not heard of it; a sum needs nothing."""
    answer = RecordAnswer((), {"B": 3}, False)
    records = FakeRecords({b"set/n/k": answer, b"counter/n/k": answer, b"register/n/k": answer})
    merge = merging(records)
    changes: list[tuple[Resolver[Any, Any, Any], Any]] = [
        (SET, FieldsDelta({}, [b"x"])), (COUNTER, 1), (REGISTER, b"v"),
    ]  # fmt: skip
    for resolver, delta in changes:
        run(merge.get(resolver, "n", ["k"]))
        run(merge.change(resolver, "n", [("k", delta)]))
    run(merge.delete(COUNTER, "n", ["k"]))
    sent = [(write.key, dict(write.context), write.value, write.delta is None) for write in records.written]
    assert sent == [
        (b"set/n/k", {"B": 3}, None, False),
        (b"counter/n/k", {}, None, False),
        (b"register/n/k", {"B": 3}, None, False),
        (b"counter/n/k", {"B": 3, "a": 2}, None, True),
    ]


untyped: Any = FieldsDelta
"""As a caller without a type checker would use it."""


@pytest.mark.parametrize(
    ("resolver", "delta"),
    [
        (COUNTER, 1.5), (COUNTER, True), (COUNTER, 2**63), (MAXIMUM, "9"), (MAXIMUM, float("nan")),
        (SET, untyped({"text": b""})), (SET, untyped({1: b""})), (MAP, untyped({b"x": 1})),
        (MAP, FieldsDelta({b"x": b""}, [b"x"])), (REGISTER, 5),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_sent(resolver: Resolver[Any, Any, Any], delta: Any) -> None:
    records = FakeRecords()
    with pytest.raises(ValueError, match=r"."):
        run(merging(records).change(resolver, "n", [("fine", DELTAS[resolver.name]), ("k", delta)]))
    assert records.written == []


DELTAS: dict[str, Any] = {
    "counter": 1, "max": 1, "min": 1, "set": FieldsDelta(), "map": FieldsDelta(), "register": b"",
}  # fmt: skip


def test_a_delta_over_the_bound_is_not_sent() -> None:
    records = FakeRecords()
    with pytest.raises(TooLarge):
        run(merging(records).change(REGISTER, "n", [("k", bytes(VALUE_BYTES_MAX))]))
    assert records.written == []


@pytest.mark.parametrize("resolver", RESOLVERS.values(), ids=RESOLVERS)
def test_keys_are_those_of_the_class_and_name(resolver: Resolver[Any, Any, Any]) -> None:
    names = [f"{kind}/n/k%2F{kind}".encode() for kind in RESOLVERS]
    records = FakeRecords(dict.fromkeys(names, RecordAnswer((), {}, False)))
    assert run(merging(records).keys(resolver, "n")) == [f"k/{resolver.name}"]


class Elsewhere(FakeRecords):
    """Puts go to a coordinator that has heard of nothing."""

    def record_put(self, writes: Sequence[RecordWrite]) -> Steps[list[RecordVersion]]:
        self.written += writes
        yield from ()
        return [RecordVersion("C", len(self.written), {"C": len(self.written)}, 1) for _ in writes]


def test_what_was_seen_of_a_resolved_record_only_grows() -> None:
    """An element read at one coordinator is still covered after a write by another that has not heard of it,
    and after a read from a replica that lags.  (Found by the simulator: a remove missed what it was for.)"""
    records = Elsewhere({b"set/n/k": RecordAnswer((), {"A": 5, "B": 2}, False)})
    merge = merging(records)
    run(merge.get(SET, "n", ["k"]))
    run(merge.change(SET, "n", [("k", FieldsDelta({b"y": b""}))]))
    records.answers[b"set/n/k"] = RecordAnswer((), {"B": 3}, True)
    run(merge.get(SET, "n", ["k"]))
    run(merge.change(SET, "n", [("k", FieldsDelta({}, [b"x"]))]))
    assert dict(records.written[1].context) == {"A": 5, "B": 3, "C": 1}


def test_of_too_many_replicas_only_the_newer_context_is_sent() -> None:
    """No replica takes a context of more than 256."""
    name, newer = b"set/n/k", {f"new{number}": 1 for number in range(200)}
    records = FakeRecords({name: RecordAnswer((), {f"old{number}": 1 for number in range(100)}, False)})
    merge = merging(records)
    run(merge.get(SET, "n", ["k"]))
    records.answers[name] = RecordAnswer((), newer, True)
    run(merge.get(SET, "n", ["k"]))
    run(merge.change(SET, "n", [("k", FieldsDelta())]))
    assert dict(records.written[0].context) == newer


@pytest.mark.parametrize("name", ["Counter", "ElementSet", "FieldMap", "Extreme", "Register"])
def test_both_faces_have_the_same_calls(name: str) -> None:
    blocking, asynchronous = getattr(merging_faces, name), getattr(aiomerging, f"Async{name}")
    calls = {call for call in dir(blocking) if not call.startswith("_")} - {"name"}
    assert calls == {call for call in dir(asynchronous) if not call.startswith("_")} - {"name"}
    assert len(calls) >= 6
    for call in calls:
        parameters = inspect.signature(getattr(blocking, call)).parameters
        assert parameters == inspect.signature(getattr(asynchronous, call)).parameters
        assert inspect.iscoroutinefunction(getattr(asynchronous, call))
        assert parameters["deadline_s"].kind is inspect.Parameter.KEYWORD_ONLY
