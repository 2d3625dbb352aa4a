"""``Roster``: what a controller knows of the nodes: the newest heartbeat of each, and whether it lives."""

from __future__ import annotations

from collections.abc import Iterable

from controller.liveness import Liveness, Patience
from kvcomm.wire.messages import Heartbeat, RingMap, RingNode, ShardMove

NO_MOVE = ShardMove()


class Roster:
    """Leaders and standbys keep one alike; times are monotonic seconds."""

    def __init__(self, patience: Patience) -> None:
        self.liveness = Liveness(patience)
        self.ring: RingMap | None = None
        """The newest map that this controller has seen with anybody: all of these were noted before."""
        self.heard_epoch = 0
        """The newest epoch that anybody said to work by."""
        self._beats: dict[str, Heartbeat] = {}
        self._taken: dict[str, tuple[int, int]] = {}
        """Node -> (life, epoch) that it answered an offer with, where that is news."""

    def heard(self, beat: Heartbeat, now: float) -> bool:
        """``False``: it is older than what is known."""
        if not self.liveness.heard(beat, now):
            return False
        self._beats[beat.node] = beat
        self.heard_epoch = max(self.heard_epoch, beat.epoch)
        if beat.ring is not None:
            self.saw(beat.ring)
        return True

    def saw(self, ring: RingMap) -> None:
        """A map that has been handed out."""
        self.heard_epoch = max(self.heard_epoch, ring.epoch)
        if self.ring is None or ring.epoch > self.ring.epoch:
            self.ring = ring

    def took(self, node: str, incarnation: int, epoch: int) -> None:
        """``node`` answered an offer, in this life of it."""
        self._taken[node] = (incarnation, epoch)

    def forget(self, node: str) -> None:
        self.liveness.forget(node)
        self._beats.pop(node, None)
        self._taken.pop(node, None)

    def beat(self, node: str) -> Heartbeat | None:
        """Its newest."""
        return self._beats.get(node)

    def epoch(self, node: str) -> int:
        """Of the map that it works by, in its present life; 0 = none, or never heard."""
        beat = self._beats.get(node)
        if beat is None:
            return 0
        life, epoch = self._taken.get(node, (0, 0))
        return max(beat.epoch, epoch) if life == beat.incarnation else beat.epoch

    def told_epoch(self, node: str) -> int:
        """Of its newest heartbeat; 0 = never heard."""
        beat = self._beats.get(node)
        return 0 if beat is None else beat.epoch

    def move(self, node: str) -> ShardMove:
        beat = self._beats.get(node)
        return NO_MOVE if beat is None or beat.move is None else beat.move

    def of_role(self, role: str) -> list[str]:
        """Nodes that have been heard, sorted."""
        return sorted(name for name, beat in self._beats.items() if beat.role == role)

    def at(self, nodes: Iterable[str]) -> dict[str, RingNode]:
        """Where each of these is, if it has been heard."""
        beats = [self._beats[node] for node in nodes if node in self._beats]
        return {
            beat.node: RingNode(beat.node, beat.address, beat.local_address, beat.control, beat.rack, 1)
            for beat in beats
        }

    @property
    def names(self) -> list[str]:
        return self.liveness.names
