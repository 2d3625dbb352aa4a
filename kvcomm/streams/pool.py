"""``BlockPool``: which blocks of an engine's paged K/V memory are free, and who holds the others.

The memory itself belongs to the engine; here are only numbers.  A block is held by every session whose table
names it, by archives, and by transfers under way; at the last release it becomes free and keeps its key, so
that it can be taken up again until somebody else needs the room.  Blocks without content are used first, then
those that have been free longest.

Taking is all or nothing, and nobody waits while holding: who needs ten blocks and finds nine takes none, so
any number of sessions that want more than there is cannot block each other.  Who would rather wait than go
without stands in line (``kvcomm.streams.admission``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

from kvcomm.block import BlockKey
from kvcomm.errors import PoolFull

BlockId = NewType("BlockId", int)
"""Place of a block in the engine's memory."""


class BlockPool:
    """``block_count`` blocks, numbered from 0, all free."""

    def __init__(self, block_count: int) -> None:
        if block_count < 1:
            raise ValueError("a pool has at least one block")
        self._holders = [0] * block_count
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(map(BlockId, range(block_count)))
        """In the order in which they are taken."""
        self._keys: dict[BlockId, BlockKey] = {}
        self._by_key: dict[BlockKey, dict[BlockId, None]] = {}
        """Sessions that computed the same block each have their own copy until one of them lets go."""

    @property
    def block_count(self) -> int:
        return len(self._holders)

    @property
    def free_count(self) -> int:
        """Those included that still have their content."""
        return len(self._free)

    def holder_count(self, block: BlockId) -> int:
        return self._holders[block]

    def take(self, count: int) -> list[BlockId]:
        """So many blocks without a key, held once each.

        Raises:
            PoolFull: there are fewer; nothing was taken.
        """
        if count > len(self._free):
            raise PoolFull(
                f"{count} blocks wanted, {len(self._free)} of {self.block_count} are free: cut a context, "
                "drop an archive, or end a session"
            )
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
            self._forget_key(block)
        return taken

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """One more holder of each; of a free one that still has its content, too."""
        for block in blocks:
            assert self._holders[block] or block in self._keys, f"block {block} holds nothing"
            self._free.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One holder less; the last one makes it free.

        ``blocks`` are in the order of a context, and become free from its end on: a block is of use only to
        who finds those before it, so the head of a prefix outlives its tail.
        """
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is held by nobody"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._keys)

    def name(self, block: BlockId, key: BlockKey) -> None:
        """``block`` is full, and its content is that of ``key``."""
        assert self._holders[block], "who names a block holds it"
        assert self._keys.get(block, key) == key, "a block is written once"
        self._keys[block] = key
        self._by_key.setdefault(key, {})[block] = None

    def find(self, key: BlockKey) -> BlockId | None:
        """A block with this content; take it with :meth:`hold`.  One that is held already, if there is one:
        that costs no free block."""
        same = self._by_key.get(key, {})
        return next((block for block in same if self._holders[block]), next(iter(same), None))

    def key_of(self, block: BlockId) -> BlockKey | None:
        return self._keys.get(block)

    def check(self) -> None:
        """Assert the invariants."""
        for block, count in enumerate(self._holders):
            assert count >= 0
            assert (count == 0) == (block in self._free), f"block {block} has {count} holders"
        named = {block: key for key, blocks in self._by_key.items() for block in blocks}
        assert named == self._keys
        assert all(self._by_key.values()), "no key without a block"

    def _forget_key(self, block: BlockId) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            same = self._by_key[key]
            del same[block]
            if not same:
                del self._by_key[key]
