"""Every measure says the right number, and every judge condemns what it should, of small made-up stories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvcomm.chaos.eventual import Ending, Replica
from kvcomm.chaos.history import History, Invoked, Outcome, Returned, Seen, Stored, Write
from kvcomm.chaos.measures import MEASURES, NEVER, measure
from kvcomm.chaos.observed import Episode, Mark, Observed, Sample, bins_of, calls_of, hurt_by
from kvcomm.chaos.picture import draw_timeline
from kvcomm.chaos.report import Report, report_of, skipped
from kvcomm.chaos.scenario import Load, Promise, Scenario
from kvcomm.chaos.shapes import cuts_of, sides

NODES = ["n1", "n2", "n3", "n4", "n5"]
CUTS = cuts_of("halves", [["n1", "n2"], ["n3", "n4", "n5"]], NODES)
SPLIT = Episode(10.0, 20.0, sides(NODES, CUTS), CUTS)
OWNERS = {"left": ["n1", "n2", "n3"], "right": ["n3", "n4", "n5"], "far": ["n3", "n4", "n5"]}
SCENARIO = Scenario("story", "it is judged", [], load=Load(deadline_s=2.0), detect_s=1.0)


class Told:
    """A history in the making."""

    def __init__(self) -> None:
        self.history = History()

    def call(
        self,
        client: str,
        kind: str,
        key: str,
        begin: float,
        end: float | None,
        outcome: Outcome = "ok",
        *,
        write: Write | None = None,
        seen: Sequence[Seen] = (),
        stored: Stored | None = None,
        error: str = "",
    ) -> None:
        number = len(self.history.lines)
        writes = [] if write is None else [write]
        self.history.add(Invoked(begin, client, number, kind, [key], writes))
        if end is not None:
            lines = [] if stored is None else [stored]
            self.history.add(Returned(end, client, number, outcome, error, lines, [], list(seen)))

    def read(self, client: str, key: str, begin: float, took_s: float = 0.01, *, good: bool = True) -> None:
        seen = [Seen([], {}, False)] if good else []
        outcome: Outcome = "ok" if good else "refused"
        self.call(client, "read", key, begin, begin + took_s, outcome, seen=seen)

    def values(self, scenario: Scenario = SCENARIO, **more: object) -> dict[str, float | None]:
        return measure(scenario, self.observed(**more)).values

    def observed(self, **more: object) -> Observed:
        ending = Ending({}, intact=True)
        facts: dict[str, object] = {"episodes": [SPLIT], "owners": OWNERS, "equal_s": 1.0, "ending": ending}
        facts |= more
        return Observed(NODES, 0.0, 40.0, self.history, **facts)  # type: ignore[arg-type]


def test_every_measure_has_a_meaning_and_an_empty_story_breaks_nothing() -> None:
    values = Told().values()
    assert set(values) == set(MEASURES)
    broken = ("eventual_broken", "strong_broken", "wrong_bytes", "untyped_errors", "late_calls")
    assert all(values[name] == 0 for name in broken)


def test_what_could_not_be_looked_at_is_not_passed() -> None:
    assert Told().values(ending=None)["eventual_broken"] == 1


def test_a_call_is_late_by_more_than_its_client_was_by_itself() -> None:
    told = Told()
    told.read("n1.s0", "left", 5.0, took_s=2.8)
    assert told.values()["late_calls"] == 1
    assert told.values(samples=[Sample(6.0, "n1", late_s=0.6)])["late_calls"] == 0


def test_the_gap_is_of_the_side_with_the_majority_and_of_its_records() -> None:
    told = Told()
    told.read("n3.s0", "right", 9.0)
    told.read("n3.s0", "right", 11.0)
    told.read("n4.s0", "right", 12.5)
    told.read("n4.s0", "left", 14.0)  # not its record: it says nothing about the gap
    for at in range(15, 20):
        told.read("n5.s0", "right", at)
    told.read("n1.s0", "left", 12.9)
    assert told.values()["strong_gap_s"] == pytest.approx(15.01 - 12.51)


def test_a_strong_call_that_is_done_without_a_majority_is_counted() -> None:
    told = Told()
    told.read("n1.s0", "left", 11.0)
    assert told.values()["strong_wrong_side"] == 0
    told.read("n1.s0", "far", 11.0)
    told.read("n1.s0", "far", 21.0)
    assert told.values()["strong_wrong_side"] == 1


def test_refusals_are_timed_once_the_partition_is_noticed() -> None:
    told = Told()
    told.read("n1.s0", "far", 10.1, 1.9, good=False)
    told.read("n1.s0", "far", 12.0, 0.4, good=False)
    assert told.values()["strong_refusal_s"] == pytest.approx(0.4)


def test_shares_count_whom_a_replica_or_a_majority_is_with() -> None:
    told = Told()
    told.call("n1.e0", "get", "left", 12.0, 12.1, seen=[Seen([], {}, True)])
    told.call("n1.e0", "get", "far", 12.0, 12.1, "refused")
    told.call("n3.e0", "get", "left", 12.0, 12.1, "unknown")
    told.read("n3.s0", "right", 12.0)
    told.read("n3.s0", "right", 13.0, good=False)
    told.read("n1.s0", "right", 13.0, good=False)
    values = told.values()
    assert values["eventual_share"] == 0.5
    assert values["strong_share"] == 0.5
    assert (values["eventual_answered"], values["strong_answered"]) == (1, 1)
    assert (values["eventual_failed"], values["strong_failed"]) == (2, 2)
    assert values["failed_share"] == pytest.approx(4 / 6)


def test_the_heal_is_over_when_every_node_had_an_answer_of_every_kind() -> None:
    told = Told()
    for node in ("n1", "n3"):
        told.read(f"{node}.s0", "left", 5.0)
    told.read("n1.s0", "left", 20.2)
    told.read("n3.s0", "left", 20.5, good=False)
    told.read("n3.s0", "left", 21.0)
    assert told.values()["first_good_s"] == pytest.approx(1.01)
    told.call("n4.e0", "get", "left", 5.0, 5.1, seen=[Seen([], {}, False)])
    assert told.values()["first_good_s"] == NEVER


def test_the_first_failure_and_the_longest_stop_of_a_record() -> None:
    told = Told()
    told.read("n3.s0", "left", 9.0, good=False)
    told.read("n3.s0", "left", 10.5, good=False)
    told.read("n3.s0", "right", 11.0, 0.3)
    told.read("n3.s0", "left", 12.0)
    values = told.values()
    assert values["first_failure_s"] == pytest.approx(0.51)
    assert values["key_stop_s"] == pytest.approx(12.01 - 9.0)


def test_late_calls_and_those_that_never_came_back() -> None:
    told = Told()
    told.call("n1.e0", "get", "left", 1.0, 3.2, "refused")
    told.call("n1.e0", "get", "left", 1.0, 3.9, "refused")
    told.call("n1.s0", "read", "left", 1.0, None)
    assert told.values(ending=Ending({}, intact=True))["late_calls"] == 2


def test_lost_writes_stale_reads_wrong_bytes_and_strange_errors_are_broken_promises() -> None:
    told = Told()
    stored = Stored("r1", 1, {"r1": 1}, 2)
    told.call("n1.e0", "put", "left", 1.0, 1.1, write=Write("left", "a"), stored=stored)
    told.call("n1.s0", "set", "x", 1.0, 1.1, write=Write("x", "s1"))
    told.read("n2.s0", "x", 2.0)
    told.call("n1.b0", "fetch", "chain", 1.0, 1.1, seen=[Seen(["wrong bytes"], {}, True)])
    told.call("n1.b0", "publish", "chain", 1.0, 1.1, "unknown", error="untyped: ZeroDivisionError()")
    there = Ending({"left": {"shard-0": Replica({"r1": 1}, {("r1", 1): "a"})}}, intact=True)
    gone = Ending({"left": {"shard-0": Replica({}, {})}}, intact=True)
    kept, lost = told.values(ending=there), told.values(ending=gone)
    assert (kept["eventual_broken"], kept["strong_broken"]) == (0, 1)
    assert lost["eventual_broken"] == 2  # nobody has seen it, and it is not there
    assert (kept["wrong_bytes"], kept["untyped_errors"]) == (1, 1)


def test_epochs_terms_and_leaders() -> None:
    samples = [
        Sample(1.0, "n1", 1, "a", "controller-0", 3),
        Sample(1.0, "n2", 1, "a", "controller-0", 3),
        Sample(12.0, "n1", 2, "b", "controller-1", 4),
        Sample(13.0, "n2", 2, "c", "controller-2", 4),
    ]
    values = Told().values(samples=samples)
    assert (values["epochs"], values["epochs_doubled"], values["terms_doubled"]) == (2, 1, 1)
    assert values["leader_changes"] == 1
    assert values["leader_back_s"] == pytest.approx(2.0)
    assert Told().values(samples=samples[:2])["leader_back_s"] == NEVER
    quiet = Told().values()
    assert (quiet["epochs"], quiet["leader_back_s"], quiet["terms_doubled"]) == (None, None, None)


def test_who_was_not_hurt_is_not_to_be_suspected() -> None:
    def alarms(at: float, *suspects: str, episode: Episode) -> float | None:
        samples = [Sample(at, "n1", suspects=[*suspects])]
        return Told().values(samples=samples, episodes=[episode])["false_alarms"]

    hurt = Episode(10.0, 20.0, sides(NODES, frozenset()), hurt=hurt_by(["down n2 shard", "loss"]))
    assert alarms(15.0, "n2", episode=hurt) == alarms(24.0, "n2", episode=hurt) == 0
    assert alarms(26.0, "n2", episode=hurt) == alarms(9.0, "n2", episode=hurt) == 1
    assert alarms(15.0, "n2", "n3", "n4", episode=hurt) == 2
    assert alarms(15.0, "n3", episode=SPLIT) is None, "behind a cut everybody is silent"
    assert alarms(30.0, "n3", episode=SPLIT) == 1
    assert Told().values(samples=[Sample(1.0, "n2")])["false_alarms"] is None, "it does not lead"


def test_latencies_are_compared_with_the_quiet_ones() -> None:
    told = Told()
    for at in range(8):
        told.read("n3.s0", "left", float(at), 0.1)
    for at in range(10, 18):
        told.read("n3.s0", "left", float(at), 0.3)
    assert told.values()["p99_ratio"] == pytest.approx(3.0)


def test_replicas_that_never_were_equal_are_told() -> None:
    measured = measure(SCENARIO, Told().observed(equal_s=None, unequal=["left: differs"]))
    assert measured.values["equal_s"] == NEVER
    assert [each.promise for each in measured.violations] == ["unequal"]


def test_a_conflict_is_an_answer_and_a_client_that_looks_last_is_none() -> None:
    told = Told()
    told.call(
        "n1.s0", "cas", "left", 1.0, 1.1, "refused", write=Write("left", "s"), seen=[Seen(["o"], {}, False)]
    )
    told.read("n1.slast", "left", 30.0)
    (call,) = calls_of(told.history.operations())
    assert call.state == "good"


def test_bins_hold_answers_where_they_were_heard() -> None:
    told = Told()
    told.read("n1.s0", "left", 0.05, 0.1)
    told.read("n1.s0", "left", 0.05, 0.1, good=False)
    found = bins_of(calls_of(told.history.operations()), 0.0, 0.3, 0.1)
    assert found["n1", "strong"] == [{}, {"good": 1, "refused": 1}, {}]


def report() -> Report:
    told = Told()
    for at in range(0, 380, 7):
        told.read("n1.s0", "left", at / 10, good=not 100 < at < 200)
        told.call("n3.e0", "get", "left", at / 10, at / 10 + 0.1, seen=[Seen([], {}, at > 300)])
    promised = [Promise("equal_s", at_most=0.5), Promise("strong_wrong_side", at_most=0)]
    scenario = msgspec.structs.replace(SCENARIO, promises=promised)
    observed = told.observed(marks=[Mark(10.0, "cut halves", "fault"), Mark(20.0, "heal", "heal")])
    return report_of(scenario, "namespaces", 7, observed, measure(scenario, observed))


def test_a_report_names_what_was_promised_and_survives_its_encoding() -> None:
    made = report()
    assert made.outcome == "failed"
    assert [verdict.measure for verdict in made.verdicts if not verdict.kept] == ["equal_s"]
    assert msgspec.json.decode(made.encoded(), type=Report) == made
    text = made.text()
    assert "FAIL  equal_s = 1, promised at most 0.5" in text
    assert "PASS  strong_wrong_side = 0" in text
    assert "10.00 to  20.00 s: n1 n2 | n3 n4 n5" in text
    assert skipped(SCENARIO, "loopback", 1, "no root").outcome == "skipped"


@pytest.mark.slow
def test_a_report_becomes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    assert draw_timeline(report(), tmp_path / "a.png") == ""
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "no call" in draw_timeline(skipped(SCENARIO, "loopback", 1, "why"), tmp_path / "b.png")
