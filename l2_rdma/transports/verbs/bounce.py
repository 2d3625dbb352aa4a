"""``Arena``: registered memory in small pieces, for operations whose own memory is not registered.

Pieces come in a few sizes, each with a list of free ones; who finds none waits for completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PIECES = ((64, 1024), (4096, 512), (256 << 10, 16))
"""(bytes, how many): words and atomics, index buckets, payloads.  6 MiB."""


class Piece(NamedTuple):
    offset: int
    """In the arena; a multiple of its size."""
    size: int


class Arena:
    """Hands out pieces of a memory of ``arena_bytes``."""

    def __init__(self, pieces: Sequence[tuple[int, int]] = PIECES) -> None:
        self._free: dict[int, list[int]] = {}
        self.arena_bytes = 0
        # The large ones first, so that each stands at a multiple of its size.
        for size, count in sorted(pieces, reverse=True):
            assert self.arena_bytes % size == 0
            self._free[size] = [self.arena_bytes + index * size for index in reversed(range(count))]
            self.arena_bytes += size * count
        self._sizes = sorted(self._free)
        self.piece_bytes_max = self._sizes[-1]

    def take(self, length: int) -> Piece | None:
        """A piece of at least ``length`` bytes, at most ``piece_bytes_max``; ``None`` = all are in use."""
        for size in self._sizes:
            if length <= size:
                free = self._free[size]
                return Piece(free.pop(), size) if free else None
        raise AssertionError(f"no piece holds {length} bytes")

    def give_back(self, piece: Piece) -> None:
        self._free[piece.size].append(piece.offset)

    @property
    def in_use(self) -> int:
        """Bytes of the pieces that are out."""
        return self.arena_bytes - sum(size * len(free) for size, free in self._free.items())
