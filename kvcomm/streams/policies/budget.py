"""``Budget``: when a view is too long, and which of its blocks may go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcomm.errors import ConfigError
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.port import Look

FIRST_SLOTS = 4
"""Attention sinks: the first tokens of a text get a large share of all attention, whatever they say."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Cut ``stride`` slots whenever the view is longer than ``window``.

    ::

        0        first slots | protected          candidates            recent        slot_count
        [ kept ... ................. )[ whole blocks that may go )[ full blocks | partial )

    Raises:
        ConfigError: the numbers contradict each other; :meth:`check`: or do not fit the blocks.
    """

    window: int
    """Most slots in view; a view whose oldest cuttable blocks are not full yet is longer for a while."""
    stride: int
    """Slots a cut, in whole blocks."""
    recent: int = 0
    """So many last slots are never cut."""
    first: int = FIRST_SLOTS
    """So many first slots are never cut, nor the rest of their block."""

    def __post_init__(self) -> None:
        if self.window < 1 or self.stride < 1:
            raise ConfigError(
                f"window {self.window}, stride {self.stride}: both are slots, and at least one block"
            )
        if self.window <= self.stride:
            raise ConfigError(
                f"window {self.window} must be larger than stride {self.stride}: a cut would take all that "
                "the window holds; enlarge the window or halve the stride"
            )
        if self.recent < 0 or self.first < 0:
            raise ConfigError("first and recent count slots that are never cut: 0 or more")
        if self.first + self.stride + self.recent > self.window:
            raise ConfigError(
                f"first {self.first}, stride {self.stride} and recent {self.recent} are more than window "
                f"{self.window}: a full window would hold nothing to cut; enlarge it"
            )

    def check(self, block_tokens: int) -> None:
        if self.stride % block_tokens:
            raise ConfigError(
                f"stride {self.stride} is not in whole blocks of {block_tokens} tokens, and only those "
                f"can leave a block table; take {_up(self.stride, block_tokens)}"
            )

    def due(self, look: Look) -> bool:
        low, high = self.candidates(look)
        return look.slot_count > self.window and high - low >= self.stride and self.obstacle(look) is None

    def obstacle(self, look: Look) -> str | None:
        """Why this stream will never be cut, if so: its window is never met, and it runs on full context."""
        if look.protected > self.window:
            return (
                f"{look.protected} slots are protected (the first message, in whole blocks), more than "
                f"window {self.window}: nothing is ever cut; enlarge the window or shorten the first message"
            )
        return None

    def candidates(self, look: Look) -> tuple[int, int]:
        """Slots of the whole, full blocks that may go: start and end."""
        low = max(look.protected, _up(self.first, look.block_tokens))
        high = (look.slot_count - self.recent) // look.block_tokens * look.block_tokens
        return low, max(low, high)

    def lowest(self, look: Look, rank: Callable[[int], float]) -> list[SlotRange]:
        """``stride`` slots of the candidates: the blocks of lowest ``rank`` (given a block's place in the
        table), of equals the older ones."""
        size = look.block_tokens
        low, high = self.candidates(look)
        by_rank = sorted(range(low // size, high // size), key=lambda block: (rank(block), block))
        return block_ranges(by_rank[: self.stride // size], size)


def block_ranges(blocks: Iterable[int], block_tokens: int) -> list[SlotRange]:
    """Slots of blocks of a table, by their places; neighbours in one range."""
    ranges: list[SlotRange] = []
    for block in sorted(blocks):
        start, end = block * block_tokens, (block + 1) * block_tokens
        if ranges and ranges[-1].end == start:
            start = ranges.pop().start
        ranges.append(SlotRange(start, end))
    return ranges


def _up(slots: int, block_tokens: int) -> int:
    return -(-slots // block_tokens) * block_tokens
