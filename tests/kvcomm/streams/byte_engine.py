"""``ByteEngine``: an engine without a model.  K/V of a row are bytes hashed from all the K/V that it attends,
so whoever continues over other bytes, or over the same ones in another view, generates another text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcomm.block import Buffer
from kvcomm.namespace import DTYPE_BYTES, Namespace
from kvcomm.streams.events import Event
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Session


class ByteEngine:
    def __init__(self, namespace: Namespace, block_count: int, rows_max: int = 10_000) -> None:
        self.namespace = namespace
        self.pool = BlockPool(block_count)
        self.rows_max = rows_max
        *shape, head_dim = namespace.block_shape
        row = head_dim * DTYPE_BYTES[namespace.dtype]
        self.memory = np.full((block_count, *shape, row), 0xAB, np.uint8)  # what others left there
        self.loads = 0
        self.fed_rows = 0

    def session(self, *, journal: Callable[[Event], None] = lambda event: None) -> Session:
        return Session(self.pool, self.namespace, rows_max=self.rows_max, journal=journal)

    def recovered(
        self,
        tokens: Sequence[int],
        events: Sequence[Event],
        *,
        journal: Callable[[Event], None] = lambda event: None,
    ) -> Session:
        return Session.recovered(
            self.pool, self.namespace, tokens, events, rows_max=self.rows_max, journal=journal
        )

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> list[Any]:
        """The next token after each."""
        answers = []
        for session, tokens in feeds:
            feed = session.plan(tokens)
            size, seen = session.block_tokens, b""
            for index, token in enumerate(feed.tokens):
                slot, row = feed.first_slot + index, feed.first_row + index
                seen = self.computed(feed.blocks, slot, token, row)
                place = self.memory[feed.blocks[slot // size]][:, :, :, slot % size]
                place[...] = np.frombuffer(seen, np.uint8).reshape(place.shape)
            session.commit(feed)
            self.fed_rows += len(feed.tokens)
            answers.append(int.from_bytes(seen[:4], "little") % self.namespace.vocab_size)
        return answers

    def fork(
        self, session: Session, name: bytes, journal: Callable[[Event], None] = lambda event: None
    ) -> Session:
        child = session.fork(name, journal)
        for mine, theirs in zip(session.table, child.table, strict=True):
            self.memory[theirs] = self.memory[mine]
        return child

    def payload(self, block: BlockId) -> memoryview:
        return memoryview(self.memory[block].tobytes())

    def load(self, block: BlockId, payload: Buffer) -> None:
        self.memory[block] = np.frombuffer(payload, np.uint8).reshape(self.memory[block].shape)
        self.loads += 1

    def generate(self, session: Session, count: int) -> list[int]:
        """Greedily; the last one stays pending."""
        tokens = []
        for _ in range(count):
            assert session.pending is not None
            (token,) = self.feed([(session, [session.pending])])
            session.sampled(token)
            tokens.append(token)
        return tokens

    def computed(self, blocks: Sequence[BlockId], slot: int, token: int, row: int) -> bytes:
        """K/V of a row over what stands before ``slot``, whose order means nothing."""
        size = self.namespace.block_tokens
        rows = [self.memory[blocks[at // size]][:, :, :, at % size].tobytes() for at in range(slot)]
        digest = hashlib.shake_256(b"".join(sorted(rows)) + b"%d %d" % (token, row))
        return digest.digest(self.namespace.block_bytes // size)
