"""``KeptMap``: the newest ring map of a shard, on its disk.

What a shard has said under a map it may not unsay under an older one: others have compared themselves with it
by that map, or the controllers have gone on because it works by it, and both count on its acknowledging
nothing under an older one any more.  A node that starts may be told an old map, by its own files or by a
controller that is behind.  So the newest is noted, and it is *taken* once it is on the disk.  Only then the
shard tells anybody that it works by it, and lets others compare themselves with it.

It is noted in both databases.  That of the records may be gone after a power cut, if it is not synced
(``fsync``); where all shards lose power, and the controllers their records, nobody would know any more how
far the cluster had come, and it would begin again at an epoch that clients and strong records are ahead of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import RingMap
from l3_shard.desk import Desk
from l3_shard.notes import Notes
from l3_shard.ring import NO_RING, Ring, RingError, decode_map, encode_map
from l3_shard.timers import Timers

NOTE = b"map"
AGAIN_S = 1.0
"""After a disk had no room for it."""


def kept_map(*noted: Mapping[bytes, bytes]) -> RingMap:
    """The newest that an earlier life noted in any of its databases; epoch 0 = none."""
    return max(map(_kept_in, noted), key=lambda each: each.epoch, default=NO_RING)


def _kept_in(notes: Mapping[bytes, bytes]) -> RingMap:
    with suppress(Corrupt, RingError):  # it rotted: others know newer ones
        if NOTE in notes:
            ring_map = decode_map(notes[NOTE])
            Ring.from_map(ring_map)
            return ring_map
    return NO_RING


class KeptMap:
    """See the module.

    Args:
        ring: the newest that the shard works by.
        databases: where it is noted, and what an earlier life noted there; none = nowhere, and every ring is
            taken at once.
    """

    def __init__(
        self,
        ring: Callable[[], Ring],
        databases: Sequence[tuple[Notes, Mapping[bytes, bytes]]],
        desk: Desk,
        timers: Timers,
    ) -> None:
        self._kept = Ring.from_map(kept_map(*(noted for _, noted in databases)))
        self._epochs = {notes: _kept_in(noted).epoch for notes, noted in databases}
        """Of what is noted in each."""
        self._ring, self._desk, self._timers = ring, desk, timers
        self._waiting: list[Callable[[], None]] = []

    @property
    def taken(self) -> Ring:
        """The newest ring that the shard works by, even if it ends now and starts again."""
        return self._kept if self._epochs else self._ring()

    def keep(self) -> None:
        """Note the newest wherever it is not; again after a while if there was no room."""
        ring = self._ring()
        for notes, epoch in self._epochs.items():
            if ring.epoch > epoch:
                notes.save(NOTE, encode_map(ring.to_map()), partial(self._noted, notes, ring))

    def _noted(self, notes: Notes, ring: Ring, durable: bool) -> None:
        if durable:
            self._epochs[notes] = max(self._epochs[notes], ring.epoch)
        elif ring is self._ring():
            self._timers.at(self._desk.now + AGAIN_S, self.keep)
        if ring.epoch > self._kept.epoch and min(self._epochs.values()) >= ring.epoch:
            self._kept = ring
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
