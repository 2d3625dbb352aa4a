"""What the experiments recorded, as Markdown tables; docs/rollouts.md has those of the recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]

_AT_AN_END = 5
"""Steps that the first and the last numbers are the mean of."""


def training_table(records: Sequence[Record]) -> str:
    """One line for each arm."""
    by_arm: dict[str, list[Record]] = {}
    for record in records:
        by_arm.setdefault(record["arm"], []).append(record)
    head = (
        "arm", "lessons", "reward, first → last steps", "recall", "entropy (nats)", "mismatch (nats)",
        "events forgotten", "rows fed, of them again", "largest view",
    )  # fmt: skip
    return _table(head, [_arm_cells(arm, own) for arm, own in by_arm.items()])


def recall_table(records: Sequence[Record]) -> str:
    """One line for each condition."""
    lines = [
        (each["condition"], "yes" if each["knowable"] else "no", f"{each['recall']:.3f}") for each in records
    ]
    return _table(("what is left when the question comes", "can be known", "recall"), lines)


def _arm_cells(arm: str, records: Sequence[Record]) -> tuple[str, ...]:
    def change(name: str) -> str:
        first, last = (_mean(some, name) for some in (records[:_AT_AN_END], records[-_AT_AN_END:]))
        return f"{first:.2f} → {last:.2f}"

    conversations = sum(record["conversations"] for record in records)
    fed, again = (sum(each[name] for each in records) / conversations for name in ("rows_fed", "rows_again"))
    cut = any(record["cut_count"] for record in records)
    return (
        arm,
        str(records[0]["lessons"]),
        change("reward"),
        change("recall"),
        change("entropy_nats"),
        f"{_mean(records, 'mismatch_nats'):.0e}",
        f"{_mean(records, 'forgetful_nats'):.0e}" if cut else "no cuts",
        f"{fed:.1f}, {again:.1f}",
        str(max(record["slots_most"] for record in records)),
    )


def _mean(records: Sequence[Record], name: str) -> float:
    return float(sum(record[name] for record in records)) / len(records)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    rows.insert(1, f"|{'---|' * len(head)}")
    return "\n".join(rows)
