"""``HeavyHitter``: the blocks go that got least attention so far.

After H2O (Zhang et al., "Heavy-Hitter Oracle", NeurIPS 2023), for a block table: one choice for all layers
and heads, of whole blocks, with a decay, so that what mattered long ago is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvcomm.errors import ConfigError
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.budget import Budget
from kvcomm.streams.policies.port import Look


@dataclass(frozen=True, slots=True)
class HeavyHitter(Budget):
    """Score of a block = attention that it got, ``decay`` times less with every row since.

    The newest blocks had little time to get any: ``recent`` keeps them.
    """

    recent: int = 64
    decay: float = 0.998
    """Half forgotten after 350 rows."""

    name: ClassVar[str] = "heavy_hitter"
    needs_scores: ClassVar[bool] = True
    query_rows: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Budget.__post_init__(self)
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay {self.decay}: above 0, and at most 1, which forgets nothing")

    def scorer(self, block_tokens: int) -> AccumulatedAttention:
        return AccumulatedAttention(block_tokens, self.decay)

    def select(self, look: Look) -> list[SlotRange]:
        return self.lowest(look, look.scores.__getitem__) if self.due(look) else []


class AccumulatedAttention:
    """By block, that is by the row in its first slot: wherever cuts and restores move it."""

    def __init__(self, block_tokens: int, decay: float) -> None:
        self._block_tokens, self._decay = block_tokens, decay
        self._sums: dict[int, float] = {}
        """Blocks out of view keep theirs as it was, and have it when they come back."""

    def observe(self, rows: Sequence[int], mass: Sequence[float], query_rows: int) -> None:
        size, kept = self._block_tokens, self._decay**query_rows
        for start in range(0, len(rows), size):
            first = rows[start]
            self._sums[first] = kept * self._sums.get(first, 0.0) + sum(mass[start : start + size])

    def scores(self, rows: Sequence[int]) -> list[float]:
        size = self._block_tokens
        full = len(rows) // size * size
        return [self._sums.get(rows[start], 0.0) for start in range(0, full, size)]
