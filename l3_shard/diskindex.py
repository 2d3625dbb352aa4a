"""``DiskIndex``: which blocks a disk tier has, what they take, and which goes next.

Room is counted as the disk counts it, in whole file-system blocks, and is taken before a file is written.
Eviction is SIEVE over the leaves, as in a region (``kvcomm.sieve``): a block that was read since the hand
last met it stays, and a parent outlives its children.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from kvcomm.block import NO_PARENT, BlockKey
from kvcomm.blockstore import ANY_TENANT
from kvcomm.shelves import KeyShelves
from kvcomm.sieve import Sieve
from kvcomm.wire.messages import BlockItem

DISK_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """One file."""

    key: BlockKey
    parent: BlockKey
    tenant: bytes
    copy_bytes: int

    @property
    def room_bytes(self) -> int:
        return room_bytes(self.copy_bytes)


def room_bytes(copy_bytes: int) -> int:
    """What a file of ``copy_bytes`` takes on the disk."""
    return -(-copy_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


class DiskIndex:
    """At most ``capacity_bytes``, room that is promised to writes under way included."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evicted_count = 0
        self._promised_bytes = 0
        self._entries: dict[BlockKey, DiskEntry] = {}
        self._marked: set[BlockKey] = set()
        self._children: dict[BlockKey, int] = {}  # entries by parent, itself here or not
        self._leaves: Sieve[BlockKey] = Sieve()
        self._listed = KeyShelves()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def find(self, key: BlockKey, tenant: bytes) -> DiskEntry | None:
        entry = self._entries.get(key)
        return entry if entry is not None and tenant in (ANY_TENANT, entry.tenant) else None

    def touch(self, key: BlockKey) -> bool:
        """It was read; whether it had been read before, as far as eviction remembers."""
        again = key in self._marked
        if key in self._entries:
            self._marked.add(key)
        return again

    def promise(self, copy_bytes: int, *, evict: bool = True) -> list[DiskEntry] | None:
        """Take room for one more file; the entries that make room for it, which are gone from here.

        ``None``: there is no room, even if all that is here went (or, without ``evict``, as long as it
        stays); nothing was changed.
        """
        wanted = room_bytes(copy_bytes)
        staying_bytes = 0 if evict else self.used_bytes
        if staying_bytes + self._promised_bytes + wanted > self.capacity_bytes:
            return None
        victims: list[DiskEntry] = []
        while self.used_bytes + self._promised_bytes + wanted > self.capacity_bytes:
            victims.append(self._evict())
        self._promised_bytes += wanted
        return victims

    def shrink(self, count_max: int) -> list[DiskEntry]:
        """Evict what is over the capacity (which was larger when the files were written), so many at most."""
        victims: list[DiskEntry] = []
        while len(victims) < count_max and self.used_bytes + self._promised_bytes > self.capacity_bytes:
            victims.append(self._evict())
        return victims

    def kept(self, entry: DiskEntry) -> None:
        """The file for which room was promised is there."""
        self.not_kept(entry.copy_bytes)
        self.add(entry)

    def not_kept(self, copy_bytes: int) -> None:
        """It is not, and will not be."""
        self._promised_bytes -= room_bytes(copy_bytes)
        assert self._promised_bytes >= 0, "more room was given back than was promised"

    def add(self, entry: DiskEntry) -> None:
        """A file that was found; a key that is here already is replaced."""
        self.remove(entry.key)
        self._entries[entry.key] = entry
        self._listed.add(entry.key)
        self.used_bytes += entry.room_bytes
        if not self._children.get(entry.key):
            self._leaves.add(entry.key)
        if entry.parent in (NO_PARENT, entry.key):
            return
        self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
        if self._children[entry.parent] == 1 and entry.parent in self._entries:
            self._leaves.remove(entry.parent)

    def remove(self, key: BlockKey) -> DiskEntry | None:
        """Forget a file; ``None`` if it is not here."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._listed.discard(key)
        self._marked.discard(key)
        self.used_bytes -= entry.room_bytes
        if not self._children.get(key):
            self._leaves.remove(key)
        if entry.parent not in (NO_PARENT, key):
            self._children[entry.parent] -= 1
            if not self._children[entry.parent]:
                del self._children[entry.parent]
                if entry.parent in self._entries:
                    self._leaves.add_at_hand(entry.parent)
        return entry

    def listing(self, after: bytes, limit: int) -> list[BlockItem]:
        """Sorted by key."""
        page = islice(self._listed.after(after), limit)
        return [BlockItem(key, self._entries[key].copy_bytes) for key in page]

    def check(self) -> None:
        """Assert every invariant."""
        assert self.used_bytes == sum(entry.room_bytes for entry in self._entries.values())
        assert self.used_bytes + self._promised_bytes <= self.capacity_bytes
        assert sorted(self._leaves) == sorted(key for key in self._entries if not self._children.get(key))
        assert self._marked <= self._entries.keys()
        assert list(self._listed.after(b"")) == sorted(self._entries)

    def _evict(self) -> DiskEntry:
        # Only a circle of parents, which no honest writer makes, leaves entries without a leaf.
        key = self._leaves.victim(self._take_mark, lambda _: True) or next(iter(self._entries))
        entry = self.remove(key)
        assert entry is not None, "the queue holds what is here"
        self.evicted_count += 1
        return entry

    def _take_mark(self, key: BlockKey) -> bool:
        marked = key in self._marked
        self._marked.discard(key)
        return marked
