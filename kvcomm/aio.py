"""``AsyncClient``: the asyncio face.  Same operations, same answers as ``kvcomm.client``; made by
``kvcomm.connect_async``.

Hits in L1 and in the host's pool are memory operations done in the event loop's thread; everything else is
awaited.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from kvcomm.aioleasing import AsyncLease
from kvcomm.aiomerging import AsyncCounter, AsyncElementSet, AsyncExtreme, AsyncFieldMap, AsyncRegister
from kvcomm.block import ROOT_LINEAGE, Buffer
from kvcomm.deadline import DEADLINE_S, deadline_after
from kvcomm.lease import TTL_S
from kvcomm.leasing import Fence, epoch_of
from kvcomm.manifest import Manifest
from kvcomm.namespace import Namespace
from kvcomm.operations import Hit, Operations, Published
from kvcomm.resolvers import table
from kvcomm.rpc import AsyncPeers, iterate_async, run_async
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


class AsyncClient:
    """``kvcomm.client.Client`` for coroutines of one event loop.  Cancelling a call is safe: nothing
    half-read is reused."""

    def __init__(
        self,
        operations: Operations,
        peers: AsyncPeers,
        counted: Callable[[], dict[str, float]],
        close: Callable[[], Awaitable[None]],
        pools: Callable[[], Sequence[PoolView]] = lambda: (),
    ) -> None:
        self._operations = operations
        self._peers = peers
        self._counted = counted
        self._close = close
        self._pools = pools
        self._closed = False

    async def fetch(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        deadline_s: float = DEADLINE_S,
        lineage: bytes = ROOT_LINEAGE,
        extra: bytes = b"",
    ) -> Hit:
        """See ``Client.fetch``."""
        return await self.run(
            self._operations.fetch(namespace, tokens, lineage=lineage, extra=extra), deadline_s
        )

    async def stream(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        deadline_s: float = DEADLINE_S,
        lineage: bytes = ROOT_LINEAGE,
        extra: bytes = b"",
    ) -> AsyncIterator[Block]:
        """See ``Client.stream``."""
        deadline = self._deadline(deadline_s)
        steps = self._operations.fetch(namespace, tokens, lineage=lineage, extra=extra)
        # "async for" does not close what it iterates over: left to the garbage collector, an abandoned stream
        # would keep its claims on blocks that others wait for.
        async with aclosing(iterate_async(steps, self._peers, deadline)) as blocks:
            async for block in blocks:
                yield block

    async def publish(
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
        """See ``Client.publish``."""
        steps = self._operations.publish(
            namespace, tokens, blocks, first_block=first_block, lineage=lineage, extra=extra
        )
        return await self.run(steps, deadline_s)

    def bind(self, namespace: Namespace) -> Namespace:
        """See ``Client.bind``."""
        return self._operations.bind(namespace)

    async def adopt_prefix(
        self, session: Session, engine: Engine, tokens: Sequence[int], *, deadline_s: float = DEADLINE_S
    ) -> int:
        """See ``Client.adopt_prefix``."""
        return await self.run(Sharing(self._operations).adopt_prefix(session, engine, tokens), deadline_s)

    def archive(self, engine: Engine, *, bytes_max: int) -> AsyncSpanArchive:
        """See ``Client.archive``."""
        return AsyncSpanArchive(
            self, Archive(Sharing(self._operations), engine, bytes_max=bytes_max, counts=self.stream_counts())
        )

    def agent(self, name: str, namespace: Namespace | None = None) -> AsyncAgent:
        """See ``Client.agent``."""
        return AsyncAgent(self, self._operations, name, namespace)

    def state(self, name: str) -> AsyncState:
        """See ``Client.state``."""
        return AsyncState(self, self._operations, name)

    def counter(self, name: str) -> AsyncCounter:
        """See ``Client.counter``."""
        return AsyncCounter(self, self._operations, table.COUNTER, name)

    def set(self, name: str) -> AsyncElementSet:
        """See ``Client.set``."""
        return AsyncElementSet(self, self._operations, table.SET, name)

    def map(self, name: str) -> AsyncFieldMap:
        """See ``Client.map``."""
        return AsyncFieldMap(self, self._operations, table.MAP, name)

    def maximum(self, name: str) -> AsyncExtreme:
        """See ``Client.maximum``."""
        return AsyncExtreme(self, self._operations, table.MAXIMUM, name)

    def minimum(self, name: str) -> AsyncExtreme:
        """See ``Client.minimum``."""
        return AsyncExtreme(self, self._operations, table.MINIMUM, name)

    def register(self, name: str) -> AsyncRegister:
        """See ``Client.register``."""
        return AsyncRegister(self, self._operations, table.REGISTER, name)

    def strong(self, name: str) -> AsyncStrong:
        """See ``Client.strong``."""
        return AsyncStrong(self, self._operations, name)

    def lease(self, name: str, ttl_s: float = TTL_S) -> AsyncLease:
        """See ``Client.lease``."""
        return AsyncLease(self._operations.leases(), name, ttl_s, self.run)

    async def names(self, prefix: bytes = b"", *, deadline_s: float = DEADLINE_S) -> list[bytes]:
        """See ``Client.names``."""
        return await self.run(self._operations.names(prefix), deadline_s)

    def metrics(self) -> dict[str, float]:
        """See ``Client.metrics``."""
        return self._counted()

    def stream_counts(self) -> StreamCounts:
        """See ``Client.stream_counts``."""
        return StreamCounts(self._operations.metrics)

    def pools(self) -> Sequence[PoolView]:
        """See ``Client.pools``."""
        return self._pools()

    async def run(self, steps: Steps[T], deadline_s: float) -> T:
        """Run an operation in this event loop."""
        return await run_async(steps, self._peers, self._deadline(deadline_s))

    async def close(self) -> None:
        """See ``Client.close``."""
        if not self._closed:
            self._closed = True
            await self._close()

    def _deadline(self, deadline_s: float) -> float:
        if self._closed:
            raise ValueError("this client is closed")
        return deadline_after(deadline_s)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class AsyncAgent:
    """See ``kvcomm.client.Agent``."""

    _client: AsyncClient
    _operations: Operations
    name: str
    namespace: Namespace | None

    def context(self, session: str, namespace: Namespace | None = None) -> AsyncContext:
        """This agent's context ``session``, to extend."""
        return AsyncContext(self._client, self._operations, self.name, session, namespace or self.namespace)

    def context_of(self, agent: str, session: str) -> AsyncContext:
        """Another agent's context, to follow."""
        return AsyncContext(self._client, self._operations, agent, session, self.namespace)

    def stream(self, name: str) -> AsyncStream:
        """This agent's stream ``name``, to publish and to take over."""
        return self.stream_of(self.name, name)

    def stream_of(self, agent: str, name: str) -> AsyncStream:
        """Another agent's stream."""
        return AsyncStream(self._client, Sharing(self._operations), agent, name)


@dataclass(frozen=True, slots=True)
class AsyncContext:
    """See ``kvcomm.client.Context``."""

    _client: AsyncClient
    _operations: Operations
    agent: str
    session: str
    namespace: Namespace | None

    async def append(
        self, tokens: Sequence[int], blocks: Sequence[Buffer] = (), *, deadline_s: float = DEADLINE_S
    ) -> Manifest:
        """See ``Context.append``."""
        steps = self._operations.append(self.agent, self.session, self.namespace, tokens, blocks)
        return await self._client.run(steps, deadline_s)

    async def manifest(self, *, deadline_s: float = DEADLINE_S) -> Manifest:
        """See ``Context.manifest``."""
        return await self._client.run(self._operations.head(self.agent, self.session), deadline_s)

    async def fetch(self, *, deadline_s: float = DEADLINE_S) -> Hit:
        """See ``Context.fetch``."""
        return await self._client.run(self._operations.follow_head(self.agent, self.session), deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncStream:
    """See ``kvcomm.client.Stream``."""

    _client: AsyncClient
    _sharing: Sharing
    agent: str
    name: str

    async def publish(
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
        return await self._client.run(steps, deadline_s)

    async def adopt(
        self,
        engine: Engine,
        *,
        context: StreamContext | None = None,
        journal: Callable[[Event], None] = no_journal,
        deadline_s: float = DEADLINE_S,
    ) -> Session | Missing:
        """Go on where it is, exactly.  See ``Sharing.adopt``."""
        steps = self._sharing.adopt(engine, self.agent, self.name, context=context, journal=journal)
        return await self._client.run(steps, deadline_s)

    async def context(self, *, deadline_s: float = DEADLINE_S) -> StreamContext:
        """What was published last.  See ``Sharing.head``."""
        return await self._client.run(self._sharing.head(self.agent, self.name), deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncSpanArchive:
    """See ``kvcomm.streams.archive.Archive``."""

    _client: AsyncClient
    _archive: Archive

    async def put_away(self, session: Session, span: SpanId, *, deadline_s: float = DEADLINE_S) -> PutAway:
        """See ``Archive.put_away``."""
        return await self._client.run(self._archive.put_away(session, span), deadline_s)

    async def settle(self, sessions: Sequence[Session], *, deadline_s: float = DEADLINE_S) -> list[PutAway]:
        """See ``Archive.settle``."""
        return await self._client.run(self._archive.settle(sessions), deadline_s)

    async def bring_back(
        self,
        session: Session,
        span: SpanId,
        insert_at: int | None = None,
        *,
        room: Sequence[BlockId] = (),
        deadline_s: float = DEADLINE_S,
    ) -> Event | SpanLost:
        """See ``Archive.bring_back``."""
        return await self._client.run(
            self._archive.bring_back(session, span, insert_at, room=room), deadline_s
        )

    def repeat(self, session: Session, lost: SpanLost, recorder: Recorder | None = None) -> Repeated:
        """See ``Archive.repeat``; computes, and asks nobody."""
        return self._archive.repeat(session, lost, recorder)


@dataclass(frozen=True, slots=True)
class AsyncState:
    """See ``kvcomm.client.State``."""

    _client: AsyncClient
    _operations: Operations
    name: str

    async def get(self, key: str, *, fresh: bool = False, deadline_s: float = DEADLINE_S) -> StateValue:
        """See ``State.get``."""
        return (await self.get_many([key], fresh=fresh, deadline_s=deadline_s))[key]

    async def get_many(
        self, keys: Sequence[str], *, fresh: bool = False, deadline_s: float = DEADLINE_S
    ) -> dict[str, StateValue]:
        """See ``State.get_many``."""
        values = await self._client.run(self._operations.state_get(self.name, keys, fresh), deadline_s)
        return dict(zip(keys, values, strict=True))

    async def put(
        self, key: str, value: bytes, *, context: Dots | None = None, deadline_s: float = DEADLINE_S
    ) -> Dots:
        """See ``State.put``."""
        return (await self.put_many({key: value}, context=context, deadline_s=deadline_s))[key]

    async def put_many(
        self, items: Mapping[str, bytes], *, context: Dots | None = None, deadline_s: float = DEADLINE_S
    ) -> dict[str, Dots]:
        """See ``State.put_many``, also for ``PartlyDone`` and its ``outcomes``."""
        steps = self._operations.state_put(self.name, list(items.items()), context)
        return dict(zip(items, await self._client.run(steps, deadline_s), strict=True))

    async def delete(self, key: str, *, context: Dots | None = None, deadline_s: float = DEADLINE_S) -> Dots:
        """See ``State.delete``."""
        steps = self._operations.state_put(self.name, [(key, None)], context)
        return (await self._client.run(steps, deadline_s))[0]

    async def keys(self, *, deadline_s: float = DEADLINE_S) -> list[str]:
        """See ``State.keys``."""
        return await self._client.run(self._operations.state_keys(self.name), deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncStrong:
    """See ``kvcomm.client.Strong``."""

    _client: AsyncClient
    _operations: Operations
    name: str

    async def read(self, key: str, *, deadline_s: float = DEADLINE_S) -> StrongValue:
        """See ``Strong.read``."""
        return await self._client.run(self._operations.strong_read(self.name, key), deadline_s)

    async def put(
        self, key: str, value: bytes, *, fence: Fence | int | None = None, deadline_s: float = DEADLINE_S
    ) -> StrongValue:
        """See ``Strong.put``."""
        epoch = epoch_of(fence)
        return await self._client.run(self._operations.strong_put(self.name, key, value, epoch), deadline_s)

    async def compare_and_set(
        self,
        key: str,
        expected_version: bytes,
        value: bytes | None,
        *,
        fence: Fence | int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> StrongValue:
        """See ``Strong.compare_and_set``."""
        epoch = epoch_of(fence)
        steps = self._operations.strong_compare_and_set(self.name, key, expected_version, value, epoch)
        return await self._client.run(steps, deadline_s)

    async def change(
        self,
        key: str,
        function: Callable[[bytes | None], bytes | None],
        *,
        fence: Fence | int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> StrongValue:
        """See ``Strong.change``."""
        steps = self._operations.strong_change(self.name, key, function, epoch_of(fence))
        return await self._client.run(steps, deadline_s)

    async def delete(
        self, key: str, *, fence: Fence | int | None = None, deadline_s: float = DEADLINE_S
    ) -> StrongValue:
        """See ``Strong.delete``."""
        steps = self._operations.strong_delete(self.name, key, epoch_of(fence))
        return await self._client.run(steps, deadline_s)
