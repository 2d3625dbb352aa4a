"""``Shard``: the records of one shard as a machine: coordinator for callers, replica for its peers.

Theory of operation.  A key's *keepers* are its owners in the ring, by both placements while keys are being
moved (``l3_shard.ring``).  Any of them may coordinate::

    caller ── RecordPut ──► coordinator: load, apply (gives the write its dot), persist
                                │ only now, durable here, does the dot leave the machine
                                ├── RecordReplicate ──► replica: load, merge, persist ── Done ──┐
                                └── RecordReplicate ──► replica ...                             │
    caller ◄── RecordVersions ── as soon as W of each group of owners have it durable ◄─────────┘

    caller ── RecordGet ──► coordinator: own durable state, merged with RecordFetch answers until R replicas
    answered

* **Persist first, replicate after.**  A dot that was sent and then lost in a crash would be given out twice.
* **Three outcomes.**  W acknowledgements: done.  Refused before anything was written: ``unavailable``,
``conflict``,
  ``too_large``, ``refused``.  Otherwise ``outcome_unknown``: it is or may be durable somewhere and will
  spread.
* **Epochs.**  A caller's request must carry this shard's epoch.  An older one is answered with the new map; a
  newer one cannot be judged yet and is ``unavailable``.  Replication under an older epoch is refused too, and
  so is an acknowledgement when the ring has changed before the record was on the disk, unless it was the next
  one and places it alike: a coordinator counts no copy that a newer map does not (``l3_shard.writing``).
  Replication under a newer epoch is accepted for records that we keep by our own map; for others the
  coordinator is told how far we are, and hands us its map.
* **A map is kept** (``l3_shard.keptmap``): a shard that starts goes on with the map that it had, after it has
asked the
  others whether there is a newer one (``l3_shard.recheck``).
* **Tenants.**  Records are stored as ``tenant digest (16 bytes) | key``, added here from the connection's
credential, so
  no request can name another tenant's record.  Placement hashes the caller's key alone: clients need not know
  their digest. Replication names stored keys and is accepted from the cluster's own nodes only.

* **Repair.**  A replica that did not acknowledge is hinted at (:meth:`Shard._missed`), and neighbours are
compared
  now and then; see ``l3_shard.repair``.  All of it ends in merges like replication.

* **Moving.**  A shard that gains records fetches them by comparing itself with those that have them, and says
when it
  has all of them (``l3_shard.readiness``); what it does not keep any more it drops (``l3_shard.purge``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvcomm.clock import ClockDrift, HybridClock, Stamp
from kvcomm.errors import Corrupt, KVCommError, Refused, Rejected, StaleEpoch, TooLarge, Unavailable
from kvcomm.machine import Answered, Effect, Event, Origin, Received, Resumed, Stop, Ticket
from kvcomm.resolvers import resolver_of
from kvcomm.validators import Validators
from kvcomm.version import Dot, VersionError, VersionVector
from kvcomm.wire.messages import (
    FENCE_MAX,
    KEYS_MAX,
    VALUE_BYTES_MAX,
    Done,
    Failure,
    LeafGet,
    Message,
    RecordFetch,
    RecordForget,
    RecordGet,
    RecordKeys,
    RecordPut,
    RecordReplicate,
    RecordScan,
    RecordState,
    RecordStates,
    RecordWrite,
    RingGet,
    RingMap,
    RingNode,
    RingOffer,
    RingTaken,
    ShardMove,
    SplitReport,
    StrongAccept,
    StrongChange,
    StrongEnter,
    StrongOrder,
    StrongPrepare,
    StrongRead,
    StrongRemove,
    StrongSettle,
    TreeGet,
)
from l3_shard import dvv
from l3_shard.desk import Desk, Request, ShardLimits
from l3_shard.keptmap import KeptMap, kept_map
from l3_shard.lines import Lines, Local
from l3_shard.notes import Notes
from l3_shard.peers import PeerWatch, WatchOptions, WatchView
from l3_shard.place import Groups, Place, place_of
from l3_shard.proposer import OPS, READ
from l3_shard.reading import Query, Reading, is_sound
from l3_shard.recheck import Recheck
from l3_shard.recovery import Recovery
from l3_shard.repair import Repair, RepairCounts, RepairOptions
from l3_shard.replica import successor
from l3_shard.resolving import resolve
from l3_shard.ring import NO_RING, Ring, RingError, decode_map, encode_map
from l3_shard.scrub import Scrub, ScrubCounts, ScrubOptions
from l3_shard.storage import Audited, Database, Loaded, Persisted, Scan, Scanned, Surveyed, Swept
from l3_shard.strong import Strong, StrongCounts, StrongIdentity
from l3_shard.timers import Timers
from l3_shard.tombstones import dead_since
from l3_shard.writing import Draft, Writing

TENANT_BYTES = 16
CHANGES_MAX = 8
"""Strong changes of one request: each may be answered with a value of ``VALUE_BYTES_MAX``."""
RECORD_KEY_BYTES_MAX = 480
"""The store's own limit is 511 bytes, tenant included."""
RECOVER_KEYS_MAX = 8
"""Records of one question for what a damaged disk lost: their values always fit one answer."""
KEEPERS_MAX = 16_384
"""Records whose keepers are remembered: who repairs asks for each several times, one soon after the other."""
RECOVER_AT_ONCE = 256
"""Records that are asked for again together."""


@dataclass(frozen=True, slots=True)
class RingChanged(Event):
    """The shell heard of a ring map; it is taken up if it is newer, else counted and forgotten."""

    ring_map: RingMap


@dataclass(frozen=True, slots=True)
class WallAdjusted(Event):
    """What the wall clock showed at ``now = 0``, in milliseconds since 1970."""

    origin_ms: int


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """What happened since start."""

    put_count: int
    get_count: int
    outcome_unknown_count: int
    degraded_count: int
    conflict_count: int
    busy_count: int
    stale_request_count: int
    """Requests that carried another epoch than ours."""
    stale_map_count: int
    """Ring maps that were not newer than ours, or impossible."""
    acked_count: int
    """Records that another replica acknowledged."""
    missed_count: int
    """Records that a replica did not acknowledge."""
    damaged_count: int
    """Records whose stored bytes failed verification."""
    contradiction_count: int
    """States read for one record that cannot both be: some replica lost its state and kept its id."""
    drift_count: int
    """Stamps too far ahead of our wall clock to follow."""
    rejected_count: int
    """Writes that broke a rule."""
    stood_still_count: int
    """How often this process stood still."""


@dataclass(eq=False, slots=True)
class _Merges:
    """A peer's request to merge."""

    request: Request
    message: RecordReplicate
    ring: Ring
    """In force when it came."""
    open_count: int
    error: KVCommError | None = None


@dataclass(eq=False, slots=True)
class _Merge:
    """A ``Change``."""

    incoming: RecordState
    keeps: Callable[[], bool]
    done: Callable[[KVCommError | None], None]
    merged: Callable[[RecordState, RecordState], None]
    """Hears what was here before and after."""
    before: RecordState = dvv.EMPTY

    def apply(self, state: RecordState) -> RecordState:
        """The ring may have changed since it was asked for, and nobody would drop the record again."""
        if not self.keeps():
            raise Unavailable("the record has other owners by now")
        self.before = state
        return dvv.merge(state, self.incoming)

    def durable(self, state: RecordState) -> None:
        self.merged(self.before, state)
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


@dataclass(eq=False, slots=True)
class _Recovery:
    """A damaged record that the other replicas are asked for."""

    key: bytes
    place: Place
    told: set[str]
    """Who has told all that it has."""
    state: RecordState = dvv.EMPTY
    """What they told, together: the merge that makes our copy whole may be the only one that is not
    refused."""

    @property
    def over(self) -> bool:
        """Whether ours has all that was acknowledged: by a write quorum that ours may have been one of."""
        old = [node for node in self.place.old if node != self.place.me]
        return sum(node in self.told for node in old) >= min(len(old), self.place.witnesses)


@dataclass(eq=False, slots=True)
class _Fetch:
    """A peer's request for our own states."""

    request: Request
    states: list[RecordState | None]
    open_count: int
    incomplete: bool = False


@dataclass(eq=False, slots=True)
class _Scan:
    request: Request
    prefix: bytes
    limit: int
    found: list[bytes] = field(default_factory=list)


class Shard:
    """One shard's records: a ``kvcomm.machine.Machine``.

    Args:
        node: this shard's name in the ring.
        replica: the id of the state in the store (see ``l3_shard.replica``).
        ring_map: the map to start with, if ``notes`` hold no newer one; ``node`` need not be in it.
        node_tenant: tenant digest of the cluster's own processes.
        origin_ms: what the wall clock showed at ``now = 0``, milliseconds since 1970.
        repair: how it repairs in the background; ``None`` = not at all.  Hand in a ``Tick`` at the start.
        notes: what the store kept beside the records.
        strong: who the shard is for strong records; ``None`` = it keeps none.
        validators: what the values of writes are held against.
        watch: how closely it watches the others; ``None`` = not at all.

    Raises:
        RingError: the map contradicts itself.
    """

    def __init__(
        self,
        node: str,
        replica: str,
        ring_map: RingMap,
        *,
        node_tenant: bytes,
        origin_ms: int,
        limits: ShardLimits | None = None,
        repair: RepairOptions | None = None,
        notes: Mapping[bytes, bytes] | None = None,
        strong: StrongIdentity | None = None,
        validators: Validators | None = None,
        watch: WatchOptions | None = None,
    ) -> None:
        self.node = node
        self.replica = replica
        kept = kept_map(notes or {}, {} if strong is None else strong.notes)
        self.ring = Ring.from_map(kept if kept.epoch > ring_map.epoch else ring_map)
        self._node_tenant = node_tenant
        self._origin_ms = origin_ms
        self._clock = HybridClock()
        self._limits = limits or ShardLimits()
        self._validators = validators or Validators()
        tickets: Iterator[int] = count(1)
        self._desk = Desk(self._limits, tickets)
        self._lines = Lines(
            self._limits.changes_max,
            tickets,
            self._limits.recent_bytes_max,
            empty=dvv.EMPTY,
            value_bytes=dvv.value_bytes,
        )
        self._writing = self._make_writing()
        self._reading = Reading(self._desk, self._lines, self._repair, self._refused, self._stale)
        self._strong: Strong | None = None
        if strong is not None:
            self._strong = Strong(
                node, strong, self._desk, tickets, ring=lambda: self.ring.serving, refused=self._refused
            )
        self._scans: dict[Ticket, _Scan] = {}
        self._plans: dict[Groups, tuple[tuple[str, ...], int, int, bool]] = {}  # of this ring
        self._places: dict[Groups, Place] = {}  # of this ring
        self._keepers: dict[bytes, tuple[str, ...]] = {}  # of this ring
        self._timers = Timers(tickets)
        self._recheck = Recheck(
            node,
            self._desk,
            self._timers,
            ring=lambda: self.ring,
            adopt=self._adopt,
            serve=self._serve_held,
        )
        self._notes = Notes(self._desk)
        databases = [(self._notes, notes or {})]
        if strong is not None and self._strong is not None:
            databases.append((self._strong.notes, strong.notes))
        self._kept = KeptMap(lambda: self.ring, databases if repair else (), self._desk, self._timers)
        self._timers.at(0.0, self._kept.keep)
        if kept.epoch > ring_map.epoch:
            self._timers.at(0.0, self._recheck.doubt)
        self._recovery = Recovery(lambda key: key[TENANT_BYTES:], lambda: self._desk.now, self._wall_ms)
        self._background = None if repair is None else self._make_repair(repair, notes or {})
        self._watch = None if watch is None else self._make_watch(watch)
        self._scrubs = {} if repair is None else self._make_scrubs(repair.scrub, notes or {})
        self._recovered_last = b""
        self._stopped = False
        self._put_count = self._get_count = self._conflict_count = self._stale_request_count = 0
        self._stale_map_count = self._missed_count = self._damaged_count = self._drift_count = 0
        self._rejected_count = 0

    def _make_writing(self) -> Writing:
        return Writing(
            self.node,
            self._desk,
            self._lines,
            self._accept,
            place=self._place,
            newest=self._newest,
            refused=self._refused,
            missed=self._missed,
        )

    def _make_repair(self, options: RepairOptions, notes: Mapping[bytes, bytes]) -> Repair:
        return Repair(
            self.node,
            options,
            self._desk,
            self._lines,
            self._notes,
            self._timers,
            ring=lambda: self.ring,
            keepers=self._keepers_if_ours,
            wall_ms=self._wall_ms,
            refused=self._refused,
            last_counter=self._last_counter,
            caught_up=self._plans.clear,
            recover=self._recover_again,
            taken=self._kept.once_taken,
            recovery=self._recovery,
            stored=notes,
        )

    def _make_scrubs(self, options: ScrubOptions, notes: Mapping[bytes, bytes]) -> dict[Database, Scrub]:
        scrubs: dict[Database, Scrub] = {
            "records": Scrub(
                options,
                self._desk,
                self._timers,
                damaged=self._rotten,
                lost=self._gone,
                misfiled=self._rewrite,
                save=self._notes.save,
                stored=notes,
            )
        }
        if self._strong is not None:
            scrubs["strong"] = Scrub(
                options,
                self._desk,
                self._timers,
                database="strong",
                damaged=self._strong.inspect,
                lost=self._strong.inspect,
                misfiled=self._strong.inspect,
                save=self._notes.save,
                stored=notes,
            )
        for scrub in scrubs.values():
            self._timers.at(0.0, scrub.start)
        return scrubs

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Decide.  After a failed write to the disk the shard orders its end and does nothing more."""
        if self._stopped:
            return []
        self._desk.now = now
        match event:
            case Received():
                self._received(event.origin, event.message)
            case Answered():
                self._desk.answered(event)
            case Loaded() | Persisted() | Scanned() if self._strong is not None and self._strong.took(event):
                pass
            case Loaded():
                self._loaded(event)
            case Persisted(outcome="failed"):
                self._stopped = True
                return [
                    Stop(f"shard {self.node}: the disk failed, what was written is unknown: {event.text}")
                ]
            case Persisted():
                self._persisted(event)
            case Surveyed():
                assert self._background is not None, "nobody else orders surveys"
                self._background.forest.surveyed(event)
            case Swept():
                assert self._background is not None, "nobody else orders sweeps"
                if not self._background.purge.swept(event):
                    self._background.forest.swept(event)
            case Audited():
                took = [scrub.audited(event) for scrub in self._scrubs.values()]
                assert sum(took) == 1, "nobody else orders audits"
            case Scanned():
                self._scanned(event)
            case Resumed():
                self._recheck.resumed()
                if self._watch is not None:
                    self._watch.resumed()
            case RingChanged():
                self._adopt(event.ring_map)
            case WallAdjusted():
                self._origin_ms = event.origin_ms
        self._timers.run(now)
        self._desk.expire()  # last: what was begun after its time (``recheck``) ends before it did anything
        return self._flush()

    def deadline(self) -> float | None:
        if self._stopped:
            return None
        waits = [self._desk.deadline(), self._timers.deadline()]
        if self._strong is not None:
            waits.append(self._strong.deadline())
        return min((wait for wait in waits if wait is not None), default=None)

    def _flush(self) -> list[Effect]:
        """Collect what was ordered; a change that came to nothing is done here and may order more."""
        effects = self._desk.take()
        while self._pending():
            effects += self._lines.flush(self.replica, self._marks)
            if self._strong is not None:
                effects += self._strong.flush()
        self._writing.flush()
        self._notes.flush(self.replica)
        if self._strong is not None:
            self._strong.flush_notes()
        return effects + self._desk.take()

    def _marks(self) -> tuple[tuple[bytes, bytes | None], ...]:
        """Notes that writes of records have to carry."""
        return () if self._background is None else self._background.purge.marks()

    def _persisted(self, event: Persisted) -> None:
        if self._notes.persisted(event):
            return
        keys = self._lines.persisted(event)
        if self._background is not None:
            for key in keys:
                self._background.forest.mark(key)

    def _pending(self) -> bool:
        if self._strong is None:
            return self._lines.pending
        self._strong.wake()
        return self._lines.pending or self._strong.pending

    # -- requests

    def _received(self, origin: Origin, message: Message) -> None:
        try:
            if origin.tenant != self._node_tenant and self._recheck.holds(origin, message):
                return
            match message:
                case RecordGet():
                    self._get(origin, message)
                case RecordPut():
                    self._put(origin, message)
                case RecordScan():
                    self._scan(origin, message)
                case RecordReplicate():
                    self._replicate(origin, message)
                case RecordFetch():
                    self._fetch(origin, message)
                case TreeGet() | LeafGet() | RecordForget():
                    self._serve_repair(origin, message)
                case StrongRead():
                    self._strong_read(origin, message)
                case StrongChange():
                    self._strong_change(origin, message)
                case StrongPrepare() | StrongAccept():
                    self._strong_vote(origin, message)
                case StrongEnter():
                    self._check_peer(origin, message.epoch, ())
                    self._strong_records().enter(origin, message)
                case StrongSettle():
                    self._check_peer(origin, message.epoch, ())
                    self._strong_records().settle(origin, message)
                case StrongRemove():
                    self._check_peer(origin, message.epoch, ())
                    _checked_keys(message.keys, TENANT_BYTES)
                    self._strong_records().remove(origin, message)
                case RingGet() if self.ring.epoch == NO_RING.epoch:
                    raise Unavailable(f"{self.node} has not been given a ring yet; ask another node")
                case RingGet():
                    self._desk.reply(origin, self.ring.to_map())
                case RingOffer():
                    self._offered(origin, message)
                case _:
                    raise Refused(f"a shard's records do not answer {type(message).__name__}")
        except KVCommError as error:
            self._desk.reply(origin, error)

    def _serve_held(self, origin: Origin, message: Message, arrived_at: float) -> None:
        self._desk.arrived_at = arrived_at
        self._received(origin, message)
        self._desk.arrived_at = None

    def _get(self, origin: Origin, message: RecordGet) -> None:
        self._check_epoch(message.epoch)
        self._get_count += 1
        tenant = origin.tenant
        queries = [self._query(tenant, key) for key in _checked_keys(message.keys)]
        if message.least:
            if len(message.least) != len(queries):
                raise Refused(f"{len(queries)} keys with {len(message.least)} least contexts")
            pairs = zip(queries, message.least, strict=True)
            queries = [Query(*query[:-1], least) if least else query for query, least in pairs]
        if not queries:
            self._desk.reply(origin, RecordStates([]))
        else:
            self._reading.get(origin, message.epoch, queries)

    def _put(self, origin: Origin, message: RecordPut) -> None:
        self._check_epoch(message.epoch)
        self._put_count += 1
        _checked_keys([write.key for write in message.writes])
        drafts = [self._draft(origin.tenant, write) for write in message.writes]
        if not drafts:
            raise Refused("a put names at least one record")
        self._writing.put(origin, message.epoch, drafts)

    def _query(self, tenant: bytes, key: bytes) -> Query:
        """Callers go past a record's first owner only when it did not answer.  It may be the one that has the
        newest write, so whoever stands in for it reads from enough replicas to meet every write quorum."""
        groups = self.ring.write_groups(key)
        plan = self._plans.get(groups)
        if plan is None:
            plan = self._plans[groups] = self._plan(self._check_ours(self._placed(groups)))
        return Query(tenant + key, *plan)

    def _plan(self, place: Place) -> tuple[tuple[str, ...], int, int, bool]:
        """The rest of a query: there are few lists of replicas and many keys."""
        ring, replicas = self.ring.to_map(), place.groups[0]
        copies = len(replicas)
        wide = copies - min(ring.write_quorum, copies) + 1
        need = min(ring.read_quorum, copies)
        if replicas[0] != self.node:
            need = max(need, wide)
        others = tuple(node for node in replicas if node != self.node)
        return others, need, wide, self.node in replicas and self._vouches(place)

    def _vouches(self, place: Place) -> bool:
        """Whether we have all that we should have of these records.  Of those that only a newer map than ours
        gives us we have nothing."""
        return self._background is None or (
            self._background.caught_up and place.ours and (self._background.ready or not place.gained)
        )

    @property
    def _caught_up(self) -> bool:
        return self._background is None or self._background.caught_up

    def _draft(self, tenant: bytes, write: RecordWrite) -> Draft:
        size = max(len(write.value or b""), len(write.delta or b""))
        if size > VALUE_BYTES_MAX:
            raise TooLarge(f"a record value has at most {VALUE_BYTES_MAX} bytes, got {size}")
        _check_kind(write)
        try:
            context = VersionVector.from_wire(write.context)
            own = None if write.own is None else Dot(*write.own)
        except VersionError as error:
            raise Refused(f"the context is not one that a get or put returned: {error}") from error
        self._check_ours(self._placed(self.ring.write_groups(write.key)))
        return Draft(tenant + write.key, write.value, context, own, write.delta)

    def _placed(self, groups: Groups) -> Place:
        """Where records with these groups of owners are."""
        place = self._places.get(groups)
        if place is None:
            place = self._places[groups] = place_of(self.ring, self.node, groups)
        return place

    def _newest(self) -> RingMap:
        return self.ring.to_map()

    def _place(self, key: bytes) -> Place:
        """Of a stored key, by the newest ring."""
        return self._placed(self.ring.write_groups(key[TENANT_BYTES:]))

    def _check_ours(self, place: Place) -> Place:
        """Raises ``Refused``: we are no keeper."""
        if not place.ours:
            owners = ", then ".join(map(str, place.groups))
            raise Refused(f"epoch {self.ring.epoch}: the owners of this record are {owners}, not {self.node}")
        return place

    def _check_replica(self, key: bytes) -> None:
        """Raises ``Refused``: a caller's strong ``key`` is not decided by us."""
        replicas = self.ring.replicas(key)
        if self.node not in replicas:
            raise Refused(
                f"epoch {self.ring.epoch}: the owners of this record are {replicas}, not {self.node}"
            )

    def _check_epoch(self, epoch: int) -> None:
        if epoch == self.ring.epoch:
            return
        self._stale_request_count += 1
        if (stale := self._stale(epoch)) is not None:
            raise stale
        raise Unavailable(f"{self.node} is at epoch {self.ring.epoch} and has not heard of {epoch} yet")

    def _stale(self, epoch: int) -> StaleEpoch | None:
        """For those whose ``epoch`` is over."""
        if epoch >= self.ring.epoch:
            return None
        return StaleEpoch(f"epoch {epoch} is over, this is {self.ring.epoch}", encode_map(self.ring.to_map()))

    # -- the replica's side

    def _check_peer(self, origin: Origin, epoch: int, keys: Sequence[bytes]) -> None:
        if origin.tenant != self._node_tenant:
            raise Refused("replication is spoken among the cluster's own nodes only")
        _checked_keys(keys, TENANT_BYTES)
        if epoch <= self.ring.epoch:
            self._check_epoch(epoch)
            for stored in keys:
                self._check_ours(self._place(stored))

    def _replicate(self, origin: Origin, message: RecordReplicate) -> None:
        self._check_peer(origin, message.epoch, message.keys)
        if message.epoch > self.ring.epoch and not all(self._keeps(key) for key in message.keys):
            # By our own map they would be dropped (``l3_shard.purge``); the sender has the newer one.
            text = f"{self.node} is at epoch {self.ring.epoch} and keeps the record by a newer one only"
            raise StaleEpoch(text, encode_map(self.ring.to_map()))
        if not message.keys or len(message.keys) != len(message.states):
            raise Refused(f"{len(message.keys)} keys with {len(message.states)} states")
        states = [dvv.checked(state) for state in message.states]
        request = self._desk.open(origin, len(states), sum(map(dvv.value_bytes, states)))
        merges = _Merges(request, message, self.ring, len(states))
        request.expire = partial(self._desk.close, request, Unavailable("the replica was too slow"))
        for key, state in zip(message.keys, states, strict=True):
            self._merge(key, state, partial(self._merged, merges))

    def _merge(self, key: bytes, state: RecordState, done: Callable[[KVCommError | None], None]) -> None:
        try:
            merged = partial(self._recovery.merged, key)
            self._lines.change(key, _Merge(state, partial(self._keeps, key), done, merged))
        except Refused as error:
            done(error)

    def _merged(self, merges: _Merges, error: KVCommError | None) -> None:
        merges.open_count -= 1
        merges.error = merges.error or error
        if not merges.open_count and merges.request.open:
            self._desk.close(merges.request, self._overtaken(merges) or merges.error or Done())

    def _overtaken(self, merges: _Merges) -> StaleEpoch | None:
        """Whether the records came to the disk too late: others may have compared themselves with us under
        the ring of now, and count on having seen all that we acknowledged before it."""
        message, then = merges.message, merges.ring
        if self.ring is then or self.ring.epoch <= message.epoch:
            return None
        next_one = then.epoch == message.epoch == self.ring.epoch - 1
        if next_one and all(self._alike(then, key) for key in message.keys):
            return None
        return self._stale(message.epoch)

    def _alike(self, then: Ring, key: bytes) -> bool:
        """Whether the ring of now places a stored key as ``then`` did."""
        if then.placement == self.ring.placement:
            return True
        return self._place(key).alike(place_of(then, self.node, then.write_groups(key[TENANT_BYTES:])))

    def _keeps(self, key: bytes) -> bool:
        """Whether the stored key is ours to keep."""
        return self._place(key).ours

    def _offered(self, origin: Origin, message: RingOffer) -> None:
        """Answered once the map is on the disk: who offers it counts on our never going back."""
        if origin.tenant != self._node_tenant:
            raise Refused("maps of the ring are taken from the cluster's own nodes only")
        self._adopt(message.ring)
        request = self._desk.open(origin, 1)

        def answer() -> None:
            if request.open:
                self._desk.close(request, RingTaken(self.taken.epoch))

        request.expire = answer
        self._kept.once_taken(answer)

    def _fetch(self, origin: Origin, message: RecordFetch) -> None:
        self._check_peer(origin, message.epoch, message.keys)
        if not message.keys:
            raise Refused("a fetch names at least one record")
        request = self._desk.open(origin, len(message.keys))
        vouches = (
            self._caught_up
            if message.compares
            else all(self._vouches(self._place(key)) for key in message.keys)
        )
        fetch = _Fetch(request, [None] * len(message.keys), len(message.keys), not vouches)
        request.expire = partial(self._desk.close, request, Unavailable("the replica was too slow"))
        for index, key in enumerate(message.keys):
            self._lines.read(key, partial(self._fetched, fetch, index), passing=message.compares)

    def _fetched(self, fetch: _Fetch, index: int, local: Local[RecordState]) -> None:
        """``degraded`` tells the coordinator that a state is missing here, not absent."""
        fetch.states[index] = local.state if local.state.context else None
        fetch.incomplete |= local.damaged or bool(local.failure)
        fetch.open_count -= 1
        if fetch.open_count or not fetch.request.open:
            return
        size = sum(dvv.value_bytes(state) for state in fetch.states if state is not None)
        if len(fetch.states) > 1 and size > self._limits.message_bytes:
            self._desk.close(fetch.request, TooLarge(f"{size} bytes of values do not fit one answer"))
        else:
            self._desk.close(fetch.request, RecordStates(fetch.states, fetch.incomplete))

    def _serve_repair(self, origin: Origin, message: TreeGet | LeafGet | RecordForget) -> None:
        """What a neighbour asks while it repairs."""
        self._check_peer(origin, message.epoch, message.keys if isinstance(message, RecordForget) else ())
        if self._background is None:
            raise Refused(f"{self.node} does not repair")
        if message.epoch > self.ring.epoch:  # our trees are of another placement, perhaps
            self._check_epoch(message.epoch)
        match message:
            case TreeGet():
                self._background.tree_get(origin, message)
            case LeafGet():
                self._background.leaf_get(origin, message)
            case RecordForget():
                self._forget(self._background, origin, message)

    def _forget(self, background: Repair, origin: Origin, message: RecordForget) -> None:
        states = [dvv.checked(state) for state in message.states]
        if not states or len(message.keys) != len(states) or not all(map(dead_since, states)):
            raise Refused("only tombstones are removed, one a key")
        request = self._desk.open(origin, len(states))
        request.expire = partial(self._desk.close, request, Unavailable("the replica was too slow"))

        def done(count: int) -> None:
            if request.open:
                self._desk.close(request, Done())

        background.forget(message.keys, states, done)

    def _keepers_if_ours(self, key: bytes) -> tuple[str, ...]:
        """The keepers of the stored ``key``; nobody if we are none ourselves (any more)."""
        found = self._keepers.get(key)
        if found is None:
            if len(self._keepers) == KEEPERS_MAX:
                self._keepers.clear()
            keepers = self.ring.keepers(key[TENANT_BYTES:])
            found = self._keepers[key] = keepers if self.node in keepers else ()
        return found

    def _repair(self, key: bytes, state: RecordState, mends: bool) -> None:
        """Merge what a read taught us; nobody waits for it, and if it cannot be done now, a later read tries
        again.
        """

        def done(error: KVCommError | None) -> None:
            if mends and error is None:
                self._lines.mend(key)

        self._merge(key, state, done)

    def _missed(self, node: str, keys: Sequence[bytes]) -> None:
        """``node`` did not acknowledge ``keys``."""
        self._missed_count += len(keys)
        if self._background is not None:
            self._background.missed(node, keys)

    def _refused(self, answer: Message) -> None:
        """A peer that is ahead of us sends its map along."""
        if isinstance(answer, Failure) and answer.code == StaleEpoch.code:
            try:
                self._adopt(decode_map(answer.detail))
            except Corrupt:
                self._stale_map_count += 1

    # -- strong records

    def _strong_records(self) -> Strong:
        if self._strong is None:
            raise Refused(f"{self.node} was started without strong records")
        return self._strong

    def _strong_read(self, origin: Origin, message: StrongRead) -> None:
        self._check_epoch(message.epoch)
        for key in _checked_keys(message.keys):
            self._check_replica(key)
        orders = [StrongOrder(origin.tenant + key, READ) for key in message.keys]
        self._strong_run(origin, orders)

    def _strong_change(self, origin: Origin, message: StrongChange) -> None:
        self._check_epoch(message.epoch)
        if len(message.changes) > CHANGES_MAX:
            raise TooLarge(f"a request has at most {CHANGES_MAX} changes, got {len(message.changes)}")
        _checked_keys([order.key for order in message.changes])
        for order in message.changes:
            self._check_replica(order.key)
            if order.op not in OPS:
                raise Refused(f"a change is one of {', '.join(OPS)}, got {order.op!r}")
            if order.value is not None and len(order.value) > VALUE_BYTES_MAX:
                raise TooLarge(f"a record value has at most {VALUE_BYTES_MAX} bytes, got {len(order.value)}")
            if order.op == "put" and order.value is None:
                raise Refused("a put without a value; delete says what you mean")
            if not 0 <= order.fence <= FENCE_MAX:
                raise Refused(f"a fence is a lease epoch from 1 to {FENCE_MAX}, or 0, got {order.fence}")
        orders = [
            StrongOrder(origin.tenant + order.key, order.op, order.expected, order.value, order.fence)
            for order in message.changes
        ]
        self._strong_run(origin, orders)

    def _strong_run(self, origin: Origin, orders: Sequence[StrongOrder]) -> None:
        strong = self._strong_records()
        if not orders:
            raise Refused("a request names at least one record")
        strong.run(origin, orders)

    def _strong_vote(self, origin: Origin, message: StrongPrepare | StrongAccept) -> None:
        """Votes are for the owners by all maps of the configuration, not by the newest alone."""
        self._check_peer(origin, message.epoch, ())
        _checked_keys([message.key], TENANT_BYTES)
        strong = self._strong_records()
        if message.epoch <= self.ring.epoch and not strong.owned(message.key):
            raise Refused(f"epoch {self.ring.epoch}: {self.node} is no owner of this record")
        strong.vote(origin, message)

    def shard(self, node: str) -> RingNode:
        """Where to call a shard of the newest map, or one that still decides beside it.  Raises
        ``KeyError``: it is neither."""
        if node in self.ring or self._strong is None:
            return self.ring.shard(node)
        return self._strong.shard(node)

    # -- what changes give and take

    def _accept(self, state: RecordState, draft: Draft) -> dvv.Written:
        """Give a write its dot and stamp."""
        try:
            return self._written(state, draft, draft.key[TENANT_BYTES:])
        except Rejected:
            self._rejected_count += 1
            raise
        except KVCommError:
            self._conflict_count += 1
            raise

    def _written(self, state: RecordState, draft: Draft, name: bytes) -> dvv.Written:
        floor = 0 if self._background is None else self._background.floor
        stamp, resolver = self._stamp(state), resolver_of(name)
        if resolver is not None:
            check = partial(self._validators.check_change, name)
            return resolve(resolver, state, self.replica, stamp, draft.delta, draft.context, floor, check)
        if draft.value is not None:
            self._validators.check_put(name, draft.value)
        return dvv.put(state, self.replica, stamp, draft.value, draft.context, draft.own, floor)

    def _stamp(self, state: RecordState) -> Stamp:
        wall_ms = self._wall_ms()
        for sibling in state.siblings:
            try:
                self._clock.observe(Stamp(sibling.hlc), wall_ms)
            except ClockDrift:
                self._drift_count += 1
        return self._clock.tick(wall_ms)

    def _wall_ms(self) -> int:
        return self._origin_ms + int(self._desk.now * 1_000)

    def _last_counter(self, states: Sequence[RecordState]) -> int:
        """The largest that this replica gave out in any of ``states``."""
        return max((state.context.get(self.replica, 0) for state in states), default=0)

    def _loaded(self, event: Loaded[RecordState]) -> None:
        """A damaged record is a lost counter: from here on our writes carry the next id (before any is
        applied).  Once for each: a record that nobody can repair must not use up an id with every look at it.
        """
        if found := self._lines.loaded(event):
            self._damage(found)

    def _damage(self, found: Sequence[bytes]) -> None:
        self._damaged_count += len(found)
        self.replica = successor(self.replica)
        self._recover(found)

    def _rotten(self, keys: Sequence[bytes]) -> None:
        """The disk holds other bytes than were written.  What is in memory is intact; what is not is read,
        and the reader finds it damaged."""
        for key in keys:
            if self._lines.known(key) is not None:
                self._rewrite([key])
            else:
                self._lines.read(key, lambda local: None)

    def _gone(self, keys: Sequence[bytes]) -> None:
        """The disk lacks what was written, and a reader would take it for a record that never was."""
        known = [key for key in keys if (self._lines.known(key) or dvv.EMPTY).context]
        self._rewrite(known)
        if found := [key for key in keys if key not in known and self._lines.lose(key)]:
            self._damage(found)

    def _rewrite(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._lines.rewrite(key)

    def _recover_again(self) -> None:
        """Now and then, for what could not be had from enough of the others, a part at a time."""
        waiting = [key for key in self._lines.damaged() if self._keeps(key)]
        rest = [key for key in waiting if key > self._recovered_last] or waiting
        if part := rest[:RECOVER_AT_ONCE]:
            self._recovered_last = part[-1]
            self._recover(part)

    def _recover(self, keys: Sequence[bytes]) -> None:
        """Get back from the others what our damaged copies held, whoever came for them: a write or merge puts
        its own state in their place, and what we alone had shown would be hidden from reads of our copy."""
        by_node: dict[str, list[_Recovery]] = {}
        for key in keys:
            place = self._place(key)
            if place.ours:
                recovery = _Recovery(key, place, set())
                for node in place.others:
                    by_node.setdefault(node, []).append(recovery)
        for node, theirs in by_node.items():
            for begin in range(0, len(theirs), RECOVER_KEYS_MAX):
                piece = theirs[begin : begin + RECOVER_KEYS_MAX]
                fetch = RecordFetch(self.ring.epoch, [recovery.key for recovery in piece], compares=True)
                self._desk.ask(node, fetch, partial(self._recovered, node, piece))

    def _recovered(self, node: str, recoveries: Sequence[_Recovery], answer: Message) -> None:
        if not isinstance(answer, RecordStates) or len(answer.states) != len(recoveries):
            self._refused(answer)
            return
        for recovery, state in zip(recoveries, answer.states, strict=True):
            if state is not None and not is_sound(state):
                continue
            try:
                recovery.state = dvv.merge(recovery.state, state or dvv.EMPTY)
            except (Corrupt, TooLarge):
                continue  # it contradicts another replica's, and is no answer
            if not answer.degraded:
                recovery.told.add(node)
            if state is not None or recovery.over:
                self._repair(recovery.key, recovery.state, recovery.over)

    def _adopt(self, ring_map: RingMap) -> None:
        """Epochs only grow.  Requests under way keep the epoch that they began with."""
        if ring_map.epoch <= self.ring.epoch:
            self._stale_map_count += 1
            return
        try:
            self.ring = Ring.from_map(ring_map)
        except RingError:
            self._stale_map_count += 1
        else:
            self._plans.clear()
            self._places.clear()
            self._keepers.clear()
            self._kept.keep()
            if self._background is not None:
                self._background.placed()
            if self._watch is not None:
                self._watch.ring_changed()

    # -- the other shards

    def _make_watch(self, options: WatchOptions) -> PeerWatch:
        watch = PeerWatch(
            self.node,
            options,
            self._desk,
            self._timers,
            ring=lambda: self.ring,
            silenced=self._recovery.silenced,
            gone=self._recovery.gone,
            returned=self._returned,
        )
        self._timers.at(0.0, watch.ring_changed)
        return watch

    def _returned(self, node: str, silent_since: float) -> None:
        if self._background is not None:
            self._background.returned(node, self._desk.now - silent_since)

    @property
    def taken(self) -> Ring:
        """The newest ring that we work by, even if we end now and start again."""
        return self._kept.taken

    # -- scans

    def _scan(self, origin: Origin, message: RecordScan) -> None:
        if len(message.prefix) > RECORD_KEY_BYTES_MAX or len(message.after) > RECORD_KEY_BYTES_MAX:
            raise TooLarge(f"record names have at most {RECORD_KEY_BYTES_MAX} bytes")
        if message.epoch:
            self._check_epoch(message.epoch)
        if message.limit < 1:
            raise Refused(f"a scan's limit starts at 1, got {message.limit}")
        if not self._caught_up:  # a caller counts on everything acknowledged being named by some write quorum
            raise Unavailable(f"{self.node} has a new store and may lack names that it knew; ask the others")
        request = self._desk.open(origin, 1)
        request.expire = partial(
            self._desk.close, request, Unavailable("the scan took too long; ask for fewer keys")
        )
        scan = _Scan(request, origin.tenant + message.prefix, min(message.limit, self._limits.scan_count_max))
        self._scan_on(scan, origin.tenant + message.after)

    def _scan_on(self, scan: _Scan, after: bytes) -> None:
        ticket = self._desk.ticket()
        self._scans[ticket] = scan
        self._desk.order(Scan(ticket, scan.prefix, after, scan.limit - len(scan.found)))

    def _scanned(self, event: Scanned) -> None:
        """Only what we keep: copies that an older ring left here are not ours to name."""
        scan = self._scans.pop(event.ticket)
        if not scan.request.open:
            return
        if event.failure:
            self._desk.close(scan.request, Unavailable(f"the shard's disk cannot be read: {event.failure}"))
            return
        names = [key[TENANT_BYTES:] for key in event.keys]
        scan.found += [name for name in names if self._placed(self.ring.write_groups(name)).ours]
        if event.resume is None or len(scan.found) >= scan.limit:
            self._desk.close(scan.request, RecordKeys(scan.found))
        else:
            self._scan_on(scan, event.resume)

    # -- looking inside

    def counts(self) -> ShardCounts:
        return ShardCounts(
            self._put_count,
            self._get_count,
            self._writing.unknown_count,
            self._reading.degraded_count,
            self._conflict_count,
            self._desk.refused_count,
            self._stale_request_count,
            self._stale_map_count,
            self._writing.acked_count,
            self._missed_count,
            self._damaged_count,
            self._reading.contradiction_count,
            self._drift_count,
            self._rejected_count,
            self._recheck.count,
        )

    def repair_counts(self) -> RepairCounts | None:
        """Of the background repair, if there is one."""
        return None if self._background is None else self._background.counts()

    def scrub_counts(self) -> Mapping[Database, ScrubCounts]:
        """Of the scrubs, by database; empty without background repair."""
        return {database: scrub.counts for database, scrub in self._scrubs.items()}

    def damaged_now(self) -> int:
        """Records that were found damaged and have not been got back."""
        return len(self._lines.damaged())

    def move_status(self) -> ShardMove:
        """How far this shard's records are with the transition under way, and with what follows it."""
        ring, repair = self.ring, self._background
        settled, clean = (ring.epoch, True) if self._strong is None else self._strong.moved()
        if repair is None:  # nobody fetches or drops records
            return ShardMove(strong_epoch=settled)
        left_count, left_bytes = repair.left()
        return ShardMove(
            ready_epoch=ring.epoch if repair.ready else 0,
            strong_epoch=settled,
            clean_epoch=ring.epoch if repair.purge.clean and clean else 0,
            records_left=left_count,
            bytes_left=left_bytes,
        )

    def watch_view(self) -> WatchView:
        """Which of the others answer this one; nobody is silent for a shard that does not look."""
        return WatchView() if self._watch is None else self._watch.view()

    def split(self) -> SplitReport | None:
        """What became of the last split that this shard was in, as far as it is over; ``None`` = of none in
        this life."""
        return self._recovery.report()

    def strong_counts(self) -> StrongCounts:
        """Of the strong records.  Raises ``Refused`` if this shard keeps none."""
        return self._strong_records().counts()

    def strong_maps(self) -> tuple[int, ...]:
        """Epochs of the maps whose owners decide strong records, as this shard knows; empty until it
        votes."""
        return self._strong_records().maps

    def check(self) -> None:
        """Assert every invariant."""
        self._desk.check()
        self._lines.check()
        self._recheck.check()
        if self._watch is not None:
            self._watch.check()
        if self._background is not None:
            self._background.check()
        if self._strong is not None:
            self._strong.check()

    def story(self, key: bytes) -> str:
        """What is known of the stored ``key`` (tenant digest included), for a person."""
        owners = ", then ".join(map(str, self.ring.write_groups(key[TENANT_BYTES:])))
        place = f"epoch {self.ring.epoch}, owners {owners}"
        strong = "" if self._strong is None else f"; strong: {self._strong.story(key)}"
        return f"{self.node} as {self.replica}, {place}: {self._lines.story(key)}{strong}"


def _check_kind(write: RecordWrite) -> None:
    """A value under a resolved name could not be joined; a delta elsewhere has nothing to be applied by."""
    resolved = resolver_of(write.key) is not None
    if resolved and write.value is not None:
        raise Refused(f"{write.key!r} is changed by deltas, not by values: its siblings are resolved")
    if not resolved and write.delta is not None:
        raise Refused(f"{write.key!r} is changed by values, not by deltas: its siblings are shown")


def _checked_keys(keys: Sequence[bytes], prefix_bytes: int = 0) -> Sequence[bytes]:
    if len(keys) > KEYS_MAX:
        raise TooLarge(f"a request names at most {KEYS_MAX} records, got {len(keys)}; split the batch")
    for key in keys:
        if not prefix_bytes < len(key) <= prefix_bytes + RECORD_KEY_BYTES_MAX:
            raise TooLarge(
                f"a record name has 1 to {RECORD_KEY_BYTES_MAX} bytes, got {len(key) - prefix_bytes}"
            )
    return keys
