"""``Section``: what one machine measured of the curves; JSON for the record, Markdown for
``docs/benchmarks.md``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from bench.report import number
from bench.scale import size_name
from bench.timing import Spread

LATENCY_FILE, BANDWIDTH_FILE = "plots/latency-{}.svg", "plots/bandwidth-{}.svg"
"""Beside ``docs/benchmarks.md``; drawn by ``bench.plots``."""


@dataclass(frozen=True, slots=True)
class Point:
    """One way to bring bytes, at one size."""

    way: str
    size_bytes: int
    latency_us: Spread
    gb_s: Spread | None
    """10^9 bytes a second with several under way; ``None`` where no bytes move."""


@dataclass(slots=True)
class Section:
    """What one machine measured."""

    machine: str
    described: str
    points: list[Point] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """What was to be measured and was not, and why."""

    def ways(self) -> list[str]:
        return list(dict.fromkeys(point.way for point in self.points))

    def sizes(self) -> list[int]:
        return sorted({point.size_bytes for point in self.points})


def to_json(sections: Sequence[Section]) -> bytes:
    """Sections as JSON; ``from_json`` is the inverse."""
    return msgspec.json.format(msgspec.json.encode(list(sections)), indent=1)


def from_json(text: bytes) -> list[Section]:
    """Raises ``msgspec.ValidationError`` if the text does not hold sections."""
    return msgspec.json.decode(text, type=list[Section])


def tables(sections: Sequence[Section]) -> str:
    """Each section as two Markdown tables, a column a size."""
    parts = []
    for section in sections:
        parts += [f"### {section.machine}", section.described]
        parts += [f"![Latency by size]({LATENCY_FILE.format(slug(section.machine))})"]
        parts += ["Latency of one read, µs (median):", _table(section, _latency)]
        parts += [f"![Bandwidth by size]({BANDWIDTH_FILE.format(slug(section.machine))})"]
        parts += ["Bandwidth with several reads under way, GB/s (median):", _table(section, _bandwidth)]
        parts += [f"Not run: {what} ({reason})." for what, reason in section.skipped.items()]
    return "\n\n".join(parts)


def slug(machine: str) -> str:
    """For a file name."""
    return re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")


def _table(section: Section, value: Callable[[Point], float | None]) -> str:
    sizes = section.sizes()
    lines = ["| | " + " | ".join(map(size_name, sizes)) + " |", "| --- |" + " ---: |" * len(sizes)]
    for way in section.ways():
        found = {point.size_bytes: value(point) for point in section.points if point.way == way}
        cells = [found.get(size) for size in sizes]
        if any(cell is not None for cell in cells):
            shown = ["" if cell is None else number(cell) for cell in cells]
            lines.append(f"| {way} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _latency(point: Point) -> float:
    return point.latency_us.median


def _bandwidth(point: Point) -> float | None:
    return point.gb_s.median if point.gb_s else None
