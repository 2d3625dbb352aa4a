"""``Round``: one search for the blocks that a shard should have and lacks, and in which order to get them.

Every shard looks after its own: it asks each other shard, page by page, which of its blocks belong here too
(``BlockHoldings``), and takes what it lacks (``BlockGet``).  A shard that came back empty is filled by those
that have the copies, and nobody has to notice that it was away.  What was read lately comes first::

    pass 1  peer b: page, page, ...  peer c: page, ...     only blocks that were used lately
    pass 2  peer b: page, page, ...                        the rest, from those who have more that we lack

A shard holds at most one page of names and one window of copies at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby, islice

from kvcomm.block import BlockKey
from kvcomm.blockstore import ANY_TENANT, BlockStore, Depot
from kvcomm.wire.messages import BlockHeld, BlockHoldings, BlockItem, Holding, Message, Want
from l3_shard.ring import Ring

PAGE_KEYS = 1024
"""Blocks that one question goes through, 2 to 3 ms of the answering shard."""
WINDOW_KEYS = 16
WINDOW_BYTES = 4 << 20
"""Of the copies that are fetched at a time; one larger copy goes alone."""


@dataclass(frozen=True, slots=True)
class AskHoldings:
    """Ask ``node``; answered by :meth:`Round.listed`."""

    node: str
    message: BlockHoldings


@dataclass(frozen=True, slots=True)
class Take:
    """Get these copies from ``node``; answered by :meth:`Round.took`."""

    node: str
    wants: list[Want]


class Round:
    """Ask :meth:`next` what to do until it is ``None``; each order is answered before the next is given.

    Args:
        lacks: of some keys, which this shard has not.
    """

    def __init__(self, node: str, ring: Ring, lacks: Callable[[Sequence[BlockKey]], list[bool]]) -> None:
        self._node, self._ring, self._lacks = node, ring, lacks
        self.failed = False
        """Some peer did not tell, or did not give, all that it has."""
        self._windows: deque[Take] = deque()
        self._more_at: set[str] = set()  # who has blocks that we lack and that were not used lately
        self._legs = self._all_legs() if node in ring else iter(())
        self._leg: tuple[str, bool] | None = next(self._legs, None)
        self._after = b""
        self._full = False

    def next(self) -> AskHoldings | Take | None:
        while self._windows:
            take = self._still_lacking(self._windows.popleft())
            if take.wants:
                return take
        if self._leg is None or self._full:
            return None
        node, _ = self._leg
        return AskHoldings(node, BlockHoldings(self._ring.epoch, self._node, self._after, PAGE_KEYS))

    def listed(self, answer: Message) -> None:
        """What the peer said; anything but ``BlockHeld`` ends its turn."""
        assert self._leg is not None, "nobody was asked"
        node, hot = self._leg
        if not isinstance(answer, BlockHeld):
            self.failed = True
            self._next_leg()
            return
        ours = [item for item in answer.items if self._ours(item.key)]
        wanted = [Want(item.key, item.copy_bytes) for item in ours if item.used or not hot]
        if hot and any(self._lacks([BlockKey(item.key) for item in ours if not item.used])):
            self._more_at.add(node)
        self._windows = deque(Take(node, window) for window in _windows(wanted))
        if answer.resume is None or answer.resume <= self._after:  # a page that leads nowhere ends it too
            self._next_leg()
        else:
            self._after = answer.resume

    def took(self, *, failed: bool = False, full: bool = False) -> None:
        """``full``: there is no more free room here, so there is nothing more to do.  ``failed``: the peer
        did not answer."""
        self.failed = self.failed or failed
        self._full = self._full or full
        if full or failed:
            self._windows.clear()
        if failed and self._leg is not None:
            self._next_leg()

    def _all_legs(self) -> Iterator[tuple[str, bool]]:
        others = [name for name in self._ring.names if name != self._node]
        for name in others:
            yield name, True
        for name in others:
            if name in self._more_at:
                yield name, False

    def _next_leg(self) -> None:
        self._leg, self._after = next(self._legs, None), b""

    def _ours(self, key: bytes) -> bool:
        return len(key) == 32 and self._node in self._ring.block_owners(key)

    def _still_lacking(self, take: Take) -> Take:
        lacks = self._lacks([BlockKey(want.key) for want in take.wants])
        return Take(take.node, [want for want, lacking in zip(take.wants, lacks, strict=True) if lacking])


def held(question: BlockHoldings, ring: Ring, blocks: BlockStore, disk: Depot | None) -> BlockHeld:
    """The answer: what this shard has, in memory or on disk, of the asking shard's blocks."""
    limit = max(1, min(question.limit, PAGE_KEYS))
    above = blocks.listing(question.after, limit, ANY_TENANT)
    below = disk.listing(question.after, limit) if disk is not None else []
    page = list(islice(_distinct(above, below), limit))
    theirs = [item for item in page if question.node in ring.block_owners(item.key)]
    used = blocks.used([BlockKey(item.key) for item in theirs])
    items = [Holding(item.key, item.copy_bytes, hot) for item, hot in zip(theirs, used, strict=True)]
    return BlockHeld(items, page[-1].key if len(page) == limit else None)


def _distinct(*listings: Iterable[BlockItem]) -> Iterator[BlockItem]:
    merged = merge(*listings, key=lambda item: item.key)
    return (next(same) for _, same in groupby(merged, key=lambda item: item.key))


def _windows(wants: Iterable[Want]) -> Iterator[list[Want]]:
    window: list[Want] = []
    window_bytes = 0
    for want in wants:
        if window and (len(window) == WINDOW_KEYS or window_bytes + want.copy_bytes > WINDOW_BYTES):
            yield window
            window, window_bytes = [], 0
        window.append(want)
        window_bytes += want.copy_bytes
    if window:
        yield window
