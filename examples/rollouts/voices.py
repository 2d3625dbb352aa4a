"""``Voice``: who writes what a conversation says: the model through its engine, or a teacher.

A teacher writes the record alone: rows, cuts and digests as an engine's, and no K/V.  A record is all that a
replay needs, so a model can be taught through the very masks that it will run under, before it generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from examples.rollouts.task import ANSWER_TOKENS_MAX, END
from kvcomm.engines.transformers.generating import Prompt, Stream, generate, prefill
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.namespace import Namespace
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session


class Voice(Protocol):
    def session(self) -> Session:
        """A new one."""
        ...

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> None:
        """Rows that nobody samples behind."""
        ...

    def ask(self, streams: Sequence[Stream], prompts: Sequence[Prompt]) -> None:
        """Feed a prompt to each."""
        ...

    def answer(self, streams: Sequence[Stream], right: Sequence[Sequence[int]]) -> list[list[int]]:
        """Write the answers and finish them.  What would be right is told; a model does not look at it."""
        ...


class Model:
    """Says what it draws."""

    def __init__(self, engine: StreamEngine) -> None:
        self.engine = engine

    def session(self) -> Session:
        return self.engine.session()

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> None:
        self.engine.feed(feeds)

    def ask(self, streams: Sequence[Stream], prompts: Sequence[Prompt]) -> None:
        prefill(self.engine, list(zip(streams, prompts, strict=True)))

    def answer(self, streams: Sequence[Stream], right: Sequence[Sequence[int]]) -> list[list[int]]:
        return [each.tokens for each in generate(self.engine, streams, ANSWER_TOKENS_MAX, end=END)]


class Teacher:
    """Says what is right, with probability 1."""

    def __init__(self, namespace: Namespace, *, rows_max: int = 512, block_count: int = 4096) -> None:
        self._namespace, self._rows_max = namespace, rows_max
        self._pool = BlockPool(block_count)

    def session(self) -> Session:
        return Session(self._pool, self._namespace, rows_max=self._rows_max)

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> None:
        for session, tokens in feeds:
            session.commit(session.plan(tokens))

    def ask(self, streams: Sequence[Stream], prompts: Sequence[Prompt]) -> None:
        for stream, prompt in zip(streams, prompts, strict=True):
            self._advance(stream, stream.admit(prompt))

    def answer(self, streams: Sequence[Stream], right: Sequence[Sequence[int]]) -> list[list[int]]:
        for stream, answer in zip(streams, right, strict=True):
            for place, token in enumerate(answer):
                stream.recorder.sampled(token, 0.0, stream.sampling)
                if place + 1 < len(answer):
                    self._advance(stream, [token])
            self._advance(stream, stream.finish(None))
        return [list(answer) for answer in right]

    def _advance(self, stream: Stream, tokens: Sequence[int]) -> None:
        stream.cut()
        self.feed([(stream.session, tokens)])
        stream.committed(torch.empty(0), None)
