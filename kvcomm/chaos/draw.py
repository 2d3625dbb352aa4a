"""``Draw``: the only source of chance in a simulation (SplitMix64 [Steele, Lea, Flood 2014]).

The same seed gives the same numbers in every process, on every platform and under every Python: nothing here
goes through the C library's mathematics or through builtin hashing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1


class Draw:
    """A stream of numbers.  ``fork`` makes an independent one, so that one part drawing more does not change
    what the others draw."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def fork(self, name: str) -> Draw:
        """A stream of its own for ``name``; draws once from this one."""
        state = self.bits()
        for byte in name.encode():
            state = Draw(state ^ byte).bits()
        return Draw(state)

    def unit(self) -> float:
        """In [0, 1)."""
        return (self.bits() >> 11) / (1 << 53)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.unit()

    def between(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``, both included."""
        return low + self.bits() % (high - low + 1)

    def chance(self, probability: float) -> bool:
        """Draws nothing when the answer is certain: a fault that is off does not shift the others."""
        return probability > 0 and (probability >= 1 or self.unit() < probability)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.bits() % len(items)]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different ones, in an order of their own."""
        left = list(items)
        return [left.pop(self.bits() % len(left)) for _ in range(min(count, len(left)))]

    def weighted(self, weights: Sequence[tuple[T, int]]) -> T:
        """One of the items, each as often as its weight says."""
        at = self.bits() % sum(weight for _, weight in weights)
        for item, weight in weights:
            at -= weight
            if at < 0:
                return item
        raise AssertionError("weights are positive")
