"""Many reports as a table."""

from __future__ import annotations

from kvcomm.chaos.report import Report, Verdict, skipped
from kvcomm.chaos.scenario import Scenario
from kvcomm.chaos.summary import summary_of


def report(name: str, seed: int, equal_s: float | str | None, *, kept: bool = True) -> Report:
    measured = {"equal_s": equal_s, "eventual_broken": 0.0, "strong_broken": 1.0}
    return Report(
        1,
        "0",
        Scenario(name, "", []),
        "namespaces",
        seed,
        "passed" if kept else "failed",
        "",
        verdicts=[Verdict("equal_s", "", "at most 1", equal_s, kept)],
        measured=measured,
        calls={"a": 1000, "b": 9},
    )


def test_one_line_a_scenario_and_the_distribution_of_random_splits() -> None:
    splits = [report("random-split", seed, float(seed)) for seed in range(1, 101)]
    told = summary_of(
        [
            report("halves", 0, 1.25),
            report("alone", 0, "never", kept=False),
            skipped(Scenario("ray-head", "", []), "namespaces", 0, "no Ray"),
            *splits,
            report("random-split", 101, "never", kept=False),
        ]
    )
    lines = told.splitlines()
    assert lines[2].startswith("| `alone` | failed: equal_s | ")
    assert lines[3] == "| `halves` | passed |  |  | 1.25 |  | 1,009 | 1 |"
    assert lines[4].startswith("| `ray-head` | skipped: no Ray |")
    assert "101 random splits, 101,909 calls, broken promises of the data: 101" in told
    assert "not kept: 101." in told
    assert lines[-1] == "| replicas equal after heal, s | 51.00 | 100.00 | 100.00 | 1 |"
