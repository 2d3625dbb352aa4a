"""Names, remembered contexts and context heads, over a fake ``Records`` that says what it was asked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm import stateplane
from kvcomm.errors import Conflict, Corrupt, PartlyDone, TooLarge, WriteOutcome, batch_error
from kvcomm.hotcopies import HotCopies
from kvcomm.manifest import Manifest
from kvcomm.metrics import Metrics
from kvcomm.stateplane import Context, StatePlane, StateValue, record_name, record_path
from kvcomm.steps import Steps
from kvcomm.tally import Tally
from kvcomm.tier import RecordAnswer
from kvcomm.wire.messages import VALUE_BYTES_MAX, Dots, RecordVersion, RecordWrite
from tests.kvcomm.test_blockplane import NAMESPACE, run


@dataclass
class FakeRecords:
    answers: dict[bytes, RecordAnswer] = field(default_factory=dict)
    written: list[RecordWrite] = field(default_factory=list)
    own: bool = False
    asked: list[list[Dots]] = field(default_factory=list)
    """The least contexts of each get."""

    def record_get(self, keys: Sequence[bytes], least: Sequence[Dots] = ()) -> Steps[list[RecordAnswer]]:
        self.asked.append([dict(each) for each in least])
        yield from ()
        return [self.answers.get(key, RecordAnswer((), {}, False)) for key in keys]

    def record_put(self, writes: Sequence[RecordWrite]) -> Steps[list[RecordVersion]]:
        self.written += writes
        yield from ()
        return [
            RecordVersion("a", len(self.written), {**write.context, "a": len(self.written)}, 1, self.own)
            for write in writes
        ]

    def record_scan(self, prefix: bytes) -> Steps[list[bytes]]:
        yield from ()
        return sorted(key for key in self.answers if key.startswith(prefix))


def plane(records: FakeRecords) -> StatePlane:
    return StatePlane(records, Tally(Metrics("client"), clock=lambda: 0.0))


parts = st.lists(st.text(min_size=1), min_size=1, max_size=4)


@given(parts)
def test_names_and_paths_are_inverses(path: list[str]) -> None:
    assert record_path(record_name(*path)) == tuple(path)


@given(parts, parts)
def test_different_paths_have_different_names_and_prefixes_end_at_parts(
    one: list[str], other: list[str]
) -> None:
    assert (record_name(*one) == record_name(*other)) == (one == other)
    below = record_name(*other).startswith(record_name(*one) + b"/")
    assert below == (len(other) > len(one) and other[: len(one)] == one)


def test_empty_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        record_name("state", "")


def test_a_put_replaces_what_was_read_unless_told_otherwise() -> None:
    records = FakeRecords({b"n": RecordAnswer((b"old",), {"b": 4}, True)})
    state = plane(records)
    run(state.put([(b"n", b"blind", None)]))
    assert run(state.get([b"n"])) == [StateValue((b"old",), {"b": 4}, True)]
    run(state.put([(b"n", b"after read", None)]))
    run(state.put([(b"n", b"after own write", None)]))
    run(state.put([(b"n", b"explicit", {"c": 9})]))
    run(state.put([(b"n", None, None)]))
    assert [write.context for write in records.written] == [
        {},
        {"b": 4},
        {"b": 4, "a": 2},
        {"c": 9},
        {"c": 9, "a": 4},
    ]
    assert records.written[-1].value is None


def test_the_context_of_another_record_is_refused() -> None:
    """Its counters would cover writes of this record that have yet to come."""
    records = FakeRecords({b"n": RecordAnswer((b"old",), {"b": 4}, False)})
    state = plane(records)
    (read,) = run(state.get([b"n"]))
    (written,) = run(state.put([(b"n", b"new", read.context)]))
    for context in (read.context, written):
        with pytest.raises(ValueError, match="says nothing about"):
            run(state.put([(b"n", b"fine", None), (b"m", b"v", context)]))
    assert len(records.written) == 1
    run(state.put([(b"m", b"v", {}), (b"m", b"v", dict(written))]))


def test_a_get_asks_for_what_was_read_and_written_before() -> None:
    records = FakeRecords({b"n": RecordAnswer((b"v",), {"x": 4}, False)})
    state = plane(records)
    run(state.get([b"n", b"m"]))
    run(state.put([(b"m", b"v", None)]))
    run(state.get([b"n", b"m"]))
    assert records.asked == [[{}, {}], [{"x": 4}, {"a": 1}]]


def test_an_own_write_counts_also_where_no_context_covers_it() -> None:
    class Uncovered(FakeRecords):
        def record_put(self, writes: Sequence[RecordWrite]) -> Steps[list[RecordVersion]]:
            yield from ()
            return [RecordVersion("b", 7, dict(write.context), 2, True) for write in writes]

    records = Uncovered({b"n": RecordAnswer((b"v",), {"x": 4}, False)})
    state = plane(records)
    run(state.get([b"n"]))
    run(state.put([(b"n", b"w", None)]))
    run(state.get([b"n"]))
    assert records.asked[-1] == [{"x": 4, "b": 7}]


def test_a_degraded_answer_lowers_nothing_and_a_sound_one_may() -> None:
    """A sound answer without what was asked for says that the record was removed and begun anew."""
    records = FakeRecords({b"n": RecordAnswer((b"v",), {"x": 4}, False)})
    state = plane(records)
    run(state.get([b"n"]))
    records.answers[b"n"] = RecordAnswer((b"old",), {"x": 2, "y": 1}, True)
    run(state.get([b"n"]))
    run(state.get([b"n"]))
    records.answers[b"n"] = RecordAnswer((), {}, False)
    run(state.get([b"n"]))
    run(state.get([b"n"]))
    assert records.asked == [[{}], [{"x": 4}], [{"x": 4, "y": 1}], [{"x": 4, "y": 1}], [{}]]


def test_an_answer_that_was_asked_for_before_a_write_does_not_forget_the_write() -> None:
    records = FakeRecords({b"n": RecordAnswer((b"v",), {"x": 4}, False)})
    state = plane(records)
    reading = state.get([b"n"])

    def late(keys: Sequence[bytes], least: Sequence[Dots] = ()) -> Steps[list[RecordAnswer]]:
        run(state.put([(b"n", b"w", None)]))  # another thread, while the get is under way
        yield from ()
        return [records.answers[key] for key in keys]

    records.record_get = late  # type: ignore[method-assign]
    run(reading)
    del records.record_get
    run(state.get([b"n"]))
    assert records.asked == [[{"x": 4, "a": 1}]]


def test_what_a_caller_does_to_a_context_is_not_remembered() -> None:
    records = FakeRecords({b"n": RecordAnswer((b"old",), {"b": 4}, False)})
    state = plane(records)
    run(state.get([b"n"]))[0].context["b"] = 900
    run(state.put([(b"n", b"v", None)]))[0]["c"] = 900
    run(state.put([(b"n", b"v", None)]))
    assert [write.context for write in records.written] == [{"b": 4}, {"b": 4, "a": 1}]


def test_the_own_write_is_named_where_the_context_cannot_cover_it() -> None:
    records = FakeRecords(own=True)
    state = plane(records)
    run(state.put([(b"n", b"1", None)]))
    (context,) = run(state.put([(b"n", b"2", None)]))
    run(state.put([(b"n", b"3", context)]))
    assert [write.own for write in records.written] == [None, ("a", 1), ("a", 2)]


def test_a_context_that_another_thread_evicts_meanwhile_is_remembered() -> None:
    class Crowded(OrderedDict[bytes, stateplane.Context]):
        def __setitem__(self, name: bytes, context: stateplane.Context) -> None:
            super().__setitem__(name, context)
            self.pop(name)  # what an eviction in another thread may do at this moment

    state = plane(FakeRecords({b"n": RecordAnswer((b"v",), {"x": 1}, False)}))
    state._contexts = Crowded()
    assert run(state.get([b"n"]))[0].values == (b"v",)


def test_a_value_over_the_limit_writes_nothing() -> None:
    records = FakeRecords()
    with pytest.raises(TooLarge, match="limit"):
        run(plane(records).put([(b"a", b"fine", None), (b"b", bytes(VALUE_BYTES_MAX + 1), None)]))
    assert records.written == []


def test_the_memory_of_contexts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateplane, "CONTEXTS_MAX", 2)
    records = FakeRecords({name: RecordAnswer((b"v",), {"x": 1}, False) for name in (b"a", b"b", b"c")})
    state = plane(records)
    run(state.get([b"a", b"b", b"c"]))
    run(state.put([(b"a", b"", None), (b"c", b"", None)]))
    assert [write.context for write in records.written] == [{}, {"x": 1}]


def test_one_value_and_siblings() -> None:
    assert StateValue((), {}, False).value is None
    assert StateValue((b"v",), {}, False).value == b"v"
    with pytest.raises(Conflict, match="2 concurrent"):
        assert StateValue((b"v", b"w"), {}, False).value


def head_of(*values: bytes) -> Manifest | None:
    return run(plane(FakeRecords({b"n": RecordAnswer(values, {"a": 1}, False)})).manifest(b"n"))


def test_a_context_without_head_is_none() -> None:
    assert head_of() is None


def test_of_two_siblings_the_longer_extension_is_the_head() -> None:
    shorter = Manifest.empty(NAMESPACE).append([1, 2, 3], NAMESPACE)
    longer = shorter.append([4, 5], NAMESPACE)
    assert head_of(longer.encode(), shorter.encode()) == longer
    assert head_of(shorter.encode(), longer.encode()) == longer


def test_siblings_that_went_different_ways_are_a_conflict() -> None:
    root = Manifest.empty(NAMESPACE).append([1, 2, 3], NAMESPACE)
    with pytest.raises(Conflict, match="different ways"):
        head_of(root.append([4], NAMESPACE).encode(), root.append([5, 6], NAMESPACE).encode())


def test_a_head_that_is_no_manifest_is_corrupt() -> None:
    with pytest.raises(Corrupt):
        head_of(b"junk")


def test_what_was_done_of_a_batch_is_remembered_and_told_by_the_callers_keys() -> None:
    one, two = record_name("state", "n", "j"), record_name("state", "n", "k")
    done = WriteOutcome(one, "done", ("a", 1), {"a": 1}, own=True)
    refused = WriteOutcome(two, "not_done", error=Conflict("siblings"))

    class Half(FakeRecords):
        def record_put(self, writes: Sequence[RecordWrite]) -> Steps[list[RecordVersion]]:
            if len(writes) == 2:
                yield from ()
                raise batch_error([done, refused])
            return (yield from super().record_put(writes))

    records, metrics = Half(), Metrics("client")
    state = StatePlane(records, Tally(metrics, clock=lambda: 0.0))
    with pytest.raises(PartlyDone) as caught:
        run(state.put([(one, b"v", None), (two, b"v", None)]))
    first, second = caught.value.outcomes
    assert isinstance(first.context, Context) and first.context.record == done.key
    assert first.context.own == ("a", 1) and first.context == {"a": 1}
    assert second.context is None and isinstance(second.error, Conflict)
    run(state.put([(one, b"w", None)]))
    assert records.written[-1] == RecordWrite(one, b"w", {"a": 1}, ("a", 1))
    for outcome in ("ok", "failed"):
        series = metrics.counter("kvcomm_record_operations_total", operation="put", outcome=outcome)
        assert series.value == (2 if outcome == "ok" else 1)


# -- copies of hot records -----------------------------------------------------------------------------------


class Moving:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def hot_plane(records: FakeRecords, clock: Moving) -> StatePlane:
    tally = Tally(Metrics("client"), clock=lambda: 0.0)
    return StatePlane(records, tally, copies=HotCopies(1.0), clock=clock)


def test_a_hot_record_is_asked_for_once_a_second() -> None:
    records = FakeRecords({b"n": RecordAnswer((b"v",), {"x": 4}, False, hot=True)})
    clock = Moving()
    state = hot_plane(records, clock)
    for _ in range(3):
        assert run(state.get([b"n", b"m"]))[0].value == b"v"
    assert [len(each) for each in records.asked] == [2, 1, 1], "the other one is not hot"
    run(state.get([b"n"], fresh=True))
    assert len(records.asked) == 4
    clock.now += 1.1
    run(state.get([b"n"]))
    assert len(records.asked) == 5


def test_a_copy_never_hides_the_own_write() -> None:
    records = FakeRecords({b"n": RecordAnswer((b"v",), {"x": 4}, False, hot=True)})
    clock = Moving()
    state = hot_plane(records, clock)
    run(state.get([b"n"]))
    run(state.put([(b"n", b"mine", None)]))
    records.answers[b"n"] = RecordAnswer((b"mine",), {"x": 4, "a": 1}, False, hot=True)
    assert run(state.get([b"n"]))[0].value == b"mine"
    assert records.written[0].context == {"x": 4}


def test_a_copy_that_is_behind_what_another_read_showed_is_not_shown() -> None:
    records = FakeRecords({b"n": RecordAnswer((b"old",), {"x": 4}, False, hot=True)})
    state = hot_plane(records, Moving())
    run(state.get([b"n"]))
    records.answers[b"n"] = RecordAnswer((b"new",), {"x": 5}, False)
    run(state.get([b"n"], fresh=True))
    assert run(state.get([b"n"]))[0].value == b"new"


def test_a_context_to_be_extended_is_never_a_copy() -> None:
    records = FakeRecords({b"n": RecordAnswer((), {"x": 4}, False, hot=True)})
    state = hot_plane(records, Moving())
    run(state.manifest(b"n"))
    run(state.manifest(b"n"))
    assert len(records.asked) == 1
    run(state.manifest(b"n", fresh=True))
    assert len(records.asked) == 2
