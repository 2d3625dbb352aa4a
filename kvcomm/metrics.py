"""``Metrics``: counters, gauges and histograms cheap enough for the hot path, and the table of all of them.

Every metric is declared once, in :data:`DEFINITIONS`, with its labels *and their values*: the page
``docs/metrics.md`` is made from the table, a series that nobody has touched yet is exported as 0 instead of
being absent, and no label can grow without bound.  Who counts takes a cell once and keeps it::

    hits = metrics.counter("kvcomm_fetch_blocks_total", tier="l2")
    ...
    hits.add(3)

Threads: ``value += amount`` holds no point where CPython (3.11 to 3.13, with its global lock) would switch
threads, so no increment is lost; a histogram's sum and buckets are each exact, and may differ by the
observation under way when they are read together.

Pure; the Prometheus endpoint is ``kvcomm.exporter``'s, so that ``import kvcomm`` pays for neither it nor
``prometheus_client``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple, TypeVar, get_args

from kvcomm.blockstore import DepotState, DepotUsage, StoreUsage
from kvcomm.config import TRANSPORTS
from kvcomm.streams.events import KINDS
from kvcomm.tier import PoolState, PutStatus, TierName
from kvcomm.wire.messages import MESSAGES

Scope = Literal["client", "pool", "shard", "controller"]
Kind = Literal["counter", "gauge", "histogram"]

SECONDS_BOUNDS = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3,
    10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of every latency histogram's buckets: from a view in memory to a timeout."""


class Counter:
    """Only goes up."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        self.value += amount

    def advance_to(self, total: float) -> None:
        """Take over a count that is kept elsewhere."""
        assert total >= self.value, f"a counter went back from {self.value} to {total}"
        self.value = total


class Gauge:
    """Goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        self.value = value

    def add(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """Counts observations by size."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """One a bucket, not cumulative; the last is above every bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def advance_to(self, other: Histogram) -> None:
        """Take over what is observed elsewhere."""
        assert other.bounds == self.bounds and other.count >= self.count, "a histogram went back"
        self.counts[:], self.sum = other.counts, other.sum

    @property
    def count(self) -> int:
        return sum(self.counts)


Cell = Counter | Gauge | Histogram
C = TypeVar("C", bound=Cell)
_CELLS: dict[Kind, type[Cell]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


OPERATION_STEPS = (
    "planned", "copying", "verifying", "serving", "purging", "done", "cancelled", "rolled back", "failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.  ``labels`` names each label's possible values."""

    name: str
    kind: Kind
    scopes: tuple[Scope, ...]
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Series(NamedTuple):
    """One cell with its labels' values."""

    labels: tuple[str, ...]
    cell: Cell


class Metrics:
    """All metrics of one process: those of its ``scope``, each series there from the start."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._families: dict[str, tuple[Definition, dict[tuple[str, ...], Cell]]] = {}
        for definition in DEFINITIONS:
            if scope in definition.scopes:
                make = _CELLS[definition.kind]
                cells = {values: make() for values in product(*definition.labels.values())}
                self._families[definition.name] = (definition, cells)

    def counter(self, name: str, **labels: str) -> Counter:
        """The cell of one series.

        Raises:
            ValueError: this process has no such counter, or not with these labels.
        """
        return self._cell(Counter, name, labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        """As :meth:`counter`."""
        return self._cell(Gauge, name, labels)

    def histogram(self, name: str, **labels: str) -> Histogram:
        """As :meth:`counter`."""
        return self._cell(Histogram, name, labels)

    def families(self) -> Iterator[tuple[Definition, list[Series]]]:
        """Every metric with its series, in the order of the table."""
        for definition, cells in self._families.values():
            yield definition, [Series(values, cell) for values, cell in cells.items()]

    def snapshot(self) -> dict[str, float]:
        """Every number by its name in Prometheus, ``name{label="value"}``; histograms as sum and count."""
        numbers: dict[str, float] = {}
        for definition, series in self.families():
            for values, cell in series:
                named = sorted(zip(definition.labels, values, strict=True))
                pairs = ",".join(f'{label}="{value}"' for label, value in named)
                tail = f"{{{pairs}}}" if pairs else ""
                if isinstance(cell, Histogram):
                    numbers[f"{definition.name}_sum{tail}"] = cell.sum
                    numbers[f"{definition.name}_count{tail}"] = cell.count
                else:
                    numbers[f"{definition.name}{tail}"] = cell.value
        return numbers

    def store(self, usage: StoreUsage) -> None:
        """Take over what the block store says of itself."""
        self.gauge("kvcomm_store_capacity_bytes").set(usage.capacity_bytes)
        self.gauge("kvcomm_store_used_bytes").set(usage.used_bytes)
        self.gauge("kvcomm_store_reserved_bytes").set(usage.reserved_bytes)
        self.gauge("kvcomm_store_pinned_bytes").set(usage.pinned_bytes)
        self.gauge("kvcomm_store_blocks").set(usage.block_count)
        self.counter("kvcomm_store_evictions_total").advance_to(usage.evicted_count)
        self.counter("kvcomm_store_quarantines_total").advance_to(usage.quarantined_count)

    def disk(self, usage: DepotUsage) -> None:
        """Take over what the disk tier says of itself."""
        for state in _DEPOT_STATES:
            self.gauge("kvcomm_disk_state", state=state).set(int(state == usage.state))
        self.gauge("kvcomm_disk_capacity_bytes").set(usage.capacity_bytes)
        self.gauge("kvcomm_disk_used_bytes").set(usage.used_bytes)
        self.gauge("kvcomm_disk_blocks").set(usage.block_count)
        self.gauge("kvcomm_disk_waiting_blocks").set(usage.waiting_count)
        for event, count in (
            ("written", usage.written_count),
            ("read", usage.read_count),
            ("promoted", usage.promoted_count),
            ("evicted", usage.evicted_count),
            ("dropped", usage.dropped_count),
            ("damaged", usage.damaged_count),
            ("busy", usage.busy_count),
        ):
            self.counter("kvcomm_disk_blocks_total", event=event).advance_to(count)
        self.counter("kvcomm_disk_errors_total").advance_to(usage.error_count)

    def _cell(self, kind: type[C], name: str, labels: Mapping[str, str]) -> C:
        if name not in self._families:
            raise ValueError(
                f"a {self.scope} has no metric {name!r}; declare it in kvcomm.metrics.DEFINITIONS"
            )
        definition, cells = self._families[name]
        if set(labels) != set(definition.labels):
            raise ValueError(f"{name} has the labels {sorted(definition.labels)}, got {sorted(labels)}")
        cell = cells.get(tuple(labels[label] for label in definition.labels))
        if cell is None:
            raise ValueError(f"{name} has no series {dict(labels)}; its values are {dict(definition.labels)}")
        if not isinstance(cell, kind):
            raise ValueError(f"{name} is a {definition.kind}")
        return cell


# -- the table -----------------------------------------------------------------------------------------------

_CLIENT: tuple[Scope, ...] = ("client",)
_NODES: tuple[Scope, ...] = ("pool", "shard")
_SERVERS: tuple[Scope, ...] = ("pool", "shard", "controller")
_CONTROLLER: tuple[Scope, ...] = ("controller",)
_SHARD: tuple[Scope, ...] = ("shard",)
_POOL: tuple[Scope, ...] = ("pool",)
_TIERS: tuple[str, ...] = get_args(TierName)
_DEPOT_STATES: tuple[str, ...] = get_args(DepotState)
_DISK_EVENTS = ("written", "read", "promoted", "evicted", "dropped", "damaged", "busy")
_DATABASES = ("records", "strong")
_GRANTS = ("granted", "present", "pending", "full", "too_large", "refused")
_RECORD_OPERATIONS = ("get", "put", "scan")
_STREAM_ROWS = ("fed", "evicted", "kept", "restored", "reprefilled")
_OPERATIONS = (
    "fetch", "publish", "record_get", "record_put", "record_scan", "strong_read", "strong_change",
)  # fmt: skip

DEFINITIONS: tuple[Definition, ...] = (
    # fetching
    Definition(
        "kvcomm_fetch_tokens_total", "counter", _CLIENT,
        "Tokens that a fetch got instead of computing them, by the tier that served their block.",
        {"tier": _TIERS},
    ),
    Definition(
        "kvcomm_fetch_blocks_total", "counter", _CLIENT,
        "Verified blocks handed to the caller, by the tier that served them.", {"tier": _TIERS},
    ),
    Definition(
        "kvcomm_fetch_bytes_total", "counter", _CLIENT,
        "Payload bytes of those blocks. A view counts like a copy.", {"tier": _TIERS},
    ),
    Definition(
        "kvcomm_fetch_missed_blocks_total", "counter", _CLIENT,
        "Blocks asked for and not had: nobody has them, or they stand behind one that nobody has.",
    ),
    Definition(
        "kvcomm_fetch_foreign_blocks_total", "counter", _CLIENT,
        "Blocks of which a copy said that it was computed under another lineage of cuts than the one asked "
        "for. Not served: each is a miss. Anything but 0 is worth an alarm.",
    ),
    Definition(
        "kvcomm_copies_refused_total", "counter", _CLIENT,
        "Copies whose header or checksum did not verify, by the tier they came from. Not served: each is a "
        "miss. Anything but 0 is worth an alarm.",
        {"tier": _TIERS},
    ),
    Definition(
        "kvcomm_stale_epochs_total", "counter", _CLIENT,
        "Requests that were answered with a newer ring map; each was sent once more by the new map.",
    ),
    Definition(
        "kvcomm_hedged_requests_total", "counter", _CLIENT,
        "Requests for blocks of which another owner was asked too, because the first one took longer than "
        "usual. At most a tenth of all.",
    ),
    Definition(
        "kvcomm_lagging_copies_total", "counter", _CLIENT,
        "Copies that an owner had not taken when the put was done with another owner's. It gets them in the "
        "background.",
    ),
    Definition(
        "kvcomm_filtered_lookups_total", "counter", _CLIENT,
        "Block keys that no shard was asked for, because the shards' filters ruled them out "
        "(`cache.l3_filter_age`).",
    ),
    Definition(
        "kvcomm_view_fallbacks_total", "counter", _CLIENT,
        "Reads of this host's memory that got a copy where a view was wanted: the pin budget is used up, or "
        "no hazard slot is free.",
    ),
    Definition(
        "kvcomm_transport_reads_total", "counter", _CLIENT,
        "Blocks read from pools, by transport. `shm`: views of this host's memory.",
        {"transport": TRANSPORTS},
    ),
    Definition(
        "kvcomm_transport_bytes_total", "counter", _CLIENT,
        "Bytes of these blocks, headers included.", {"transport": TRANSPORTS},
    ),
    Definition(
        "kvcomm_transport_fallbacks_total", "counter", _CLIENT,
        "Pools that were attached through another transport (`used`) because one that is configured before "
        "it (`wanted`) could not be used. `none`: no transport reaches the pool. `Client.pools()` has the "
        "reasons.",
        {"wanted": TRANSPORTS, "used": (*TRANSPORTS, "none")},
    ),
    Definition(
        "kvcomm_transport_unavailable_total", "counter", _CLIENT,
        "Blocks that were not read because their pool was lost, or did not answer in time.",
        {"transport": TRANSPORTS},
    ),
    Definition(
        "kvcomm_pools", "gauge", _CLIENT,
        "Pools of the rack as this client sees them. `suspect`: has just ended, and is tried again. `away`: "
        "cannot be reached; its keys have other homes meanwhile. `Client.pools()` names them.",
        {"state": get_args(PoolState)},
    ),
    Definition(
        "kvcomm_pool_losses_total", "counter", _CLIENT,
        "Pools that ended, or stopped answering, while this client was attached to them.",
    ),
    Definition(
        "kvcomm_negative_hits_total", "counter", _CLIENT,
        "Blocks not asked for because their absence was remembered.",
    ),
    Definition(
        "kvcomm_flight_followers_total", "counter", _CLIENT,
        "Blocks that a reader got from another reader's load in the same process.",
    ),
    # publishing
    Definition(
        "kvcomm_publish_blocks_total", "counter", _CLIENT,
        "Blocks offered to a tier, by what became of them.",
        {"tier": ("l2", "l3"), "status": get_args(PutStatus)},
    ),
    Definition(
        "kvcomm_publish_bytes_total", "counter", _CLIENT,
        "Payload bytes of the blocks that were stored.", {"tier": ("l2", "l3")},
    ),
    # records
    Definition(
        "kvcomm_record_operations_total", "counter", _CLIENT,
        "Records read, written and scanned for. `degraded`: fewer replicas answered than the read quorum.",
        {"operation": _RECORD_OPERATIONS, "outcome": ("ok", "degraded", "failed")},
    ),
    Definition(
        "kvcomm_record_siblings_total", "counter", _CLIENT,
        "Values beyond the first that reads returned: concurrent writes that nobody has merged yet.",
    ),
    Definition(
        "kvcomm_hot_record_reads_total", "counter", _CLIENT,
        "Reads of hot records that were answered from a copy of a moment ago, without asking a shard.",
    ),
    Definition(
        "kvcomm_hot_record_copies_total", "counter", _CLIENT,
        "Such copies: `kept` where a shard marked its answer, `dropped` when too old, written to or in the "
        "way.",
        {"event": ("kept", "dropped")},
    ),
    Definition(
        "kvcomm_hot_reports_total", "counter", _CLIENT,
        "Reports to a shard of what this client reads most.",
    ),
    Definition(
        "kvcomm_operation_seconds", "histogram", _CLIENT,
        "Time of whole operations, as the caller waited for them.",
        {"operation": _OPERATIONS},
    ),
    # streams: compacted rollouts, counted where ``Client.stream_counts()`` is handed to an engine
    Definition(
        "kvcomm_streams_events_total", "counter", _CLIENT,
        "Changes of a view, by kind; `evict` are the cuts.", {"kind": KINDS},
    ),
    Definition(
        "kvcomm_streams_rows_total", "counter", _CLIENT,
        "Rows (tokens) of streams. `fed`: computed. `evicted`: cut out of a view. `kept`: in view after a "
        "cut, and not computed again; a re-prefill at each cut would have computed them. `restored`: brought "
        "back. `reprefilled`: of those fed, text whose K/V was lost, or dropped to compute it anew.",
        {"what": _STREAM_ROWS},
    ),
    Definition(
        "kvcomm_streams_live_slots", "gauge", _CLIENT,
        "Rows in view of the streams of the last forward pass, together. What compaction bounds: growing "
        "with every turn means that nothing is cut.",
    ),
    Definition(
        "kvcomm_streams_archive_bytes", "gauge", _CLIENT,
        "K/V of archived spans in the engine's memory, after the last `settle` of its archive.",
    ),
    Definition(
        "kvcomm_streams_mismatch_kl", "gauge", _CLIENT,
        "Of a trainer's last replay: KL between the engine's and the trainer's distribution, in nats a "
        "sampled token, on average and of the worst token. Above 0.001 on average in bfloat16, or 1e-9 in "
        "float32: the replay does not see what the engine saw, or has other weights.",
        {"over": ("mean", "worst")},
    ),
    # hot keys
    Definition(
        "kvcomm_hot_records", "gauge", _SHARD,
        "Hot records that this shard has been told of: it marks its answers about them.",
    ),
    Definition(
        "kvcomm_hot_answers_total", "counter", _SHARD, "Answers that it marked.",
    ),
    Definition(
        "kvcomm_warm_copies", "gauge", _POOL,
        "Copies of hot blocks that this pool was told to have, has fetched, and has not evicted since.",
    ),
    Definition(
        "kvcomm_warmed_blocks_total", "counter", _POOL,
        "Hot blocks that this pool was told to have and had not, by what became of asking the shards. "
        "`full`: they take their share of the pool already, or nothing could go for them.",
        {"outcome": ("stored", "absent", "full", "failed")},
    ),
    Definition(
        "kvcomm_warmed_bytes_total", "counter", _POOL, "Bytes of the copies that were stored.",
    ),
    Definition(
        "kvcomm_warm_copies_dropped_total", "counter", _POOL, "Of these copies, evicted since.",
    ),
    # strong records
    Definition(
        "kvcomm_strong_votes", "gauge", _SHARD,
        "1 = this shard votes on strong records; 0 = it is catching up with the others. At 0 for long: too "
        "few of them remember what it has lost.",
    ),
    Definition(
        "kvcomm_strong_contended_rounds_total", "counter", _SHARD,
        "Rounds that met another proposer's ballot and were repeated after a wait.",
    ),
    Definition(
        "kvcomm_strong_failures_total", "counter", _SHARD,
        "Strong reads and changes without an answer: `unavailable` = no majority, nothing was changed; "
        "`outcome_unknown` = a change may have been made.",
        {"outcome": ("unavailable", "outcome_unknown")},
    ),
    Definition(
        "kvcomm_strong_pending_maps", "gauge", _SHARD,
        "Ring maps whose owners are taking strong records over: majorities by all of them and by the settled "
        "one are needed until then. Above 0 for long: too many of the old owners are away.",
    ),
    Definition(
        "kvcomm_strong_confirmed_records_total", "counter", _SHARD,
        "Records that were confirmed for new owners.",
    ),
    Definition(
        "kvcomm_strong_damaged_records_total", "counter", _SHARD,
        "Records whose stored bytes failed verification: this shard does not vote on them until the others "
        "have told what they have.",
    ),
    Definition(
        "kvcomm_strong_healed_records_total", "counter", _SHARD,
        "Of the damaged ones, filled again by the others.",
    ),
    Definition(
        "kvcomm_strong_removed_records_total", "counter", _SHARD,
        "Remains of deleted records that were taken away, all owners having had them.",
    ),
    # a node's block store
    Definition(
        "kvcomm_store_capacity_bytes", "gauge", _NODES, "Size of the region's slots.",
    ),
    Definition(
        "kvcomm_store_used_bytes", "gauge", _NODES,
        "Published and reserved slots, slack of the size class included.",
    ),
    Definition(
        "kvcomm_store_reserved_bytes", "gauge", _NODES,
        "Slots reserved by writers that have not published yet. Returns to 0 when nobody writes.",
    ),
    Definition(
        "kvcomm_store_pinned_bytes", "gauge", _NODES,
        "Slots that cannot be evicted because a view or a reply holds them. Returns to 0 when nobody reads.",
    ),
    Definition(
        "kvcomm_store_blocks", "gauge", _NODES, "Published blocks.",
    ),
    Definition(
        "kvcomm_store_evictions_total", "counter", _NODES, "Blocks that made room for others.",
    ),
    Definition(
        "kvcomm_store_quarantines_total", "counter", _NODES,
        "Slots taken out because their bytes failed verification. Anything but 0 is worth an alarm.",
    ),
    Definition(
        "kvcomm_reservations_total", "counter", _NODES,
        "Reservations asked for, by the answer.", {"status": _GRANTS},
    ),
    # a node's wires
    Definition(
        "kvcomm_connections", "gauge", _SERVERS, "Open connections of the data wire.",
    ),
    Definition(
        "kvcomm_requests_total", "counter", _SERVERS,
        "Messages received on the data wire.", {"message": tuple(message.__name__ for message in MESSAGES)},
    ),
    Definition(
        "kvcomm_requests_overdue_total", "counter", _SERVERS,
        "Requests refused because their sender had stopped waiting before they could be looked at.",
    ),
    Definition(
        "kvcomm_ring_epoch", "gauge", _SERVERS, "Epoch of the ring that this node works by; 0 = none yet.",
    ),
    Definition(
        "kvcomm_scrapes_stale_total", "counter", _SERVERS,
        "Scrapes answered with older numbers because the event loop did not answer in time.",
    ),
    # a controller
    Definition(
        "kvcomm_controller_term", "gauge", _CONTROLLER,
        "Epoch of the lease under which this controller leads; 0 = another one does, or none.",
    ),
    Definition(
        "kvcomm_controller_leads", "gauge", _CONTROLLER,
        "1 = this controller leads. The sum over all controllers is 1 but for the time of an election.",
    ),
    Definition(
        "kvcomm_cluster_nodes", "gauge", _CONTROLLER,
        "Nodes that there should be, by how this controller finds them.",
        {"state": ("alive", "suspect", "dead", "unknown")},
    ),
    Definition(
        "kvcomm_operations_total", "counter", _CONTROLLER,
        "Operations (scale, drain, move, ...) begun in this cluster since it was made, as this controller "
        "knew when it led.",
    ),
    Definition(
        "kvcomm_operations", "gauge", _CONTROLLER,
        "Those that the leader remembers, by their step.",
        {"step": OPERATION_STEPS},
    ),
    Definition(
        "kvcomm_operation_done_share", "gauge", _CONTROLLER,
        "Of the operation under way: how much of its records and bytes has been copied; 1 = none is.",
    ),
    Definition(
        "kvcomm_controller_votes", "gauge", _CONTROLLER,
        "1 = this controller takes part in the decisions of the controllers; 0 = it is catching up. At 0 for "
        "long: too few of the others remember what it has lost.",
    ),
    Definition(
        "kvcomm_hot_keys", "gauge", _CONTROLLER,
        "Keys that are hot at present, by what the leader has found. Hot blocks are brought to the pools of "
        "all racks; answers about hot records may be kept for a moment.",
        {"plane": ("block", "record")},
    ),
    # a shard's disk tier, and the copies that it gets back
    Definition(
        "kvcomm_disk_state", "gauge", _SHARD,
        "1 = the state that the disk tier is in; all 0 = there is none. `full`: the disk has no room, "
        "nothing is taken until it has. `stalled`: it does not answer in time. `off`: too many errors, until "
        "the next start.",
        {"state": _DEPOT_STATES},
    ),
    Definition(
        "kvcomm_disk_capacity_bytes", "gauge", _SHARD, "`shard.disk_bytes`.",
    ),
    Definition(
        "kvcomm_disk_used_bytes", "gauge", _SHARD, "What the block files take, in whole disk blocks.",
    ),
    Definition(
        "kvcomm_disk_blocks", "gauge", _SHARD, "Blocks on the disk.",
    ),
    Definition(
        "kvcomm_disk_waiting_blocks", "gauge", _SHARD,
        "Blocks that are still to be written. Growing: more is published than the disk takes.",
    ),
    Definition(
        "kvcomm_disk_blocks_total", "counter", _SHARD,
        "What happened to blocks on the disk. `promoted`: also put into memory when read. `dropped`: not "
        "written, for want of time or room. `damaged`: failed verification, a miss, and deleted. `busy`: a "
        "miss because the disk had too much to do.",
        {"event": _DISK_EVENTS},
    ),
    Definition(
        "kvcomm_disk_errors_total", "counter", _SHARD,
        "Failed calls to the disk, those for want of room included.",
    ),
    Definition(
        "kvcomm_refilled_blocks_total", "counter", _SHARD,
        "Blocks that this shard should have and lacked, by what became of asking the others. `full`: there "
        "was no room that nobody uses. `failed`: it did not arrive, or not whole.",
        {"outcome": ("stored", "full", "failed")},
    ),
    Definition(
        "kvcomm_refilled_bytes_total", "counter", _SHARD, "Bytes of the copies that were stored.",
    ),
    Definition(
        "kvcomm_refill_rounds_total", "counter", _SHARD,
        "Comparisons of this shard's blocks with those of all others. `failed`: not with all of them.",
        {"outcome": ("complete", "failed")},
    ),
    Definition(
        "kvcomm_shed_blocks_total", "counter", _SHARD,
        "Blocks that were dropped because the ring gave them to other shards.",
    ),
    Definition(
        "kvcomm_shed_bytes_total", "counter", _SHARD, "Bytes of their copies.",
    ),
    Definition(
        "kvcomm_move_records_left", "gauge", _SHARD,
        "Records that this shard still has to get or to drop after a change of the ring, about.",
    ),
    Definition(
        "kvcomm_move_blocks_left", "gauge", _SHARD, "The same for blocks.",
    ),
    Definition(
        "kvcomm_move_bytes_left", "gauge", _SHARD, "Bytes of both.",
    ),
    # a shard's records
    Definition(
        "kvcomm_replication_acks_total", "counter", _SHARD,
        "Records that this shard, coordinating a write, asked another replica to keep, by its answer.",
        {"outcome": ("acked", "failed")},
    ),
    Definition(
        "kvcomm_split_mode", "gauge", _SHARD,
        "On which side of a split this shard is: 0 = all other shards of its ring answer it; 1 = some do "
        "not, but it and those that do are a majority; 2 = they are none.",
    ),
    Definition(
        "kvcomm_silent_peers", "gauge", _SHARD, "Other shards that do not answer this one at present.",
    ),
    Definition(
        "kvcomm_silences_total", "counter", _SHARD,
        "Times that one of the others fell silent. Growing steadily: a link that flaps.",
    ),
    Definition(
        "kvcomm_split_seconds_total", "counter", _SHARD,
        "Time in which some other shard did not answer this one.",
    ),
    Definition(
        "kvcomm_stood_still_total", "counter", _SHARD,
        "Times that this process stood still for a second or longer (stopped, paused machine, blocked loop).",
    ),
    Definition(
        "kvcomm_rejected_writes_total", "counter", _SHARD,
        "Record writes that broke a rule of `records.validators`; nothing was written.",
    ),
    Definition(
        "kvcomm_hints", "gauge", _SHARD,
        "Records that another shard missed and that this one will tell it about.",
    ),
    Definition(
        "kvcomm_hint_bytes", "gauge", _SHARD, "What those hints take, of `cluster.hint_bytes`.",
    ),
    Definition(
        "kvcomm_hints_total", "counter", _SHARD,
        "What became of hints. `refused`: no room, left to comparing. `void`: nothing to tell any more.",
        {"outcome": ("kept", "refused", "delivered", "expired", "void")},
    ),
    Definition(
        "kvcomm_comparisons_total", "counter", _SHARD,
        "Comparisons with another shard's records. `failed`: it did not answer; tried again.",
        {"outcome": ("equal", "repaired", "failed")},
    ),
    Definition(
        "kvcomm_repaired_records_total", "counter", _SHARD,
        "Records in which a comparison found the other shard to know more (`pulled`) or less (`pushed`).",
        {"direction": ("pulled", "pushed")},
    ),
    Definition(
        "kvcomm_tombstones_removed_total", "counter", _SHARD,
        "Deleted records that were removed for good, on every shard that kept them.",
    ),
    Definition(
        "kvcomm_records_purged_total", "counter", _SHARD,
        "Records that were dropped here after a move, for other shards keep them now.",
    ),
    Definition(
        "kvcomm_caught_up", "gauge", _SHARD,
        "1 = this shard's word counts; 0 = its store is new and not compared with all others yet, so reads "
        "ask those.",
    ),
    Definition(
        "kvcomm_disk_full", "gauge", _SHARD,
        "1 = the last write of records was refused for lack of room. Free some space: reads go on meanwhile, "
        "and writes go on by themselves.",
    ),
    Definition(
        "kvcomm_damaged_records", "gauge", _SHARD,
        "Records whose bytes were damaged and that have not been got back from other shards. Anything but 0 "
        "for long is worth an alarm.",
    ),
    Definition(
        "kvcomm_scrubbed_bytes_total", "counter", _SHARD,
        "Stored record bytes that were read and verified though nobody asked for them.",
        {"database": _DATABASES},
    ),
    Definition(
        "kvcomm_scrub_passes_total", "counter", _SHARD,
        "Times that all records were gone through; see `storage.scrub_interval`.", {"database": _DATABASES},
    ),
    Definition(
        "kvcomm_scrub_problems_total", "counter", _SHARD,
        "What was found: records with `damaged` bytes, records that were `lost` though the index has them, "
        "sound records about which the index was wrong (`misfiled`), steps that the disk refused "
        "(`unreadable`). The first three are mended.",
        {"database": _DATABASES, "problem": ("damaged", "lost", "misfiled", "unreadable")},
    ),
    Definition(
        "kvcomm_fsyncs_total", "counter", _SHARD, "Times that records were forced to disk.",
    ),
    Definition(
        "kvcomm_fsync_seconds", "histogram", _SHARD,
        "How long that took; with `fsync: always` the write before it included.",
    ),
)  # fmt: skip


# -- documentation -------------------------------------------------------------------------------------------


def reference() -> str:
    """``docs/metrics.md``."""
    lines = list(_PREAMBLE)
    for scopes, title in (
        (_CLIENT, "Agents"),
        (_SERVERS, "Pools, shards and controllers"),
        (_NODES, "Pools and shards"),
        (_SHARD, "Shards only"),
        (_POOL, "Pools only"),
        (_CONTROLLER, "Controllers only"),
    ):
        lines += ["", f"## {title}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
        for each in DEFINITIONS:
            if each.scopes == scopes:
                lines.append(f"| `{each.name}` | {each.kind} | {_labels(each)} | {each.help} |")
    return "\n".join(lines) + "\n"


_PREAMBLE = (
    "# Metrics",
    "",
    "<!-- Generated from kvcomm/metrics.py by scripts/gen-docs; do not edit. -->",
    "",
    "Every node serves Prometheus text at `http://127.0.0.1:PORT/metrics`; `kvcomm status --json` shows the",
    "address. Beside the metrics below a node serves `kvcomm_node_info` (labels `node`, `role`, `instance`,",
    "`version`; always 1) and the `process_*` metrics of the Prometheus client. A series exists, as 0, from",
    "the start of the process. Histograms of seconds have the buckets",
    f"{', '.join(f'{bound:g}' for bound in SECONDS_BOUNDS)}.",
)


def _labels(definition: Definition) -> str:
    described = [
        f"`{label}`: {'any message of the data wire' if label == 'message' else ', '.join(values)}"
        for label, values in definition.labels.items()
    ]
    return "; ".join(described) or "–"
