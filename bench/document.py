"""The generated part of ``docs/benchmarks.md``, between two markers; what stands around it is written by
hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.host import Host
from bench.report import Report, claims_table, detail_table

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN = "<!-- begin: written by python -m bench --write-docs -->"
END = "<!-- end -->"


def rendered(host: Host, reports: Sequence[Report]) -> str:
    """Everything measured, as Markdown."""
    parts = ["### The machine", host.described(), "### Targets", claims_table(reports)]
    for report in reports:
        parts += [f"### {report.title}", detail_table(report)]
    return "\n\n".join(parts)


def written_into(text: str, generated: str) -> str:
    """``text`` with the part between the markers replaced.

    Raises:
        ValueError: a marker is missing, or they stand in the wrong order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN!r} and {END!r}, in this order")
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"
