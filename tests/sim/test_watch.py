"""What the watch makes of a vote whose record is gone by the time that it is heard of."""

from __future__ import annotations

import pytest

from kvcomm.chaos.cluster import shipped_strong_disk
from kvcomm.chaos.draw import Draw
from kvcomm.chaos.watch import Watch
from kvcomm.wire.messages import (
    StrongAccept,
    StrongAccepted,
    StrongPrepare,
    StrongPromised,
    StrongRegister,
    StrongState,
)
from l3_shard.ballot import Ballot

KEY = bytes(16) + b"k"
LOW, HIGH = Ballot(4, "a", 1).code, Ballot(5, "b", 1).code


@pytest.mark.parametrize(
    ("floor", "kept", "broken"), [(HIGH, False, 0), (LOW, False, 1), (b"", False, 1), (HIGH, True, 1)]
)
def test_a_promise_without_its_record_is_the_floor(floor: bytes, kept: bool, broken: int) -> None:
    """``kept``: the record is there, and promises less; then the floor says nothing of it."""
    disk = shipped_strong_disk(Draw(1), lambda: "member1")
    old = StrongState(LOW, LOW, StrongRegister([LOW], None), True)
    if kept:
        disk.values[KEY] = disk._encode(KEY, old)
    watch = Watch({}, {"a": disk}, 1, 1, lambda node: floor, lambda: 0.0)
    promised = StrongPromised(True, StrongState(HIGH, LOW, old.register, True), 1, {}, floor)
    watch.answered("a", b"", StrongPrepare(1, KEY, HIGH, [1]), (1, 1), promised)
    assert [violation.promise for violation in watch.violations] == ["votes"] * broken


@pytest.mark.parametrize(
    ("floor", "value", "broken"), [(HIGH, None, 0), (LOW, None, 1), (b"", None, 1), (HIGH, b"v", 1)]
)
def test_an_accepted_deletion_without_its_record_is_the_floor(
    floor: bytes, value: bytes | None, broken: int
) -> None:
    """A value is nothing that a floor may stand for."""
    disk = shipped_strong_disk(Draw(1), lambda: "member1")
    watch = Watch({}, {"a": disk}, 1, 1, lambda node: floor, lambda: 0.0)
    vote = StrongAccept(1, KEY, HIGH, StrongRegister([HIGH], value), b"", [1])
    watch.answered("a", b"", vote, (1, 1), StrongAccepted(True, HIGH, 1, {}))
    assert [violation.promise for violation in watch.violations] == ["votes"] * broken
