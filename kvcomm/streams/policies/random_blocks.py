"""``RandomBlocks``: any blocks go.  What a policy that chooses must beat."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import ClassVar

from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.budget import Budget
from kvcomm.streams.policies.port import Look

_DRAW = struct.Struct("<qQQQ")


@dataclass(frozen=True, slots=True)
class RandomBlocks(Budget):
    """Of each choice of blocks, as likely as any other; the same seed makes the same choices on a stream of
    the same lengths."""

    seed: int = 0

    name: ClassVar[str] = "random"
    needs_scores: ClassVar[bool] = False

    def select(self, look: Look) -> list[SlotRange]:
        if not self.due(look):
            return []

        def draw(block: int) -> int:
            numbers = _DRAW.pack(self.seed, look.next_row, look.slot_count, block)
            return int.from_bytes(hashlib.sha256(numbers).digest()[:8], "little")

        return self.lowest(look, draw)
