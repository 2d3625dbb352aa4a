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
touched.  The event is handed to ``journal`` first: after a crash a log with a cut too many says what is
missing from memory that is gone anyway, one with a cut too few would make the replay wrong.

**Invariants** (:meth:`Session.check`)::

    len(table) == ceil(slot_count / block_tokens), block ids unique, none of them free
    rows of the view ascend strictly, until a restore brings older ones back
    pending is set: one sampled token more than rows
    the view computed from (row count, events) alone is this view
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

from kvcomm.block import NO_PARENT, ROOT_LINEAGE, BlockKey, block_keys, token_array
from kvcomm.errors import Refused
from kvcomm.namespace import Namespace
from kvcomm.streams.events import NO_SPAN, Event, SlotRange, SpanId
from kvcomm.streams.lineage import History, next_lineage, span_id
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.view import View


@dataclass(frozen=True, slots=True)
class Feed:
    """On the way through the model: token ``i`` is row ``first_row + i``, in slot ``first_slot + i``."""

    tokens: tuple[int, ...]
    first_row: int
    first_slot: int
    blocks: tuple[BlockId, ...]
    """The table with the new blocks at its end."""
    taken: tuple[BlockId, ...]
    """The new ones."""


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
        journal: Callable[[Event], None] = lambda event: None,
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
        self.closed = False
        self._history = History()
        self._planned: Feed | None = None

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
            Refused: ``rows_max`` would be passed, or the session is closed.
            PoolFull: there is no memory.
        """
        fed = tuple(token_array(tokens, self.namespace.vocab_size))
        if not fed or self._planned is not None:
            raise ValueError("feed at least one token, and commit or abandon the feed before")
        if self.pending is not None and fed[0] != self.pending:
            raise ValueError(f"token {self.pending} was sampled and must be fed first")
        self._require_open()
        if self.next_row + len(fed) > self.rows_max:
            raise Refused(
                f"{self.next_row} rows and {len(fed)} more are over the model's {self.rows_max}; cuts make "
                "room in memory, not in positions: begin a new session"
            )
        blocks = -(-(self.slot_count + len(fed)) // self.block_tokens)
        taken = tuple(self.pool.take(blocks - len(self.table)))
        self._planned = Feed(fed, self.next_row, self.slot_count, (*self.table, *taken), taken)
        return self._planned

    def commit(self, feed: Feed) -> None:
        """Their K/V is written: the rows are in view."""
        self._end_plan(feed)
        self.table += feed.taken
        self.view.feed(len(feed.tokens))
        self.tokens += feed.tokens
        self.pending = None
        self._history.feed(feed.tokens, self.namespace.vocab_size)
        self._name_blocks(feed.first_slot // self.block_tokens)

    def abandon(self, feed: Feed) -> None:
        """The forward pass failed, or its rows were rejected: they were never fed."""
        self._end_plan(feed)
        self.pool.release(feed.taken)

    def sampled(self, token: int) -> None:
        """``token`` was drawn from what the last row predicts; it is the first of the next feed."""
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
        cut = tuple(SlotRange(*each) for each in ranges)
        self._check_ranges(cut)
        positions = list(chain.from_iterable(range(*self._blocks(each)) for each in cut))
        blocks = [self.table[at] for at in positions]
        keys = tuple(self._key_of(block) for block in blocks)
        span = span_id(self.lineage, self._history.digest(), keys) if archive else NO_SPAN
        event = self._event(Event("evict", self.next_row, cut, span, reason=reason))
        rows = self._happen(event)
        for each in reversed(cut):
            first, last = self._blocks(each)
            del self.table[first:last]
        if archive:
            self.archive[span] = Archived(tuple(blocks), keys, tuple(rows))
        else:
            self.pool.release(blocks)
        self.turns = [left for turn in self.turns if (left := _shifted(turn, cut))]
        return event

    def restore(
        self, span: SpanId, insert_at: int | None = None, blocks: Sequence[BlockId] | None = None
    ) -> Event:
        """Bring archived rows back into view, as they were computed.

        Args:
            insert_at: slot on a block border; behind the protected prefix if not given.
            blocks: where the bytes are now, held by the caller and handed over, if they were moved away.

        Raises:
            ValueError: no such span, not on a border of full blocks, or bytes that are not here.
        """
        self._require_idle()
        archived = self.archive.get(span)
        at = min(self.protected, self.full_slots) if insert_at is None else insert_at
        if archived is None:
            raise ValueError("no such span: it was not archived by this session, or is back already")
        if at % self.block_tokens or not 0 <= at <= self.full_slots:
            raise ValueError(f"slot {at} is not on a border of full blocks of {self.block_tokens}")
        held = archived.blocks if blocks is None else tuple(blocks)
        if len(held) != len(archived.keys):
            raise ValueError(f"{len(held)} blocks for a span of {len(archived.keys)}: fetch its bytes first")
        event = self._event(Event("restore", self.next_row, span=span, insert_at=at, reason="restore"))
        self._happen(event)
        del self.archive[span]
        self.table[at // self.block_tokens : at // self.block_tokens] = held
        if held != archived.blocks:
            self.pool.release(archived.blocks)
        count = len(archived.rows)
        self.turns = [
            Turn(turn.start + count, turn.end + count) if turn.start >= at else turn for turn in self.turns
        ]
        return event

    def drop_archived(self, span: SpanId, *, moved: bool) -> None:
        """Free the memory of an archived span: ``moved`` to other tiers, or for good."""
        archived = self.archive.pop(span)
        self.pool.release(archived.blocks)
        if moved:
            self.archive[span] = replace(archived, blocks=())

    def set_weights(self, version: int, reason: str = "weights") -> Event:
        """Rows from now on are computed with other weights, over the K/V of the old ones."""
        self._require_idle()
        event = self._event(Event("weights", self.next_row, reason=reason, weights_version=version))
        self._happen(event)
        return event

    def fork(self, name: bytes, journal: Callable[[Event], None] = lambda event: None) -> Session:
        """Another session with the same past; blocks are shared, the partial last one excepted, which the
        engine copies.

        Args:
            name: 32 bytes; stands in the child's log.

        Raises:
            PoolFull: no block for the copy.
        """
        self._require_idle()
        partial = self.table[self.full_slots // self.block_tokens :]
        copies = self.pool.take(len(partial))
        whole = self.table[: len(self.table) - len(partial)]
        self.pool.hold(whole)
        child = Session(self.pool, self.namespace, rows_max=self.rows_max, journal=journal)
        child.table = [*whole, *copies]
        child.view = self.view.copy()
        child.tokens, child.turns, child.events = self.tokens[:], self.turns[:], self.events[:]
        child.protected, child.pending, child.lineage = self.protected, self.pending, self.lineage
        child._history = self._history.copy()
        child.archive = dict(self.archive)
        for archived in child.archive.values():
            self.pool.hold(archived.blocks)
        child._happen(child._event(Event("fork", child.next_row, span=SpanId(name), reason="fork")))
        return child

    def close(self) -> None:
        """Let go of all memory; idempotent."""
        if not self.closed:
            if self._planned is not None:
                self.abandon(self._planned)
            self.pool.release(self.table)
            for archived in self.archive.values():
                self.pool.release(archived.blocks)
            self.table, self.archive, self.closed = [], {}, True

    def check(self) -> None:
        """Assert the invariants."""
        if self.closed:
            return
        size, count = self.block_tokens, self.slot_count
        assert len(self.table) == -(-count // size), "no empty blocks, no holes"
        assert len(set(self.table)) == len(self.table)
        assert all(self.pool.holder_count(block) for block in self.table)
        assert len(self.tokens) == self.next_row <= self.rows_max
        rows = self.view.rows
        restored = any(event.kind == "restore" for event in self.events)
        assert restored or all(before < after for before, after in pairwise(rows))
        assert len(set(rows)) == count and all(row < self.next_row for row in rows)
        ends = [0, *chain.from_iterable((turn.start, turn.end) for turn in self.turns), count]
        assert ends == sorted(ends), "turns overlap or go past the end"
        again = View()
        for event in self.events:
            again.feed(event.at_row - again.next_row)
            again.apply(event)
        again.feed(self.next_row - again.next_row)
        assert again == self.view, "the log does not lead to this view"

    # -- inside

    def _name_blocks(self, first: int) -> None:
        """Give the full blocks from place ``first`` of the table on their keys."""
        size, full = self.block_tokens, self.full_slots // self.block_tokens
        if first >= full:
            return
        rows = self.view.rows[first * size : full * size]
        tokens = [self.tokens[row] for row in rows]
        parent = self._key_of(self.table[first - 1]) if first else NO_PARENT
        keys = block_keys(self.namespace, tokens, parent=parent, positions=rows, lineage=self.lineage)
        for block, key in zip(self.table[first:full], keys, strict=True):
            self.pool.name(block, key)

    def _key_of(self, block: BlockId) -> BlockKey:
        key = self.pool.key_of(block)
        assert key is not None, "a full block in a table has a key"
        return key

    def _blocks(self, cut: SlotRange) -> tuple[int, int]:
        return cut.start // self.block_tokens, cut.end // self.block_tokens

    def _check_ranges(self, cut: Sequence[SlotRange]) -> None:
        self._require_idle()
        end = self.protected
        if not cut:
            raise ValueError("a cut of nothing is no event")
        for each in cut:
            if each.start % self.block_tokens or each.end % self.block_tokens:
                raise ValueError(f"{each} is not in whole blocks of {self.block_tokens}")
            if each.start < self.protected:
                raise ValueError(f"{each} touches the protected prefix of {self.protected} slots")
            if not end <= each.start < each.end:
                raise ValueError(f"ranges must ascend, be disjoint and not empty: {list(cut)}")
            end = each.end
        if end > self.full_slots:
            raise ValueError(
                f"{cut[-1]} touches the partial last block; {self.full_slots} slots are in full ones"
            )

    def _event(self, event: Event) -> Event:
        weights = event.weights_version if event.kind == "weights" else self.view.weights_version
        return self.view.stamped(replace(event, weights_version=weights))

    def _happen(self, event: Event) -> Sequence[int]:
        self.journal(event)
        moved = self.view.apply(event)
        self.events.append(event)
        self.lineage = next_lineage(self.lineage, self._history.digest(), event)
        return moved

    def _end_plan(self, feed: Feed) -> None:
        if self._planned is not feed:
            raise ValueError("that feed is not under way")
        self._planned = None

    def _require_open(self) -> None:
        if self.closed:
            raise Refused("the session is closed; begin another one")

    def _require_idle(self) -> None:
        self._require_open()
        if self._planned is not None:
            raise ValueError("commit or abandon the feed that is under way first")


def _shifted(turn: Turn, cut: Sequence[SlotRange]) -> Turn | None:
    """Where what is left of a turn stands after the cut."""

    def moved(slot: int) -> int:
        return slot - sum(min(max(slot - each.start, 0), each.slot_count) for each in cut)

    start, end = moved(turn.start), moved(turn.end)
    return Turn(start, end) if start < end else None
