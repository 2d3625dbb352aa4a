"""``RemoteKeys``: what L3 is known to hold, so that a request for a key it cannot hold is never sent.

Off until it is fed, and usable only while the feed is *authoritative*: whoever makes a key visible anywhere
has told this filter first.  A client's own observations are no such feed (another agent publishes without
asking), so a client leaves this off; a node that sees every write of a shard can turn it on::

    off --opened()--> listing --synced(feed)--> authoritative
     ^                   |                           |
     +------ lost() -----+-----------lost()----------+   a gap in the feed, a new epoch, a network split

Between ``opened`` and ``synced`` live notices and the inventory's pages arrive in any order; both are
``heard``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

from l1.bloom import LayeredBloom

Feed = NewType("Feed", int)
"""One uninterrupted life of a feed."""


class RemoteKeys:
    """Answers "maybe" for everything unless an authoritative feed says otherwise.  Not thread-safe.

    Args as of :class:`l1.bloom.LayeredBloom`.
    """

    __slots__ = ("_authoritative", "_capacity", "_feed", "_filter", "_rate", "skipped")

    def __init__(self, capacity: int = 1 << 16, rate: float = 0.001) -> None:
        self._capacity = capacity
        self._rate = rate
        self._feed = Feed(0)
        self._filter: LayeredBloom | None = None
        self._authoritative = False
        self.skipped = 0
        """Keys called absent, since start: requests saved."""

    @property
    def authoritative(self) -> bool:
        return self._authoritative

    @property
    def key_count(self) -> int:
        return 0 if self._filter is None else self._filter.key_count

    def opened(self) -> Feed:
        """A feed begins: forget the former one.  From now on every key that becomes visible must be ``heard``
        first."""
        self._filter = LayeredBloom(self._capacity, self._rate)
        self._authoritative = False
        self._feed = Feed(self._feed + 1)
        return self._feed

    def heard(self, keys: Iterable[bytes]) -> None:
        """These keys are, or are about to be, in L3."""
        if self._filter is not None:
            for key in keys:
                self._filter.add(key)

    def synced(self, feed: Feed) -> bool:
        """The whole inventory as of ``opened`` has been heard; False = that feed is gone, start over."""
        if feed != self._feed or self._filter is None:
            return False
        self._authoritative = True
        return True

    def lost(self) -> None:
        """The feed may have missed a key."""
        self._filter = None
        self._authoritative = False

    def maybe(self, key: bytes) -> bool:
        """False = L3 certainly does not hold the key."""
        if not self._authoritative or self._filter is None or key in self._filter:
            return True
        self.skipped += 1
        return False
