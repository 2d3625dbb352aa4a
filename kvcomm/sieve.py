"""``Sieve``: the order in which blocks of one size class are evicted.

SIEVE (Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024): a queue in order of insertion and a *hand* that
walks from the oldest item to the newest.  An item that was referenced since the hand last met it loses its
mark and stays where it is; the first one without a mark goes.  A hit only sets a mark, which a one-sided
reader can do with one store; LRU would need a message to the owner for every hit.

Only **leaves** (blocks that have no child in the region) stand in the queue: a prefix without its head is
worthless, so heads must outlive tails.  A block leaves the queue when its first child is published and comes
back, just behind the hand, when its last child is gone: its children were found cold, so it is the next to be
asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class _Node(Generic[T]):
    __slots__ = ("item", "newer", "older")

    def __init__(self, item: T) -> None:
        self.item = item
        self.newer: _Node[T] | None = None
        self.older: _Node[T] | None = None


class Sieve(Generic[T]):
    """The queue.  All operations take constant time, :meth:`victim` amortised."""

    def __init__(self) -> None:
        self._nodes: dict[T, _Node[T]] = {}
        self._newest: _Node[T] | None = None
        self._oldest: _Node[T] | None = None
        self._hand: _Node[T] | None = None  # the next to be asked; None = start at the oldest

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, item: T) -> bool:
        return item in self._nodes

    def __iter__(self) -> Iterator[T]:
        """From the oldest to the newest."""
        node = self._oldest
        while node is not None:
            yield node.item
            node = node.newer

    def add(self, item: T) -> None:
        """At the newest end."""
        self._link(_Node(item), self._newest)

    def add_at_hand(self, item: T) -> None:
        """Where the hand is: it is asked next."""
        at = self._hand or self._oldest
        node = _Node(item)
        self._link(node, at.older if at is not None else None)
        self._hand = node

    def remove(self, item: T) -> None:
        """``KeyError`` if it is not in the queue."""
        node = self._nodes.pop(item)
        if self._hand is node:
            self._hand = node.newer
        if node.older is not None:
            node.older.newer = node.newer
        else:
            self._oldest = node.newer
        if node.newer is not None:
            node.newer.older = node.older
        else:
            self._newest = node.older

    def victim(self, take_mark: Callable[[T], bool], evictable: Callable[[T], bool]) -> T | None:
        """The next item to evict, still in the queue; ``None`` if two rounds found nobody.

        Args:
            take_mark: whether the item was referenced, clearing the mark.
            evictable: whether it can go at all (not pinned, not leased); one that cannot is passed over, mark
                untouched.
        """
        for _ in range(2 * len(self._nodes)):
            node = self._hand or self._oldest
            assert node is not None
            if evictable(node.item) and not take_mark(node.item):
                self._hand = node
                return node.item
            self._hand = node.newer
        return None

    def _link(self, node: _Node[T], older: _Node[T] | None) -> None:
        assert node.item not in self._nodes
        self._nodes[node.item] = node
        node.older = older
        node.newer = older.newer if older is not None else self._oldest
        if node.newer is not None:
            node.newer.older = node
        else:
            self._newest = node
        if older is not None:
            older.newer = node
        else:
            self._oldest = node
