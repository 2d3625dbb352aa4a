"""Every promise that the judge of strong records knows, kept and broken, on histories of a few lines."""

from __future__ import annotations

import pytest

from kvcomm.chaos.history import History, Invoked, Outcome, Returned, Seen, Swap, Write
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.registers import KINDS, UNDECIDED, check_strong

PLAN = Plan(seed=0)


class Story:
    """Writes a history; every operation takes a second, one after the other."""

    def __init__(self) -> None:
        self.history = History()
        self._at = 0.0
        self._number = 0

    def read(self, value: str | None, version: str = "", kind: str = "read", error: str = "") -> Story:
        seen = [] if error else [Seen([] if value is None else [value], {}, False)]
        return self._add(kind, [], "refused" if error else "ok", seen=seen, version=version, error=error)

    def put(self, value: str, outcome: Outcome = "ok", version: str = "") -> Story:
        return self._add("set", [Write("k", value)], outcome, version=version)

    def clear(self, outcome: Outcome = "ok") -> Story:
        return self._add("clear", [Write("k", None)], outcome)

    def cas(
        self, expected: str | None, value: str, *, saw: str | None = None, outcome: Outcome = "ok"
    ) -> Story:
        seen = [Seen([saw], {}, False)] if saw is not None else []
        return self._add("cas", [Write("k", value, expected=expected)], outcome, seen=seen)

    def change(self, expected: str | None, value: str, outcome: Outcome = "ok") -> Story:
        return self._add("change", [], outcome, swap=Swap(expected, value))

    def never_returns(self) -> Story:
        self.history.add(Invoked(self._at, "c", self._number, "read", ["k"]))
        return self

    def broken(self) -> list[str]:
        return sorted({violation.promise for violation in check_strong(PLAN, self.history)})

    def _add(
        self,
        kind: str,
        writes: list[Write],
        outcome: Outcome,
        *,
        seen: list[Seen] | None = None,
        version: str = "",
        error: str = "",
        swap: Swap | None = None,
    ) -> Story:
        self.history.add(Invoked(self._at, "c", self._number, kind, ["k"], writes))
        line = Returned(
            self._at + 1, "c", self._number, outcome, error, seen=seen or [], version=version, swap=swap
        )
        self.history.add(line)
        self._at += 2
        self._number += 1
        return self


def test_what_was_acknowledged_is_read() -> None:
    assert Story().read(None).put("a").read("a").clear().read(None).broken() == []
    assert Story().put("a").read(None).broken() == ["linearizable"]
    assert Story().put("a").clear().read("a").broken() == ["linearizable"], "it came back"


def test_nobody_knows_what_an_unknown_change_did() -> None:
    assert Story().put("a").put("b", "unknown").read("a").read("b").broken() == []
    assert Story().put("a").put("b", "unknown").read("b").read("a").broken() == ["linearizable"], "once"


def test_not_done_is_true() -> None:
    assert Story().put("a").put("b", "refused").read("a").broken() == []
    assert Story().put("a").put("b", "refused").read("b").broken() == ["linearizable", "refused"]
    assert Story().put("a").change("a", "b.0", "refused").read("b.0").broken() == ["linearizable", "refused"]


def test_a_compare_and_set_compares() -> None:
    assert Story().put("a").cas("a", "b").read("b").broken() == []
    assert Story().put("a").cas("z", "b").broken() == ["linearizable"]
    assert Story().put("a").cas("z", "b", saw="a", outcome="refused").read("a").broken() == []
    assert Story().put("a").cas("z", "b", saw="y", outcome="refused").broken() == ["linearizable"]
    assert Story().put("a").cas(None, "b").broken() == ["linearizable"], "there was a value"


def test_a_change_is_made_of_what_it_was_given() -> None:
    assert Story().put("a").change("a", "b.0").read("b.0").broken() == []
    assert Story().put("a").put("c").change("a", "b.0").broken() == ["linearizable"]


def test_a_version_stands_for_one_value() -> None:
    assert Story().put("a", version="01").read("a", "01").broken() == []
    assert Story().put("a", version="01").put("b", version="01").broken() == ["versions"]


def test_after_the_healing_it_can_be_read_at_the_last_try() -> None:
    unavailable = "unavailable: no majority"
    assert Story().read(None, kind="final", error=unavailable).read(None, kind="final").broken() == []
    assert Story().read(None, kind="final", error=unavailable).broken() == ["back"]


def test_every_operation_returns() -> None:
    assert Story().never_returns().broken() == ["deadlines"]


def test_what_is_too_hard_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcomm.chaos import registers
    from kvcomm.chaos.linearizable import TooHard

    def gives_up(accesses: object) -> None:
        raise TooHard("many")

    monkeypatch.setattr(registers, "check_register", gives_up)
    assert Story().put("a").broken() == [UNDECIDED]


def test_histories_are_told_apart_by_their_kinds() -> None:
    history = Story().put("a").history
    history.add(Invoked(9.0, "c", 9, "get", ["k"]))
    strong, others = history.parted(KINDS)
    assert [operation.invoked.kind for operation in strong.operations()] == ["set"]
    assert [operation.invoked.kind for operation in others.operations()] == ["get"]
