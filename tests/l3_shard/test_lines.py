"""Lines against a plain list: whatever storage's pace, no change is lost, doubled or reordered."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.clock import Stamp
from kvcomm.errors import Conflict, KVCommError, Refused
from kvcomm.machine import Effect
from kvcomm.version import VersionVector
from kvcomm.wire.messages import RecordState
from l3_shard import dvv
from l3_shard.lines import Lines, Local, Recent
from l3_shard.storage import Load, Loaded, Persist, Persisted


@dataclass(eq=False)
class Append:
    """Replaces the value by itself and one byte more; a lost update would lose its byte."""

    mark: int
    refuse: bool = False
    outcome: str = ""

    def apply(self, state: RecordState) -> RecordState:
        if self.refuse:
            raise Conflict("refused")
        (before,) = [sibling.value or b"" for sibling in state.siblings] or [b""]
        context = VersionVector.from_wire(state.context)
        return dvv.put(state, "replica0.1", Stamp(1), before + bytes([self.mark]), context).state

    def durable(self, state: RecordState) -> None:
        assert not self.outcome and bytes([self.mark]) in value(state)
        self.outcome = "durable"

    def failed(self, error: KVCommError) -> None:
        assert not self.outcome
        self.outcome = "failed"


def value(state: RecordState) -> bytes:
    return b"".join(sibling.value or b"" for sibling in state.siblings)


@dataclass
class Driver:
    lines: Lines = field(
        default_factory=lambda: Lines(100, count(1), empty=dvv.EMPTY, value_bytes=dvv.value_bytes)
    )
    disk: dict[bytes, RecordState] = field(default_factory=dict)
    orders: list[Effect] = field(default_factory=list)

    def flush(self) -> None:
        while self.lines.pending:
            self.orders += self.lines.flush("replica0.1")
        self.lines.check()

    def carry_out(self, number: int, full: bool = False) -> None:
        """Storage finishes one of its orders, any of them."""
        order = self.orders.pop(number % len(self.orders))
        if isinstance(order, Load):
            self.lines.loaded(Loaded(order.ticket, tuple(self.disk.get(key) for key in order.keys)))
        elif isinstance(order, Persist):
            if not full:
                self.disk.update(order.writes)
            self.lines.persisted(Persisted(order.ticket, "full" if full else "durable"))
        self.flush()

    def finish(self) -> None:
        while self.orders:
            self.carry_out(0)


events = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from([b"k", b"l"]), st.booleans()),
        st.tuples(st.just("read"), st.sampled_from([b"k", b"l"]), st.none()),
        st.tuples(st.just("storage"), st.integers(0, 9), st.booleans()),
    ),
    max_size=30,
)


def test_a_large_record_takes_several_turns_for_many_changes():
    lines = Lines(100, count(1), empty=dvv.EMPTY, value_bytes=dvv.value_bytes, turn_bytes=2)
    driver, changes = Driver(lines), [Append(mark) for mark in (1, 2, 3, 4)]
    for change in changes:
        lines.change(b"k", change)
    driver.flush()
    driver.carry_out(0)  # the load
    assert [value(state) for _, state in driver.orders[0].writes] == [b"\1\2"]  # type: ignore[attr-defined]
    assert lines.withdraw(b"k", changes[2]), "what has not had its turn can be taken back"
    driver.finish()
    assert value(driver.disk[b"k"]) == b"\1\2\4"


@given(events, st.sampled_from([0, 5, 1 << 20]))
def test_no_change_is_lost_doubled_or_reordered(steps, turn_bytes):
    driver = Driver(Lines(100, count(1), empty=dvv.EMPTY, value_bytes=dvv.value_bytes, turn_bytes=turn_bytes))
    changes: dict[bytes, list[Append]] = {b"k": [], b"l": []}
    for mark, (kind, what, flag) in enumerate(steps, start=1):
        if kind == "change":
            change = Append(mark, refuse=bool(flag) and mark % 3 == 0)
            changes[what].append(change)
            driver.lines.change(what, change)
            driver.flush()
        elif kind == "read":
            durable = {key: value(state) for key, state in driver.disk.items()}

            def look(local: Local, key: bytes = what, then: dict[bytes, bytes] = durable) -> None:
                assert value(local.state).startswith(then.get(key, b""))

            driver.lines.read(what, look)
            driver.flush()
        elif driver.orders:
            driver.carry_out(what, full=bool(flag) and what == 9)
    driver.finish()
    for key, made in changes.items():
        assert all(change.outcome for change in made)
        done = bytes(change.mark for change in made if change.outcome == "durable")
        assert value(driver.disk.get(key, dvv.EMPTY)) == done
        assert driver.lines.story(key) == "not in use"


def test_a_withdrawn_change_does_not_happen_and_one_being_written_cannot_be_withdrawn():
    driver = Driver()
    first, second = Append(1), Append(2)
    driver.lines.change(b"k", first)
    driver.flush()
    driver.carry_out(0)
    driver.lines.change(b"k", second)
    driver.flush()
    assert driver.lines.withdraw(b"k", second) and not driver.lines.withdraw(b"k", first)
    driver.finish()
    assert value(driver.disk[b"k"]) == b"\x01" and not second.outcome
    assert not driver.lines.withdraw(b"k", first)


def test_the_queue_of_a_record_is_bounded():
    lines = Lines(2, count(1), empty=dvv.EMPTY, value_bytes=dvv.value_bytes)
    for mark in (1, 2):
        lines.change(b"k", Append(mark))
    with pytest.raises(Refused, match="busy"):
        lines.change(b"k", Append(3))


def test_an_unreadable_disk_fails_the_changes_and_the_next_ones_read_again():
    driver = Driver()
    change = Append(1)
    driver.lines.change(b"k", change)
    driver.flush()
    (load,) = driver.orders
    assert isinstance(load, Load)
    driver.orders.clear()
    driver.lines.loaded(Loaded(load.ticket, (), failure="EIO"))
    driver.flush()
    assert change.outcome == "failed" and not driver.orders
    driver.lines.change(b"k", Append(2))
    driver.flush()
    driver.finish()
    assert value(driver.disk[b"k"]) == b"\x02"


def test_the_check_notices_a_second_write_in_flight():
    driver = Driver()
    driver.lines.change(b"k", Append(1))
    driver.flush()
    driver.carry_out(0)
    ticket = next(iter(driver.lines._persists))
    driver.lines._persists[type(ticket)(99)] = (b"k",)
    with pytest.raises(AssertionError, match="two writes"):
        driver.lines.check()


def held(bytes_max: int) -> Recent:
    recent = Recent(bytes_max, dvv.value_bytes)
    for key in (b"a", b"b", b"c"):
        recent.keep(key, Local(state_of(key)))
        recent.check()
    return recent


def state_of(value: bytes) -> RecordState:
    return dvv.put(dvv.EMPTY, "replica0.1", Stamp(1), value, VersionVector()).state


def test_recent_states_are_kept_up_to_the_bound_the_least_used_goes_first():
    recent = held(2 * (Recent.OVERHEAD_BYTES + 1))
    assert [key in recent for key in (b"a", b"b", b"c")] == [False, True, True]
    assert recent.get(b"b") == Local(state_of(b"b")) and recent.get(b"a") is None
    recent.keep(b"d", Local(state_of(b"d")))
    assert [key in recent for key in (b"b", b"c", b"d")] == [True, False, True]
    assert recent.take(b"b") == Local(state_of(b"b")) and recent.take(b"b") is None
    recent.check()
    assert not any(key in held(0) for key in (b"a", b"b", b"c"))


def test_a_recent_record_is_read_and_changed_without_a_load():
    lines = Lines(8, count(1), 1 << 20, empty=dvv.EMPTY, value_bytes=dvv.value_bytes)
    change = Append(1)
    lines.change(b"k", change)
    (load,) = lines.flush("replica0.1")
    assert isinstance(load, Load) and lines.known(b"k") is None
    lines.loaded(Loaded(load.ticket, (None,)))
    (persist,) = lines.flush("replica0.1")
    assert isinstance(persist, Persist) and lines.known(b"k") == dvv.EMPTY, "not durable yet"
    lines.persisted(Persisted(persist.ticket))
    lines.check()
    assert lines.known(b"k") == persist.writes[0][1]
    lines.change(b"k", Append(2))
    (again,) = lines.flush("replica0.1")
    assert isinstance(again, Persist) and value(again.writes[0][1]) == bytes([1, 2])
    lines.check()


def test_a_rewrite_persists_what_did_not_change_once():
    driver = Driver(Lines(100, count(1), 1 << 20, empty=dvv.EMPTY, value_bytes=dvv.value_bytes))
    mark = Append(1)
    driver.lines.change(b"k", mark)
    driver.flush()
    driver.finish()
    before = driver.disk.pop(b"k")
    driver.lines.rewrite(b"k")
    driver.flush()
    driver.finish()
    assert driver.disk == {b"k": before}
    driver.lines.rewrite(b"absent")
    driver.flush()
    driver.finish()
    assert driver.disk[b"absent"] == dvv.EMPTY, "it takes the index's entry along"
    assert not driver.lines.pending


def test_a_lost_record_counts_as_damaged_until_it_is_mended():
    driver = Driver(Lines(100, count(1), 1 << 20, empty=dvv.EMPTY, value_bytes=dvv.value_bytes))
    driver.lines.change(b"k", Append(1))
    driver.flush()
    driver.finish()
    assert driver.lines.lose(b"k") and not driver.lines.lose(b"k")
    assert driver.lines.damaged() == [b"k"] and driver.lines.known(b"k") is None
    seen: list[Local] = []
    driver.lines.read(b"k", seen.append)
    driver.flush()
    driver.finish()
    assert seen[0].damaged
    driver.lines.mend(b"k")
    assert driver.lines.damaged() == []


def test_what_was_written_over_damage_and_is_damaged_again_is_news_again():
    """What was lost the second time may be a counter that was given out since the first."""
    driver = Driver()

    def look() -> list[bytes]:
        seen: list[Local] = []
        driver.lines.read(b"k", seen.append)
        (load,) = driver.lines.flush("replica0.1")
        assert isinstance(load, Load)
        return driver.lines.loaded(Loaded(load.ticket, (None,), (b"k",)))

    assert look() == [b"k"] and look() == [], "a record that nobody can mend is no news at every look"
    driver.lines.change(b"k", Append(1))
    driver.flush()
    driver.finish()
    assert look() == [b"k"] and look() == []
    driver.lines.mend(b"k")
    assert look() == [b"k"]


def test_who_passes_over_all_records_leaves_none_in_memory_but_those_that_others_use_too():
    lines = Lines(100, count(1), 1 << 20, empty=dvv.EMPTY, value_bytes=dvv.value_bytes)
    driver = Driver(lines, {key: state_of(key) for key in (b"a", b"b", b"c", b"d")})
    lines.read(b"a", lambda local: None)
    driver.flush()
    driver.finish()
    seen: list[Local] = []
    lines.read(b"a", seen.append, passing=True)
    lines.read(b"b", seen.append, passing=True)
    lines.read(b"c", seen.append, passing=True)
    lines.read(b"c", seen.append)
    lines.change(b"d", Append(1), passing=True)
    driver.flush()
    driver.finish()
    assert len(seen) == 4 and value(driver.disk[b"d"]).endswith(b"\x01")
    assert [lines.known(key) is None for key in (b"a", b"b", b"c", b"d")] == [False, True, False, True]
