"""``Client``: the blocking face.  Made by ``kvcomm.connect``; safe to use from many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from kvcomm.block import ROOT_LINEAGE, Buffer
from kvcomm.deadline import DEADLINE_S, deadline_after
from kvcomm.lease import TTL_S
from kvcomm.leasing import Fence, Lease, epoch_of
from kvcomm.manifest import Manifest
from kvcomm.merging import Counter, ElementSet, Extreme, FieldMap, Register
from kvcomm.namespace import Namespace
from kvcomm.operations import Hit, Operations, Published
from kvcomm.resolvers import table
from kvcomm.rpc import Peers, iterate_blocking, run_blocking
from kvcomm.stateplane import StateValue
from kvcomm.steps import Steps
from kvcomm.streams.archive import Archive, PutAway, Repeated, SpanLost
from kvcomm.streams.context import StreamContext
from kvcomm.streams.counts import StreamCounts
from kvcomm.streams.engine import Engine
from kvcomm.streams.events import Event, SpanId, no_journal
from kvcomm.streams.pool import BlockId
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.session import Session
from kvcomm.streams.sharing import Missing, Shared, Sharing
from kvcomm.strongplane import StrongValue
from kvcomm.tier import Block, PoolView
from kvcomm.wire.messages import Dots

T = TypeVar("T")


class Client:
    """One agent process's door to the cluster.

    Every call takes ``deadline_s``.  When it passes, block operations give what they have (a shorter prefix,
    a failed status) and state operations raise ``Unavailable`` or ``OutcomeUnknown``.  0 s is allowed: what
    needs no I/O is done.  Raises ``ValueError`` for anything over a day or not a number, and when the client
    is closed.
    """

    def __init__(
        self,
        operations: Operations,
        peers: Peers,
        counted: Callable[[], dict[str, float]],
        close: Callable[[], None],
        pools: Callable[[], Sequence[PoolView]] = lambda: (),
    ) -> None:
        self._operations = operations
        self._peers = peers
        self._counted = counted
        self._close = close
        self._pools = pools
        self._closed = False

    def fetch(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        deadline_s: float = DEADLINE_S,
        lineage: bytes = ROOT_LINEAGE,
        extra: bytes = b"",
    ) -> Hit:
        """The KV of the longest prefix of ``tokens`` that any agent has published; see
        ``Operations.fetch``."""
        return self.run(self._operations.fetch(namespace, tokens, lineage=lineage, extra=extra), deadline_s)

    def stream(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        deadline_s: float = DEADLINE_S,
        lineage: bytes = ROOT_LINEAGE,
        extra: bytes = b"",
    ) -> Iterator[Block]:
        """Like :meth:`fetch`, one verified block at a time, in order, as they arrive.

        The deadline counts from this call and includes what the caller does between blocks.
        """
        deadline = self._deadline(deadline_s)
        steps = self._operations.fetch(namespace, tokens, lineage=lineage, extra=extra)
        return iterate_blocking(steps, self._peers, deadline)

    def publish(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        blocks: Sequence[Buffer],
        *,
        first_block: int = 0,
        deadline_s: float = DEADLINE_S,
        lineage: bytes = ROOT_LINEAGE,
        extra: bytes = b"",
    ) -> Published:
        """Let every agent have the KV of these blocks; only what nobody has yet is written."""
        steps = self._operations.publish(
            namespace, tokens, blocks, first_block=first_block, lineage=lineage, extra=extra
        )
        return self.run(steps, deadline_s)

    def bind(self, namespace: Namespace) -> Namespace:
        """``namespace`` under this client's tenant: what an engine is built with whose streams are shared."""
        return self._operations.bind(namespace)

    def adopt_prefix(
        self, session: Session, engine: Engine, tokens: Sequence[int], *, deadline_s: float = DEADLINE_S
    ) -> int:
        """Begin to feed ``tokens`` with K/V that anybody has computed under the same past; the number of rows
        that this gave.  See ``Sharing.adopt_prefix``."""
        return self.run(Sharing(self._operations).adopt_prefix(session, engine, tokens), deadline_s)

    def archive(self, engine: Engine, *, bytes_max: int) -> SpanArchive:
        """Where the archived spans of ``engine``'s sessions go, and come back from; see ``Archive``."""
        return SpanArchive(
            self, Archive(Sharing(self._operations), engine, bytes_max=bytes_max, counts=self.stream_counts())
        )

    def agent(self, name: str, namespace: Namespace | None = None) -> Agent:
        """The agent ``name``; ``namespace`` is the default of its contexts."""
        return Agent(self, self._operations, name, namespace)

    def state(self, name: str) -> State:
        """The small versioned state called ``name``."""
        return State(self, self._operations, name)

    def counter(self, name: str) -> Counter:
        """The sums called ``name``: concurrent adds all count."""
        return Counter(self, self._operations, table.COUNTER, name)

    def set(self, name: str) -> ElementSet:
        """The sets called ``name``: concurrent adds and removes of elements both take effect."""
        return ElementSet(self, self._operations, table.SET, name)

    def map(self, name: str) -> FieldMap:
        """The maps called ``name``: their fields are written independently of each other."""
        return FieldMap(self, self._operations, table.MAP, name)

    def maximum(self, name: str) -> Extreme:
        """The largest numbers called ``name``."""
        return Extreme(self, self._operations, table.MAXIMUM, name)

    def minimum(self, name: str) -> Extreme:
        """The smallest numbers called ``name``."""
        return Extreme(self, self._operations, table.MINIMUM, name)

    def register(self, name: str) -> Register:
        """The values called ``name`` of which the last written is shown; concurrent ones **are lost**."""
        return Register(self, self._operations, table.REGISTER, name)

    def strong(self, name: str) -> Strong:
        """The linearizable values called ``name``."""
        return Strong(self, self._operations, name)

    def lease(self, name: str, ttl_s: float = TTL_S) -> Lease:
        """The lease called ``name``, not acquired yet.  Each call makes a contender of its own.

        Args:
            ttl_s: how long it lasts without renewal; short = quickly taken over from a dead process, long =
                fewer renewals and longer pauses survived.
        """
        return Lease(self._operations.leases(), name, ttl_s, self.run)

    def names(self, prefix: bytes = b"", *, deadline_s: float = DEADLINE_S) -> list[bytes]:
        """Names of this tenant's records under ``prefix`` (``kvcomm.stateplane.record_name``), sorted."""
        return self.run(self._operations.names(prefix), deadline_s)

    def metrics(self) -> dict[str, float]:
        """Every metric of this client by its name in Prometheus (docs/metrics.md)."""
        return self._counted()

    def stream_counts(self) -> StreamCounts:
        """Counts of an engine's streams, in :meth:`metrics`; hand it to the engine."""
        return StreamCounts(self._operations.metrics)

    def pools(self) -> Sequence[PoolView]:
        """How each pool of the rack is read, through which transport, and why not through another."""
        return self._pools()

    def run(self, steps: Steps[T], deadline_s: float) -> T:
        """Run an operation in this thread."""
        return run_blocking(steps, self._peers, self._deadline(deadline_s))

    def close(self) -> None:
        """Give back connections and pins; views that are still in use stay readable.  Idempotent."""
        if not self._closed:
            self._closed = True
            self._close()

    def _deadline(self, deadline_s: float) -> float:
        if self._closed:
            raise ValueError("this client is closed")
        return deadline_after(deadline_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Agent:
    """A name under which contexts are kept."""

    _client: Client
    _operations: Operations
    name: str
    namespace: Namespace | None

    def context(self, session: str, namespace: Namespace | None = None) -> Context:
        """This agent's context ``session``, to extend."""
        return Context(self._client, self._operations, self.name, session, namespace or self.namespace)

    def context_of(self, agent: str, session: str) -> Context:
        """Another agent's context, to follow."""
        return Context(self._client, self._operations, agent, session, self.namespace)

    def stream(self, name: str) -> Stream:
        """This agent's stream ``name``, to publish and to take over."""
        return self.stream_of(self.name, name)

    def stream_of(self, agent: str, name: str) -> Stream:
        """Another agent's stream."""
        return Stream(self._client, Sharing(self._operations), agent, name)


@dataclass(frozen=True, slots=True)
class Context:
    """What an agent's session looks like now: a versioned head that names its blocks."""

    _client: Client
    _operations: Operations
    agent: str
    session: str
    namespace: Namespace | None

    def append(
        self, tokens: Sequence[int], blocks: Sequence[Buffer] = (), *, deadline_s: float = DEADLINE_S
    ) -> Manifest:
        """Add tokens (and the KV of the full blocks that they complete); the new head.  See
        ``Operations.append``."""
        steps = self._operations.append(self.agent, self.session, self.namespace, tokens, blocks)
        return self._client.run(steps, deadline_s)

    def manifest(self, *, deadline_s: float = DEADLINE_S) -> Manifest:
        """The head.  Raises ``Unavailable`` if there is none yet, ``Conflict`` if writers forked it."""
        return self._client.run(self._operations.head(self.agent, self.session), deadline_s)

    def fetch(self, *, deadline_s: float = DEADLINE_S) -> Hit:
        """The blocks that the head names, as far as they can be had."""
        return self._client.run(self._operations.follow_head(self.agent, self.session), deadline_s)


@dataclass(frozen=True, slots=True)
class Stream:
    """A rollout under an agent's name, compacted or not, that others may take over; see
    ``kvcomm.streams.sharing``."""

    _client: Client
    _sharing: Sharing
    agent: str
    name: str

    def publish(
        self,
        session: Session,
        engine: Engine,
        *,
        policy: str = "",
        recorder: Recorder | None = None,
        replaces: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> Shared:
        """Let others take ``session`` over as it is now.  See ``Sharing.publish``."""
        steps = self._sharing.publish(
            session, engine, self.agent, self.name, policy=policy, recorder=recorder, replaces=replaces
        )
        return self._client.run(steps, deadline_s)

    def adopt(
        self,
        engine: Engine,
        *,
        context: StreamContext | None = None,
        journal: Callable[[Event], None] = no_journal,
        deadline_s: float = DEADLINE_S,
    ) -> Session | Missing:
        """Go on where it is, exactly.  See ``Sharing.adopt``."""
        steps = self._sharing.adopt(engine, self.agent, self.name, context=context, journal=journal)
        return self._client.run(steps, deadline_s)

    def context(self, *, deadline_s: float = DEADLINE_S) -> StreamContext:
        """What was published last.  See ``Sharing.head``."""
        return self._client.run(self._sharing.head(self.agent, self.name), deadline_s)


@dataclass(frozen=True, slots=True)
class SpanArchive:
    """See ``kvcomm.streams.archive.Archive``."""

    _client: Client
    _archive: Archive

    def put_away(self, session: Session, span: SpanId, *, deadline_s: float = DEADLINE_S) -> PutAway:
        """See ``Archive.put_away``."""
        return self._client.run(self._archive.put_away(session, span), deadline_s)

    def settle(self, sessions: Sequence[Session], *, deadline_s: float = DEADLINE_S) -> list[PutAway]:
        """See ``Archive.settle``."""
        return self._client.run(self._archive.settle(sessions), deadline_s)

    def bring_back(
        self,
        session: Session,
        span: SpanId,
        insert_at: int | None = None,
        *,
        room: Sequence[BlockId] = (),
        deadline_s: float = DEADLINE_S,
    ) -> Event | SpanLost:
        """See ``Archive.bring_back``."""
        steps = self._archive.bring_back(session, span, insert_at, room=room)
        return self._client.run(steps, deadline_s)

    def repeat(self, session: Session, lost: SpanLost, recorder: Recorder | None = None) -> Repeated:
        """See ``Archive.repeat``; computes, and asks nobody."""
        return self._archive.repeat(session, lost, recorder)


@dataclass(frozen=True, slots=True)
class State:
    """Small values under a name: never lost once a put returned, siblings shown when writers did not know
    each other."""

    _client: Client
    _operations: Operations
    name: str

    def get(self, key: str, *, fresh: bool = False, deadline_s: float = DEADLINE_S) -> StateValue:
        """The value or values and their causal context.

        Args:
            fresh: not from a copy of a hot record, which may be a second old (``cache.hot_record_age``).
        """
        return self.get_many([key], fresh=fresh, deadline_s=deadline_s)[key]

    def get_many(
        self, keys: Sequence[str], *, fresh: bool = False, deadline_s: float = DEADLINE_S
    ) -> dict[str, StateValue]:
        """Many keys in one round trip a shard."""
        values = self._client.run(self._operations.state_get(self.name, keys, fresh), deadline_s)
        return dict(zip(keys, values, strict=True))

    def put(
        self, key: str, value: bytes, *, context: Dots | None = None, deadline_s: float = DEADLINE_S
    ) -> Dots:
        """Write; the new causal context.

        The write replaces what ``context`` covers: by default what this client last saw of the key.
        """
        return self.put_many({key: value}, context=context, deadline_s=deadline_s)[key]

    def put_many(
        self, items: Mapping[str, bytes], *, context: Dots | None = None, deadline_s: float = DEADLINE_S
    ) -> dict[str, Dots]:
        """Many keys in one round trip a shard; each key by itself, not a transaction.

        ``context`` applies to every item, so it is for one item, or empty: concurrent to all that is there.

        What is raised for several items has ``outcomes``, one a key: ``done`` with its new context,
        ``not_done`` with the reason, or ``unknown``.  Its class is ``PartlyDone`` if something was or may
        have been written; any other class says that nothing was.
        """
        steps = self._operations.state_put(self.name, list(items.items()), context)
        return dict(zip(items, self._client.run(steps, deadline_s), strict=True))

    def delete(self, key: str, *, context: Dots | None = None, deadline_s: float = DEADLINE_S) -> Dots:
        """Delete what ``context`` covers; a concurrent write survives."""
        return self._client.run(self._operations.state_put(self.name, [(key, None)], context), deadline_s)[0]

    def keys(self, *, deadline_s: float = DEADLINE_S) -> list[str]:
        """The keys that exist under this name."""
        return self._client.run(self._operations.state_keys(self.name), deadline_s)


@dataclass(frozen=True, slots=True)
class Strong:
    """Small values under a name, linearizable: all clients see one order of changes, and the newest value.

    A change needs a majority of the record's replicas, which have it on their disks before it returns; the
    minority side of a split raises ``Unavailable``.  ``Conflict`` and ``Unavailable`` mean that nothing was
    changed, ``OutcomeUnknown`` that only a read can tell.

    Every change may carry ``fence``, a lease (or its epoch): a record refuses (``Fenced``) what is changed
    under a smaller epoch than the largest it has seen, so a process whose lease is over cannot write, however
    late its message comes.  A record that was ever changed under a lease takes no change without one.
    ``change(key, lambda value: value, fence=lease)`` closes a record to earlier epochs and changes nothing.
    Fence a record with one lease only: epochs of different leases do not compare.
    """

    _client: Client
    _operations: Operations
    name: str

    def read(self, key: str, *, deadline_s: float = DEADLINE_S) -> StrongValue:
        """The value, and its version for :meth:`compare_and_set`."""
        return self._client.run(self._operations.strong_read(self.name, key), deadline_s)

    def put(
        self, key: str, value: bytes, *, fence: Fence | int | None = None, deadline_s: float = DEADLINE_S
    ) -> StrongValue:
        """Write, whatever was there."""
        epoch = epoch_of(fence)
        return self._client.run(self._operations.strong_put(self.name, key, value, epoch), deadline_s)

    def compare_and_set(
        self,
        key: str,
        expected_version: bytes,
        value: bytes | None,
        *,
        fence: Fence | int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> StrongValue:
        """Write (``None``: delete) only if the version is still ``expected_version``; ``b""``: only if there
        is no value.  Raises ``StrongConflict``, whose ``found`` is what was there instead."""
        epoch = epoch_of(fence)
        steps = self._operations.strong_compare_and_set(self.name, key, expected_version, value, epoch)
        return self._client.run(steps, deadline_s)

    def change(
        self,
        key: str,
        function: Callable[[bytes | None], bytes | None],
        *,
        fence: Fence | int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> StrongValue:
        """Replace the value by ``function(value)``.  ``function`` may be called several times and should do
        nothing else."""
        steps = self._operations.strong_change(self.name, key, function, epoch_of(fence))
        return self._client.run(steps, deadline_s)

    def delete(
        self, key: str, *, fence: Fence | int | None = None, deadline_s: float = DEADLINE_S
    ) -> StrongValue:
        """Delete, whatever was there; the record still knows its fence."""
        return self._client.run(self._operations.strong_delete(self.name, key, epoch_of(fence)), deadline_s)
