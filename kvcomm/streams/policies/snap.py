"""``Snap``: the blocks stay that the last rows attend.

After SnapKV (Li et al., "LLM Knows What You are Looking for Before Generation", NeurIPS 2024), for a block
table: one choice for all layers and heads, of whole blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcomm.errors import ConfigError
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.budget import Budget
from kvcomm.streams.policies.port import Look


@dataclass(frozen=True, slots=True)
class Snap(Budget):
    """Score of a block = its best slot's attention by the ``observed`` last rows, smoothed over ``pool``
    neighbouring slots, so that what stands around a needle stays with it."""

    observed: int = 32
    """These rows are not cut either."""
    pool: int = 5

    name: ClassVar[str] = "snap"
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Budget.__post_init__(self)
        if self.first + self.stride + self.observed > self.window:
            raise ConfigError(
                f"first {self.first}, stride {self.stride} and observed {self.observed} are more than window "
                f"{self.window}: a full window would hold nothing to cut; enlarge it"
            )
        if self.observed < 1 or self.pool < 1 or self.pool % 2 == 0:
            raise ConfigError(
                f"observed {self.observed}, pool {self.pool}: at least one row, and an odd number of slots"
            )

    @property
    def query_rows(self) -> int:
        return self.observed

    def candidates(self, look: Look) -> tuple[int, int]:
        low, high = Budget.candidates(self, look)
        return low, max(
            low, min(high, (look.slot_count - self.observed) // look.block_tokens * look.block_tokens)
        )

    def scorer(self, block_tokens: int) -> LastAttention:
        return LastAttention(block_tokens, self.observed, self.pool)

    def select(self, look: Look) -> list[SlotRange]:
        return self.lowest(look, look.scores.__getitem__) if self.due(look) else []


class LastAttention:
    """Of the last forward passes that have ``observed`` rows together.

    A block that was out of view in some of them is judged by the others, or one that was brought back would
    be the first to go again.
    """

    def __init__(self, block_tokens: int, observed: int, pool: int) -> None:
        self._block_tokens, self._observed, self._pool = block_tokens, observed, pool
        self._passes: deque[tuple[int, dict[int, Sequence[float]]]] = deque()
        """(rows, by the row in a block's first slot: attention by slot), oldest first."""
        self._rows = 0

    def observe(self, rows: Sequence[int], mass: Sequence[float], query_rows: int) -> None:
        size = self._block_tokens
        blocks = {rows[start]: mass[start : start + size] for start in range(0, len(rows), size)}
        self._passes.append((query_rows, blocks))
        self._rows += query_rows
        while self._rows - self._passes[0][0] >= self._observed:
            self._rows -= self._passes.popleft()[0]

    def scores(self, rows: Sequence[int]) -> list[float]:
        size = self._block_tokens
        full = len(rows) // size * size
        slots: list[float] = []
        for start in range(0, full, size):
            seen = [(count, blocks[rows[start]]) for count, blocks in self._passes if rows[start] in blocks]
            share = self._rows / max(1, sum(count for count, _ in seen))
            slots += [share * sum(part[at] for _, part in seen if at < len(part)) for at in range(size)]
        smooth = _smoothed(slots, self._pool)
        return [max(smooth[start : start + size]) for start in range(0, full, size)]


def _smoothed(values: Sequence[float], pool: int) -> list[float]:
    """Mean over ``pool`` values around each; at the ends, what is missing counts 0."""
    half = pool // 2
    return [sum(values[max(0, at - half) : at + half + 1]) / pool for at in range(len(values))]
