"""``summary_of``: many reports as a page: one line a scenario, and how long random splits took to heal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcomm.chaos.report import Report

COLUMNS = (
    ("strong_gap_s", "longest strong gap, s"),
    ("first_good_s", "first good calls after heal, s"),
    ("equal_s", "replicas equal after heal, s"),
    ("key_stop_s", "longest stop of a record, s"),
)
SPLITS = "random-split"
BROKEN = ("eventual_broken", "strong_broken", "wrong_bytes", "untyped_errors", "late_calls")


def summary_of(reports: Sequence[Report]) -> str:
    """Markdown."""
    return "\n".join(_lines(reports)) + "\n"


def _lines(reports: Sequence[Report]) -> Iterator[str]:
    names = " | ".join(title for _, title in COLUMNS)
    yield f"| scenario | outcome | {names} | calls | broken promises of the data |"
    yield f"|{'---|' * (len(COLUMNS) + 4)}"
    for report in sorted(reports, key=lambda each: (each.scenario.name, each.seed)):
        if report.scenario.name != SPLITS:
            yield _line(report)
    splits = [report for report in reports if report.scenario.name == SPLITS and report.outcome != "skipped"]
    if splits:
        yield ""
        yield from _distribution(splits)


def _line(report: Report) -> str:
    name = f"`{report.scenario.name}`"
    if report.outcome == "skipped":
        return f"| {name} | skipped: {report.why} |{' |' * (len(COLUMNS) + 2)}"
    missed = [verdict.measure for verdict in report.verdicts if not verdict.kept]
    outcome = report.outcome + (f": {', '.join(missed)}" if missed else "")
    values = " | ".join(_shown(report.measured.get(measure)) for measure, _ in COLUMNS)
    return f"| {name} | {outcome} | {values} | {sum(report.calls.values()):,} | {_broken(report):g} |"


def _broken(report: Report) -> float:
    values = (report.measured.get(measure) for measure in BROKEN)
    return sum(value for value in values if isinstance(value, float | int))


def _shown(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.2f}"


def _distribution(splits: Sequence[Report]) -> Iterator[str]:
    calls = sum(sum(report.calls.values()) for report in splits)
    broken = sum(_broken(report) for report in splits)
    failed = [report for report in splits if report.outcome == "failed"]
    seeds = ", ".join(f"{report.seed}" for report in failed) or "none"
    yield (
        f"{len(splits)} random splits, {calls:,} calls, broken promises of the data: {broken:g}; "
        f"seeds with a promise that was not kept: {seeds}."
    )
    yield ""
    yield "| of the random splits | median | 99th percentile | max | never |"
    yield "|---|---|---|---|---|"
    for measure, title in COLUMNS:
        values = [report.measured.get(measure) for report in splits]
        times = sorted(value for value in values if isinstance(value, float | int))
        if times:
            cells = " | ".join(f"{_quantile(times, share):.2f}" for share in (0.5, 0.99, 1.0))
            yield f"| {title} | {cells} | {values.count('never')} |"


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
