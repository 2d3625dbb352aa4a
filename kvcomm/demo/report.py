"""``Report``: what the demo measured, as a verdict, a JSON document and a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcomm.demo.messages import Row

if TYPE_CHECKING:
    from rich.console import Console

LOGPROB_TOLERANCE = 1e-3
"""Float32 with other shapes of matrix products differs by some 1e-5; a wrong K or V differs by far more."""

_NUMBERS = [
    "tokens",
    "L1",
    "L2",
    "L3",
    "MB",
    "computed",
    "first token",
    "alone",
    "faster",
    "same text",
    "|Δlogp|",
    "refused",
]
"""Columns.  ``alone`` is the time to the first token without sharing."""


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    text_source: str
    context_tokens: int
    block_tokens: int
    block_bytes: int
    rows: tuple[Row, ...]
    pool_restart_s: float
    """From the kill to a new pool that serves."""
    damaged_copies: int | None
    """How many copies were damaged on purpose; ``None`` if that was not asked for."""

    @property
    def tokens_equal(self) -> bool:
        return all(row.tokens_equal for row in self.rows)

    @property
    def hits(self) -> dict[str, int]:
        """Tokens fetched, by tier."""
        return {tier: sum(row.fetched_tokens[tier] for row in self.rows) for tier in ("l1", "l2", "l3")}

    @property
    def refused_copies(self) -> int:
        return sum(row.refused_copies for row in self.rows)

    @property
    def speed_up(self) -> float | None:
        """Of the time to the first token: the smallest of all readings that fetched."""
        return min((row.speed_up for row in self.rows if row.speed_up is not None), default=None)

    def problems(self) -> list[str]:
        """Why the demonstration failed; empty if it did not."""
        wrong = [f"{row.agent} ({row.step}) got another text" for row in self.rows if not row.tokens_equal]
        wrong += [
            f"{row.agent} ({row.step}): log-probabilities differ by {row.logprob_difference:.2g}"
            for row in self.rows
            if row.logprob_difference > LOGPROB_TOLERANCE
        ]
        wrong += [f"nothing was fetched from {tier.upper()}" for tier in ("l2", "l3") if not self.hits[tier]]
        if self.damaged_copies == 0:
            wrong.append("no copy was found to damage")
        if self.damaged_copies and not self.refused_copies:
            wrong.append("damaged copies were not refused")
        if self.damaged_copies is None and self.refused_copies:
            wrong.append(f"{self.refused_copies} copies were refused although nobody damaged any")
        return wrong

    def document(self) -> dict[str, Any]:
        """Plain values for JSON; seconds, bytes and tokens."""
        return {
            "ok": not self.problems(),
            "problems": self.problems(),
            "model": self.model,
            "text": self.text_source,
            "context_tokens": self.context_tokens,
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_bytes,
            "tokens_equal": self.tokens_equal,
            "max_logprob_difference": max(row.logprob_difference for row in self.rows),
            "hits": self.hits,
            "speed_up": self.speed_up,
            "refused_copies": self.refused_copies,
            "damaged_copies": self.damaged_copies,
            "pool_restart_s": self.pool_restart_s,
            "agents": [_row_document(row) for row in self.rows],
        }

    def show(self, console: Console) -> None:
        from rich.table import Table

        table = Table(title=f"{self.model}, {self.context_tokens} shared tokens ({self.text_source})")
        for name in ("agent", "reads"):
            table.add_column(name)
        for name in _NUMBERS:
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(*_cells(row))
        console.print(table)
        for problem in self.problems():
            console.print(f"FAILED: {problem}", style="bold red", highlight=False)


def _row_document(row: Row) -> dict[str, Any]:
    return {
        "agent": row.agent,
        "step": row.step,
        "tokens": row.token_count,
        "fetched_tokens": row.fetched_tokens,
        "fetched_bytes": row.fetched_bytes,
        "prefilled_tokens": row.prefilled_tokens,
        "published_blocks": row.published_blocks,
        "first_token_s": row.first_token_s,
        "prefill_first_token_s": row.prefill_first_token_s,
        "speed_up": row.speed_up,
        "tokens_equal": row.tokens_equal,
        "max_logprob_difference": row.logprob_difference,
        "refused_copies": row.refused_copies,
        "text": row.text,
        "trouble": row.trouble,
    }


def _cells(row: Row) -> list[str]:
    return [
        row.agent,
        row.step,
        f"{row.token_count}",
        *(f"{row.fetched_tokens[tier] or '-'}" for tier in ("l1", "l2", "l3")),
        f"{row.fetched_bytes / 1e6:.1f}" if row.fetched_bytes else "-",
        f"{row.prefilled_tokens}",
        f"{row.first_token_s:.2f} s",
        f"{row.prefill_first_token_s:.2f} s",
        "-" if row.speed_up is None else f"{row.speed_up:.1f}x",
        "yes" if row.tokens_equal else "NO",
        f"{row.logprob_difference:.1e}",
        f"{row.refused_copies or '-'}",
    ]
