"""``KeptMap``: the newest ring map of a shard, on its disk.

What a shard has said under a map it may not unsay under an older one: others have compared themselves with it
by that map, or the controllers have gone on because it works by it, and both count on its acknowledging
nothing under an older one any more.  A node that starts may be told an old map, by its own files or by a
controller that is behind.  So the newest is noted, and it is *taken* once it is on the disk.  Only then the
shard tells anybody that it works by it, and lets others compare themselves with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import RingMap
from l3_shard.desk import Desk
from l3_shard.notes import Notes
from l3_shard.ring import NO_RING, Ring, RingError, decode_map, encode_map
from l3_shard.timers import Timers

NOTE = b"map"
AGAIN_S = 1.0
"""After a disk had no room for it."""


def kept_map(notes: Mapping[bytes, bytes]) -> RingMap:
    """The newest that an earlier life took; epoch 0 = none."""
    with suppress(Corrupt, RingError):  # it rotted: others know newer ones
        if NOTE in notes:
            ring_map = decode_map(notes[NOTE])
            Ring.from_map(ring_map)
            return ring_map
    return NO_RING


class KeptMap:
    """See the module.

    Args:
        kept: what an earlier life took.
        ring: the newest that the shard works by.
        notes: where it is noted; ``None`` = nowhere, and every ring is taken at once.
    """

    def __init__(
        self, kept: RingMap, ring: Callable[[], Ring], notes: Notes | None, desk: Desk, timers: Timers
    ) -> None:
        self._kept = Ring.from_map(kept)
        self._ring, self._notes, self._desk, self._timers = ring, notes, desk, timers
        self._waiting: list[Callable[[], None]] = []

    @property
    def taken(self) -> Ring:
        """The newest ring that the shard works by, even if it ends now and starts again."""
        return self._ring() if self._notes is None else self._kept

    def keep(self) -> None:
        """Note the newest; again after a while if there was no room."""
        ring = self._ring()
        if self._notes is not None and ring.epoch > self._kept.epoch:
            self._notes.save(NOTE, encode_map(ring.to_map()), lambda durable: self._noted(ring, durable))

    def _noted(self, ring: Ring, durable: bool) -> None:
        if durable:
            self._kept = max(self._kept, ring, key=lambda each: each.epoch)
        elif ring is self._ring():
            self._timers.at(self._desk.now + AGAIN_S, self.keep)
        if self._kept.epoch == self._ring().epoch:
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()

    def once_taken(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the newest ring is taken."""
        if self.taken.epoch == self._ring().epoch:
            then()
        else:
            self._waiting.append(then)
