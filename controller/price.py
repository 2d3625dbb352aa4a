"""What a change of the placement costs: which share of the keys gets another owner, and how long that takes.

Shares are exact: both placements are laid over each other, and the stretches of the circle that change hands
are measured.  Records and bytes are that share of what the shards say they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvcomm.wire.messages import PlannedMove, RingMap, RingNode, RingRange, RingTransition, ShardLoad
from l3_shard.ring import Ring

CIRCLE = 2**64


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the cluster holds: each record and each block once."""

    records: float = 0.0
    record_bytes: float = 0.0
    blocks: float = 0.0
    block_bytes: float = 0.0

    @staticmethod
    def of(loads: Mapping[str, ShardLoad], ring: RingMap) -> Holdings:
        """From what each shard of the map counts; those that are not heard hold as much as the others do."""
        known = [loads[node.node] for node in ring.shards if node.node in loads]
        if not known:
            return Holdings()
        all_heard = len(ring.shards) / len(known)
        record_copies = min(ring.replicas, len(ring.shards)) / all_heard
        block_copies = min(ring.block_copies, len(ring.shards)) / all_heard
        return Holdings(
            sum(load.record_count for load in known) / record_copies,
            sum(load.record_bytes for load in known) / record_copies,
            sum(load.block_count for load in known) / block_copies,
            sum(load.block_bytes + load.disk_bytes for load in known) / block_copies,
        )


def planned_moves(
    ring: RingMap,
    shards: Sequence[RingNode],
    ranges: Sequence[RingRange],
    holdings: Holdings,
    rate_bytes_s: float,
) -> list[PlannedMove]:
    """What each shard is to get, largest first; ``rate_bytes_s`` is what one shard may take in a second.

    Shards get theirs at the same time, so the whole takes as long as the longest of these.
    """
    target = replace(ring, transition=RingTransition("copy", list(shards), list(ranges)))
    moving = Ring.from_map(target)
    records, blocks = gained(moving, ring.replicas), gained(moving, ring.block_copies)
    names = {node.node for node in ring.shards}
    moves = []
    for node in sorted({*records, *blocks}):
        record_share, block_share = records.get(node, 0.0), blocks.get(node, 0.0)
        record_bytes = record_share * holdings.record_bytes
        block_bytes = block_share * holdings.block_bytes
        moves.append(
            PlannedMove(
                what=f"{node} gets keys" if node in names else f"{node} joins",
                share=record_share,
                records=round(record_share * holdings.records),
                record_bytes=round(record_bytes),
                blocks=round(block_share * holdings.blocks),
                block_bytes=round(block_bytes),
                seconds=(record_bytes + block_bytes) / rate_bytes_s if rate_bytes_s else 0.0,
            )
        )
    return sorted(moves, key=lambda move: (-move.share, move.what))


def gained(moving: Ring, count: int) -> dict[str, float]:
    """Shard -> the share of all keys that it is to be one of the first ``count`` owners of, and is not."""
    points: dict[str, int] = {}
    for (before, after), length in moving.flows(count).items():
        for node in after:
            if node not in before:
                points[node] = points.get(node, 0) + length
    return {node: length / CIRCLE for node, length in points.items()}
