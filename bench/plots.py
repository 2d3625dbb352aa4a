"""``python -m bench.plots``: the recorded curves as SVG, one picture of latency and one of bandwidth for each
machine, one of where by reference and inline cross, and one of decode steps over length.

Ours are drawn thick, everything else thin; each curve bears its own name at its right end.  Ink is
``currentColor``, which follows the reader's light or dark page; the curves' colours stand out on both.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import crossover, sections, stream_sections
from bench.arms import Race, Way
from bench.crossover import CROSSOVER_FILE
from bench.curves import CURVES_FILE
from bench.document import RECORDS
from bench.scale import size_name
from bench.sections import BANDWIDTH_FILE, LATENCY_FILE, Section, slug
from bench.sources import OURS
from bench.stream_sections import STEPS_FILE, STREAMS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"
"""Stands for ``currentColor``, which matplotlib does not know."""
LIGHT_INK, DARK_INK = "#1f2328", "#e6edf3"
COLOURS = {
    "memcpy": "#8b949e",
    "raw TCP socket": "#1b9e9e",
    "raw unix socket": "#57ab5a",
    "Redis GET, unix": "#e5534b",
    "Redis GET, tcp": "#c96198",
    "Mooncake get, tcp": "#c69026",
    "bare pyverbs READ": "#c69026",
    "plain copy": "#8b949e",
    f"{OURS}shm view": "#3d7dff",
    f"{OURS}shm": "#6cb6ff",
    f"{OURS}tcp": "#a371f7",
    f"{OURS}tcp get": "#7c4dff",
    f"{OURS}verbs": "#6cb6ff",
    f"{OURS}verbs get": "#3d7dff",
    f"{OURS}cuda": "#6cb6ff",
    f"{OURS}cuda fetch": "#3d7dff",
    f"{OURS}cuda to a GPU": "#57ab5a",
}
ARM_COLOURS: dict[Way, tuple[str, str]] = {
    "splice": ("#3d7dff", "#6cb6ff"),
    "again": ("#e5534b", "#c69026"),
    "never": ("#8b949e", "#8b949e"),
}
"""Two of a way in one picture."""
OTHERS = ("#986ee2", "#1b9e9e", "#c69026", "#e5534b", "#57ab5a", "#c96198")
TICKS_MAX = 5
NARROW, NARROWER = 300, 10
"""Values that lie in a narrower range get more lines a decade."""
LABEL_GAP_POINTS = 12.5
"""Between the base lines of two curves' names."""
WIDTH_INCHES, HEIGHT_INCHES = 7.6, 4.4
PLACE = (0.085, 0.1, 0.64, 0.74)
"""Of the axes in the picture: left, bottom, width, height."""


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve."""

    name: str
    sizes: list[int]
    values: list[float]
    colour: str
    bold: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """What stands around the lines."""

    title: str
    hint: str
    unit: Callable[[float], str]
    """A decade's name on the axis."""
    line_at: float | None = None
    """A value that everything is held against."""
    linear: bool = False
    """Both axes, from 0 on."""
    size: Callable[[int], str] = size_name
    """A size's name on the axis."""


def _time_name(us: float) -> str:
    if us >= 1e6:
        return f"{_plain(us / 1e6)} s"
    return f"{_plain(us / 1e3)} ms" if us >= 1e3 else f"{_plain(us)} µs"


def _rate_name(gb_s: float) -> str:
    return f"{_plain(gb_s)} GB/s" if gb_s >= 1 else f"{_plain(gb_s * 1e3)} MB/s"


def _plain(value: float) -> str:
    return f"{value:.10g}"


LATENCY = Picture("Latency of one read", "by size; lower is better", _time_name)
BANDWIDTH = Picture("Bandwidth, several reads under way", "by size; higher is better", _rate_name)
CROSSOVER = Picture(
    "Time by reference, as a multiple of the time inline",
    "below 1 the reference is faster",
    lambda ratio: f"{_plain(ratio)} ×",
    line_at=1.0,
)
STEPS = Picture(
    "Time of a decode step",
    "by tokens of text so far; lower is better",
    lambda ms: f"{_plain(ms)} ms",
    linear=True,
    size=lambda tokens: f"{tokens:,}",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("directory", nargs="?", default=str(RECORDS), help="by default that of the documents")
    directory = Path(parser.parse_args(arguments).directory)
    pictures: dict[str, str] = {}
    for file, draw in (
        (CURVES_FILE, _of_curves),
        (CROSSOVER_FILE, _of_crossover),
        (STREAMS_FILE, _of_streams),
    ):
        if (directory / file).exists():
            pictures |= draw((directory / file).read_bytes())
    for name, text in pictures.items():
        (directory / name).write_text(text)
        print(directory / name)
    return int(not pictures)


def _of_curves(text: bytes) -> dict[str, str]:
    pictures = {}
    for section in sections.from_json(text):
        for file, picture, lines in (
            (LATENCY_FILE, LATENCY, latencies(section)),
            (BANDWIDTH_FILE, BANDWIDTH, bandwidths(section)),
        ):
            name = Path(file.format(slug(section.machine))).name
            if lines:
                pictures[name] = svg(picture, section.machine, lines)
    return pictures


def _of_crossover(text: bytes) -> dict[str, str]:
    found = crossover.from_json(text)
    return {crossover.PICTURE_FILE: svg(CROSSOVER, found.machine, crossings(found))}


def _of_streams(text: bytes) -> dict[str, str]:
    pictures = {}
    for recorded in stream_sections.from_json(text):
        race = stream_sections.longest(recorded.races)
        if race is not None:
            name = Path(STEPS_FILE.format(slug(recorded.machine))).name
            subtitle = f"{recorded.machine}, {stream_sections.described(race)}"
            pictures[name] = svg(STEPS, subtitle, step_lines(race))
    return pictures


def step_lines(race: Race) -> list[Line]:
    """Milliseconds of a decode step by tokens of text; where the prompt is kept it is as where it is not."""
    lines: list[Line] = []
    seen: dict[Way, int] = {}
    for run in race.runs:
        way = run.arm.way
        if way != "again, prompt kept":
            rows, step_ms = zip(*stream_sections.steps(run), strict=True)
            colour = ARM_COLOURS[way][seen.get(way, 0) % 2]
            seen[way] = seen.get(way, 0) + 1
            bold, dashed = way == "splice", way == "never"
            lines.append(Line(run.arm.name, list(rows), list(step_ms), colour, bold, dashed))
    return lines


def crossings(found: crossover.Crossover) -> list[Line]:
    """Time by reference over time inline, of a block's life and its parts; the rest is in the tables."""
    names = {"life": "put, then get"}
    return [
        Line(
            f"{names.get(curve.verb, curve.verb)}, {curve.transport}",
            [pair.size_bytes for pair in curve.pairs],
            [pair.ratio.median for pair in curve.pairs],
            COLOURS[f"{OURS}{curve.transport}"],
            bold=curve.verb == "life",
            dashed=curve.verb.startswith("get"),
        )
        for curve in found.curves
        if curve.verb in ("life", *crossover.LIFE)
    ]


def latencies(section: Section) -> list[Line]:
    """Microseconds."""
    return _lines(section, lambda point: point.latency_us.median)


def bandwidths(section: Section) -> list[Line]:
    """10^9 bytes a second."""
    return _lines(section, lambda point: point.gb_s.median if point.gb_s else None)


def svg(picture: Picture, subtitle: str, lines: Sequence[Line]) -> str:
    """The picture as SVG text; the same lines give the same text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "kvcomm", "font.family": "sans-serif", "font.size": 9,
        "text.color": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
        axes = figure.add_axes(PLACE)
        _draw(axes, lines)
        _dress(axes, picture, lines)
        _name(axes, lines)
        figure.text(0.012, 0.94, picture.title, fontsize=11, fontweight="bold")
        figure.text(0.012, 0.885, f"{subtitle}; {picture.hint}", fontsize=8.5, alpha=0.75)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inked(out.getvalue())


def _lines(section: Section, value: Callable[[Any], float | None]) -> list[Line]:
    lines = []
    for number, way in enumerate(section.ways()):
        found = [(point.size_bytes, value(point)) for point in section.points if point.way == way]
        there = [(size, each) for size, each in sorted(found) if each is not None]
        if there:
            sizes, values = zip(*there, strict=True)
            lines.append(
                Line(
                    way,
                    list(sizes),
                    list(values),
                    _colour(way, number),
                    way.startswith(OURS),
                    _is_floor(way),
                )
            )
    return lines


def _is_floor(way: str) -> bool:
    """A mere copy."""
    return way.startswith(("memcpy", "plain copy"))


def _colour(way: str, number: int) -> str:
    """The longest name that begins this one, so that variants of a way share its colour."""
    known = [name for name in COLOURS if way.startswith(name)]
    return COLOURS[max(known, key=len)] if known else OTHERS[number % len(OTHERS)]


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        axes.plot(
            line.sizes, line.values, color=line.colour, linewidth=2.4 if line.bold else 1.2,
            linestyle=(0, (4, 2)) if line.dashed else "-", marker="o", markersize=4 if line.bold else 2.5,
            zorder=3 if line.bold else 2, solid_capstyle="round",
        )  # fmt: skip


def _dress(axes: Axes, picture: Picture, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    sizes = sorted({size for line in lines for size in line.sizes})
    values = [value for line in lines for value in line.values]
    if picture.linear:
        axes.set_ylim(0, max(values) * 1.1)
        axes.set_xlim(0, sizes[-1] * 1.02)
    else:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
        axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
    shown = sizes[::-1][:: -(-len(sizes) // TICKS_MAX)]
    axes.xaxis.set_major_locator(FixedLocator([float(size) for size in shown]))
    axes.xaxis.set_major_formatter(lambda size, _: picture.size(int(size)))
    if picture.line_at is not None:
        axes.axhline(picture.line_at, color=INK, linewidth=0.9, alpha=0.7)
    if not picture.linear and max(values) < NARROW * min(values):
        subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if max(values) < NARROWER * min(values) else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(lambda value, _: picture.unit(value))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(True, which="major", linewidth=0.4, alpha=0.25, color=INK)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_alpha(0.4)


def _name(axes: Axes, lines: Sequence[Line]) -> None:
    """Each curve's name beside its right end, moved apart where they would lie on each other."""
    height_points = PLACE[3] * HEIGHT_INCHES * 72
    ends = [axes.transAxes.inverted().transform(axes.transData.transform(_end(line)))[1] for line in lines]
    places = spread_apart([end * height_points for end in ends], LABEL_GAP_POINTS)
    right = max(_end(line)[0] for line in lines)
    begin = axes.transAxes.inverted().transform(axes.transData.transform((right, 1)))[0]
    for line, end, place in zip(lines, ends, places, strict=True):
        at = place / height_points
        axes.plot(
            [begin + 0.012, begin + 0.045], [end, at], transform=axes.transAxes, clip_on=False,
            color=line.colour, linewidth=0.7, alpha=0.7,
        )  # fmt: skip
        axes.text(
            begin + 0.052, at, line.name, transform=axes.transAxes, va="center", color=line.colour,
            fontsize=9, fontweight="bold" if line.bold else "normal",
        )  # fmt: skip


def _end(line: Line) -> tuple[float, float]:
    return line.sizes[-1], line.values[-1]


def spread_apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in the order of ``wanted``, at least ``gap`` from each other, near where they want to be.

    Those that would touch are taken together and centred on the mean of what they want.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _top(groups[-2], wanted, gap) + gap > _bottom(groups[-1], wanted, gap):
            groups[-2:] = [groups[-2] + groups[-1]]
    places = [0.0] * len(wanted)
    for group in groups:
        for rank, index in enumerate(group):
            places[index] = _bottom(group, wanted, gap) + rank * gap
    return places


def _bottom(group: list[int], wanted: Sequence[float], gap: float) -> float:
    return sum(wanted[index] for index in group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: list[int], wanted: Sequence[float], gap: float) -> float:
    return _bottom(group, wanted, gap) + gap * (len(group) - 1)


def _inked(text: str) -> str:
    style = (
        f"<style>svg{{color:{LIGHT_INK}}}@media(prefers-color-scheme:dark){{svg{{color:{DARK_INK}}}}}</style>"
    )
    head, opening, rest = text.partition("<defs>")
    inked = f"{head}{style}{opening}{rest}".replace(INK, "currentColor")
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", inked)  # nobody sees the rest


if __name__ == "__main__":
    sys.exit(main())
