"""Between the control wire's protobuf messages and the words that the rest of the house uses.

Pure.  What comes in is checked here, before a role sees it; :class:`RequestError` is the caller's mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal, cast

from kvcomm.block import BlockKey, Incarnation
from kvcomm.blockstore import DepotState, DepotUsage, StoreUsage
from kvcomm.errors import TooLarge
from kvcomm.wire import control_pb2 as pb
from kvcomm.wire.messages import (
    KEYS_MAX,
    VALUE_BYTES_MAX,
    BlockItem,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordWrite,
    RingMap,
    RingNode,
    RingRange,
    RingTransition,
    Sibling,
)

KEY_BYTES = 32
LIST_LIMIT_DEFAULT = 1000


class RequestError(ValueError):
    """A request that could not be answered by any node in any state."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a node says of itself."""

    node: str
    role: str
    """``pool``, ``shard`` or ``controller``."""
    instance: str
    version: str
    """Of the software."""
    incarnation: Incarnation
    epoch: int
    """Of the ring; 0 = none yet."""
    uptime_s: float
    usage: StoreUsage | None
    disk: DepotUsage | None = None
    """Of a shard with a disk tier."""
    mode: str = ""
    """Of a shard: ``whole``, ``majority`` or ``minority``, by which other shards answer it."""
    silent: tuple[str, ...] = ()
    """Shards that do not answer it."""


# -- status --------------------------------------------------------------------------------------------------


def status_to_pb(status: NodeStatus) -> pb.StatusReply:
    return pb.StatusReply(
        node=status.node,
        role=status.role,
        instance=status.instance,
        version=status.version,
        incarnation=status.incarnation,
        epoch=status.epoch,
        uptime_seconds=status.uptime_s,
        usage=_usage_to_pb(status.usage) if status.usage else None,
        disk=pb.DepotUsage(**asdict(status.disk)) if status.disk else None,
        mode=status.mode,
        silent=status.silent,
    )


def status_from_pb(reply: pb.StatusReply) -> NodeStatus:
    return NodeStatus(
        node=reply.node,
        role=reply.role,
        instance=reply.instance,
        version=reply.version,
        incarnation=Incarnation(reply.incarnation),
        epoch=reply.epoch,
        uptime_s=reply.uptime_seconds,
        usage=_usage_from_pb(reply.usage) if reply.HasField("usage") else None,
        disk=_disk_from_pb(reply.disk) if reply.HasField("disk") else None,
        mode=reply.mode,
        silent=tuple(reply.silent),
    )


def _usage_to_pb(usage: StoreUsage) -> pb.StoreUsage:
    return pb.StoreUsage(
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        reserved_bytes=usage.reserved_bytes,
        pinned_bytes=usage.pinned_bytes,
        block_count=usage.block_count,
        evicted_count=usage.evicted_count,
        quarantined_count=usage.quarantined_count,
    )


def _usage_from_pb(usage: pb.StoreUsage) -> StoreUsage:
    return StoreUsage(
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        reserved_bytes=usage.reserved_bytes,
        pinned_bytes=usage.pinned_bytes,
        block_count=usage.block_count,
        evicted_count=usage.evicted_count,
        quarantined_count=usage.quarantined_count,
    )


def _disk_from_pb(disk: pb.DepotUsage) -> DepotUsage:
    counts = {each.name: getattr(disk, each.name) for each in fields(DepotUsage) if each.name != "state"}
    return DepotUsage(state=cast("DepotState", disk.state), **counts)


# -- ring ----------------------------------------------------------------------------------------------------


def ring_to_pb(ring: RingMap | None) -> pb.Ring:
    """``None`` is epoch 0."""
    if ring is None:
        return pb.Ring()
    return pb.Ring(
        epoch=ring.epoch,
        replicas=ring.replicas,
        write_quorum=ring.write_quorum,
        read_quorum=ring.read_quorum,
        block_copies=ring.block_copies,
        shards=[_node_to_pb(node) for node in ring.shards],
        pools=[_node_to_pb(node) for node in ring.pools],
        ranges=[_range_to_pb(each) for each in ring.ranges],
        transition=_transition_to_pb(ring.transition) if ring.transition else None,
    )


def ring_from_pb(ring: pb.Ring) -> RingMap | None:
    """Raises :class:`RequestError` for a ring that cannot be worked by."""
    if not ring.epoch:
        return None
    if not 1 <= ring.write_quorum <= ring.replicas or not 1 <= ring.read_quorum <= ring.replicas:
        raise RequestError(
            f"ring epoch {ring.epoch}: quorums {ring.write_quorum} and {ring.read_quorum} "
            f"do not fit {ring.replicas} replicas"
        )
    placements = [ring.shards]
    if ring.HasField("transition"):
        placements.append(ring.transition.shards)
        if ring.transition.stage not in ("copy", "serve"):
            raise RequestError(f"ring epoch {ring.epoch}: no stage {ring.transition.stage!r}")
    for shards in placements:
        names = [node.node for node in (*shards, *ring.pools)]
        if not all(names) or len(set(names)) != len(names):
            raise RequestError(f"ring epoch {ring.epoch}: nodes need different, non-empty names")
    return RingMap(
        epoch=ring.epoch,
        replicas=ring.replicas,
        write_quorum=ring.write_quorum,
        read_quorum=ring.read_quorum,
        block_copies=ring.block_copies,
        shards=[_node_from_pb(node) for node in ring.shards],
        pools=[_node_from_pb(node) for node in ring.pools],
        ranges=[_range_from_pb(each) for each in ring.ranges],
        transition=_transition_from_pb(ring.transition) if ring.HasField("transition") else None,
    )


def _node_to_pb(node: RingNode) -> pb.Node:
    return pb.Node(
        node=node.node,
        address=node.address,
        local_address=node.local_address,
        control=node.control,
        rack=node.rack,
        weight=node.weight,
    )


def _node_from_pb(node: pb.Node) -> RingNode:
    return RingNode(
        node=node.node,
        address=node.address,
        local_address=node.local_address,
        control=node.control,
        rack=node.rack,
        weight=node.weight,
    )


def _range_to_pb(given: RingRange) -> pb.Range:
    return pb.Range(first=given.first, last=given.last, node=given.node)


def _range_from_pb(given: pb.Range) -> RingRange:
    return RingRange(given.first, given.last, given.node)


def _transition_to_pb(moving: RingTransition) -> pb.Transition:
    return pb.Transition(
        stage=moving.stage,
        shards=[_node_to_pb(node) for node in moving.shards],
        ranges=[_range_to_pb(each) for each in moving.ranges],
    )


def _transition_from_pb(moving: pb.Transition) -> RingTransition:
    return RingTransition(
        cast('Literal["copy", "serve"]', moving.stage),
        [_node_from_pb(node) for node in moving.shards],
        [_range_from_pb(each) for each in moving.ranges],
    )


# -- blocks --------------------------------------------------------------------------------------------------


def block_key(key: bytes) -> BlockKey:
    if len(key) != KEY_BYTES:
        raise RequestError(f"a block key is {KEY_BYTES} bytes, got {len(key)}")
    return BlockKey(key)


def list_range(request: pb.ListBlocksRequest) -> tuple[bytes, int]:
    """(key to continue after or empty, most items)."""
    if request.after:
        block_key(request.after)
    if request.limit > KEYS_MAX:
        raise RequestError(f"limit {request.limit} is over {KEYS_MAX}; ask for pages")
    return request.after, request.limit or LIST_LIMIT_DEFAULT


def items_to_pb(items: Sequence[BlockItem]) -> pb.ListBlocksReply:
    return pb.ListBlocksReply(
        items=[pb.BlockItem(key=item.key, copy_bytes=item.copy_bytes) for item in items]
    )


def items_from_pb(reply: pb.ListBlocksReply) -> list[BlockItem]:
    return [BlockItem(item.key, item.copy_bytes) for item in reply.items]


# -- records -------------------------------------------------------------------------------------------------


def record_keys(keys: Sequence[bytes]) -> list[bytes]:
    if len(keys) > KEYS_MAX:
        raise RequestError(f"{len(keys)} keys in one request, at most {KEYS_MAX}")
    if not all(keys):
        raise RequestError("a record's key is not empty")
    return list(keys)


def records_to_pb(states: RecordStates) -> pb.GetRecordsReply:
    return pb.GetRecordsReply(
        records=[_record_to_pb(state) for state in states.states], degraded=states.degraded
    )


def records_from_pb(reply: pb.GetRecordsReply) -> RecordStates:
    return RecordStates([_record_from_pb(record) for record in reply.records], reply.degraded)


def _record_to_pb(state: RecordState | None) -> pb.Record:
    if state is None:
        return pb.Record(found=False)
    return pb.Record(
        found=True,
        context=state.context,
        siblings=[
            pb.Sibling(replica=each.replica, counter=each.counter, hlc=each.hlc, value=each.value)
            for each in state.siblings
            if each.value is not None  # a delete concurrent with a write: the context covers it
        ],
    )


def _record_from_pb(record: pb.Record) -> RecordState | None:
    if not record.found:
        return None
    siblings = [Sibling(each.replica, each.counter, each.hlc, each.value) for each in record.siblings]
    return RecordState(dict(record.context), siblings)


def writes_to_pb(writes: Sequence[RecordWrite]) -> pb.PutRecordsRequest:
    return pb.PutRecordsRequest(
        writes=[pb.RecordWrite(key=write.key, value=write.value, context=write.context) for write in writes]
    )


def writes_from_pb(request: pb.PutRecordsRequest) -> list[RecordWrite]:
    """Raises :class:`RequestError`, or ``TooLarge`` for a value over its limit."""
    record_keys([write.key for write in request.writes])
    for write in request.writes:
        if len(write.value) > VALUE_BYTES_MAX:
            raise TooLarge(f"a record's value is at most {VALUE_BYTES_MAX} bytes, got {len(write.value)}")
    return [
        RecordWrite(write.key, write.value if write.HasField("value") else None, dict(write.context))
        for write in request.writes
    ]


def versions_to_pb(versions: Sequence[RecordVersion]) -> pb.PutRecordsReply:
    return pb.PutRecordsReply(
        versions=[
            pb.RecordVersion(replica=each.replica, counter=each.counter, context=each.context, acks=each.acks)
            for each in versions
        ]
    )


def versions_from_pb(reply: pb.PutRecordsReply) -> list[RecordVersion]:
    return [
        RecordVersion(each.replica, each.counter, dict(each.context), each.acks) for each in reply.versions
    ]
