"""``Getting``: whether a shard has got the blocks that a transition of the ring gives it.

A block is a cache: a move does not hang on it.  Besides having got all that the others have, a shard is
*ready* when there is no room for more, or when the time for blocks is up.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kvcomm.wire.messages import ShardMove
from l3_shard.ring import Ring


@dataclass(frozen=True, slots=True)
class BlockMove:
    """How far a shard is with its blocks; see ``ShardMove``."""

    ready_epoch: int = 0
    clean_epoch: int = 0
    blocks_left: int = 0
    """To be got or dropped, about."""
    bytes_left: int = 0


def together(records: ShardMove, blocks: BlockMove) -> ShardMove:
    """What a shard says of a move: it is as far as the slower of both."""
    return ShardMove(
        min(records.ready_epoch, blocks.ready_epoch),
        records.strong_epoch,
        min(records.clean_epoch, blocks.clean_epoch),
        records.records_left,
        records.blocks_left + blocks.blocks_left,
        records.bytes_left + blocks.bytes_left,
    )


class Getting:
    """Of one shard.  ``limit_s``: how long a transition waits for blocks; ``now`` is monotonic seconds."""

    def __init__(self, node: str, ring: Ring, limit_s: float, now: float) -> None:
        self.full = False
        """There is no room for more."""
        self.told: set[str] = set()
        """Who told and gave all that it has, under this placement."""
        self._node, self._limit_s = node, limit_s
        self._ring, self._began_at = ring, now

    def placed(self, ring: Ring, now: float) -> bool:
        """The ring in force; whether it is another one.  What was got stays got in the other stages of a
        transition, and at its end."""
        was, self._ring = self._ring, ring
        over = was.moving and not ring.moving and was.serving.block_placement == ring.block_placement
        if was.block_placement != ring.block_placement and not over:
            self.full, self._began_at = False, now
            self.told.clear()
        return was.epoch != ring.epoch

    @property
    def complete(self) -> bool:
        """Whether everybody told and gave, as far as there is room."""
        return self.full or self._others <= self.told

    def took(self, ring: Ring, told: Set[str], *, full: bool) -> None:
        """A round by ``ring`` is over: it counts if that places blocks as the ring in force does."""
        if ring.block_placement == self._ring.block_placement:
            self.told |= told
            self.full = full

    def ready(self, now: float) -> bool:
        """For the transition, if there is one."""
        late = now >= self._began_at + self._limit_s
        return self.complete or late or not self._ring.gains_blocks(self._node)

    @property
    def _others(self) -> set[str]:
        return set(self._ring.names) - {self._node}
