"""``KeyShelves``: a set of block keys that can be listed in order, page by page, for the cost of the page.

Keys are digests, so their first byte spreads them evenly: a page sorts the few shelves that it needs, not
the whole set.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcomm.block import BlockKey

_SHELVES = 256


class KeyShelves:
    """Keys that are not empty; no order of insertion is remembered."""

    def __init__(self) -> None:
        self._shelves: list[set[BlockKey]] = [set() for _ in range(_SHELVES)]

    def add(self, key: BlockKey) -> None:
        self._shelves[key[0]].add(key)

    def discard(self, key: BlockKey) -> None:
        self._shelves[key[0]].discard(key)

    def after(self, key: bytes) -> Iterator[BlockKey]:
        """The keys behind ``key`` in order; the set must not change meanwhile."""
        first = key[0] if key else 0
        for number in range(first, _SHELVES):
            for each in sorted(self._shelves[number]):
                if each > key:
                    yield each
