from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node", "role", "instance", "version", "incarnation", "epoch", "uptime_seconds", "usage", "disk", "mode", "silent")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    instance: str
    version: str
    incarnation: int
    epoch: int
    uptime_seconds: float
    usage: StoreUsage
    disk: DepotUsage
    mode: str
    silent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ..., instance: _Optional[str] = ..., version: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., usage: _Optional[_Union[StoreUsage, _Mapping]] = ..., disk: _Optional[_Union[DepotUsage, _Mapping]] = ..., mode: _Optional[str] = ..., silent: _Optional[_Iterable[str]] = ...) -> None: ...

class StoreUsage(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes", "reserved_bytes", "pinned_bytes", "block_count", "evicted_count", "quarantined_count")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_COUNT_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    pinned_bytes: int
    block_count: int
    evicted_count: int
    quarantined_count: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., evicted_count: _Optional[int] = ..., quarantined_count: _Optional[int] = ...) -> None: ...

class DepotUsage(_message.Message):
    __slots__ = ("state", "capacity_bytes", "used_bytes", "block_count", "waiting_count", "written_count", "read_count", "promoted_count", "evicted_count", "dropped_count", "damaged_count", "error_count", "busy_count")
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    READ_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_COUNT_FIELD_NUMBER: _ClassVar[int]
    BUSY_COUNT_FIELD_NUMBER: _ClassVar[int]
    state: str
    capacity_bytes: int
    used_bytes: int
    block_count: int
    waiting_count: int
    written_count: int
    read_count: int
    promoted_count: int
    evicted_count: int
    dropped_count: int
    damaged_count: int
    error_count: int
    busy_count: int
    def __init__(self, state: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., written_count: _Optional[int] = ..., read_count: _Optional[int] = ..., promoted_count: _Optional[int] = ..., evicted_count: _Optional[int] = ..., dropped_count: _Optional[int] = ..., damaged_count: _Optional[int] = ..., error_count: _Optional[int] = ..., busy_count: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node", "address", "local_address", "control", "rack", "weight")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    local_address: str
    control: str
    rack: str
    weight: int
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., local_address: _Optional[str] = ..., control: _Optional[str] = ..., rack: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class Ring(_message.Message):
    __slots__ = ("epoch", "replicas", "write_quorum", "read_quorum", "block_copies", "shards", "pools", "ranges", "transition")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WRITE_QUORUM_FIELD_NUMBER: _ClassVar[int]
    READ_QUORUM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TRANSITION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    replicas: int
    write_quorum: int
    read_quorum: int
    block_copies: int
    shards: _containers.RepeatedCompositeFieldContainer[Node]
    pools: _containers.RepeatedCompositeFieldContainer[Node]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    transition: Transition
    def __init__(self, epoch: _Optional[int] = ..., replicas: _Optional[int] = ..., write_quorum: _Optional[int] = ..., read_quorum: _Optional[int] = ..., block_copies: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., transition: _Optional[_Union[Transition, _Mapping]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("first", "last", "node")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    node: str
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class Transition(_message.Message):
    __slots__ = ("stage", "shards", "ranges")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    stage: str
    shards: _containers.RepeatedCompositeFieldContainer[Node]
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, stage: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class GetRingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRingRequest(_message.Message):
    __slots__ = ("after_epoch",)
    AFTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    after_epoch: int
    def __init__(self, after_epoch: _Optional[int] = ...) -> None: ...

class SetRingRequest(_message.Message):
    __slots__ = ("ring",)
    RING_FIELD_NUMBER: _ClassVar[int]
    ring: Ring
    def __init__(self, ring: _Optional[_Union[Ring, _Mapping]] = ...) -> None: ...

class SetRingReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: bytes
    limit: int
    def __init__(self, after: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class BlockItem(_message.Message):
    __slots__ = ("key", "copy_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    copy_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., copy_bytes: _Optional[int] = ...) -> None: ...

class ListBlocksReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BlockItem]
    def __init__(self, items: _Optional[_Iterable[_Union[BlockItem, _Mapping]]] = ...) -> None: ...

class GetBlockRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class GetBlockReply(_message.Message):
    __slots__ = ("copy",)
    COPY_FIELD_NUMBER: _ClassVar[int]
    copy: bytes
    def __init__(self, copy: _Optional[bytes] = ...) -> None: ...

class Sibling(_message.Message):
    __slots__ = ("replica", "counter", "hlc", "value")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    HLC_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    counter: int
    hlc: int
    value: bytes
    def __init__(self, replica: _Optional[str] = ..., counter: _Optional[int] = ..., hlc: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("found", "context", "siblings")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    found: bool
    context: _containers.ScalarMap[str, int]
    siblings: _containers.RepeatedCompositeFieldContainer[Sibling]
    def __init__(self, found: bool = ..., context: _Optional[_Mapping[str, int]] = ..., siblings: _Optional[_Iterable[_Union[Sibling, _Mapping]]] = ...) -> None: ...

class GetRecordsRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetRecordsReply(_message.Message):
    __slots__ = ("records", "degraded")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    degraded: bool
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., degraded: bool = ...) -> None: ...

class RecordWrite(_message.Message):
    __slots__ = ("key", "value", "context")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    value: bytes
    context: _containers.ScalarMap[str, int]
    def __init__(self, key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., context: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PutRecordsRequest(_message.Message):
    __slots__ = ("writes",)
    WRITES_FIELD_NUMBER: _ClassVar[int]
    writes: _containers.RepeatedCompositeFieldContainer[RecordWrite]
    def __init__(self, writes: _Optional[_Iterable[_Union[RecordWrite, _Mapping]]] = ...) -> None: ...

class RecordVersion(_message.Message):
    __slots__ = ("replica", "counter", "context", "acks")
    class ContextEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    counter: int
    context: _containers.ScalarMap[str, int]
    acks: int
    def __init__(self, replica: _Optional[str] = ..., counter: _Optional[int] = ..., context: _Optional[_Mapping[str, int]] = ..., acks: _Optional[int] = ...) -> None: ...

class PutRecordsReply(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[RecordVersion]
    def __init__(self, versions: _Optional[_Iterable[_Union[RecordVersion, _Mapping]]] = ...) -> None: ...
