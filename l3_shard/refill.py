"""``Round``: one search for the blocks that a shard should have and lacks, and in which order to get them.

Every shard looks after its own: it asks each other shard, page by page, which of its blocks belong here too
(``BlockHoldings``), and takes what it lacks (``BlockGet``).  A shard that came back empty is filled by those
that have the copies, and nobody has to notice that it was away.  What was read lately comes first::

    pass 1  peer b: page, page, ...  peer c: page, ...     only blocks that were used lately
    pass 2  peer b: page, page, ...                        the rest, from those who have more that we lack

A shard holds at most one page of names and one window of copies at a time.

What belongs here is what the ring's *keepers* say: while keys are on their way from one placement to another,
the shards of the one to come get their blocks like one that came back empty, from whoever has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import merge
from itertools import groupby, islice

from kvcomm.block import BlockKey
from kvcomm.blockstore import ANY_TENANT, BlockStore, Depot
from kvcomm.wire.messages import BlockHeld, BlockHoldings, BlockItem, Holding, Message, Want
from l3_shard.ring import Ring

PAGE_KEYS = 1024
"""Blocks that one question goes through, up to 3 ms of the answering shard."""
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
    """Ask :meth:`next` what to do until it is ``None``; it says the same until that was answered, or
    :meth:`renew` changed by which epoch it is asked.

    Args:
        lacks: of some keys, which this shard has not.
        told: peers that need not be asked: they told and gave all that they have already.
    """

    def __init__(
        self,
        node: str,
        ring: Ring,
        lacks: Callable[[Sequence[BlockKey]], list[bool]],
        told: Set[str] = frozenset(),
    ) -> None:
        self._node, self._ring, self._lacks = node, ring, lacks
        self.full = False
        """There is no room for more."""
        self.owing: set[str] = set()
        """Peers that did not tell, or did not give, all that they have."""
        self._others = [name for name in ring.names if name not in told and name != node]
        self._windows: deque[Take] = deque()
        self._giving = ""  # whose they are
        self._more_at: set[str] = set()  # who has blocks that we lack and that were not used lately
        self._lacking = Progress(len(self._others))
        self._legs = self._all_legs() if node in ring else iter(())
        self._leg: tuple[str, bool] | None = next(self._legs, None)
        self._after = b""

    @property
    def failed(self) -> bool:
        """Whether somebody has to be asked again."""
        return bool(self.owing)

    @property
    def told(self) -> set[str]:
        """Who told and gave all that it has, once there is nothing :meth:`next`."""
        return set() if self.full else set(self._others) - self.owing

    def left(self) -> tuple[int, int]:
        """Blocks and bytes that are still to be got, about."""
        return self._lacking.left()

    def renew(self, ring: Ring) -> None:
        """Go on under another epoch, by which the blocks belong to the same shards."""
        self._ring = ring

    def next(self) -> AskHoldings | Take | None:
        while self._windows:
            take = self._still_lacking(self._windows[0])
            if take.wants:
                return take
            self._windows.popleft()
        if self._leg is None or self.full:
            return None
        node, _ = self._leg
        return AskHoldings(node, BlockHoldings(self._ring.epoch, self._node, self._after, PAGE_KEYS))

    def listed(self, answer: Message) -> None:
        """What the peer said; anything but ``BlockHeld`` ends its turn."""
        assert self._leg is not None, "nobody was asked"
        node, hot = self._leg
        if not isinstance(answer, BlockHeld):
            self.owing.add(node)
            self._end_leg()
            return
        ours = [item for item in answer.items if self._ours(item.key)]
        if hot:
            ours = self._note_lacking(node, ours)
        wanted = [Want(item.key, item.copy_bytes) for item in ours if item.used or not hot]
        self._giving, self._windows = node, deque(Take(node, window) for window in _windows(wanted))
        if answer.resume is None or answer.resume <= self._after:  # a page that leads nowhere ends it too
            self._end_leg()
        else:
            self._after = answer.resume
            if hot:
                self._lacking.at(self._after)

    def took(
        self,
        *,
        count: int = 0,
        copy_bytes: int = 0,
        failed: bool = False,
        full: bool = False,
        short: bool = False,
    ) -> None:
        """So much of the take has arrived.  ``full``: there is no more free room here, so nothing is left to
        do.  ``failed``: the peer did not answer; ``short``: it did not give all that it was asked for."""
        self._windows.popleft()
        self._lacking.got(count, copy_bytes)
        if short:
            self.owing.add(self._giving)
        self.full = self.full or full
        if full or failed:
            self._windows.clear()
        if failed:
            self.owing.add(self._giving)
            if self._leg is not None and self._leg[0] == self._giving:
                self._end_leg()

    def _note_lacking(self, node: str, ours: Sequence[Holding]) -> list[Holding]:
        """Those of them that are not here."""
        lacks = self._lacks([BlockKey(item.key) for item in ours])
        lacking = [item for item, lacked in zip(ours, lacks, strict=True) if lacked]
        if any(not item.used for item in lacking):
            self._more_at.add(node)
        self._lacking.found(len(lacking), sum(item.copy_bytes for item in lacking))
        return lacking

    def _all_legs(self) -> Iterator[tuple[str, bool]]:
        for name in self._others:
            yield name, True
        for name in self._others:
            if name in self._more_at and name not in self.owing:
                yield name, False

    def _end_leg(self) -> None:
        assert self._leg is not None, "somebody was asked"
        if self._leg[1]:
            self._lacking.leg_over()
        self._leg, self._after = next(self._legs, None), b""

    def _ours(self, key: bytes) -> bool:
        return len(key) == 32 and self._node in self._ring.block_keepers(key)

    def _still_lacking(self, take: Take) -> Take:
        lacks = self._lacks([BlockKey(want.key) for want in take.wants])
        return Take(take.node, [want for want, lacking in zip(take.wants, lacks, strict=True) if lacking])


class Progress:
    """How much of a walk over block keys is left, by what has been found so far: keys are digests, so those
    of any shard lie evenly between the first and the last possible one."""

    def __init__(self, leg_count: int) -> None:
        self._leg_count = leg_count
        self._legs_over = 0
        self._share = 0.0  # of this leg
        self._found_count = self._found_bytes = 0
        self._got_count = self._got_bytes = 0

    def found(self, count: int, copy_bytes: int) -> None:
        self._found_count += count
        self._found_bytes += copy_bytes

    def got(self, count: int, copy_bytes: int) -> None:
        """They are not left any more."""
        self._got_count += count
        self._got_bytes += copy_bytes

    def at(self, after: bytes) -> None:
        """This leg has come so far."""
        self._share = int.from_bytes(after[:8].ljust(8, b"\0"), "big") / 2.0**64

    def leg_over(self) -> None:
        self._legs_over += 1
        self._share = 0.0

    def left(self) -> tuple[int, int]:
        """Blocks and bytes, about; nothing before something was found."""
        walked = (self._legs_over + self._share) / max(1, self._leg_count)
        if walked <= 0.0:
            return self._found_count - self._got_count, self._found_bytes - self._got_bytes
        scale = 1.0 / min(1.0, walked)
        return (
            max(0, round(self._found_count * scale) - self._got_count),
            max(0, round(self._found_bytes * scale) - self._got_bytes),
        )


def held(question: BlockHoldings, ring: Ring, blocks: BlockStore, disk: Depot | None) -> BlockHeld:
    """The answer: what this shard has, in memory or on disk, of the asking shard's blocks."""
    limit = max(1, min(question.limit, PAGE_KEYS))
    above = blocks.listing(question.after, limit, ANY_TENANT)
    below = disk.listing(question.after, limit) if disk is not None else []
    page = list(islice(distinct(above, below), limit)) if below else above
    theirs = [item for item in page if question.node in ring.block_keepers(item.key)]
    used = blocks.used([BlockKey(item.key) for item in theirs])
    items = [Holding(item.key, item.copy_bytes, hot) for item, hot in zip(theirs, used, strict=True)]
    return BlockHeld(items, page[-1].key if len(page) == limit else None)


def distinct(*listings: Iterable[BlockItem]) -> Iterator[BlockItem]:
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
