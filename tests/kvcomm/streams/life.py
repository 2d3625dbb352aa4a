"""A rollout told twice: by a toy engine that follows a session's numbers, and by an oracle that knows none.

The K/V of a row is a digest of its token, its position, the weights and *everything that it saw*, as with
attention.  So a block in the wrong place, a row that saw too much or too little, a shared block that was
written over or another one under the same name: each shows as another digest, there and in all rows after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from kvcomm.block import BlockKey
from kvcomm.streams.events import Event, SpanId
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Feed, Session
from tests.namespaces import namespace

BLOCK_TOKENS = 4
ROWS_MAX = 10_000
NO_KV = b""


def kv_of(token: int, position: int, weights: int, seen: Iterable[bytes]) -> bytes:
    """The order of slots makes no difference, as it makes none to a softmax."""
    digest = hashlib.blake2b(f"{token} {position} {weights}".encode(), digest_size=8)
    digest.update(b"".join(sorted(seen)))
    return digest.digest()


class ToyEngine:
    """Paged memory of digests; computes from what a session says is in view."""

    def __init__(self, block_count: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.namespace = namespace(block_tokens=block_tokens, vocab_size=100)
        self.pool = BlockPool(block_count)
        self.memory = [[NO_KV] * block_tokens for _ in range(block_count)]
        self.computed_rows = 0

    def session(self, journal: Callable[[Event], None] = lambda event: None) -> Session:
        return Session(self.pool, self.namespace, rows_max=ROWS_MAX, journal=journal)

    def feed(self, session: Session, tokens: Sequence[int], count: int | None = None) -> None:
        """In one forward pass; only ``count`` rows of it are kept, if given."""
        feed = session.plan(tokens)
        self.compute(session, feed)
        session.commit(feed, count)

    def admit(self, session: Session, tokens: Sequence[int]) -> int:
        """A prompt; the number of rows that were not computed."""
        adopted = session.adopt_prefix(tokens)
        self.feed(session, tokens[adopted:])
        return adopted

    def compute(self, session: Session, feed: Feed) -> None:
        size = self.namespace.block_tokens
        seen = self.in_view(session)
        for i, token in enumerate(feed.tokens):
            made = kv_of(token, feed.first_row + i, session.view.weights_version, seen)
            place, slot = divmod(feed.first_slot + i, size)
            block = feed.tail[place - feed.first_slot // size]
            assert block == feed.blocks[place]
            assert self.pool.holder_count(block) == 1, "a shared block is never written"
            self.memory[block][slot] = made
            seen.append(made)
            self.computed_rows += 1

    def in_view(self, session: Session) -> list[bytes]:
        """The K/V of every slot."""
        slots = [kv for block in session.table for kv in self.memory[block]]
        return slots[: session.slot_count]

    def fork(
        self,
        session: Session,
        name: bytes,
        journal: Callable[[Event], None] = lambda event: None,
        at_row: int | None = None,
    ) -> Session:
        child = session.fork(name, journal, at_row=at_row)
        if child.slot_count % self.namespace.block_tokens:
            self.load(child.table[-1], self.payload(session.table[len(child.table) - 1]))
        return child

    def payload(self, block: BlockId) -> tuple[bytes, ...]:
        return tuple(self.memory[block])

    def load(self, block: BlockId, payload: Sequence[bytes]) -> None:
        self.memory[block] = list(payload)

    def named(self) -> Iterable[tuple[BlockKey, tuple[bytes, ...]]]:
        """Every block that has a name, with its content."""
        for number in range(self.pool.block_count):
            key = self.pool.key_of(BlockId(number))
            if key is not None:
                yield key, self.payload(BlockId(number))


class Life:
    """What one rollout should be: rows, who saw whom, and the K/V of each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.kv: list[bytes] = []
        self.saw: list[frozenset[int]] = []
        self.slots: list[int] = []
        self.spans: dict[SpanId, list[int]] = {}
        self.weights = 0

    def feed(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            row = len(self.tokens)
            seen = [self.kv[key] for key in self.slots]
            self.tokens.append(token)
            self.kv.append(kv_of(token, row, self.weights, seen))
            self.slots.append(row)
            self.saw.append(frozenset(self.slots))

    def evict(self, ranges: Iterable[tuple[int, int]], span: SpanId) -> None:
        gone = [row for start, end in ranges for row in self.slots[start:end]]
        self.slots = [row for row in self.slots if row not in gone]
        if span:
            self.spans[span] = gone

    def restore(self, span: SpanId, at: int) -> None:
        self.slots = self.slots[:at] + self.spans.pop(span) + self.slots[at:]

    def before(self, row: int) -> Life:
        past = Life()
        past.tokens, past.kv, past.saw = self.tokens[:row], self.kv[:row], self.saw[:row]
        past.slots = [each for each in self.slots if each < row]
        past.spans, past.weights = dict(self.spans), self.weights
        return past
