"""Any story of several sessions on one small memory: an engine says last what one masked pass says."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch

from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import PoolFull
from kvcomm.streams.session import Session
from tests.kvcomm.engines.transformers.test_streaming import CLOSE, replayed
from tests.models import VOCAB_SIZE, StreamModelKind, stream_model

pytestmark = pytest.mark.slow

STEPS = 70
ROWS_MAX = 180
BLOCKS = 40


class Story:
    def __init__(self, engine: StreamEngine, seed: int) -> None:
        self.engine, self.draw = engine, random.Random(seed)
        self.sessions: list[Session] = []
        self.said: dict[Session, torch.Tensor] = {}
        """The logits after each one's last row."""
        self.count = 0

    def tokens(self, most: int) -> list[int]:
        return [self.draw.randrange(4, VOCAB_SIZE) for _ in range(self.draw.randint(1, most))]

    def step(self) -> None:
        happens = self.draw.choices(
            [self.begin, self.feed, self.cut, self.restore, self.fork, self.swap, self.guess, self.close],
            [1, 12, 4, 2, 1, 2, 1, 0.5],
        )[0]
        if len(self.sessions) < 2:
            happens = self.begin
        try:
            happens()
        except PoolFull:
            self.close()
        for session in self.sessions:
            session.check()
        self.engine.pool.check()

    def some(self) -> Session | None:
        return self.draw.choice(self.sessions) if self.sessions else None

    def begin(self) -> None:
        session = self.engine.session()
        if self.sessions and self.draw.random() < 0.5:
            mine = self.draw.choice(self.sessions).tokens
            session.adopt_prefix(mine)
        self.sessions.append(session)

    def feed(self) -> None:
        able = [each for each in self.sessions if each.swapped is None]
        chosen = self.draw.sample(able, self.draw.randint(1, len(able))) if able else []
        most = self.draw.choice([1, 1, 30])
        feeds = [(session, self.tokens(most)) for session in chosen if session.next_row + most <= ROWS_MAX]
        for (session, _), logits in zip(feeds, self.engine.feed(feeds), strict=True):
            self.said[session] = logits

    def cut(self) -> None:
        session = self.some()
        if session is None or session.swapped is not None or session.full_slots < 32:
            return
        first = self.draw.randrange(0, session.full_slots, 16)
        last = self.draw.randrange(first + 16, session.full_slots + 16, 16)
        session.evict([(first, last)], archive=self.draw.random() < 0.5)

    def restore(self) -> None:
        session = self.some()
        if session is not None and session.swapped is None and session.archive:
            at = self.draw.randrange(0, session.full_slots + 16, 16)
            session.restore(self.draw.choice(sorted(session.archive)), at)

    def fork(self) -> None:
        session = self.some()
        if session is not None and session.swapped is None and len(self.sessions) < 6:
            self.count += 1
            self.sessions.append(self.engine.fork(session, self.count.to_bytes(32)))

    def swap(self) -> None:
        session = self.some()
        if session is None:
            return
        if session.swapped is None:
            self.engine.swap_out(session)
        else:
            self.engine.swap_in(session)

    def guess(self) -> None:
        session = self.some()
        if session is None or session.swapped is not None or session.next_row + 9 > ROWS_MAX:
            return
        guessed = self.tokens(9)
        right = self.draw.randint(0, len(guessed))
        logits = self.engine.feed_guess(session, guessed, lambda _: right)
        if right:
            self.said[session] = logits

    def close(self) -> None:
        if self.sessions:
            session = self.sessions.pop(self.draw.randrange(len(self.sessions)))
            session.close()
            self.said.pop(session, None)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "decode"), [("qwen3 sliding", "lanes"), ("qwen3", "pages"), ("llama mha", "lanes")]
)
def test_any_story_ends_with_what_one_masked_pass_says(
    kind: StreamModelKind, decode: Literal["lanes", "pages"], seed: int
):
    limits: dict[str, Any] = {"lanes_max": 3, "chunk_rows": 16, "rows_max": ROWS_MAX + 40}
    engine = StreamEngine(stream_model(kind), BLOCKS, decode=decode, **limits)
    story = Story(engine, seed)
    for _ in range(STEPS):
        story.step()
    judged = 0
    for session, logits in story.said.items():
        rows = session.next_row
        last_event = session.events[-1].at_row if session.events else 0
        if last_event < rows:  # its last row ran under the view that it has now
            torch.testing.assert_close(logits, replayed(engine.model, session)[rows - 1], atol=CLOSE, rtol=0)
            judged += 1
    for session in story.sessions:
        session.close()
    assert engine.pool.free_count == BLOCKS
    assert judged
