"""The generated parts of ``docs/benchmarks.md``, each between two markers; what stands around them is written
by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.host import Host
from bench.report import Report, claims_table, detail_table

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"
RECORDS = DOCUMENT.parent / "plots"
"""What the pictures there are drawn from lies beside them."""
END = "<!-- end -->"


def begin(module: str) -> str:
    """The marker before what ``python -m module --write-docs`` writes."""
    return f"<!-- begin: written by python -m {module} --write-docs -->"


BEGIN = begin("bench")


def rendered(host: Host, reports: Sequence[Report]) -> str:
    """Everything measured, as Markdown."""
    parts = ["### The machine", host.described(), "### Targets", claims_table(reports)]
    for report in reports:
        parts += [f"### {report.title}", detail_table(report)]
    return "\n\n".join(parts)


def written_into(text: str, generated: str, marker: str = BEGIN) -> str:
    """``text`` with the part between ``marker`` and the next end replaced.

    Raises:
        ValueError: a marker is missing, or they stand in the wrong order.
    """
    before, found, rest = text.partition(marker)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the document needs the lines {marker!r} and {END!r}, in this order")
    return f"{before}{marker}\n\n{generated}\n\n{END}{after}"
