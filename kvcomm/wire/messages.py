"""Every message of the data wire.

A message is a small msgspec struct; block bytes travel beside it as the frame's *payload* and are received
straight into their destination.  Requests that depend on placement carry the ring ``epoch`` they were
computed from.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

PROTOCOL_VERSION = 1
KEYS_MAX = 65_536
"""Most keys one request may name; one that names more is refused by name."""
ITEMS_MAX = 4 * KEYS_MAX
"""A longer list ends the connection: that is noticed before its items are made, which can take 30 times the
memory of the bytes that announce them."""
SUSPECTS_MAX = 64
"""Most keys of one ``BlockSuspect``."""
VALUE_BYTES_MAX = 1 << 20
"""Largest record value."""
FENCE_MAX = (1 << 63) - 1
"""Largest epoch of a lease."""


T = TypeVar("T")
Many = Annotated[list[T], msgspec.Meta(max_length=ITEMS_MAX)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the class name is the tag."""

    idempotent: ClassVar[bool] = True
    """Whether sending the request twice has the effect of sending it once."""


# -- session
# --------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of every connection."""

    protocol: int
    token: str
    """Credential, ``tenant:hex``; the tenant is what the server makes of it, not what the text claims."""
    caller: int
    """Incarnation of the calling process."""
    key_vector: bytes
    """Key of a fixed test block: two sides that hash differently must not talk."""


class Welcome(Message, frozen=True):
    node: str
    role: str
    """``pool`` or ``shard``."""
    instance: str
    incarnation: int
    tenant: bytes
    """The caller's tenant digest, 16 bytes."""
    region: str
    """Path of the shared-memory region that holds this node's blocks for the tenant, or empty."""
    epoch: int


class Goodbye(Message, frozen=True):
    """The server stops, says so under number 0, and looks at nothing more: whatever it has not answered by
    now it has not done."""


class Ping(Message, frozen=True):
    pass


class Pong(Message, frozen=True):
    pass


class Failure(Message, frozen=True):
    """An operating failure as data; see ``kvcomm.errors``."""

    code: str
    text: str
    detail: bytes = b""


# -- faults on order
# --------------------------------------------------------------------------------------------------------


class DropPeer(msgspec.Struct, frozen=True, array_like=True):
    """One peer, and what passes no more between it and the process that is told."""

    addresses: Many[str]
    """Of its data wire: this process calls it there."""
    caller: int
    """Its incarnation: it calls this process under that; 0 = it is no node."""
    mute: bool
    """What this process says to it is held back."""
    deaf: bool
    """What it says to this process is not looked at."""


class DropOrder(Message, frozen=True):
    """Test: from now on behave as if the network to these peers were cut, and to no others; ``Done``.
    Refused unless the node was started with ``network.drop_table``; see ``kvcomm.rpc.droptable``."""

    peers: Many[DropPeer]


# -- blocks: one-sided writes through a reservation
# ----------------------------------------------------------------


class Want(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    copy_bytes: int
    """Header plus payload."""


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Answer to one want.  ``status``: ``granted``, ``present`` (first copy won), ``pending`` (another
    writer holds the
    reservation), ``full`` (nothing could be evicted), ``too_large``, ``refused`` (no valid key or size)."""

    status: str
    token: int = 0
    offset: int = 0
    """Of the copy, from the start of the region."""
    generation: int = 0


class BlockReserve(Message, frozen=True):
    wants: Many[Want]


class BlockReserved(Message, frozen=True):
    grants: Many[Grant]


class BlockPublish(Message, frozen=True):
    tokens: Many[int]


class BlockPublished(Message, frozen=True):
    statuses: Many[str]
    """``published``, ``expired`` (the reservation ran out; the block is not visible), ``corrupt`` (the
    header in the slot
    does not name the reserved key)."""


class BlockAbort(Message, frozen=True):
    tokens: Many[int]


class Done(Message, frozen=True):
    pass


class PinOpen(Message, frozen=True):
    """Asks for hazard slots that belong to this connection; they are dropped when it closes."""

    slots: int


class PinRange(Message, frozen=True):
    first: int
    count: int
    budget_bytes: int


# -- blocks: over the wire
# -----------------------------------------------------------------------------------------


class BlockLookup(Message, frozen=True):
    epoch: int
    keys: Many[bytes]


class BlockPresence(Message, frozen=True):
    present: bytes
    """One byte a key, 1 = present."""


class BlockFilterGet(Message, frozen=True):
    """Which of the caller's blocks may you have?"""

    epoch: int


class BlockFilter(Message, frozen=True):
    epoch: int
    """Of the ring that the shard works by."""
    layers: Many[bytes]
    """Of ``l3_shard.bloom``: a block in none of them was not here when this was sent.  Empty = nothing can be
    said."""


class BlockGet(Message, frozen=True):
    epoch: int
    keys: Many[bytes]


class BlockCopies(Message, frozen=True):
    """The payload is the present copies, one after the other."""

    copy_bytes: Many[int]
    """One a key; 0 = miss."""


class BlockPut(Message, frozen=True):
    """The payload is the copies, one after the other.  First copy wins."""

    epoch: int
    wants: Many[Want]


class BlockStored(Message, frozen=True):
    statuses: Many[str]
    """``stored``, ``present``, ``pending``, ``full``, ``too_large``, ``corrupt``."""


class BlockSuspect(Message, frozen=True):
    """The caller got copies that failed verification; at most :data:`SUSPECTS_MAX` keys.

    Answered ``Done`` when the server has verified its own copies and hidden those that are damaged: a sound
    copy that broke on the way stays.
    """

    keys: Many[bytes]


class BlockList(Message, frozen=True):
    after: bytes
    limit: int


class BlockItem(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    copy_bytes: int


class BlockListed(Message, frozen=True):
    items: Many[BlockItem]


class BlockHoldings(Message, frozen=True):
    """Shard to shard: which of your blocks behind ``after`` do I own, too?  Goes through at most ``limit``
    of them."""

    epoch: int
    node: str
    """Who asks."""
    after: bytes
    limit: int


class Holding(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    copy_bytes: int
    used: bool
    """Read lately, as far as eviction knows."""


class BlockHeld(Message, frozen=True):
    items: Many[Holding]
    """Sorted by key."""
    resume: bytes | None
    """Where to go on (``after``); ``None`` = that was all."""


# -- records
# -------------------------------------------------------------------------------------------------------

Dots = Annotated[dict[str, int], msgspec.Meta(max_length=ITEMS_MAX)]
"""A version vector on the wire: replica incarnation id -> counter."""


class Sibling(msgspec.Struct, frozen=True, array_like=True):
    replica: str
    counter: int
    hlc: int
    """Hybrid logical time of the write, packed (see ``kvcomm.clock``)."""
    value: bytes | None
    """``None`` only inside replication: a delete."""


class RecordState(msgspec.Struct, frozen=True, array_like=True):
    """One record's whole replicated state: what was ever seen, and the values not yet overwritten."""

    context: Dots
    siblings: Many[Sibling]


class RecordGet(Message, frozen=True):
    epoch: int
    keys: Many[bytes]
    least: Many[Dots] = []
    """One a key, or none at all: what the answer must have seen, else it is ``degraded``."""


class RecordStates(Message, frozen=True):
    states: Many[RecordState | None]
    degraded: bool = False
    """Fewer replicas answered than the read quorum."""
    hot: Many[int] = []
    """Indices of records that so many ask for that the caller may keep the answer for a moment; see
    ``kvcomm.hotcopies``."""


class RecordWrite(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    value: bytes | None
    """``None`` deletes."""
    context: Dots
    """What the caller had read; the write replaces exactly what this covers, and ``own``."""
    own: tuple[str, int] | None = None
    """Dot of the caller's last write of the record, where no context can cover it (see ``RecordVersion``)."""
    delta: bytes | None = None
    """Of a record that is resolved (``kvcomm.resolvers``): the change, instead of a value."""


class RecordPut(Message, frozen=True):
    idempotent: ClassVar[bool] = False

    epoch: int
    writes: Many[RecordWrite]


class RecordVersion(msgspec.Struct, frozen=True, array_like=True):
    replica: str
    counter: int
    context: Dots
    """Context after the write: hand it to the next put."""
    acks: int
    own: bool = False
    """The context cannot cover the write without hiding what its author has not seen; the next put replaces
    it by naming its dot."""


class RecordVersions(Message, frozen=True):
    versions: Many[RecordVersion]


class RecordReplicate(Message, frozen=True):
    """Replica to replica: merge these states.  Idempotent and commutative."""

    epoch: int
    keys: Many[bytes]
    states: Many[RecordState]


class RecordFetch(Message, frozen=True):
    """Replica to replica: your local states, no quorum."""

    epoch: int
    keys: Many[bytes]
    compares: bool = False
    """Not for a reader: the answer is ``degraded`` only where the shard's own disk has lost something, not
    where it has yet to be given records that are being moved to it."""


class RecordForget(Message, frozen=True):
    """Replica to replica: every replica has these tombstones, and they are old: remove each record whose
    state is still exactly this one."""

    epoch: int
    keys: Many[bytes]
    states: Many[RecordState]


class TreeGet(Message, frozen=True):
    """Replica to replica: the digests below some inner nodes of your Merkle tree over the records that both
    of us keep (see ``l3_shard.merkle``)."""

    epoch: int
    node: str
    """Who asks."""
    depth: int
    indices: Many[int]


class TreeDigests(Message, frozen=True):
    digests: Many[int]
    """``FAN_OUT`` a node asked for, one after the other."""
    degraded: bool = False
    """The answering shard has a new store or damaged records, and may lack what it has acknowledged."""


class LeafGet(Message, frozen=True):
    """Replica to replica: which records do you have in these leaves of that tree?"""

    epoch: int
    node: str
    leaves: Many[int]


class LeafRecords(Message, frozen=True):
    """All records of the first ``leaf_count`` leaves that were asked for: at least one, the rest did not
    fit."""

    leaf_count: int
    keys: Many[bytes]
    digests: Many[int]


class RecordScan(Message, frozen=True):
    prefix: bytes
    after: bytes
    limit: int
    epoch: int = 0
    """0: of whichever ring; else an older one is refused: the caller would ask too few shards."""


class RecordKeys(Message, frozen=True):
    keys: Many[bytes]


# -- ring
# ----------------------------------------------------------------------------------------------------------


class RingNode(msgspec.Struct, frozen=True, array_like=True):
    node: str
    address: str
    """``tcp://host:port`` of the data wire."""
    local_address: str
    """``unix:///path`` of the data wire, for callers on the same host."""
    control: str
    """``host:port`` of the control wire."""
    rack: str
    weight: int


class RingRange(msgspec.Struct, frozen=True, array_like=True):
    """Keys that were given to one shard by name: it is their first owner, whatever the circle says."""

    first: Annotated[int, msgspec.Meta(ge=0)]
    """Points of the circle (``l3_shard.ring.point_of``), 64-bit."""
    last: Annotated[int, msgspec.Meta(ge=0)]
    """Included; not below ``first``."""
    node: str


class RingTransition(msgspec.Struct, frozen=True, array_like=True):
    """Where the keys are being moved to; see ``l3_shard.ring`` for what each stage means."""

    stage: Literal["copy", "serve"]
    shards: Many[RingNode]
    """All shards of the placement to come."""
    ranges: Many[RingRange]


class RingMap(Message, frozen=True):
    """One epoch of the cluster: who is in the ring, and the rack pools beside it."""

    epoch: int
    replicas: int
    write_quorum: int
    read_quorum: int
    block_copies: int
    shards: Many[RingNode]
    pools: Many[RingNode]
    ranges: Many[RingRange] = []
    """Ordered, without overlaps."""
    transition: RingTransition | None = None


class RingGet(Message, frozen=True):
    pass


class RingOffer(Message, frozen=True):
    """A controller hands a shard a map, answered by :class:`RingTaken`; only the cluster's own nodes may."""

    ring: RingMap


class RingTaken(Message, frozen=True):
    epoch: int
    """That the shard works by now: the offered one, or a newer one."""


# -- the controllers
# ------------------------------------------------------------------------------------------------------


class ShardLoad(msgspec.Struct, frozen=True, array_like=True):
    """What a node did since its last heartbeat, and what it holds.  Rates are averages over that time."""

    ops_s: float = 0.0
    """Requests of clients a second."""
    hit_share: float = 0.0
    """Of the blocks that were asked for, in [0, 1]."""
    p99_s: float = 0.0
    """Time from a request's arrival to its answer."""
    record_count: int = 0
    record_bytes: int = 0
    block_count: int = 0
    block_bytes: int = 0
    disk_bytes: int = 0
    capacity_bytes: int = 0
    """Of memory for blocks."""


class ShardMove(msgspec.Struct, frozen=True, array_like=True):
    """How far a shard is with a transition, and with what follows it; epochs of ring maps."""

    ready_epoch: int = 0
    """It has everything that it gains by this map: each old group's writes, from enough of its members, after
    they had heard of the map; and the blocks that it could get."""
    strong_epoch: int = 0
    """Its strong records are settled by the map of this epoch, or one that places them alike."""
    clean_epoch: int = 0
    """It keeps nothing any more that it does not keep by this map, in any of its stores."""
    records_left: int = 0
    """To be got or dropped, about."""
    blocks_left: int = 0
    bytes_left: int = 0


class SplitReport(msgspec.Struct, frozen=True, array_like=True):
    """What became of the last split that a shard was in; times are seconds after its end was noticed."""

    lasted_s: float
    hints_drained: int
    records_compared: int
    """In which a neighbour and we differed."""
    merged: int
    """Records whose writes of both sides were joined by their resolver, or replaced one another."""
    siblings_kept: int
    """Records that are shown with the values of both sides until somebody resolves them."""
    equal_after_s: float
    """All neighbours have been compared and were equal; -1 = not yet."""


class Heartbeat(Message, frozen=True):
    """Every node tells every controller who it is and how it is, every ``cluster.heartbeat``; answered by
    :class:`HeartbeatAnswer`."""

    node: str
    role: str
    """``pool``, ``shard``, ``controller`` or ``launcher``."""
    rack: str
    incarnation: int
    number: int
    """Counts up in each life; an older one that comes late is ignored."""
    address: str
    local_address: str
    control: str
    epoch: int
    """Of the ring that it works by; 0 = none yet."""
    late_s: float = 0.0
    """By how much its own beat was late: it was paused, or has too little processor time.  It distrusts what
    it says of others in ``silent``."""
    silent: Many[str] = []
    """Nodes that it asked and that do not answer it at present."""
    load: ShardLoad | None = None
    move: ShardMove | None = None
    split: SplitReport | None = None
    ring: RingMap | None = None
    """That it works by, when the controller asked for it."""
    running: Many[str] = []
    """Of a launcher: nodes whose processes it keeps."""


class NodePlan(msgspec.Struct, frozen=True, array_like=True):
    """A node that a launcher is to keep running."""

    node: str
    role: str
    rack: str
    weight: int = 1


class HeartbeatAnswer(Message, frozen=True):
    leader: str
    """Node name of the leader that this controller knows of; "" = none at present."""
    epoch: int
    """Of the newest map that it knows."""
    ring: RingMap | None = None
    """That map, when the node's is older."""
    wants_ring: bool = False
    """The next heartbeat should carry the node's map: the controllers have lost theirs."""
    plan: list[NodePlan] | None = None
    """For a launcher, from the leader only: all that it is to run; it stops what is not in it."""
    suspects: Many[str] = []
    """Nodes that the leader does not count on at present."""


class ScaleOrder(Message, frozen=True):
    """Operator: run so many shards.  Every order is answered by :class:`OrderAnswer`, or by a failure
    ``not_leader`` whose detail is the leader's node name."""

    shards: int
    dry_run: bool = False


class DrainOrder(Message, frozen=True):
    """Operator: move everything away from ``node``, then stop it."""

    node: str
    dry_run: bool = False


class MoveOrder(Message, frozen=True):
    """Operator: make ``node`` the first owner of the keys with these points."""

    first: int
    last: int
    node: str
    dry_run: bool = False


class RebalanceOrder(Message, frozen=True):
    """Operator: let the load policy make its moves."""

    policy: str
    dry_run: bool = False


class CancelOrder(Message, frozen=True):
    """Operator: take back the operation under way, as far as it can be."""

    operation: int


class PlannedMove(msgspec.Struct, frozen=True, array_like=True):
    """One step of what an order would do or does."""

    what: str
    """For a person, such as ``shard-3 joins`` or ``0x40..0x7f to shard-1``."""
    share: float
    """Of all keys that get another owner, in [0, 1]."""
    records: int
    """About."""
    record_bytes: int
    blocks: int
    block_bytes: int
    seconds: float
    """At the throughput cap."""


class OrderAnswer(Message, frozen=True):
    operation: int
    """Its number; 0 = it was a dry run, or there is nothing to do."""
    moves: Many[PlannedMove]


class ClusterGet(Message, frozen=True):
    """Everything that a controller knows, answered by :class:`ClusterView`; any controller answers."""


class NodeView(msgspec.Struct, frozen=True, array_like=True):
    node: str
    role: str
    rack: str
    state: str
    """``alive``, ``suspect``, ``dead``, ``unknown`` (has not been heard in this controller's life)."""
    silent_s: float
    """Since its last heartbeat; -1 = none yet."""
    epoch: int
    incarnation: int
    silent_to: Many[str] = []
    """Nodes that say it does not answer them."""
    in_ring: bool = False
    load: ShardLoad | None = None
    move: ShardMove | None = None
    split: SplitReport | None = None
    address: str = ""
    control: str = ""


class OperationView(msgspec.Struct, frozen=True, array_like=True):
    """The operation under way, or the last ones."""

    operation: int
    what: str
    step: str
    """``planned``, ``copying``, ``verifying``, ``serving``, ``purging``, ``done``, ``cancelled``,
    ``rolled back``, ``failed``."""
    done_share: float
    """Of its records and bytes, in [0, 1]."""
    eta_s: float
    """-1 = not known."""
    moves: Many[PlannedMove] = []
    trouble: str = ""
    """Why it does not go on at present, or did not."""


class ClusterView(Message, frozen=True):
    controller: str
    """Who answers."""
    leader: str
    term: int
    """Epoch of the leader's lease."""
    mode: str
    """``whole``, ``partitioned`` (some nodes that should be there are not heard) or ``leaderless``."""
    ring: RingMap | None
    nodes: Many[NodeView]
    operations: Many[OperationView]
    """Newest first."""


# -- hot keys
# ------------------------------------------------------------------------------------------------------------

HOT_KEYS_MAX = 1_024
"""Most keys of one list of a report or order about hot keys."""
TRAFFIC_AGENTS_MAX = 256
TRAFFIC_PUBLISHERS_MAX = 64


class KeyHeat(msgspec.Struct, frozen=True, array_like=True):
    """How often one key was asked for; see ``kvcomm.sketch.Counted``."""

    key: bytes
    count: float
    error: float = 0.0


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that an agent got from the cache, by who had published them."""

    publisher: int
    """Incarnation that the blocks' headers name."""
    blocks: int
    near_bytes: int
    """Of payload, from the pools of its rack."""
    far_bytes: int
    """From the shards."""


class AgentTraffic(msgspec.Struct, frozen=True, array_like=True):
    """What one agent's process fetched of others' blocks since its last report."""

    agent: int
    """Its incarnation."""
    rack: str
    """Where it runs; empty = it does not say."""
    fetched: Many[Fetched]
    """The heaviest, at most :data:`TRAFFIC_PUBLISHERS_MAX`."""
    name: str = ""
    """For a person."""


class HotReport(Message, frozen=True):
    """What was asked for most since the last report: of a client to a shard, and of a shard, which has added
    up those of its clients, to the controllers.  Answered ``Done``."""

    idempotent: ClassVar[bool] = False

    lasted_s: float
    """Since the last one."""
    blocks: Many[KeyHeat]
    """Blocks fetched, from whichever tier; at most :data:`HOT_KEYS_MAX`, as all lists of keys here."""
    records: Many[KeyHeat]
    """Eventual records read, from copies too: names from a client, tenant digest and name from a shard."""
    served: Many[KeyHeat] = []
    """Of a shard: records that it was asked for itself."""
    traffic: Many[AgentTraffic] = []


class HotRecords(Message, frozen=True):
    """The leading controller to every shard: answers about these records may be kept for a moment by whoever
    gets them.  Replaces the last list; answered ``Done``."""

    keys: Many[bytes]
    """Tenant digest and name."""
    ttl_s: float
    """The list is void so long after it came."""


class WarmOrder(Message, frozen=True):
    """The leading controller to a pool: many ask for these blocks, have a copy of each.  Answered ``Done`` at
    once."""

    keys: Many[bytes]
    """Hottest first."""
    rate_bytes: int
    """A second, at most."""


class HotGet(Message, frozen=True):
    """Operator to the leading controller: what is hot?  Answered by :class:`HotView`."""


class HotKey(msgspec.Struct, frozen=True, array_like=True):
    """One key that is hot."""

    key: bytes
    """Of a block, or tenant digest and name of a record."""
    rate_s: float
    """Reads a second, of all clients."""
    for_s: float
    """Since it became hot."""


class HotView(Message, frozen=True):
    controller: str
    """Who answers; what one knows that does not lead is old."""
    blocks: Many[HotKey]
    """Hottest first."""
    records: Many[HotKey]


# -- where agents should live
# ------------------------------------------------------------------------------------------------------------


RACKS_MAX = 4_096


class AffinityGet(Message, frozen=True):
    """Which agents should live in which rack?  Answered :class:`AffinityView` by any controller, which may
    take seconds."""

    rooms: Annotated[dict[str, int], msgspec.Meta(max_length=ITEMS_MAX)]
    """Agents that a rack takes; others take an equal share."""
    horizon_s: float
    move_bytes: float
    """Price of moving one agent."""


class AgentPlace(msgspec.Struct, frozen=True, array_like=True):
    """See ``controller.affinity.Residence``."""

    agent: int
    name: str
    rack: str
    better_rack: str
    bytes_s: float
    gain_bytes_s: float


class AffinityView(Message, frozen=True):
    """See ``controller.affinity.Advice``."""

    agents: Many[AgentPlace]
    bytes_s: float
    share_before: float
    share_after: float
    unplaced_bytes_s: float
    reason: str


# -- strong records
# ------------------------------------------------------------------------------------------------------


Entries = Annotated[dict[str, int], msgspec.Meta(max_length=ITEMS_MAX)]
"""Shard -> how often it has entered the acceptors with an empty state."""


class StrongRegister(msgspec.Struct, frozen=True, array_like=True):
    """What a strong record holds."""

    versions: Many[bytes]
    """One for each of its last rounds of changes, oldest first, bounded; the last one is the record's
    version.  Empty = never changed, or deleted and removed since."""
    value: bytes | None
    """``None`` = absent or deleted."""
    fence: int = 0
    """The largest lease epoch under which it was changed; a change under a smaller one is refused."""

    @property
    def version(self) -> bytes:
        return self.versions[-1] if self.versions else b""


class StrongState(msgspec.Struct, frozen=True, array_like=True):
    """One acceptor's state of one record; ballots are the bytes of ``l3_shard.ballot``, empty = none yet."""

    promised: bytes
    accepted: bytes
    register: StrongRegister
    """What was accepted under ``accepted``."""
    voted: bool
    """Whether this acceptor accepted it itself; False = it was told after it had lost its state."""


class StrongOrder(msgspec.Struct, frozen=True, array_like=True):
    """One change of one record."""

    key: bytes
    op: str
    """``put``, ``cas`` (only if ``expected`` is the version) or ``delete``."""
    expected: bytes = b""
    """Of ``cas``; empty = there must be no value."""
    value: bytes | None = None
    """``None`` in a ``cas`` deletes."""
    fence: int = 0
    """Epoch of the lease that the change is made under; 0 = none."""


class StrongOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of one change or read."""

    code: str
    """Empty = done; else an error's code: ``conflict`` (not done, and ``version`` and ``value`` are what the
    record had instead), ``fenced`` (not done, told likewise), ``unavailable`` (not done),
    ``outcome_unknown``, ``refused`` (not done)."""
    version: bytes
    value: bytes | None
    text: str = ""
    fence: int = 0
    """The record's, where its version is told."""


class StrongRead(Message, frozen=True):
    epoch: int
    keys: Many[bytes]


class StrongChange(Message, frozen=True):
    idempotent: ClassVar[bool] = False

    epoch: int
    changes: Many[StrongOrder]


class StrongOutcomes(Message, frozen=True):
    """One a key or change, in their order."""

    outcomes: Many[StrongOutcome]


class StrongPrepare(Message, frozen=True):
    """Shard to shard: promise this ballot.  Idempotent: a ballot belongs to one proposer and one round."""

    epoch: int
    key: bytes
    ballot: bytes
    """Empty = promise nothing, only tell."""
    maps: Many[int] = []
    """Epochs of the asker's configuration; a vote is given only by an acceptor that has the same one."""


class StrongPromised(Message, frozen=True):
    granted: bool
    state: StrongState
    """After the promise; of a refusal, its ``promised`` is the ballot that stood in the way."""
    entry: int
    """How often the acceptor has entered the group with an empty state, its first time included."""
    entries: Entries
    """Entries of other acceptors that this one knows of."""
    floor: bytes = b""
    """No version at or below it can be told from one that was never there: records were removed up to it."""


class StrongAccept(Message, frozen=True):
    """Shard to shard: accept under this ballot.  Idempotent: one register a ballot."""

    epoch: int
    key: bytes
    ballot: bytes
    register: StrongRegister
    following: bytes
    """Ballot to promise at once for the proposer's next change, or empty."""
    maps: Many[int] = []
    """As in a prepare."""


class StrongAccepted(Message, frozen=True):
    granted: bool
    promised: bytes
    entry: int
    entries: Entries


class StrongEnter(Message, frozen=True):
    """Shard to shard: I have no state; note my entry, then tell me what you have of the records I own."""

    epoch: int
    node: str
    entry: int
    """0 = note nothing and list nothing, only tell which entries you know of."""
    after: bytes
    keys: Many[bytes] | None = None
    """Not a page of all, only these: the asker's copies are damaged."""


class StrongListed(Message, frozen=True):
    entries: Entries
    """Entries that the answering shard has noted, its own included."""
    settled: RingMap | None
    """The settled map of the answering shard's configuration; ``None`` = it has no state to speak of either,
    and its answer counts for nothing."""
    keys: Many[bytes]
    states: Many[StrongState]
    resume: bytes | None
    """Where to go on (``after``); ``None`` = that was all."""
    pending: Many[RingMap] = []
    """The maps that are being settled, in order."""
    floor: bytes = b""
    """Of removed records."""
    origin: Many[int] = []
    """As in ``StrongSettle``."""
    fresh: bool = False
    """The answering shard does not vote yet, and never did."""


class StrongSettle(Message, frozen=True):
    """Shard to shard: this is my configuration; take it up, durably, then tell me yours."""

    epoch: int
    settled: RingMap
    """Its owners decided everything that was decided before the pending maps."""
    pending: Many[RingMap]
    """Maps whose owners every quorum needs too, until the last of them is settled."""
    floor: bytes
    origin: Many[int] = []
    """Epochs of the configuration under which the settled map was settled; empty: the cluster began with it,
    or nobody knows any more."""
    confirmed: Many[bytes] = []
    """Records that the sender has confirmed under this very configuration: their other owners need not."""


class StrongSettling(Message, frozen=True):
    """After it has taken up what it was told."""

    settled: RingMap
    pending: Many[RingMap]
    floor: bytes
    confirmed: Many[int]
    """Epochs of the configuration under which it has confirmed all its records, if it has."""
    entries: Entries
    origin: Many[int] = []
    """As in ``StrongSettle``."""


class StrongRemove(Message, frozen=True):
    """Shard to shard: every owner has these tombstones; forget yours, if they are still what you have."""

    epoch: int
    maps: Many[int]
    """As in a prepare."""
    keys: Many[bytes]
    accepted: Many[bytes]
    """Ballot of the tombstone, one a key."""
    floor: bytes
    """At or above everything that any owner has promised for them: what the acceptor promises for every
    record that it does not have."""


class RecordFate(msgspec.Struct, frozen=True, array_like=True):
    """What became of one write of a batch."""

    version: RecordVersion | None
    """``None``: it was not done, or is not known to be."""
    code: str = ""
    """Of the failure then; see ``kvcomm.errors``."""
    text: str = ""


class RecordFates(Message, frozen=True):
    """The answer to a ``RecordPut`` whose writes had different fates; in its order."""

    fates: Many[RecordFate]


# -- one-sided channels
# --------------------------------------------------------------------------------------------------


class ChannelAsk(Message, frozen=True):
    """How can this node's region be reached one-sided?"""


class ChannelOffer(msgspec.Struct, frozen=True, array_like=True):
    transport: str
    detail: bytes
    """For the transport of that name alone."""


class ChannelOffers(Message, frozen=True):
    header: bytes
    """The region's, packed; empty = its blocks are not for this tenant."""
    offers: Many[ChannelOffer]
    refused: Many[ChannelOffer]
    """What this node was to offer and cannot; ``detail`` is the reason, in UTF-8."""


class ChannelOpen(Message, frozen=True):
    """One step of opening a channel, which lives as long as this connection."""

    idempotent: ClassVar[bool] = False
    transport: str
    proposal: bytes


class ChannelOpened(Message, frozen=True):
    answer: bytes


MESSAGES: tuple[type[Message], ...] = (
    Hello, Welcome, Ping, Pong, Failure, DropOrder, BlockReserve, BlockReserved, BlockPublish, BlockPublished,
    BlockAbort, Done, PinOpen, PinRange, BlockLookup, BlockPresence, BlockGet, BlockCopies, BlockPut,
    BlockStored, BlockSuspect, BlockList, BlockListed, RecordGet, RecordStates, RecordPut, RecordVersions,
    RecordReplicate, RecordFetch, RecordForget, TreeGet, TreeDigests, LeafGet, LeafRecords, RecordScan,
    RecordKeys, RingMap, RingGet, StrongRead, StrongChange,
    StrongOutcomes, StrongPrepare, StrongPromised, StrongAccept, StrongAccepted, StrongEnter, StrongListed,
    BlockHoldings, BlockHeld,
    RecordFates,
    StrongSettle, StrongSettling, StrongRemove,
    BlockFilterGet, BlockFilter, AffinityGet, AffinityView,
    ChannelAsk, ChannelOffers, ChannelOpen, ChannelOpened,
    RingOffer, RingTaken, Heartbeat, HeartbeatAnswer,
    HotReport, HotRecords, WarmOrder, HotGet, HotView,
    ScaleOrder, DrainOrder, MoveOrder, RebalanceOrder, CancelOrder, OrderAnswer, ClusterGet, ClusterView,
    Goodbye,
)  # fmt: skip
