"""``Sharing``: a compacted context goes to another agent, which continues exactly where this one is.

::

    publish   blocks of the view and of archived spans that nobody has ──► block plane
              then the head ``stream/<agent>/<session>`` (a StreamContext) ──► state plane
    adopt     head ──► every key computed again ──► room taken, all of it ──► blocks that this engine has
              held, the others fetched and loaded ──► a session; or, if a block is missing, which rows

Blocks first: whoever sees a head finds what it names.  What was computed after a cut cannot be computed again
from the text that is left, so there is no shorter prefix here: a context is taken over whole, or not at all,
and never repaired in silence.

The partial last block travels as it is, the unused slots zero.  Feeding its rows again would give other K/V
whenever a cut came after they were fed.

Names are one: an engine that shares is built with the namespace that ``Client.bind`` gives, tenant included,
so a block has the same key in the engine's pool and in the cluster, and no tenant finds another's.

All of it is steps (``kvcomm.steps``), for both faces of the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvcomm.block import NO_PARENT, header_for
from kvcomm.blockplane import Stored
from kvcomm.errors import Conflict, NamespaceError, Unavailable
from kvcomm.namespace import Namespace
from kvcomm.operations import Operations, Published
from kvcomm.stateplane import StateValue, record_name
from kvcomm.steps import Steps
from kvcomm.streams.chain import ChainBlock, chain_of
from kvcomm.streams.context import StreamContext, newest
from kvcomm.streams.engine import Engine
from kvcomm.streams.events import Event, no_journal
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.session import Session
from kvcomm.tier import Block, BlockCopy

_T = TypeVar("_T")

PART_BYTES = 64 << 20
"""K/V under way at a time, beside the engine's memory."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What became of a published context."""

    context: StreamContext
    published: Published
    """Of each block: those of the table, then those of archived spans."""

    @property
    def complete(self) -> bool:
        """Whether others can take it over: the head was moved.  If not, some block found no room anywhere
        (see ``published``), and the head is what it was."""
        return not self.published.failed


@dataclass(frozen=True, slots=True)
class Missing:
    """A context that cannot be taken over, because K/V of its view could not be had.  Nothing was changed.

    What is left to do is visible: try again unless it is :attr:`gone`; or read the text of the view as the
    prompt of a *new* stream, which will not continue as the old one would have.
    """

    context: StreamContext
    rows: tuple[int, ...]
    """Of the view: those whose K/V could not be had."""
    gone: bool
    """Nobody has it.  Else somebody may, who did not answer in time, or whose copy was refused."""


class Sharing:
    """What one client does with engines' streams."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def publish(
        self,
        session: Session,
        engine: Engine,
        agent: str,
        name: str,
        *,
        policy: str = "",
        recorder: Recorder | None = None,
        replaces: bool = False,
    ) -> Steps[Shared]:
        """Let others take the session over as it is now.

        Args:
            policy: name of what decides the cuts.
            recorder: of the session; knows which rows are nobody's text.
            replaces: put it over a head that went another way, or cannot be read; it is forgotten.

        Raises:
            ValueError: it is swapped out, closed, or of another engine.
            NamespaceError: the engine's namespace was not bound to this client's tenant.
            Conflict: the head is not a past of this session.
            TooLarge: the record would be; see ``StreamContext.encode``.
            And what ``StatePlane.put`` raises.
        """
        namespace = self.require_bound(engine)
        if session.pool is not engine.pool:
            raise ValueError("a session of another engine: its blocks are not in this memory")
        if session.closed or session.swapped is not None:
            raise ValueError(
                "the session's bytes are not in memory: publish before it is closed or swapped out"
            )
        chain = chain_of(namespace, session.tokens, session.events)
        context = StreamContext.of(
            session,
            chain,
            producer=self._operations.producer,
            policy=policy,
            filler_rows=recorder.filler_rows if recorder else (),
            repeated_rows=recorder.repeated_rows if recorder else (),
        )
        value = context.encode()
        here = list(zip(session.table, chain.blocks, strict=True))
        for span, archived in session.archive.items():
            here += zip(archived.blocks, chain.archived[span], strict=bool(archived.blocks))
        record = _record(agent, name)
        with _holding(engine.pool, [block for block, _ in here]):
            (before,) = yield from self._operations.state().get([record], fresh=True)
            if not replaces and not all(context.extends(head) for head in _contexts(before)):
                raise Conflict(
                    f"stream {name!r} of agent {agent!r} is not a past of this session: publish under "
                    "another name, or pass replaces=True to forget it"
                )
            published = yield from self.put(engine, here)
        if not published.failed:
            # Over what was compared with alone: what came meanwhile stays beside it, for the next one to see.
            yield from self._operations.state().put([(record, value, before.context)])
        return Shared(context, published)

    def head(self, agent: str, name: str) -> Steps[StreamContext]:
        """What another agent published last.  Raises ``Unavailable`` if there is nothing (yet), ``Conflict``
        if writers took it different ways, ``Corrupt``."""
        (state,) = yield from self._operations.state().get([_record(agent, name)])
        heads = _contexts(state)
        if not heads:
            raise Unavailable(f"agent {agent!r} has no stream {name!r} (yet)")
        head = newest(heads)
        if head is None:
            raise Conflict(f"{len(heads)} writers took stream {name!r} of agent {agent!r} different ways")
        return head

    def adopt(
        self,
        engine: Engine,
        agent: str,
        name: str,
        *,
        context: StreamContext | None = None,
        journal: Callable[[Event], None] = no_journal,
    ) -> Steps[Session | Missing]:
        """Take a published context over: a session that goes on exactly as its own would, or which rows
        cannot be had.

        Args:
            context: as :meth:`head` gave it; the head of now if not given.
            journal: the new session's; it is given all events of the past first.

        Raises:
            NamespaceError: it is of another model or tenant, or the engine's namespace was not bound.
            Corrupt: its keys do not follow from its tokens and events.
            TooLarge: see ``StreamContext.verify``.
            PoolFull: the engine has no room for all of it; nothing was taken.
            Refused: it is longer than the engine's model reaches.
            And what :meth:`head` raises.
        """
        namespace = self.require_bound(engine)
        if context is None:
            context = yield from self.head(agent, name)
        chain = context.verify(namespace)
        session = engine.recovered(context.tokens, context.events, journal=journal)
        table = yield from self.get(engine, chain.table, chain.tail)
        if isinstance(table, Lost):
            return Missing(context, table.rows, table.gone)
        session.attach(table)
        try:
            for event in context.events:
                journal(event)
        except BaseException:
            session.close()
            raise
        kept = {each.span for each in context.archived}
        for span in [span for span in session.archive if span not in kept]:
            session.drop_archived(span, moved=False)
        session.turns, session.pending = list(context.turns), context.pending
        session.protect(context.protected)
        return session

    def put(self, engine: Engine, blocks: Sequence[tuple[BlockId, ChainBlock]]) -> Steps[Published]:
        """Publish blocks that the engine holds, as far as nobody has them."""
        namespace = engine.namespace

        def build(part: Sequence[tuple[BlockId, ChainBlock]], index: int) -> BlockCopy:
            block, known = part[index]
            payload = _filled(engine.payload(block), namespace, len(known.rows))
            header = header_for(
                namespace,
                known.key,
                known.parent,
                payload,
                logical_start=known.rows[0],
                producer=self._operations.producer,
                lineage=known.lineage,
            )
            return BlockCopy(replace(header, token_count=len(known.rows)), payload)

        statuses: list[Stored] = []
        with _holding(engine.pool, [block for block, _ in blocks]):
            for part in _parts(blocks, namespace):
                keys = [known.key for _, known in part]
                put = yield from self._operations.publish_copies(namespace, keys, partial(build, part))
                statuses += put.statuses
        return Published(tuple(statuses))

    def get(
        self,
        engine: Engine,
        full: Sequence[ChainBlock],
        tail: ChainBlock | None = None,
        *,
        room: Sequence[BlockId] | None = None,
    ) -> Steps[list[BlockId] | Lost]:
        """Blocks of the engine that hold these, held once each and named; or those that cannot be had.

        Room is taken for all before any is fetched, and given back if one is missing: nobody waits for room
        while holding some.

        Args:
            room: blocks taken for this before (``kvcomm.streams.admission``), handed over, as many as all of
                these; what is not needed is given back.

        Raises:
            PoolFull: there is no room; nothing was taken.
            ValueError: ``room`` is too little; it was given back.
        """
        pool = engine.pool
        if room is not None and len(room) < len(full) + (tail is not None):
            pool.release(room)
            raise ValueError(
                f"room of {len(room)} blocks for {len(full) + (tail is not None)}: take one for each"
            )
        found = [pool.find(block.key) for block in full]
        wanted = [block for block, mine in zip(full, found, strict=True) if mine is None]
        wanted += [tail] if tail else []
        held = [block for block in found if block is not None]
        pool.hold(held)
        try:
            if room is None:
                taken = pool.take(len(wanted))
            else:
                taken = list(room[: len(wanted)])
                pool.release(room[len(wanted) :])
            held += taken
            loaded = yield from self._load(engine, list(zip(taken, wanted, strict=True)))
            lost = (yield from self._lost(wanted[loaded:])) if loaded < len(wanted) else None
        except BaseException:
            pool.release(held)
            raise
        if lost is not None:
            pool.release(held)
            return lost
        fresh = iter(taken)
        table = [next(fresh) if mine is None else mine for mine in found]
        return [*table, *fresh]

    def adopt_prefix(self, session: Session, engine: Engine, tokens: Sequence[int]) -> Steps[int]:
        """Begin to feed ``tokens`` with blocks that anybody has computed under the same past: a prompt that
        other agents began with, too; behind a cut, what forks and siblings of this rollout were fed.

        Returns the number of rows that this gave; feed the others, of which there is at least one.  0 where
        the view does not end with a full block.  What is not in the engine's pool is fetched, as far as there
        is room; a miss is no error.

        Raises:
            NamespaceError: the engine's namespace was not bound to this client's tenant.
            ValueError, TokenError, Refused: see ``Session.plan``.
        """
        namespace, pool = self.require_bound(engine), engine.pool
        size = namespace.block_tokens
        here = not session.closed and session.swapped is None
        if here and session.slot_count % size == 0:
            ahead = _ahead(session, tokens[: max(len(tokens) - 1, 0) // size * size])
            known = next((at for at, each in enumerate(ahead) if pool.find(each.key) is None), len(ahead))
            held = [block for each in ahead[:known] if (block := pool.find(each.key)) is not None]
            pool.hold(held)  # room is not made at the cost of what is here
            try:
                room = pool.take(min(len(ahead) - known, pool.free_count))
                held += room
                yield from self._load(engine, list(zip(room, ahead[known:], strict=False)))
                return session.adopt_prefix(tokens)
            finally:
                pool.release(held)
        return session.adopt_prefix(tokens)

    def require_bound(self, engine: Engine) -> Namespace:
        """The engine's namespace.  Raises ``NamespaceError`` if its keys are not those of this client's
        tenant."""
        if self._operations.bind(engine.namespace).id != engine.namespace.id:
            raise NamespaceError(
                "this engine names its blocks without a tenant, so nobody would find them: build it with "
                "namespace=client.bind(namespace)"
            )
        return engine.namespace

    def _load(self, engine: Engine, wanted: Sequence[tuple[BlockId, ChainBlock]]) -> Steps[int]:
        """Fetch, verify, load and name, a part at a time; how many of the first could be had."""
        namespace, asked, loaded = engine.namespace, 0, 0
        for part in _parts(wanted, namespace):
            asked += len(part)
            keys, lineages = [known.key for _, known in part], [known.lineage for _, known in part]
            hit = yield from self._operations.fetch_named(namespace, keys, lineages)
            for (block, known), copy in zip(part, hit.blocks, strict=False):
                if not _is(known, copy, namespace):
                    break
                engine.load(block, copy.payload)
                if len(known.rows) == namespace.block_tokens:
                    engine.pool.name(block, known.key)
                loaded += 1
            if loaded < asked:
                break
        return loaded

    def _lost(self, rest: Sequence[ChainBlock]) -> Steps[Lost]:
        """The first of these could not be had; others may be."""
        there = yield from self._operations.present([block.key for block in rest])
        missing = [
            (block, seen) for block, seen in zip(rest, there, strict=True) if not seen or block is rest[0]
        ]
        return Lost(tuple(block for block, _ in missing), all(seen is False for _, seen in missing))


@dataclass(frozen=True, slots=True)
class Lost:
    """Blocks that could not be had.  More may be: after the first, the others were asked for, not fetched."""

    blocks: tuple[ChainBlock, ...]
    gone: bool
    """Whether all who may have them said that they have not."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(row for block in self.blocks for row in block.rows)


def _record(agent: str, name: str) -> bytes:
    return record_name("stream", agent, name)


def _contexts(state: StateValue) -> list[StreamContext]:
    return [StreamContext.decode(value) for value in state.values]


def _ahead(session: Session, tokens: Sequence[int]) -> list[ChainBlock]:
    """The blocks that these will fill, of a session whose last block is full."""
    size = session.block_tokens
    parent = session.pool.key_of(session.table[-1]) if session.table else NO_PARENT
    assert parent is not None, "a full block in a table has a key"
    ahead: list[ChainBlock] = []
    for place, key in enumerate(session.next_keys(tokens)):
        first = session.next_row + place * size
        ahead.append(ChainBlock(key, parent, session.lineage, tuple(range(first, first + size))))
        parent = key
    return ahead


def _parts(blocks: Sequence[_T], namespace: Namespace) -> Iterator[Sequence[_T]]:
    """So many at a time as may be held twice."""
    count = max(1, PART_BYTES // namespace.block_bytes)
    for start in range(0, len(blocks), count):
        yield blocks[start : start + count]


def _is(known: ChainBlock, copy: Block, namespace: Namespace) -> bool:
    """Whether a verified copy says of itself what the chain says of the block."""
    header = copy.header
    says = (header.namespace, header.parent, header.lineage, header.logical_start, header.token_count)
    follows = (namespace.id, known.parent, known.lineage, known.rows[0], len(known.rows))
    return (*says, header.payload_bytes, header.approximate) == (
        *follows,
        namespace.block_bytes,
        namespace.approximate,
    )


def _filled(payload: memoryview, namespace: Namespace, slots: int) -> memoryview:
    """``payload`` with zeros where nothing was written: what others left in a block is nobody's business."""
    if slots == namespace.block_tokens:
        return payload
    assert namespace.layout == "LKHTD"
    data = bytearray(payload)
    run = len(data) // (namespace.layers * 2 * namespace.kv_heads)
    used = run // namespace.block_tokens * slots
    for start in range(0, len(data), run):
        data[start + used : start + run] = bytes(run - used)
    return memoryview(data)


@contextmanager
def _holding(pool: BlockPool, blocks: Sequence[BlockId]) -> Iterator[None]:
    """For a transfer: the session may cut them meanwhile, and nobody writes over them."""
    pool.hold(blocks)
    try:
        yield
    finally:
        pool.release(blocks)
