"""Every promise that the judge of eventual records knows, kept and broken, on histories of a few lines."""

from __future__ import annotations

import pytest

from kvcomm.chaos.eventual import Ending, Replica, check_converged, check_eventual
from kvcomm.chaos.history import (
    History,
    Invoked,
    Outcome,
    Returned,
    Seen,
    Stored,
    Write,
    outcome_of,
    outcome_of_each,
)
from kvcomm.chaos.plan import Plan
from kvcomm.errors import Conflict, KVCommError, OutcomeUnknown, Unavailable, WriteOutcome, batch_error

PLAN = Plan(seed=0, read_quorum=2, write_quorum=2)


class Story:
    """Writes a history; every operation takes a second, one after the other."""

    def __init__(self) -> None:
        self.history = History()
        self._at = 0.0
        self._number = 0

    def put(
        self,
        value: str | None,
        counter: int = 0,
        *,
        outcome: Outcome = "ok",
        covers: bool = True,
        own: bool = False,
        client: str = "c",
        blind: bool = False,
    ) -> Story:
        context = {"r": counter} if covers else {}
        stored = [Stored("r", counter, context, 2, own)] if outcome == "ok" else []
        writes = [Write("k", value, blind)]
        self._add(client, "put", writes, Returned(self._at + 1, client, self._number, outcome, stored=stored))
        return self

    def get(self, values: list[str], counter: int, *, degraded: bool = False, client: str = "c") -> Story:
        seen = [Seen(values, {"r": counter} if counter else {}, degraded)]
        self._add(client, "get", [], Returned(self._at + 1, client, self._number, "ok", seen=seen))
        return self

    def never_returns(self) -> Story:
        self._add("c", "get", [], None)
        return self

    def _add(self, client: str, kind: str, writes: list[Write], returned: Returned | None) -> None:
        self.history.add(Invoked(self._at, client, self._number, kind, ["k"], writes))
        if returned is not None:
            self.history.add(returned)
        self._at += 2
        self._number += 1

    def promises(
        self, held: dict[int, str | None], seen: int, *, intact: bool = True, plan: Plan = PLAN
    ) -> list[str]:
        """Broken ones, if one replica ends with these writes after having seen ``seen``."""
        replica = Replica(
            {"r": seen} if seen else {}, {("r", number): value for number, value in held.items()}
        )
        ending = Ending({"k": {"n": replica}}, intact)
        return sorted({violation.promise for violation in check_eventual(plan, self.history, ending)})


def test_what_was_read_and_replaced_may_go() -> None:
    story = Story().put("a", 1).get(["a"], 1).put("b", 2)
    assert story.promises({2: "b"}, 2) == []
    assert story.promises({1: "a", 2: "b"}, 2) == ["came back"]


def test_an_acknowledged_write_that_nobody_replaced_stays() -> None:
    story = Story().put("a", 1).put("b", 2, client="d", blind=True)
    assert story.promises({1: "a", 2: "b"}, 2) == []
    assert story.promises({2: "b"}, 2) == ["lost"]
    assert story.promises({1: "a"}, 1) == ["lost"], "its dot was never seen"


def test_replaced_by_somebody_who_had_not_seen_it_is_lost() -> None:
    story = Story().put("a", 1).get([], 0, client="d", degraded=True).put("b", 2, client="d")
    assert story.promises({2: "b"}, 2) == ["lost"]


def test_an_unknown_write_may_have_happened_and_may_have_replaced() -> None:
    story = Story().put("a", 1).put("b", outcome="unknown")
    assert story.promises({1: "a"}, 1) == []
    assert story.promises({2: "b"}, 2) == []
    assert story.promises({1: "a", 2: "b"}, 2) == [], "it may have met a replica that had not heard of a"


def test_refused_is_true() -> None:
    story = Story().put("a", 1).put("b", outcome="refused")
    assert story.promises({1: "a"}, 1) == []
    assert story.promises({1: "a", 2: "b"}, 2) == ["refused"]


def test_nothing_is_made_up() -> None:
    assert Story().put("a", 1).promises({1: "z"}, 1) == ["lost", "made up"]
    assert Story().put("a", 1).get(["z"], 1).promises({1: "a"}, 1) == ["made up"]


def test_a_delete_is_final_for_who_saw_the_value() -> None:
    story = Story().put("a", 1).put(None, 2)
    assert story.promises({2: None}, 2) == []
    assert story.promises({1: "a", 2: None}, 2) == ["came back"]


def test_an_own_write_that_no_context_covers_goes_where_write_quorums_meet_and_may_stay_elsewhere() -> None:
    story = Story().put("a", 1, covers=False, own=True).put("b", 2, covers=False)
    assert story.promises({2: "b"}, 2) == []
    assert story.promises({1: "a", 2: "b"}, 2) == ["came back"]
    assert story.promises({1: "a", 2: "b"}, 2, intact=False) == []
    apart = Plan(seed=0, read_quorum=3, write_quorum=1)
    assert story.promises({1: "a", 2: "b"}, 2, plan=apart) == []


def test_quorums_meet_unless_degraded_or_replicas_were_lost() -> None:
    assert Story().put("a", 1, client="d").get([], 0).promises({1: "a"}, 1) == ["quorums"]
    assert Story().put("a", 1).get([], 0, degraded=True).promises({1: "a"}, 1) == []
    assert Story().put("a", 1, client="d").get([], 0).promises({1: "a"}, 1, intact=False) == []
    apart = Plan(seed=0, read_quorum=1, write_quorum=2)
    assert Story().put("a", 1, client="d").get([], 0).promises({1: "a"}, 1, plan=apart) == []


def test_a_session_does_not_go_back_unless_degraded() -> None:
    apart = Plan(seed=0, read_quorum=1, write_quorum=2)
    own = Story().put("a", 1).get([], 0)
    assert own.promises({1: "a"}, 1, plan=apart) == ["sessions"], "read your writes"
    reads = Story().put("a", 1, client="d").get(["a"], 1).get([], 0)
    assert reads.promises({1: "a"}, 1, plan=apart) == ["sessions"], "monotonic reads"
    assert reads.promises({1: "a"}, 1, intact=False, plan=apart) == [], "it may have gone with a disk"
    assert Story().put("a", 1).get([], 0, degraded=True).promises({1: "a"}, 1, plan=apart) == []
    others = Story().put("a", 1, client="d").get([], 0)
    assert others.promises({1: "a"}, 1, plan=apart) == [], "another client's session"


def test_where_records_move_a_session_may_lose_what_was_never_acknowledged() -> None:
    apart = Plan(seed=0, read_quorum=1, write_quorum=2)
    moved = Plan(seed=0, read_quorum=1, write_quorum=2, controllers=3)
    shown = Story().put("a", outcome="unknown", client="d").get(["a"], 1).get([], 0)
    assert shown.promises({1: "a"}, 1, plan=apart) == ["sessions"]
    assert shown.promises({1: "a"}, 1, plan=moved) == []
    done = Story().put("a", 1, client="d").get(["a"], 1).get([], 0)
    assert done.promises({1: "a"}, 1, plan=moved) == ["sessions"]


def test_every_operation_returns() -> None:
    assert Story().never_returns().promises({}, 0) == ["deadlines"]


def test_a_dot_that_is_not_seen_is_held_by_nobody() -> None:
    assert "dots" in Story().put("a", 1).promises({1: "a"}, 0)


def test_owners_that_differ_after_repair() -> None:
    one, two = Replica({"r": 1}, {("r", 1): "a"}), Replica({"r": 2}, {("r", 2): "b"})
    owners = {"k": ["m", "n"]}
    assert check_converged(Ending({"k": {"m": one, "n": one, "elsewhere": two}}, True, owners)) == []
    for records in ({"m": one, "n": two}, {"m": one}):
        found = check_converged(Ending({"k": records}, True, owners))
        assert [violation.promise for violation in found] == ["converged"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Unavailable(""), "refused"), (Conflict(""), "refused"), (OutcomeUnknown(""), "unknown")],
)
def test_what_an_error_promises(error: KVCommError, outcome: Outcome) -> None:
    assert outcome_of(error) == outcome and outcome_of_each(error) == []


def test_what_the_error_of_a_batch_says_of_each_write_is_held_against_it() -> None:
    done = WriteOutcome("j", "done", ("r", 1), {"r": 1})
    error = batch_error([done, WriteOutcome("k", "not_done", error=Conflict("full"))])
    assert outcome_of(error) == "unknown" and outcome_of_each(error) == ["ok", "refused"]
    history = History()
    history.add(Invoked(0.0, "c", 0, "batch", ["j", "k"], [Write("j", "a"), Write("k", "b")]))
    stored = [Stored("r", 1, {"r": 1}, 0), None]
    history.add(Returned(1.0, "c", 0, "unknown", stored=stored, each=outcome_of_each(error)))

    def broken(records: dict[str, str]) -> list[str]:
        held = {key: {"n": Replica({"r": 1}, {("r", 1): value})} for key, value in records.items()}
        return [violation.promise for violation in check_eventual(PLAN, history, Ending(held, True))]

    assert broken({"j": "a"}) == []
    assert broken({}) == ["lost", "lost"], "its dot, and its value"
    assert broken({"j": "a", "k": "b"}) == ["refused"]
