"""``Report``: what one case found; JSON for machines, Markdown for ``docs/benchmarks.md``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from bench.timing import Rounds, Spread

Unit = Literal["us", "ms", "x", "MiB", "x faster", "%"]


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at one size."""

    what: str
    size: str
    us: Spread
    baseline: str = ""
    """Empty for a baseline itself."""
    ratio: Spread | None = None
    """Time over the baseline's, round by round."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A target, and what was measured.  The median decides; the spread is shown beside it."""

    what: str
    sign: Literal["<=", ">="]
    target: float
    unit: Unit
    measured: Spread

    @property
    def met(self) -> bool:
        compare = operator.le if self.sign == "<=" else operator.ge
        return bool(compare(self.measured.median, self.target))


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was to be measured and was not."""

    what: str
    reason: str


@dataclass(slots=True)
class Report:
    """What one case found.  Built up while it runs, so that what was measured survives what fails later."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: bool = False
    """The case itself failed: what is missing here is our bug, not a missing peer."""
    load: list[float] = field(default_factory=list)
    """One-minute load averages seen before and after each set of rounds."""

    def add(self, rounds: Rounds, size: str, baselines: dict[str, str], *, only: Sequence[str] = ()) -> None:
        """Take over rounds; ``baselines`` names each operation's baseline, those without one are
        baselines."""
        for name in only or rounds.seconds:
            baseline = baselines.get(name, "")
            ratio = rounds.ratio(name, baseline) if baseline else None
            self.rows.append(Row(name, size, rounds.spread(name).scaled(1e6), baseline, ratio))
        self.load.extend(rounds.load)

    def claim(
        self, what: str, sign: Literal["<=", ">="], target: float, unit: Unit, measured: Spread
    ) -> None:
        self.claims.append(Claim(what, sign, target, unit, measured))

    @staticmethod
    def failed(name: str, reason: str) -> Report:
        return Report(name, name, skipped=[Skipped(f"everything of {name}", reason)], broken=True)

    def skip(self, what: str, reason: str) -> None:
        self.skipped.append(Skipped(what, reason))

    def of(self, machine: str) -> Report:
        """The same, saying everywhere that it is of this machine."""
        return replace(
            self,
            title=f"{self.title} ({machine})",
            claims=[replace(claim, what=f"{machine}: {claim.what}") for claim in self.claims],
            skipped=[replace(skipped, what=f"{machine}: {skipped.what}") for skipped in self.skipped],
        )


def to_json(reports: Sequence[Report]) -> bytes:
    """Reports as JSON; ``from_json`` is the inverse."""
    return msgspec.json.format(msgspec.json.encode(list(reports)), indent=1)


def from_json(text: bytes) -> list[Report]:
    """Raises ``msgspec.ValidationError`` if the text does not hold reports."""
    return msgspec.json.decode(text, type=list[Report])


def claims_table(reports: Sequence[Report]) -> str:
    """Every target with its verdict."""
    lines = ["| target | measured (p10 – p90) | verdict |", "| --- | --- | --- |"]
    for report in reports:
        for claim in report.claims:
            target = f"{claim.what} {'≤' if claim.sign == '<=' else '≥'} {number(claim.target)} {claim.unit}"
            lines.append(f"| {target} | {_shown(claim.measured)} {claim.unit} | {_verdict(claim)} |")
        for skipped in report.skipped:
            lines.append(f"| {skipped.what} | | not run: {skipped.reason} |")
    return "\n".join(lines)


def detail_table(report: Report) -> str:
    """Every operation of one case."""
    lines = [
        "| operation | size | µs, median (p10 – p90) | times the baseline |",
        "| --- | --- | --- | --- |",
    ] * bool(report.rows)
    for row in report.rows:
        ratio = f"{_shown(row.ratio)} × {row.baseline}" if row.ratio else ""
        lines.append(f"| {row.what} | {row.size} | {_shown(row.us)} | {ratio} |")
    if report.load:
        lines.append(f"\nLoad average while it ran: {min(report.load):.1f} to {max(report.load):.1f}.")
    lines.extend(f"\n{note}" for note in report.notes)
    return "\n".join(lines)


def _verdict(claim: Claim) -> str:
    if claim.met:
        return "met"
    within = claim.measured.p10 <= claim.target <= claim.measured.p90
    return "**not met**" + (" (target inside the spread)" if within else "")


def _shown(spread: Spread) -> str:
    return f"{number(spread.median)} ({number(spread.p10)} – {number(spread.p90)})"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
