"""``Engine``: what KV-streams need of whoever runs the model; no tensor library here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvcomm.block import Buffer
from kvcomm.namespace import Namespace
from kvcomm.streams.events import Event
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Session


class Engine(Protocol):
    """A model, its paged K/V memory, and forward passes over it.

    The memory is the truth: the bytes of a block do not change from the moment when it is full until it is
    free, whatever cuts and restores happen to the tables that name it.
    """

    @property
    def namespace(self) -> Namespace:
        """Of the K/V that the model computes."""
        ...

    @property
    def pool(self) -> BlockPool:
        """Of the memory."""
        ...

    def session(self, *, journal: Callable[[Event], None] = ...) -> Session:
        """A new rollout on this memory."""
        ...

    def recovered(
        self, tokens: Sequence[int], events: Sequence[Event], *, journal: Callable[[Event], None] = ...
    ) -> Session:
        """A rollout that another session wrote so far, swapped out; see :meth:`Session.recovered`.

        Raises:
            Refused: it is too long, or was written under a version of weights that the model does not have.
        """
        ...

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> list[Any]:
        """Compute the K/V of tokens of several sessions, whatever their views and counts, and commit them:
        all of them, or none when it raises.

        Returns for each session the logits after its last token, float32 ``[vocab_size]``.

        Raises:
            ValueError, Refused, PoolFull: see :meth:`Session.plan`.
        """
        ...

    def fork(self, session: Session, name: bytes, *, journal: Callable[[Event], None] = ...) -> Session:
        """:meth:`Session.fork`, the bytes of the partial last block included."""
        ...

    def payload(self, block: BlockId) -> memoryview:
        """A copy of a block's bytes, layout ``LKHTD``: ``namespace.block_bytes`` of them."""
        ...

    def load(self, block: BlockId, payload: Buffer) -> None:
        """Put verified bytes, as :meth:`payload` gives them, into a block that the caller holds.

        Raises:
            PayloadError: they are not those of a block of the namespace.
        """
        ...
