"""Who writes rollouts: an engine that computes, or a scribe that only keeps the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvcomm.namespace import Namespace
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session


class Writer(Protocol):
    """What the examples need of an engine; see ``kvcomm.streams.engine``."""

    def session(self) -> Session: ...

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> list[Any]: ...


class Scribe:
    """Writes the record of what a teacher says: rows, cuts and digests as an engine's, and no K/V.

    A record is all that a replay needs, so a model can be taught from it through the same masks that it will
    run under, before it generates anything.
    """

    def __init__(self, namespace: Namespace, block_count: int = 4096) -> None:
        self.namespace = namespace
        self.pool = BlockPool(block_count)

    def session(self) -> Session:
        return Session(self.pool, self.namespace, rows_max=512)

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> list[Any]:
        for session, tokens in feeds:
            session.commit(session.plan(tokens))
        return [None] * len(feeds)
