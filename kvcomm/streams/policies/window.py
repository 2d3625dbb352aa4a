"""``WindowFifo``: the oldest slots behind the protected prefix go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.budget import Budget
from kvcomm.streams.policies.port import Look


@dataclass(frozen=True, slots=True)
class WindowFifo(Budget):
    """``stride`` slots whenever the view is longer than ``window``, as soon as the last one is in a full
    block.  Asked after every forward pass; at admission for a stream that stopped before its cut."""

    name: ClassVar[str] = "window"
    needs_scores: ClassVar[bool] = False

    def select(self, look: Look) -> list[SlotRange]:
        low, _ = self.candidates(look)
        return [SlotRange(low, low + self.stride)] if self.due(look) else []
