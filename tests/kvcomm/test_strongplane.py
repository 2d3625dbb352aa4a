"""Strong values over a fake ``Registers``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcomm.errors import OutcomeUnknown, TooLarge, Unavailable
from kvcomm.metrics import Metrics
from kvcomm.steps import Park, Steps
from kvcomm.strongplane import NO_VERSION, StrongConflict, StrongPlane, StrongValue
from kvcomm.tally import Tally
from kvcomm.wire.messages import VALUE_BYTES_MAX, StrongOrder, StrongOutcome


class FakeRegister:
    """One record; ``answers`` come before its own."""

    def __init__(self) -> None:
        self.value: bytes | None = None
        self.version = b""
        self.orders: list[StrongOrder] = []
        self.answers: list[StrongOutcome] = []
        self.rivals: list[bytes] = []
        """Values that somebody else puts, one after each read or conflict."""

    def strong_read(self, keys: Sequence[bytes]) -> Steps[list[StrongOutcome]]:
        yield from ()
        outcomes = [self.answers.pop(0) if self.answers else self._held("") for _ in keys]
        self._rival()
        return outcomes

    def strong_change(self, orders: Sequence[StrongOrder]) -> Steps[list[StrongOutcome]]:
        yield from ()
        self.orders += orders
        (order,) = orders
        if self.answers:
            return [self.answers.pop(0)]
        expected = order.expected == self.version if order.expected else self.value is None
        if order.op == "cas" and not expected:
            outcome = self._held("conflict")
            self._rival()
            return [outcome]
        self._write(None if order.op == "delete" else order.value)
        return [StrongOutcome("", self.version, None)]

    def _held(self, code: str) -> StrongOutcome:
        return StrongOutcome(code, self.version, self.value, "text")

    def _rival(self) -> None:
        if self.rivals:
            self._write(self.rivals.pop(0))

    def _write(self, value: bytes | None) -> None:
        self.value, self.version = value, b"version-%d" % (len(self.orders) + 100 * len(self.rivals))


def plane(register: FakeRegister) -> StrongPlane:
    return StrongPlane(register, Tally(Metrics("client"), lambda: 0.0), lambda: 0.5)


def run(steps: Steps[Any], parks: list[float] | None = None) -> Any:
    """Only ever waits for time to pass."""
    try:
        step = next(steps)
        while True:
            assert isinstance(step, Park) and step.timeout_s is not None
            if parks is not None:
                parks.append(step.timeout_s)
            step = steps.send(False)
    except StopIteration as end:
        return end.value


def test_values_are_read_put_compared_and_deleted():
    register = FakeRegister()
    strong = plane(register)
    assert run(strong.read([b"k"])) == [StrongValue(None, NO_VERSION)]
    put = run(strong.put(b"k", b"1"))
    assert put == StrongValue(b"1", register.version) and run(strong.read([b"k"])) == [put]
    second = run(strong.compare_and_set(b"k", put.version, b"2"))
    with pytest.raises(StrongConflict) as conflict:
        run(strong.compare_and_set(b"k", put.version, b"3"))
    assert conflict.value.found == second and conflict.value.code == "conflict"
    assert run(strong.delete(b"k")).value is None and register.value is None
    assert run(strong.compare_and_set(b"k", NO_VERSION, b"4")).value == b"4"


def test_a_change_is_computed_again_from_the_value_that_was_in_the_way():
    register = FakeRegister()
    register.rivals = [b"10", b"20"]
    parks: list[float] = []
    seen: list[bytes | None] = []

    def add(value: bytes | None) -> bytes:
        seen.append(value)
        return b"%d" % (int(value or 0) + 1)

    assert run(plane(register).change(b"k", add), parks).value == b"21"
    assert seen == [None, b"10", b"20"] and register.value == b"21"
    assert len(parks) == 2 and 0 < parks[0] < parks[1]


def test_a_change_that_changes_nothing_writes_nothing():
    register = FakeRegister()
    assert run(plane(register).change(b"k", lambda value: value)) == StrongValue(None, NO_VERSION)
    assert register.orders == []


@pytest.mark.parametrize(
    ("code", "error"), [("unavailable", Unavailable), ("outcome_unknown", OutcomeUnknown)]
)
def test_the_other_outcomes_are_raised_and_nothing_is_sent_again(code, error):
    register = FakeRegister()
    register.answers = [StrongOutcome(code, b"", None, "no majority")]
    with pytest.raises(error, match="no majority"):
        run(plane(register).put(b"k", b"v"))
    assert len(register.orders) == 1
    register.answers = [StrongOutcome("", b"", None), StrongOutcome(code, b"", None, "no majority")]
    with pytest.raises(error, match="no majority"):
        run(plane(register).change(b"k", lambda value: b"v"))
    assert len(register.orders) == 2


def test_a_value_over_the_limit_is_refused_here():
    register = FakeRegister()
    with pytest.raises(TooLarge):
        run(plane(register).put(b"k", bytes(VALUE_BYTES_MAX + 1)))
    assert register.orders == []
