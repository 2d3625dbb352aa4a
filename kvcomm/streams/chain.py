"""``Chain``: the blocks of a stream, computed again from its tokens and its events alone.

Who generates keeps a table (``kvcomm.streams.session``); who takes a context over computes the table's keys
again and believes nothing else.  All follows from the order of rows and events: a block gets its key when its
last row is fed, under the lineage of the events before that row, behind the block that stood before it then.

A **tail**, the partial last block, has no key in ``kvcomm.block``: nobody looks up part of a block by its
tokens.  But its rows cannot be computed again when a cut came after them (they saw what is gone), so for an
exact continuation its K/V travels too, under a key of its own kind.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.block import NO_PARENT, ROOT_LINEAGE, BlockKey, block_keys, little_endian, token_array
from kvcomm.errors import Corrupt
from kvcomm.namespace import Namespace
from kvcomm.streams.events import Event, SpanId
from kvcomm.streams.lineage import History, next_lineage, span_id
from kvcomm.streams.view import View

_TAIL_DOMAIN = b"kvcomm.streams.tail/1\x00"


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """One block, and what it was computed from."""

    key: BlockKey
    parent: BlockKey
    """Of the block that stood before it when it was filled; that one may be cut by now."""
    lineage: bytes
    rows: tuple[int, ...]
    """Fewer than ``block_tokens`` in a tail."""


class Chain:
    """A stream that is walked through; see :func:`chain_of`."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.view = View()
        self.history = History()
        self.lineage: bytes = ROOT_LINEAGE
        self.tokens = array("I")
        """By row."""
        self.table: list[ChainBlock] = []
        """The full blocks."""
        self.archived: dict[SpanId, tuple[ChainBlock, ...]] = {}

    @property
    def tail(self) -> ChainBlock | None:
        """The partial last block."""
        rows = tuple(self.view.rows_from(self._full_slots))
        if not rows:
            return None
        key = tail_key(self.namespace, self._tip, self.lineage, [self.tokens[row] for row in rows], rows)
        return ChainBlock(key, self._tip, self.lineage, rows)

    @property
    def blocks(self) -> list[ChainBlock]:
        """The whole table, the tail at its end."""
        tail = self.tail
        return self.table if tail is None else [*self.table, tail]

    def feed(self, tokens: Sequence[int]) -> None:
        """Raises ``TokenError`` for an id out of range."""
        fed = token_array(tokens, self.namespace.vocab_size)
        self.history.feed(fed, self.namespace.vocab_size)
        self.tokens += fed
        self.view.feed(len(fed))
        size, rows = self.namespace.block_tokens, self.view.rows_from(self._full_slots)
        ids = [self.tokens[row] for row in rows]
        parent = self._tip
        keys = block_keys(self.namespace, ids, parent=parent, positions=rows, lineage=self.lineage)
        for index, key in enumerate(keys):
            mine = tuple(rows[index * size : (index + 1) * size])
            self.table.append(ChainBlock(key, parent, self.lineage, mine))
            parent = key

    def apply(self, event: Event) -> None:
        """Raises ``Corrupt`` when it cannot happen here."""
        history = self.history.digest()
        if event.kind == "evict":
            self._evict(event, history)
        elif event.kind == "restore":
            self._restore(event)
        self.view.apply(event)
        self.lineage = next_lineage(self.lineage, history, event)

    @property
    def _full_slots(self) -> int:
        return len(self.table) * self.namespace.block_tokens

    @property
    def _tip(self) -> BlockKey:
        return self.table[-1].key if self.table else NO_PARENT

    def _evict(self, event: Event, history: bytes) -> None:
        size, gone = self.namespace.block_tokens, list[ChainBlock]()
        for start, end in reversed(event.ranges):
            if start % size or end % size or end > self._full_slots:
                raise Corrupt(f"a cut of slots {start} to {end} is not one of whole, full blocks of {size}")
            first, last = start // size, end // size
            gone[:0] = self.table[first:last]
            del self.table[first:last]
        if event.span:
            if event.span != span_id(self.lineage, history, [block.key for block in gone]):
                raise Corrupt("an archived span is not named by what was cut")
            self.archived[event.span] = tuple(gone)

    def _restore(self, event: Event) -> None:
        size = self.namespace.block_tokens
        back = self.archived.pop(event.span, None)
        if back is None or event.insert_at % size or event.insert_at > self._full_slots:
            raise Corrupt(f"a restore at slot {event.insert_at} that is not one of an archived span")
        self.table[event.insert_at // size : event.insert_at // size] = back


def chain_of(namespace: Namespace, tokens: Sequence[int], events: Sequence[Event]) -> Chain:
    """The chain of a whole stream.

    Raises:
        Corrupt: an event cannot happen where it stands, or stands behind the last row.
        TokenError: an id is out of range.
    """
    chain = Chain(namespace)
    for event in events:
        chain.feed(tokens[event.at_row - chain.view.count_before(event, len(tokens)) : event.at_row])
        chain.apply(event)
    chain.feed(tokens[chain.view.next_row :])
    return chain


def tail_key(
    namespace: Namespace, parent: BlockKey, lineage: bytes, tokens: Sequence[int], rows: Sequence[int]
) -> BlockKey:
    """The key of a partial block: never that of a full one."""
    ids = token_array(tokens, namespace.vocab_size)
    digest = hashlib.sha256(_TAIL_DOMAIN + namespace.id + parent + lineage)
    digest.update(len(ids).to_bytes(4, "little") + little_endian(ids) + little_endian(array("q", rows)))
    return BlockKey(digest.digest())
