"""``Lru``: a least-recently-used map bounded by the bytes of what it holds.

The one thing it adds to the textbook is the *run*: the keys of one prefix, head first.  A block is only of
use to a reader who also has every block before it, so a run is touched from its tail to its head.  The head
is then the youngest entry and the tail goes first: what is left of a run is always a prefix of it.

``OrderedDict`` keeps the recency order: its ``move_to_end`` is one C call, a linked list in Python would be
ten times that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from kvcomm.errors import ConfigError

V = TypeVar("V")


class Lru(Generic[V]):
    """Values by key, at most ``capacity_bytes`` of them.  Not thread-safe.

    Every value comes with its weight, an integer >= 1, so the number of entries is bounded too.  A capacity
    of 0 holds nothing.

    Raises:
        ConfigError: the capacity is negative.
    """

    __slots__ = ("_entries", "capacity_bytes", "evicted", "hits", "misses", "refused", "used_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ConfigError(f"an LRU cannot hold {capacity_bytes} bytes; 0 turns it off")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.hits = 0
        """Keys found by :meth:`get` and :meth:`get_run`, since start."""
        self.misses = 0
        """Keys not found by them."""
        self.evicted = 0
        """Entries that went to make room; replaced and discarded ones do not count."""
        self.refused = 0
        """Puts of something heavier than the whole capacity."""
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()  # oldest first

    def get(self, key: bytes) -> V | None:
        """The value, which becomes the youngest; ``None`` = a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def get_run(self, keys: Sequence[bytes]) -> list[V | None]:
        """One value or ``None`` a key; ``keys`` are a run, head first, and what was found of it is touched
        tail first.

        Entries behind a hole are answered as well: the reader may be about to fill the hole.
        """
        entries = self._entries
        found = [entries.get(key) for key in keys]
        hits = 0
        for index in range(len(found) - 1, -1, -1):
            if found[index] is not None:
                entries.move_to_end(keys[index])
                hits += 1
        self.hits += hits
        self.misses += len(found) - hits
        return [None if entry is None else entry[0] for entry in found]

    def touch_run(self, keys: Sequence[bytes]) -> None:
        """Make the run the youngest of all, its head the very youngest; absent keys and the counters are left
        alone.

        To be called when a run has been put block by block as it arrived, which leaves its tail the youngest.
        """
        entries = self._entries
        for key in reversed(keys):
            if key in entries:
                entries.move_to_end(key)

    def put(self, key: bytes, value: V, weight_bytes: int) -> list[V] | None:
        """Store as the youngest, replacing what was there; the values that had to go for it, oldest first.

        ``None`` = heavier than the whole capacity: nothing was stored and nothing went.

        The values are handed back so that the caller decides where they die: the last reference to a pinned
        view runs code.

        Raises:
            ValueError: the weight is not at least 1.
        """
        if weight_bytes < 1:
            raise ValueError(f"a weight is at least 1 byte, got {weight_bytes}")
        if weight_bytes > self.capacity_bytes:
            self.refused += 1
            return None
        replaced = self.discard(key)
        gone = [] if replaced is None else [replaced]
        self.used_bytes += weight_bytes
        while self.used_bytes > self.capacity_bytes:
            _, (value_gone, weight_gone) = self._entries.popitem(last=False)
            self.used_bytes -= weight_gone
            self.evicted += 1
            gone.append(value_gone)
        self._entries[key] = (value, weight_bytes)
        return gone

    def discard(self, key: bytes) -> V | None:
        """Take the entry out, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.used_bytes -= entry[1]
        return entry[0]

    def peek(self, key: bytes) -> V | None:
        """The value; neither touches nor counts."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        """Keys in the order in which they would be evicted."""
        return iter(self._entries)

    def check(self) -> None:
        """Assert the invariants."""
        weights = [weight for _, weight in self._entries.values()]
        assert self.used_bytes == sum(weights)
        assert self.used_bytes <= self.capacity_bytes
        assert all(weight >= 1 for weight in weights)
