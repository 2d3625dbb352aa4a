"""A dialogue on the symbolic engine, driven as a generator drives one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from kvcomm.streams.compactor import Compactor
from kvcomm.streams.conversation import Chunk, Conversation, Markup
from kvcomm.streams.policies.port import Policy
from tests.kvcomm.streams.symbolic import END, FILLER, NEWLINE, SymbolicEngine

PREFIX = (11, 12)
"""Makes the model answer."""


class Dialogue:
    """Text is ids from 100 on, all different as long as there are; ``sampled`` is (query row, token)."""

    def __init__(
        self,
        policy: Policy,
        *,
        block_tokens: int = 16,
        filler: int | None = FILLER,
        filler_rows_max: int | None = None,
        rows_max: int = 100_000,
        chunk: int = 10_000,
    ) -> None:
        self.engine = SymbolicEngine(block_tokens, rows_max=rows_max)
        self.session = self.engine.session()
        markup = Markup(frozenset({END}), (NEWLINE,), filler)
        self.conversation = Conversation(self.session, markup, filler_rows_max=filler_rows_max)
        self.compactor = Compactor(self.session, policy)
        self.sampled: list[tuple[int, int]] = []
        self.live_turns: list[int] = []
        """That each admitted message found, after the cut."""
        self._chunk = chunk
        self._text = count()

    def text(self, length: int) -> list[int]:
        return [100 + next(self._text) % 900 for _ in range(length)]

    def message(self, length: int) -> list[int]:
        """So many tokens of text, and its end."""
        return [*self.text(length), END, NEWLINE]

    def feed(self, chunk: Chunk) -> None:
        for start in range(0, len(chunk.tokens), self._chunk):
            self.engine.feed(self.session, chunk.tokens[start : start + self._chunk])
            self.conversation.scan()
            self.compactor.after_forward()
            self.session.check()

    def admit(self, *messages: Sequence[int], prefix: Sequence[int] = PREFIX) -> None:
        self.compactor.at_admission()
        self.live_turns.append(len(self.session.turns))
        self.feed(self.conversation.admit(messages, prefix))

    def answer(self, length: int, *, end: bool = True) -> None:
        """So many tokens of text, and the end that stops them."""
        for token in [*self.text(length), *([END] if end else [])]:
            if self.session.pending is not None:
                self.engine.feed(self.session, [self.session.pending])
                self.conversation.scan()
            self.sampled.append((self.session.next_row - 1, token))
            self.session.sampled(token)
            if token != END:
                self.compactor.after_forward()
        self.compactor.stop()
        self.feed(self.conversation.finish())

    def turn(self, asked: int, answered: int) -> None:
        self.admit(self.message(asked))
        self.answer(answered)
