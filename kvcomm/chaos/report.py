"""``Report``: what came of a scenario, as a document that says everything that went in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvcomm import __version__
from kvcomm.chaos.measures import MEASURES, NEVER, Measured
from kvcomm.chaos.observed import CALL_STATES, Observed, bins_of
from kvcomm.chaos.scenario import Scenario

SCHEMA = 1
BIN_S = 0.1
VIOLATIONS_MAX = 50
"""Told in full; the rest is counted."""


class Verdict(msgspec.Struct, frozen=True):
    """One promise and what was measured of it."""

    measure: str
    means: str
    limit: str
    value: float | str | None
    """``"never"``; ``null`` = there was nothing to measure."""
    kept: bool


class Event(msgspec.Struct, frozen=True):
    at_s: float
    what: str
    kind: str


class Broken(msgspec.Struct, frozen=True):
    """Begin and end of a fault, and who was together meanwhile."""

    begin_s: float
    end_s: float
    sides: list[list[str]]


class Row(msgspec.Struct, frozen=True):
    """Answers that the clients of one node heard: of each bin, how many of each of ``states``."""

    node: str
    kind: str
    bins: list[list[int]]


class Report(msgspec.Struct, frozen=True):
    """Times are seconds after the clients began."""

    schema: int
    version: str
    scenario: Scenario
    backend: str
    seed: int
    outcome: Literal["passed", "failed", "skipped"]
    why: str
    """Of what was skipped, or could not be run to its end."""
    verdicts: list[Verdict] = []
    measured: dict[str, float | str | None] = {}
    violations: list[str] = []
    violation_count: int = 0
    calls: dict[str, int] = {}
    """By kind and state: ``eventual good``."""
    errors: dict[str, int] = {}
    """What calls raised, the most frequent first."""
    events: list[Event] = []
    faults: list[Broken] = []
    states: list[str] = []
    bin_s: float = BIN_S
    rows: list[Row] = []

    def encoded(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def text(self) -> str:
        """For a person."""
        head = f"{self.scenario.name} ({self.backend}, seed {self.seed}): {self.outcome.upper()}"
        lines = [head, f"  promised: {self.scenario.promise}"]
        if self.why:
            lines.append(f"  {self.why}")
        for fault in self.faults[:8]:
            sides = " | ".join(" ".join(side) for side in fault.sides)
            lines.append(f"  {fault.begin_s:6.2f} to {fault.end_s:6.2f} s: {sides}")
        for verdict in self.verdicts:
            mark = "PASS" if verdict.kept else "FAIL"
            lines.append(f"  {mark}  {verdict.measure} = {shown(verdict.value)}, promised {verdict.limit}")
        promised = {verdict.measure for verdict in self.verdicts}
        rest = [
            f"{name} {shown(value)}"
            for name, value in self.measured.items()
            if name not in promised and value is not None
        ]
        if rest:
            lines.append(f"  also measured: {', '.join(rest)}")
        lines += [f"  broken: {text}" for text in self.violations[:8]]
        return "\n".join(lines)


def shown(value: float | str | None) -> str:
    if value is None:
        return "nothing to measure"
    return value if isinstance(value, str) else f"{value:.4g}"


def skipped(scenario: Scenario, backend: str, seed: int, why: str) -> Report:
    """Of a scenario that was not run."""
    return Report(SCHEMA, __version__, scenario, backend, seed, "skipped", why)


def broken_off(scenario: Scenario, backend: str, seed: int, why: str) -> Report:
    """Of one that could not be run to its end: nothing is known, so nothing is passed."""
    return Report(SCHEMA, __version__, scenario, backend, seed, "failed", why)


def report_of(scenario: Scenario, backend: str, seed: int, observed: Observed, measured: Measured) -> Report:
    """The report of a story that was told to its end."""
    verdicts = [
        Verdict(
            promise.measure, MEASURES[promise.measure], promise.text(),
            _plain(measured.values[promise.measure]), promise.kept(measured.values[promise.measure]),
        )
        for promise in scenario.all_promises
    ]  # fmt: skip
    calls: dict[str, int] = {}
    errors: dict[str, int] = {}
    for call in measured.calls:
        name = f"{call.kind} {call.state}"
        calls[name] = calls.get(name, 0) + 1
        if call.error:
            told = f"{call.kind}: {call.error[:120]}"
            errors[told] = errors.get(told, 0) + 1
    kept = all(verdict.kept for verdict in verdicts)
    return Report(
        SCHEMA, __version__, scenario, backend, seed, "passed" if kept else "failed", "",
        verdicts=verdicts,
        measured={name: _plain(value) for name, value in measured.values.items()},
        violations=[f"{each.promise}: {each.text}" for each in measured.violations[:VIOLATIONS_MAX]],
        violation_count=len(measured.violations),
        calls=dict(sorted(calls.items())),
        errors=dict(sorted(errors.items(), key=lambda each: -each[1])[:20]),
        events=[Event(round(mark.at - observed.begin, 3), mark.what, mark.kind) for mark in observed.marks],
        faults=[
            Broken(
                round(episode.begin - observed.begin, 3), round(episode.end - observed.begin, 3),
                [list(side) for side in episode.sides],
            )
            for episode in observed.episodes
        ],
        states=list(CALL_STATES),
        rows=_rows(observed, measured),
    )  # fmt: skip


def _rows(observed: Observed, measured: Measured) -> list[Row]:
    found = bins_of(measured.calls, observed.begin, observed.end, BIN_S)
    return [
        Row(node, kind, [[each.get(state, 0) for state in CALL_STATES] for each in bins])
        for (node, kind), bins in sorted(found.items())
    ]


def _plain(value: float | None) -> float | str | None:
    if value is None or value != NEVER:
        return None if value is None else round(value, 4)
    return "never"


def counted(reports: Sequence[Report]) -> str:
    """One line of several runs."""
    counts = {
        outcome: sum(report.outcome == outcome for report in reports)
        for outcome in ("passed", "failed", "skipped")
    }
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
