"""``draw_timeline``: a report as a PNG: what clients heard on every node, tenth of a second by tenth.

Needs matplotlib (extra ``bench``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcomm.chaos.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"good": "#3fa66b", "degraded": "#e3b23c", "refused": "#d9603b", "unknown": "#8a63c9"}
MEANINGS = {
    "good": "answered",
    "degraded": "answered by too few replicas, or block missed",
    "refused": "refused: not done",
    "unknown": "outcome unknown",
}
SILENCE = "#eef0f2"
INK, FAINT = "#24292f", "#6e7781"
KINDS = ("eventual", "strong", "blocks")
SIDE_COLOURS = ("#3d7dff", "#c96198", "#1b9e9e", "#c69026", "#986ee2", "#57606a")
ROW_IN, HEAD_IN, FOOT_IN = 0.21, 0.62, 1.12
LEFT = 0.115
"""Where the rows begin, as a share of the width."""
NODE_GAP = 0.35
"""In rows, between two nodes."""


def draw_timeline(report: Report, path: Path) -> str:
    """Draw it; why it could not be drawn, or the empty string."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "there is no picture without matplotlib: pip install 'kvcomm[bench]'"
    rows = _ordered(report)
    if not rows:
        return "there is nothing to draw: no call was made"
    nodes = sorted({row.node for row, _ in rows})
    height = len(rows) + NODE_GAP * len(nodes)
    tall_in = HEAD_IN + FOOT_IN + ROW_IN * height
    figure = Figure(figsize=(11, tall_in), dpi=130, facecolor="white")
    axes = figure.add_axes((LEFT, FOOT_IN / tall_in, 0.84, ROW_IN * height / tall_in))
    end_s = max(len(row.bins) for row, _ in rows) * report.bin_s
    for row, top in rows:
        _strip(axes, report, row, top)
    _faults(axes, report, nodes, rows, height)
    axes.set_xlim(0, end_s)
    axes.set_ylim(height, -0.1)
    axes.set_yticks([top + 0.5 for _, top in rows], [row.kind for row, _ in rows], fontsize=7.5, color=FAINT)
    axes.tick_params(length=0, colors=FAINT, labelsize=8)
    axes.set_xlabel("seconds after the clients began", color=FAINT, fontsize=8.5, labelpad=3)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    for node in nodes:
        tops = [top for row, top in rows if row.node == node]
        middle = (min(tops) + max(tops) + 1) / 2
        axes.annotate(
            node, (0, middle), xycoords=("axes fraction", "data"), xytext=(-62, 0), va="center", ha="right",
            textcoords="offset points", fontsize=10, color=INK, weight="bold",
        )  # fmt: skip
    _words(figure, report, tall_in)
    figure.savefig(path)
    return ""


def _ordered(report: Report) -> list[tuple[Row, float]]:
    """Rows from above, with where each begins; a gap after each node's."""
    found: list[tuple[Row, float]] = []
    top = 0.0
    before = ""
    for row in sorted(report.rows, key=lambda row: (row.node, KINDS.index(row.kind))):
        if before and row.node != before:
            top += NODE_GAP
        found.append((row, top))
        before, top = row.node, top + 1
    return found


def _strip(axes: Axes, report: Report, row: Row, top: float) -> None:
    """Each bin is filled from below by the shares of its answers; what nobody answered stays empty."""
    width = report.bin_s
    axes.broken_barh([(0, len(row.bins) * width)], (top + 0.08, 0.84), facecolors=SILENCE, linewidth=0)
    for index, counts in enumerate(row.bins):
        total = sum(counts)
        bottom = top + 0.92
        for state, count in zip(report.states, counts, strict=True):
            if count:
                share = 0.84 * count / total
                bottom -= share
                axes.bar(
                    index * width,
                    share,
                    width * 1.02,
                    bottom,
                    align="edge",
                    color=COLOURS[state],
                    linewidth=0,
                )


def _faults(
    axes: Axes, report: Report, nodes: list[str], rows: list[tuple[Row, float]], height: float
) -> None:
    """Begin and end of each fault, and beside each node a bar in the colour of its side."""
    many = len(report.faults) > 6
    for number, fault in enumerate(report.faults):
        for at_s, name, style in ((fault.begin_s, "fault", "-"), (fault.end_s, "heal", (0, (4, 2)))):
            axes.axvline(at_s, color=INK, linewidth=0.6 if many else 1.1, linestyle=style, zorder=5)
            first = number == 0 if name == "fault" else number == len(report.faults) - 1
            if first or not many:
                axes.annotate(
                    f"{name} {at_s:.1f} s", (at_s, 0), xycoords=("data", "axes fraction"), xytext=(0, -17),
                    textcoords="offset points", fontsize=7.5, color=INK, ha="center", va="top",
                )  # fmt: skip
        if len(fault.sides) < 2:
            continue
        for side, names in enumerate(fault.sides):
            for node in names:
                tops = [top for row, top in rows if row.node == node]
                if tops:
                    axes.plot(
                        [fault.begin_s, fault.end_s], [min(tops) - 0.09] * 2, linewidth=2.4, zorder=6,
                        color=SIDE_COLOURS[side % len(SIDE_COLOURS)], solid_capstyle="butt",
                    )  # fmt: skip


def _words(figure: Any, report: Report, tall_in: float) -> None:
    """What it is, how it ended, and what the colours mean."""
    passed = report.outcome == "passed"
    x = 0.02
    figure.text(
        x, 1 - 0.22 / tall_in, report.scenario.name, fontsize=13, weight="bold", color=INK, va="center"
    )
    figure.text(
        0.98, 1 - 0.22 / tall_in, report.outcome.upper(), fontsize=12, weight="bold", va="center", ha="right",
        color=COLOURS["good"] if passed else COLOURS["refused"],
    )  # fmt: skip
    told = [f"{report.backend}, seed {report.seed}"]
    for measure, name in (
        ("strong_gap_s", "longest strong gap"),
        ("first_good_s", "first good calls after heal"),
        ("equal_s", "replicas equal after heal"),
    ):
        value = report.measured.get(measure)
        if value is not None:
            told.append(f"{name} {value if isinstance(value, str) else f'{value:.2f} s'}")
    broken = sum(
        value
        for measure in ("eventual_broken", "strong_broken", "wrong_bytes")
        if isinstance(value := report.measured.get(measure), float | int)
    )
    told.append(f"broken promises of the data: {broken:g}")
    figure.text(x, 1 - 0.45 / tall_in, "  ·  ".join(told), fontsize=8.5, color=FAINT, va="center")
    place = _Legend(figure, 0.36 / tall_in)
    for state in report.states:
        place.entry(MEANINGS[state], COLOURS[state])
    place.entry("no answer", "#d5d9dd")
    sides = next((fault.sides for fault in report.faults if len(fault.sides) > 1), None)
    if sides is not None:
        place = _Legend(figure, 0.14 / tall_in)
        place.words("sides of the partition:", FAINT)
        for number, side in enumerate(sides):
            place.words(" ".join(side), SIDE_COLOURS[number % len(SIDE_COLOURS)], weight="bold")


class _Legend:
    """One line of words, each after the one before."""

    def __init__(self, figure: Any, y: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        self._figure, self._y, self._at = figure, y, LEFT
        self._canvas = FigureCanvasAgg(figure)

    def entry(self, text: str, colour: str) -> None:
        """A coloured square and what it means."""
        self._figure.text(self._at, self._y, "■", fontsize=11, color=colour, va="center", ha="left")
        self._at += 0.014
        self.words(text, FAINT)

    def words(self, text: str, colour: str, weight: str = "normal") -> None:
        put = self._figure.text(
            self._at, self._y, text, fontsize=8, color=colour, va="center", ha="left", weight=weight
        )
        right = put.get_window_extent(self._canvas.get_renderer()).x1
        self._at = right / (self._figure.get_figwidth() * self._figure.dpi) + 0.018
