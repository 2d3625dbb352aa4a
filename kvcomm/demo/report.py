"""``Report``: what the demo measured, as a verdict, a JSON document and a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcomm.demo.messages import Row

if TYPE_CHECKING:
    from rich.console import Console

LOGPROB_TOLERANCE = 1e-3
"""Float32 with other shapes of matrix products differs by some 1e-5; a wrong K or V differs by far more."""

_COLUMNS = (
    "agent: reads",
    "tokens",
    "fetched",
    "MB",
    "computed",
    "TTFT",
    "alone",
    "faster",
    "same",
    "|Δlogp|",
)
"""``TTFT``: time to the first token; ``alone``: without sharing; ``same``: both runs wrote the same text."""


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
    transport: str | None = None
    """The only one that was to be used; ``None`` if that was left to the agents."""

    @property
    def tokens_equal(self) -> bool:
        """Whether every reading that shared or was compared gave the text of the one without sharing."""
        return all(row.tokens_equal is not False for row in self.rows)

    @property
    def hits(self) -> dict[str, int]:
        """Tokens fetched, by tier."""
        return {tier: sum(row.fetched_tokens[tier] for row in self.rows) for tier in ("l1", "l2", "l3")}

    @property
    def l2_reads(self) -> dict[str, int]:
        """Blocks that came from the pool, by the transport that brought them."""
        used = {name for row in self.rows for name, count in row.l2_reads.items() if count}
        return {name: sum(row.l2_reads.get(name, 0) for row in self.rows) for name in sorted(used)}

    @property
    def refused_copies(self) -> int:
        return sum(row.refused_copies for row in self.rows)

    @property
    def speed_up(self) -> float | None:
        """Of the time to the first token: the smallest of all readings that fetched."""
        return min((row.speed_up for row in self.rows if row.speed_up is not None), default=None)

    def problems(self) -> list[str]:
        """Why the demonstration failed; empty if it did not."""
        wrong = [
            f"{row.agent} ({row.step}) got another text" for row in self.rows if row.tokens_equal is False
        ]
        wrong += [
            f"{row.agent} ({row.step}): log-probabilities differ by {row.logprob_difference:.2g}"
            for row in self.rows
            if row.logprob_difference is not None and row.logprob_difference > LOGPROB_TOLERANCE
        ]
        wrong += [f"{row.agent} ({row.step}): {row.trouble}" for row in self.rows if row.trouble]
        wrong += [f"nothing was fetched from {tier.upper()}" for tier in ("l2", "l3") if not self.hits[tier]]
        if self.transport is not None:
            wrong += [
                f"{count} blocks came from the pool through {name}, not through {self.transport}"
                for name, count in self.l2_reads.items()
                if name != self.transport
            ]
            if self.transport not in self.l2_reads:
                wrong.append(f"nothing came from the pool through {self.transport}")
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
            "max_logprob_difference": max(row.logprob_difference or 0.0 for row in self.rows),
            "hits": self.hits,
            "transport": self.transport,
            "l2_reads": self.l2_reads,
            "speed_up": self.speed_up,
            "refused_copies": self.refused_copies,
            "damaged_copies": self.damaged_copies,
            "pool_restart_s": self.pool_restart_s,
            "agents": [_row_document(row) for row in self.rows],
        }

    def _remarks(self) -> list[str]:
        reads = ", ".join(f"{count} through {name}" for name, count in self.l2_reads.items()) or "none"
        remarks = [
            f"Blocks read from the pool: {reads}.",
            f"The pool was killed; a new one served after {self.pool_restart_s:.2f} s.",
        ]
        if self.damaged_copies is not None:
            remarks.append(
                f"{self.damaged_copies} stored copies were damaged; readers refused {self.refused_copies}."
            )
        return remarks

    def show(self, console: Console) -> None:
        from rich import box
        from rich.table import Table

        console.print(f"{self.model}; {self.context_tokens} shared tokens from the {self.text_source}")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(_COLUMNS[0], no_wrap=True)
        for name in _COLUMNS[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*_cells(row))
        console.print(table)
        for line in self._remarks():
            console.print(line, highlight=False)
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
        "fetch_s": row.fetch_s,
        "prefill_first_token_s": row.prefill_first_token_s,
        "speed_up": row.speed_up,
        "tokens_equal": row.tokens_equal,
        "max_logprob_difference": row.logprob_difference,
        "refused_copies": row.refused_copies,
        "text": row.text,
        "trouble": row.trouble,
    }


def _cells(row: Row) -> list[str]:
    fetched = [f"{tier.upper()} {count}" for tier, count in row.fetched_tokens.items() if count]
    return [
        f"{row.agent}: {row.step}",
        f"{row.token_count}",
        " ".join(fetched) or "-",
        f"{row.fetched_bytes / 1e6:.1f}" if row.fetched_bytes else "-",
        f"{row.prefilled_tokens}",
        f"{row.first_token_s:.2f} s",
        f"{row.prefill_first_token_s:.2f} s",
        "-" if row.speed_up is None else f"{row.speed_up:.1f}x",
        {True: "yes", False: "NO", None: "-"}[row.tokens_equal],
        "-" if row.logprob_difference is None else f"{row.logprob_difference:.0e}",
    ]
