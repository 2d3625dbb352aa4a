"""An engine whose K/V are digests: of a row's token, its position, and the K/V of all rows that it attends.

Two rows have the same K/V here if and only if a real model would compute both from the same: whatever was
visible too much, too little, too early or too late changes it, without a floor of rounding to hide in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcomm.streams.events import Event
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Session
from tests.namespaces import namespace

END, NEWLINE, FILLER = 7, 8, 9
"""Ids in the tests' markup."""


class SymbolicEngine:
    """``computed[row]`` of a session is what :meth:`kv` says of a row when it is in view."""

    def __init__(self, block_tokens: int = 16, block_count: int = 400, rows_max: int = 100_000) -> None:
        self.pool = BlockPool(block_count)
        self.namespace = namespace(block_tokens=block_tokens, vocab_size=1_000)
        self.rows_max = rows_max
        self._memory: dict[tuple[BlockId, int], bytes] = {}
        self.feeds: list[int] = []
        """Rows of each forward pass."""
        self.seen: dict[int, frozenset[int]] = {}
        """By row, of all sessions: the rows that it attended."""

    def session(self) -> Session:
        return Session(self.pool, self.namespace, rows_max=self.rows_max)

    def feed(self, session: Session, tokens: Sequence[int]) -> None:
        feed = session.plan(tokens)
        size = self.namespace.block_tokens
        visible = self.kv(session)
        rows = list(session.view.rows)
        for at, token in enumerate(feed.tokens):
            row, slot = feed.first_row + at, feed.first_slot + at
            visible.append(_kv(token, row, visible))
            rows.append(row)
            self.seen[row] = frozenset(rows)
            self._memory[feed.blocks[slot // size], slot % size] = visible[-1]
        session.commit(feed)
        self.feeds.append(len(feed.tokens))

    def adopt(self, parent: Session, child: Session) -> None:
        """Copy the partial block of a session that was forked."""
        size = self.namespace.block_tokens
        for slot in range(child.full_slots, child.slot_count):
            at = self._memory[parent.table[slot // size], slot % size]
            self._memory[child.table[slot // size], slot % size] = at

    def kv(self, session: Session) -> list[bytes]:
        """By slot."""
        size = self.namespace.block_tokens
        return [self._memory[session.table[slot // size], slot % size] for slot in range(session.slot_count)]


def prefilled(tokens: Sequence[int], rows: Sequence[int]) -> list[bytes]:
    """K/V of these rows, each computed while those before it were in view and no others."""
    visible: list[bytes] = []
    for row in rows:
        visible.append(_kv(tokens[row], row, visible))
    return visible


def cuts(events: Sequence[Event]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """(row, ranges) of each."""
    return [(event.at_row, tuple(tuple(each) for each in event.ranges)) for event in events]  # type: ignore[misc]


def _kv(token: int, row: int, visible: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"%d at %d" % (token, row) + b"".join(sorted(visible))).digest()
