"""``Session``: the bookkeeping of one rollout on paged K/V memory: which block stands where, which row each
slot holds, and how cuts and restores change that.

No tensor is touched here.  An engine asks where to write (:meth:`Session.plan`), computes, writes, and says
so (:meth:`Session.commit`)::

    plan(tokens) ── slots, positions ──► forward pass, K/V written ──► commit     rows are in view
                                                └── it failed ──► abandon         as if never planned

Two coordinates, and no offset between them for the whole sequence::

    slot       place in the view: block = table[slot // block_tokens]; what the attention kernel counts
    row        number in feeding order = logical (RoPE) position; never goes back, never is given out twice

**Cuts** take whole, full blocks behind the protected prefix out of the table; K/V bytes of what stays are not
touched.  A row costs the same however long the context is, an event costs the table.

**The event is journaled before anything changes.**  Journal and tokens together are the session
(:meth:`Session.recovered`); a crash in between leaves one event more than happened, at the end of the log.
No row ran after it, so it changes nothing that a replay computes, and the session recovers as if the cut had
been made.  The other order would lose a cut under which rows may have run already: a rollout that looks right
and is not.

**Blocks that are there are not computed again.**  A block's key says what its rows saw
(``kvcomm.streams.lineage``), so a block under the key that the next one will have *is* the next one, whoever
computed it: :meth:`Session.adopt_prefix`.  Its rows are rows like any other, with the same numbers, tokens
and views as if they had been fed here.

**Memory can go and the session stay** (:meth:`Session.swap_out`, :meth:`Session.swap_in`): bytes are moved,
nothing is computed again.  A session recovered from its log starts like that.

**Invariants** (:meth:`Session.check`)::

    len(table) == ceil(slot_count / block_tokens), block ids unique, none of them free, the full ones named
    rows of the view ascend strictly, until a restore brings older ones back
    pending is set: one sampled token more than rows
    the view computed from (row count, events) alone is this view
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from kvcomm.block import NO_PARENT, POSITION_MAX, ROOT_LINEAGE, BlockKey, block_keys, token_array
from kvcomm.errors import Corrupt, Refused
from kvcomm.namespace import Namespace
from kvcomm.streams.events import NO_SPAN, Event, SlotRange, SpanId, no_journal
from kvcomm.streams.lineage import History, next_lineage, span_id
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.view import View


@dataclass(frozen=True, slots=True)
class Feed:
    """On the way through the model: token ``i`` is row ``first_row + i``, in slot ``first_slot + i``."""

    tokens: tuple[int, ...]
    first_row: int
    first_slot: int
    tail: tuple[BlockId, ...]
    """The blocks that are written, from the one on that holds ``first_slot``."""
    taken: tuple[BlockId, ...]
    """Those of ``tail`` that are new."""
    _table: Sequence[BlockId] = field(repr=False, compare=False)

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        """While the feed is under way: the table with the new blocks at its end.  Costs its length, so a
        decode step reads ``tail``."""
        return (*self._table[: len(self._table) + len(self.taken) - len(self.tail)], *self.tail)


class Turn(NamedTuple):
    """A finished message pair, in slots of the current view."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Archived:
    """Rows out of view that can come back."""

    blocks: tuple[BlockId, ...]
    """Held for it; empty = their bytes were moved to other tiers, where ``keys`` finds them."""
    keys: tuple[BlockKey, ...]
    rows: tuple[int, ...]


class Session:
    """One rollout.

    Args:
        pool: of the engine; several sessions share it.
        namespace: of the model's K/V; ``block_tokens`` and ``vocab_size`` are its.
        rows_max: most rows ever fed (the model's length limit: positions count, not slots).
        journal: is given every event before it happens; what it raises stops the event.
    """

    def __init__(
        self,
        pool: BlockPool,
        namespace: Namespace,
        *,
        rows_max: int,
        journal: Callable[[Event], None] = no_journal,
    ) -> None:
        self.pool, self.namespace, self.rows_max, self.journal = pool, namespace, rows_max, journal
        self.table: list[BlockId] = []
        self.view = View()
        self.tokens: list[int] = []
        """By row, all that were ever fed."""
        self.turns: list[Turn] = []
        self.protected = 0
        """Slots from the start that are never cut."""
        self.pending: int | None = None
        """Sampled and not fed: it has no K/V."""
        self.events: list[Event] = []
        self.archive: dict[SpanId, Archived] = {}
        self.lineage = ROOT_LINEAGE
        self.swapped: tuple[BlockKey, ...] | None = None
        """While the bytes are elsewhere: the keys of the full blocks."""
        self.closed = False
        self._history = History()
        self._planned: Feed | None = None

    @classmethod
    def recovered(
        cls,
        pool: BlockPool,
        namespace: Namespace,
        tokens: Sequence[int],
        events: Iterable[Event],
        *,
        rows_max: int,
        journal: Callable[[Event], None] = no_journal,
    ) -> Session:
        """The session that a log tells of, swapped out: after a crash, or at another agent's.

        Its memory comes with :meth:`swap_in`; archived spans are known by their keys and come with
        :meth:`restore`.  Turns, the protected prefix and a pending token stand in no event: who has them sets
        them.

        Args:
            tokens: by row, all that were fed.
            events: all, in order; the journal is given only those that come after.

        Raises:
            Corrupt: they are no log of a session with blocks of this namespace.
            TokenError: an id is out of range.
            Refused: more tokens than ``rows_max``.
        """
        # Numbers are all that a pool holds, so the keys come from living through it once more.
        session = cls(BlockPool(len(tokens) // namespace.block_tokens + 1), namespace, rows_max=rows_max)
        for event in events:
            session._feed(tokens[event.at_row - session.view.count_before(event, len(tokens)) : event.at_row])
            problem = session._problem(event)
            if problem:
                raise Corrupt(f"no log of a session with blocks of {namespace.block_tokens}: {problem}")
            session._happen(event)
        session._feed(tokens[session.next_row :])
        session.swap_out()
        for span in session.archive:
            session.drop_archived(span, moved=True)
        session.turns = []
        session.pool, session.journal = pool, journal
        return session

    @property
    def block_tokens(self) -> int:
        return self.namespace.block_tokens

    @property
    def slot_count(self) -> int:
        """Rows in view, all with K/V."""
        return self.view.slot_count

    @property
    def next_row(self) -> int:
        return self.view.next_row

    @property
    def full_slots(self) -> int:
        """Slots in full blocks."""
        return self.slot_count // self.block_tokens * self.block_tokens

    # -- rows

    def plan(self, tokens: Sequence[int]) -> Feed:
        """Reserve memory for ``tokens``, all or none.

        Raises:
            ValueError: there are none, another feed is under way, or a pending token is not the first.
            TokenError: an id is out of range.
            Refused: ``rows_max`` would be passed, or the session is closed or swapped out.
            PoolFull: there is no memory.
        """
        fed = self._admissible(tokens)
        if not fed:
            raise ValueError("feed at least one token")
        block_count = -(-(self.slot_count + len(fed)) // self.block_tokens)
        taken = tuple(self.pool.take(block_count - len(self.table)))
        tail = (*self.table[self.slot_count // self.block_tokens :], *taken)
        self._planned = Feed(fed, self.next_row, self.slot_count, tail, taken, self.table)
        return self._planned

    def commit(self, feed: Feed, count: int | None = None) -> None:
        """Their K/V is written: the rows are in view.

        Args:
            count: only so many from the front; the others were never fed, for what was guessed of them was
                wrong, and their K/V will be written over.
        """
        tokens = feed.tokens[:count]
        if count is not None and count != len(tokens):
            raise ValueError(f"{count} of {len(feed.tokens)} planned tokens")
        self._end_plan(feed)
        place, end = feed.first_slot // self.block_tokens, feed.first_slot + len(tokens)
        kept = -(-end // self.block_tokens) - len(self.table)
        keys = self.next_keys(tokens) if end // self.block_tokens > place else []
        self._grow(feed.taken[:kept], tokens)
        self.pool.release(feed.taken[kept:])
        for block, key in zip(self.table[place:], keys, strict=False):
            self.pool.name(block, key)

    def abandon(self, feed: Feed) -> None:
        """The forward pass failed, or its rows were rejected: they were never fed."""
        self._end_plan(feed)
        self.pool.release(feed.taken)

    def next_keys(self, tokens: Sequence[int] = ()) -> list[BlockKey]:
        """The keys of the blocks that become full when ``tokens`` are fed under the view in force, from the
        partial last one on.  Under these names their bytes can be looked for anywhere, also while the
        session's are elsewhere.  Raises ``Refused`` when it is closed."""
        if self.closed:
            raise Refused("the session is closed; begin another one")
        rows = self.view.rows_from(self.full_slots)
        ids = [*map(self.tokens.__getitem__, rows), *tokens]
        rows.extend(range(self.next_row, self.next_row + len(tokens)))
        place = self.full_slots // self.block_tokens
        parent = NO_PARENT
        if place:
            parent = self._key_of(self.table[place - 1]) if self.swapped is None else self.swapped[-1]
        return block_keys(self.namespace, ids, parent=parent, positions=rows, lineage=self.lineage)

    def adopt_prefix(self, tokens: Sequence[int]) -> int:
        """Begin to feed ``tokens`` with blocks that the pool has already, whoever computed them; the number
        of rows that this gave, 0 if there are none or the view does not end with a full block.

        Feed the others, of which there is at least one: it says what comes next.  Between two events the
        blocks of every session with the same tokens are found, behind an event those of its forks and of
        siblings with the same past.

        Raises:
            ValueError, TokenError, Refused: see :meth:`plan`; nothing was taken.
        """
        ids, size = self._admissible(tokens), self.block_tokens
        if not ids or self.slot_count % size:
            return 0
        found: list[BlockId] = []
        for key in self.next_keys(ids[: (len(ids) - 1) // size * size]):
            block = self.pool.find(key)
            if block is None:
                break
            found.append(block)
        self.pool.hold(found)
        if found:
            self._grow(found, ids[: len(found) * size])
        return len(found) * size

    def sampled(self, token: int) -> None:
        """``token`` was drawn from what the last row predicts; it is the first of the next feed.  Also while
        the bytes are elsewhere."""
        self._require_open()
        if self.pending is not None or not self.next_row:
            raise ValueError("one token is sampled a row, and it is fed before the next")
        (self.pending,) = token_array([token], self.namespace.vocab_size)

    def protect(self, slots: int) -> None:
        """Never cut the first ``slots``, rounded up to whole blocks, nor anything before that."""
        border = -(-slots // self.block_tokens) * self.block_tokens
        self.protected = max(self.protected, border)

    def end_turn(self, start: int, end: int | None = None) -> None:
        """The rows from slot ``start`` on, up to ``end`` or that of the view, are one finished turn."""
        last = self.turns[-1].end if self.turns else 0
        end = self.slot_count if end is None else end
        if not last <= start < end <= self.slot_count:
            raise ValueError(f"a turn [{start}, {end}) in a view of {self.slot_count}, after slot {last}")
        self.turns.append(Turn(start, end))

    def drop_turns(self, start: int, end: int) -> int:
        """What lies in these slots is no turn any more, whether a cut took it or left a part; how many."""
        kept = [turn for turn in self.turns if not start <= turn.start <= turn.end <= end]
        dropped = len(self.turns) - len(kept)
        self.turns = kept
        return dropped

    # -- events

    def evict(self, ranges: Sequence[tuple[int, int]], *, archive: bool = False, reason: str = "") -> Event:
        """Take whole blocks out of view.

        Args:
            ranges: slots of the current view, ascending and disjoint.
            archive: keep the rows under a span id, to bring them back.

        Raises:
            ValueError: a range is empty, out of order, not in whole blocks, touches the protected prefix or
                the partial last block; or a feed is under way.
        """
        self._require_idle()
        if not ranges:
            raise ValueError("a cut of nothing is no event")
        problem = self._cut_problem(ranges)
        if problem:
            raise ValueError(problem)
        cut = _merged(ranges)
        span = self._span_of(cut) if archive else NO_SPAN
        return self._new(Event("evict", self.next_row, cut, span, reason=reason))

    def restore(
        self, span: SpanId, insert_at: int | None = None, blocks: Sequence[BlockId] | None = None
    ) -> Event:
        """Bring archived rows back into view, as they were computed; between turns they are a turn.

        Args:
            insert_at: slot on a block border; right behind the protected prefix if not given.
            blocks: where the bytes are now, if they were moved away: held by the caller and handed over,
                unless this raises.

        Raises:
            ValueError: no such span, not on a border of full blocks, inside the protected prefix, or bytes
                that are not here.
        """
        self._require_idle()
        archived = self.archived(span)
        at = self.protected if insert_at is None else insert_at
        problem = self._border_problem(at)
        if problem:
            raise ValueError(problem)
        held = archived.blocks if blocks is None else tuple(blocks)
        if len(held) != len(archived.keys):
            raise ValueError(f"{len(held)} blocks for a span of {len(archived.keys)}: fetch its bytes first")
        event = self._new(Event("restore", self.next_row, span=span, insert_at=at, reason="restore"), held)
        if blocks is not None:
            self.pool.release(archived.blocks)
            for block, key in zip(held, archived.keys, strict=True):
                self.pool.name(block, key)
        return event

    def archived(self, span: SpanId) -> Archived:
        """Raises ``ValueError``: no such span."""
        archived = self.archive.get(span)
        if archived is None:
            raise ValueError("no such span: it was not archived by this session, is back, or was dropped")
        return archived

    def drop_archived(self, span: SpanId, *, moved: bool) -> None:
        """Free the memory of an archived span: ``moved`` to other tiers, or for good."""
        archived = self.archived(span)
        self.pool.release(archived.blocks)
        if moved:
            self.archive[span] = replace(archived, blocks=())
        else:
            del self.archive[span]

    def set_weights(self, version: int, reason: str = "weights", *, digest: bytes = b"") -> Event:
        """Rows from now on are computed with other weights, over the K/V of the old ones.

        Blocks that become full from then on are found by none but those who changed at the same row after the
        same tokens.  A new session under new weights does this before its first row: then it shares the
        blocks of every other that did, and none of older weights.

        Args:
            digest: 32 bytes that no other weights have.  Without one the version alone names them in a
                block's key, and two trainings of one model in one namespace that count alike would each find
                what the other computed.

        Raises:
            ValueError: no version, or the one in force, or no digest.
        """
        self._require_idle()
        if len(digest) not in (0, 32):
            raise ValueError(f"a digest of weights has 32 bytes, not {len(digest)}")
        if not 0 <= version <= POSITION_MAX or version == self.view.weights_version:
            raise ValueError(f"weights {version} after {self.view.weights_version}: that is no change")
        event = Event("weights", self.next_row, span=SpanId(digest), reason=reason, weights_version=version)
        return self._new(event)

    def fork(
        self,
        name: bytes,
        journal: Callable[[Event], None] = no_journal,
        *,
        at_row: int | None = None,
    ) -> Session:
        """Another session with the same past; blocks are shared, the partial last one excepted, which the
        engine copies: to ``child.table[-1]`` from the block at that place of this table.

        Args:
            name: 32 bytes; stands in the child's log.
            journal: is given the past, too, so that it is a whole log.
            at_row: with the past before that row: what came after it is abandoned.  Not before the last
                event, for what that took out of view may be gone.

        Raises:
            ValueError: ``at_row`` is no such row, or ``name`` is none.
            PoolFull: no block for the copy.
        """
        self._require_idle()
        if len(name) != 32:
            raise ValueError(f"a fork's name has 32 bytes, not {len(name)}")
        row = self.next_row if at_row is None else at_row
        first = self.events[-1].at_row if self.events else 0
        if not first <= row <= self.next_row:
            raise ValueError(f"a fork at row {row}: the view changed at {first}, and {self.next_row} are fed")
        child = Session(self.pool, self.namespace, rows_max=self.rows_max, journal=journal)
        child._inherit(self, row)
        try:
            for event in self.events:
                journal(event)
            child._new(Event("fork", row, span=SpanId(name), reason="fork"))
        except BaseException:
            child.close()
            raise
        return child

    # -- memory

    def swap_out(self) -> None:
        """Let go of the table's blocks; the caller has their bytes, or they are found by their keys."""
        self._require_idle()
        full = self.full_slots // self.block_tokens
        self.swapped = tuple(self._key_of(block) for block in self.table[:full])
        self.pool.release(self.table)
        self.table = []

    def swap_in(self, load: Callable[[int, BlockId], None]) -> None:
        """Take memory for the whole table again, and go on.

        Args:
            load: writes the bytes for a place of the table into a block; not called for blocks that the pool
                still has.  Bytes from elsewhere are verified first: they get the name in ``swapped``.

        Raises:
            ValueError: the session is not swapped out.
            Refused: it is closed.
            PoolFull: no memory.  Nothing is changed then, nor when ``load`` raises.
        """
        self._require_open()
        if self.swapped is None:
            raise ValueError("the session's bytes are in memory")
        places = -(-self.slot_count // self.block_tokens)
        found = {
            place: block
            for place, key in enumerate(self.swapped)
            if (block := self.pool.find(key)) is not None
        }
        self.pool.hold(found.values())
        held = list(found.values())
        try:
            missing = [place for place in range(places) if place not in found]
            taken = self.pool.take(len(missing))
            held += taken
            for place, block in zip(missing, taken, strict=True):
                load(place, block)
                found[place] = block
        except BaseException:
            self.pool.release(held)
            raise
        self.attach([found[place] for place in range(places)])

    def attach(self, blocks: Sequence[BlockId]) -> None:
        """Go on over blocks that hold the bytes of the whole table, a partial last one included.

        Args:
            blocks: held by the caller and handed over; the full ones get the names in ``swapped``.

        Raises:
            ValueError: the session is not swapped out, or its table has another length.
            Refused: it is closed.
        """
        self._require_open()
        places = -(-self.slot_count // self.block_tokens)
        if self.swapped is None or len(blocks) != places:
            raise ValueError(f"{len(blocks)} blocks for a session that is swapped out with {places}")
        for block, key in zip(blocks, self.swapped, strict=False):
            self.pool.name(block, key)
        self.table, self.swapped = list(blocks), None

    def close(self) -> None:
        """Let go of all memory; idempotent."""
        if not self.closed:
            if self._planned is not None:
                self.abandon(self._planned)
            for archived in self.archive.values():
                self.pool.release(archived.blocks)
            self.pool.release(self.table)
            self.table, self.archive, self.closed = [], {}, True

    def check(self) -> None:
        """Assert the invariants."""
        if self.closed:
            return
        size, count = self.block_tokens, self.slot_count
        self.view.check()
        if self.swapped is None:
            assert len(self.table) == -(-count // size), "no empty blocks, no holes"
            assert len(set(self.table)) == len(self.table)
            assert all(self.pool.holder_count(block) for block in self.table)
            assert all(self.pool.key_of(block) for block in self.table[: count // size])
        else:
            assert not self.table and len(self.swapped) == count // size
        for span, archived in self.archive.items():
            assert len(archived.blocks) in (0, len(archived.keys))
            assert list(archived.rows) == list(self.view.archived[span])
            assert tuple(map(self.pool.key_of, archived.blocks)) in ((), archived.keys)
        assert len(self.tokens) == self.next_row <= self.rows_max
        restored = any(event.kind == "restore" for event in self.events)
        assert restored or all(before < after for before, after in pairwise(self.view.rows))
        ends = [0, *chain.from_iterable((turn.start, turn.end) for turn in self.turns), count]
        assert ends == sorted(ends), "turns overlap or go past the end"
        again = View()
        for event in self.events:
            again.feed(event.at_row - again.next_row)
            again.apply(event)
        again.feed(self.next_row - again.next_row)
        assert again == self.view, "the log does not lead to this view"

    # -- inside

    def _admissible(self, tokens: Sequence[int]) -> tuple[int, ...]:
        self._require_idle()
        fed = tuple(token_array(tokens, self.namespace.vocab_size))
        if fed and self.pending is not None and fed[0] != self.pending:
            raise ValueError(f"token {self.pending} was sampled and must be fed first")
        if self.next_row + len(fed) > self.rows_max:
            raise Refused(
                f"{self.next_row} rows and {len(fed)} more are over the model's {self.rows_max}; cuts make "
                "room in memory, not in positions: begin a new session"
            )
        return fed

    def _grow(self, blocks: Sequence[BlockId], tokens: Sequence[int]) -> None:
        self.table += blocks
        self.view.feed(len(tokens))
        self.tokens += tokens
        self._history.feed(tokens, self.namespace.vocab_size)
        if tokens:
            self.pending = None

    def _feed(self, tokens: Sequence[int]) -> None:
        if tokens:
            self.commit(self.plan(tokens))

    def _inherit(self, parent: Session, row: int) -> None:
        """All of ``parent`` before ``row``."""
        behind = parent.next_row - row
        slots = parent.slot_count - behind
        whole = parent.table[: slots // self.block_tokens]
        copies = self.pool.take(-(-slots // self.block_tokens) - len(whole))
        self.pool.hold(whole)
        self.table = whole + copies
        self.view = parent.view.copy()
        self.view.unfeed(behind)
        self.tokens, self.events = parent.tokens[:row], parent.events[:]
        self.turns = [turn for turn in parent.turns if turn.end <= slots]
        self.protected, self.lineage = parent.protected, parent.lineage
        self.archive = dict(parent.archive)
        for archived in self.archive.values():
            self.pool.hold(archived.blocks)
        if behind:
            self._history.feed(self.tokens, self.namespace.vocab_size)
        else:
            self._history, self.pending = parent._history.copy(), parent.pending

    def _key_of(self, block: BlockId) -> BlockKey:
        key = self.pool.key_of(block)
        assert key is not None, "a full block in a table has a key"
        return key

    def _places(self, cut: Sequence[SlotRange]) -> list[SlotRange]:
        size = self.block_tokens
        return [SlotRange(start // size, end // size) for start, end in cut]

    def _problem(self, event: Event) -> str | None:
        """Why a recorded event cannot have been one of a session with such blocks."""
        if event.kind == "restore":
            return self._border_problem(event.insert_at)
        if event.kind != "evict":
            return None
        problem = self._cut_problem(event.ranges)
        if problem or not event.span or event.span == self._span_of(event.ranges):
            return problem
        return "a span that is not named by what was cut"

    def _span_of(self, cut: Sequence[SlotRange]) -> SpanId:
        keys = [self._key_of(block) for block in _divided(self.table, self._places(cut))[1]]
        return span_id(self.lineage, self._history.digest(), keys)

    def _cut_problem(self, ranges: Sequence[tuple[int, int]]) -> str | None:
        last = self.protected
        for start, end in ranges:
            if start % self.block_tokens or end % self.block_tokens:
                return f"[{start}, {end}) is not in whole blocks of {self.block_tokens}"
            if start < self.protected:
                return f"[{start}, {end}) touches the protected prefix of {self.protected} slots"
            if not last <= start < end:
                return f"ranges must ascend, be disjoint and not empty: {list(ranges)}"
            last = end
        if last > self.full_slots:
            return f"slot {last} is behind the full blocks, which end at {self.full_slots}"
        return None

    def _border_problem(self, slot: int) -> str | None:
        if slot % self.block_tokens or not self.protected <= slot <= self.full_slots:
            return (
                f"slot {slot} is no border of full blocks of {self.block_tokens} between the protected "
                f"prefix, which ends at {self.protected}, and {self.full_slots}"
            )
        return None

    def _new(self, event: Event, blocks: Sequence[BlockId] = ()) -> Event:
        weights = event.weights_version if event.kind == "weights" else self.view.weights_version
        stamped = self.view.stamped(replace(event, weights_version=weights))
        self.journal(stamped)
        self._happen(stamped, blocks)
        return stamped

    def _happen(self, event: Event, blocks: Sequence[BlockId] = ()) -> None:
        """``blocks`` are those of a span that comes back."""
        moved = self.view.apply(event)
        if event.kind == "evict":
            self._splice_out(event, tuple(moved))
        elif event.kind == "restore":
            self._splice_in(event, blocks or self.archive[event.span].blocks)
        self.events.append(event)
        self.lineage = next_lineage(self.lineage, self._history.digest(), event)

    def _splice_out(self, event: Event, rows: tuple[int, ...]) -> None:
        self.table[:], gone = _divided(self.table, self._places(event.ranges))
        if event.span:
            keys = tuple(self._key_of(block) for block in gone)
            self.archive[event.span] = Archived(tuple(gone), keys, rows)
        else:
            self.pool.release(gone)
        self.turns = _shifted(self.turns, event.ranges)

    def _splice_in(self, event: Event, blocks: Sequence[BlockId]) -> None:
        at, count = event.insert_at, len(self.archive.pop(event.span).rows)
        place = at // self.block_tokens
        self.table[place:place] = blocks
        # A turn that it comes back into goes on behind it; elsewhere it is one, or nothing cuts it again.
        alone = not any(start < at < end for start, end in self.turns)
        moved = [Turn(start + count * (start >= at), end + count * (end > at)) for start, end in self.turns]
        self.turns = sorted([*moved, Turn(at, at + count)]) if alone else moved

    def _end_plan(self, feed: Feed) -> None:
        if self._planned is not feed:
            raise ValueError("that feed is not under way")
        self._planned = None

    def _require_idle(self) -> None:
        if self.swapped is not None and not self.closed:
            raise Refused("the session's bytes are elsewhere; swap it in first")
        self._require_open()

    def _require_open(self) -> None:
        if self.closed:
            raise Refused("the session is closed; begin another one")
        if self._planned is not None:
            raise ValueError("commit or abandon the feed that is under way first")


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[SlotRange, ...]:
    """One form for one cut."""
    merged: list[SlotRange] = []
    for start, end in ranges:
        if merged and merged[-1].end == start:
            merged[-1] = SlotRange(merged[-1].start, end)
        else:
            merged.append(SlotRange(start, end))
    return tuple(merged)


def _divided(table: Sequence[BlockId], cut: Sequence[SlotRange]) -> tuple[list[BlockId], list[BlockId]]:
    """(what stays, what goes)."""
    stays: list[BlockId] = []
    goes: list[BlockId] = []
    at = 0
    for start, end in cut:
        stays += table[at:start]
        goes += table[start:end]
        at = end
    return stays + list(table[at:]), goes


def _shifted(turns: Sequence[Turn], cut: Sequence[SlotRange]) -> list[Turn]:
    """Where what is left of them stands after the cut."""
    starts = [each.start for each in cut]
    lost = [0, *accumulate(each.slot_count for each in cut)]

    def moved(slot: int) -> int:
        at = bisect_right(starts, slot) - 1
        return slot if at < 0 else slot - lost[at] - min(slot - starts[at], cut[at].slot_count)

    left = (Turn(moved(start), moved(end)) for start, end in turns)
    return [turn for turn in left if turn.start < turn.end]
