"""``Archive``: where spans go that were cut to be restored, and how they come back.

A span is archived in the engine's memory first (``Session.evict(archive=True)``).  From there::

    put_away     blocks published ──► all of them readable by others ──► memory freed      else: stays here
    bring_back   room taken, all of it ──► blocks fetched, verified, loaded ──► restore
                                      └── one is missing ──► room given back ──► SpanLost

Both are all or nothing.  A span is found by what its blocks were computed from, on whatever node: engines
that count alike never restore each other's (``kvcomm.streams.lineage.span_id``).

**A lost span is not computed again in secret.**  Its rows saw what may be out of view by now, so their K/V
cannot be computed again; ``SpanLost`` says which rows are gone.  What can be done is to let the model read
the text once more, as new rows at new positions (:meth:`Archive.repeat`), and that is written down.

**Memory is bounded**: :meth:`Archive.settle` puts the coldest spans away while more than ``bytes_max`` are
here.  Nobody waits for room while holding some: who finds none stands in line without blocks
(``kvcomm.streams.admission``) and hands over what it is given as ``room``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm.operations import Published
from kvcomm.steps import Steps
from kvcomm.streams.chain import ChainBlock, chain_of
from kvcomm.streams.counts import StreamCounts
from kvcomm.streams.engine import Engine
from kvcomm.streams.events import Event, SpanId
from kvcomm.streams.pool import BlockId
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.session import Session
from kvcomm.streams.sharing import Lost, Sharing


@dataclass(frozen=True, slots=True)
class PutAway:
    """What became of a span that was to leave memory."""

    span: SpanId
    published: Published

    @property
    def moved(self) -> bool:
        """Whether others can read all of it, and its memory is free.  If not, it is where it was."""
        return not self.published.failed


@dataclass(frozen=True, slots=True)
class SpanLost:
    """A span that did not come back.  The session is as it was: try again unless it is :attr:`gone`,
    ``Archive.repeat`` its text, or drop it."""

    span: SpanId
    rows: tuple[int, ...]
    """All of its rows."""
    missing_rows: tuple[int, ...]
    """Those whose K/V could not be had."""
    gone: bool
    """Nobody has it.  Else somebody may, who did not answer in time, or whose copy was refused."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """The text of a lost span, read again as new rows ``[first_row, first_row + row_count)``."""

    span: SpanId
    first_row: int
    row_count: int
    logits: Any
    """After the last of them, as ``Engine.feed`` gives them."""


class Archive:
    """The archived spans of one engine's sessions.

    Args:
        sharing: of the client through which spans move.
        bytes_max: of archived K/V in the engine's memory, after :meth:`settle`.
        counts: of the engine's streams; its own if not given.
    """

    def __init__(
        self, sharing: Sharing, engine: Engine, *, bytes_max: int, counts: StreamCounts | None = None
    ) -> None:
        if bytes_max < 0:
            raise ValueError("bytes_max must not be negative")
        self._sharing, self.engine, self.bytes_max = sharing, engine, bytes_max
        self._counts = counts or StreamCounts()

    def memory_bytes(self, sessions: Sequence[Session]) -> int:
        """Archived K/V of these sessions in the engine's memory; what forks share counts once."""
        held = {block for each in sessions for kept in each.archive.values() for block in kept.blocks}
        return len(held) * self.engine.namespace.block_bytes

    def put_away(self, session: Session, span: SpanId) -> Steps[PutAway]:
        """Move a span's bytes to the cluster; its memory is free when all of them can be read there.

        Raises:
            ValueError: no such span.
            NamespaceError: the engine's namespace was not bound; see ``Sharing``.
        """
        return (yield from self._put_away([session], span))

    def settle(self, sessions: Sequence[Session]) -> Steps[list[PutAway]]:
        """Put spans away until at most ``bytes_max`` are here, the coldest first: those after whose cut most
        rows were fed.  One that cannot be moved stays, and the next is tried.

        Args:
            sessions: all of the engine's that may have archived something.
        """
        done: list[PutAway] = []
        for span, holders in _coldest_first(sessions):
            if self.memory_bytes(sessions) <= self.bytes_max:
                break
            done.append((yield from self._put_away(holders, span)))
        self._counts.archived(self.memory_bytes(sessions))
        return done

    def bring_back(
        self,
        session: Session,
        span: SpanId,
        insert_at: int | None = None,
        *,
        room: Sequence[BlockId] = (),
    ) -> Steps[Event | SpanLost]:
        """Restore a span, wherever its bytes are.

        Args:
            insert_at: see ``Session.restore``.
            room: blocks taken for it before, one a block of the span, handed over: used or given back.

        Raises:
            ValueError: no such span, no place to insert it, or too little ``room``.
            PoolFull: no room for all of it; nothing was taken.
            NamespaceError: the engine's namespace was not bound; see ``Sharing``.
        """
        pool = self.engine.pool
        try:
            archived = session.archived(span)
            wanted = () if archived.blocks else self._blocks_of(session, span)
        except BaseException:
            pool.release(room)
            raise
        if archived.blocks:
            pool.release(room)
            return session.restore(span, insert_at)
        found = yield from self._sharing.get(self.engine, wanted, room=room or None)
        if isinstance(found, Lost):
            return SpanLost(span, archived.rows, found.rows, found.gone)
        try:
            return session.restore(span, insert_at, blocks=found)
        except BaseException:
            pool.release(found)
            raise

    def repeat(self, session: Session, lost: SpanLost, recorder: Recorder | None = None) -> Repeated:
        """Let the model read the text of a lost span once more: visibly, as new rows at the end, each
        computed under the view of now.  A pending token is fed before them.  The span is dropped.

        Args:
            recorder: of the session; writes down that these rows repeat a text.

        Raises:
            ValueError: no such span, or its text was repeated already.
            Refused, PoolFull: as ``Session.plan``.  Nothing is changed then.
        """
        session.archived(lost.span)
        text = [session.tokens[row] for row in lost.rows]
        before = [] if session.pending is None else [session.pending]
        (logits,) = self.engine.feed([(session, [*before, *text])])
        session.drop_archived(lost.span, moved=False)
        if recorder is not None:
            recorder.repeated(len(text))
        self._counts.reprefilled(len(text))
        return Repeated(lost.span, session.next_row - len(text), len(text), logits)

    def _put_away(self, sessions: Sequence[Session], span: SpanId) -> Steps[PutAway]:
        archived, blocks = sessions[0].archived(span), self._blocks_of(sessions[0], span)
        held = zip(archived.blocks, blocks, strict=bool(archived.blocks))
        put = PutAway(span, (yield from self._sharing.put(self.engine, list(held))))
        for session in sessions if put.moved else ():
            if span in session.archive:  # it may have come back meanwhile
                session.drop_archived(span, moved=True)
        return put

    def _blocks_of(self, session: Session, span: SpanId) -> tuple[ChainBlock, ...]:
        namespace = self._sharing.require_bound(self.engine)
        return chain_of(namespace, session.tokens, session.events).archived[span]


def _coldest_first(sessions: Sequence[Session]) -> list[tuple[SpanId, list[Session]]]:
    """Spans with bytes in memory and who holds them."""
    holders: dict[SpanId, list[Session]] = {}
    age: dict[SpanId, int] = {}
    for session in sessions:
        cut_at = {event.span: event.at_row for event in session.events if event.kind == "evict"}
        for span, archived in session.archive.items():
            if archived.blocks:
                holders.setdefault(span, []).append(session)
                age[span] = max(age.get(span, 0), session.next_row - cut_at[span])
    return sorted(holders.items(), key=lambda each: (-age[each[0]], each[0]))
