"""``Full``: nothing is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.port import Look


@dataclass(frozen=True, slots=True)
class Full:
    """The reference that others are compared with."""

    name: ClassVar[str] = "full"
    needs_scores: ClassVar[bool] = False

    def select(self, look: Look) -> list[SlotRange]:
        return []
