"""What the experiments recorded, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.rollouts.task import CHANCE, RECALL_SHARE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]

COLOURS = {"full context": "#6e7781", "KV-streams": "#1f6feb", "re-prefill": "#d4820f"}
FORGETFUL_COLOUR = "#cf222e"
MARKERS = {"full context": "s", "KV-streams": "o", "re-prefill": "^"}
_SMOOTHED_STEPS = 5
_DPI = 110


def draw_training(records: Sequence[Record], path: Path) -> None:
    """Four panels: reward, mismatch, entropy, rows."""
    by_arm: dict[str, list[Record]] = {}
    for record in records:
        by_arm.setdefault(record["arm"], []).append(record)
    figure, panels = _figure(2, 2, (9.6, 8.4))
    _draw_reward(panels[0], by_arm)
    _draw_mismatch(panels[1], by_arm)
    _draw_entropy(panels[2], by_arm)
    _draw_rows(panels[3], by_arm)
    _save(figure, path)


def draw_recall(records: Sequence[Record], path: Path) -> None:
    """One bar for each condition."""
    figure, (panel,) = _figure(1, 1, (8.0, 2.0 + 0.42 * len(records)))
    names = [record["condition"] for record in records]
    colours = [COLOURS[record["condition"].split(",")[0]] for record in records]
    shares = [record["recall"] for record in records]
    bars = panel.barh(names, shares, color=colours, height=0.66)
    panel.bar_label(bars, labels=[f"{share:.3f}" for share in shares], padding=4)
    panel.axvline(records[0]["chance"], color=FORGETFUL_COLOUR, linewidth=1, linestyle="--")
    panel.text(
        records[0]["chance"], 1.01, "chance", color=FORGETFUL_COLOUR, ha="center", va="bottom",
        fontsize=9, transform=panel.get_xaxis_transform(),
    )  # fmt: skip
    panel.invert_yaxis()
    panel.set_xlim(0, 1.12)
    panel.set_xlabel("share of right answers about the fact")
    panel.set_title("Recall of a fact, by what is left of its context\n(neutral tokens behind it)", pad=22)
    _save(figure, path)


def _draw_reward(panel: Axes, by_arm: dict[str, list[Record]]) -> None:
    for arm, records in by_arm.items():
        steps, rewards = _column(records, "step"), _column(records, "reward")
        panel.plot(steps, rewards, color=COLOURS[arm], alpha=0.25, linewidth=1)
        panel.plot(steps, _smoothed(rewards), color=COLOURS[arm], linewidth=2, label=arm)
    unknowing = 1 - RECALL_SHARE + RECALL_SHARE * CHANCE
    panel.axhline(unknowing, color="#57606a", linewidth=1, linestyle=":")
    panel.text(0.98, unknowing + 0.01, "everything but the recall", ha="right", va="bottom", fontsize=8,
               color="#57606a", transform=panel.get_yaxis_transform())  # fmt: skip
    panel.set_ylim(0, 1.04)
    panel.set_title("Reward")
    _count_steps(panel)
    panel.set_ylabel("mean reward of a conversation (1 = all right)")
    panel.legend(loc="lower right", frameon=False)


def _draw_mismatch(panel: Axes, by_arm: dict[str, list[Record]]) -> None:
    for arm, records in by_arm.items():
        panel.plot(_column(records, "step"), _column(records, "mismatch_nats"), color=COLOURS[arm],
                   linewidth=1.4, marker=MARKERS[arm], markersize=3, label=arm)  # fmt: skip
    cut = [record for records in by_arm.values() for record in records if record["cut_count"]]
    panel.plot(_column(cut, "step"), _column(cut, "forgetful_nats"), color=FORGETFUL_COLOUR, linewidth=1.8,
               label="KV-streams,\nevents forgotten")  # fmt: skip
    panel.set_yscale("log")
    panel.set_ylim(1e-16, 1e2)
    panel.set_title("Mismatch: replay against generation")
    _count_steps(panel)
    panel.set_ylabel("KL estimate k3, mean of sampled tokens (nats)")
    panel.legend(loc="lower right", bbox_to_anchor=(1, 0.2), frameon=False)


def _draw_entropy(panel: Axes, by_arm: dict[str, list[Record]]) -> None:
    for arm, records in by_arm.items():
        steps, entropies = _column(records, "step"), _column(records, "entropy_nats")
        panel.plot(steps, entropies, color=COLOURS[arm], alpha=0.25, linewidth=1)
        panel.plot(steps, _smoothed(entropies), color=COLOURS[arm], linewidth=2, label=arm)
    panel.set_ylim(0, 1.4 * panel.get_ylim()[1])  # room for the legend
    panel.set_title("Entropy of the policy")
    _count_steps(panel)
    panel.set_ylabel("mean of sampled tokens (nats)")
    panel.legend(loc="upper right", frameon=False)


def _count_steps(panel: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.set_xlabel("training step")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_rows(panel: Axes, by_arm: dict[str, list[Record]]) -> None:
    for place, (arm, records) in enumerate(by_arm.items()):
        count = sum(record["conversations"] for record in records)
        fed, again = (sum(_column(records, name)) / count for name in ("rows_fed", "rows_again"))
        panel.bar(place, fed - again, color=COLOURS[arm], width=0.62)
        panel.bar(place, again, bottom=fed - again, color=COLOURS[arm], alpha=0.45, width=0.62)
        panel.text(place, fed, f"{fed:.1f}", ha="center", va="bottom")
        most = max(_column(records, "slots_most"))
        panel.plot([place - 0.38, place + 0.38], [most, most], color="#24292f", linewidth=2)
    panel.bar(0, 0, color="#57606a", label="fed")
    panel.bar(0, 0, color="#57606a", alpha=0.45, label="fed again")
    panel.plot([], [], color="#24292f", linewidth=2, label="largest view")
    panel.set_xticks(range(len(by_arm)), list(by_arm))
    panel.set_ylim(0, 1.35 * panel.get_ylim()[1])
    panel.set_title("Rows of a conversation")
    panel.set_ylabel("rows (tokens), mean")
    panel.legend(loc="upper left", frameon=False, ncols=3, fontsize=9)


def _column(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each and those before it."""
    windows = [values[max(0, at + 1 - _SMOOTHED_STEPS) : at + 1] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _figure(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
