"""Rollouts that somebody could have written: random feeds, samples, fillers, cuts, restores and weights."""

from __future__ import annotations

import random

from kvcomm.streams.pool import BlockPool
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Rollout, Sampling
from kvcomm.streams.session import Session
from tests.namespaces import namespace

SAMPLINGS = (Sampling(), Sampling(0.7, 20, 0.9), Sampling(0.0), Sampling(1.3, 0, 0.95))
BLOCK_TOKENS = 4


def story(seed: int, steps: int = 30) -> Rollout:
    """Ends anywhere: in the middle of a block, after an event, with a pending token."""
    return Story(seed).told(steps).rollout()


class Story:
    """A recorder and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        ns = namespace(block_tokens=BLOCK_TOKENS, vocab_size=100)
        self.session = Session(BlockPool(400), ns, rows_max=10_000)
        self.recorder = Recorder(self.session, f"story-{seed}")
        self.prompt(self.draw.randint(1, 30))

    def told(self, steps: int) -> Recorder:
        for _ in range(steps):
            self.step()
        return self.recorder

    def step(self) -> None:
        kind = self.draw.random()
        if kind < 0.4:
            self.sample(self.draw.randint(1, 9), self.draw.choice(SAMPLINGS))
        elif kind < 0.5:
            self.prompt(self.draw.randint(1, 9))
        elif kind < 0.6:
            self.fill()
        elif kind < 0.85 and self.session.full_slots:
            self.cut()
        elif kind < 0.97 and self.session.archive:
            self.session.restore(self.draw.choice(sorted(self.session.archive)))
        elif kind >= 0.97:
            self.session.set_weights(self.session.view.weights_version + 1)

    def prompt(self, count: int) -> None:
        self._feed([self.draw.randrange(100) for _ in range(count)])

    def sample(self, count: int, sampling: Sampling) -> None:
        for _ in range(count):
            if self.session.pending is not None:
                self._feed([])
            loss = self.draw.random() < 0.9
            self.recorder.sampled(self.draw.randrange(100), -3 * self.draw.random(), sampling, loss)

    def fill(self) -> None:
        pending = self.session.pending is not None
        count = -(self.session.slot_count + pending) % BLOCK_TOKENS
        if pending or count:
            self._feed([0] * count)
            self.recorder.filler(count)

    def cut(self) -> None:
        blocks = self.session.full_slots // BLOCK_TOKENS
        borders = sorted(self.draw.sample(range(blocks + 1), k=min(blocks + 1, 2 * self.draw.randint(1, 2))))
        ranges = [
            (BLOCK_TOKENS * a, BLOCK_TOKENS * b) for a, b in zip(borders[::2], borders[1::2], strict=False)
        ]
        self.session.evict(ranges, archive=self.draw.random() < 0.5, reason=self.draw.choice(("", "fifo")))

    def _feed(self, tokens: list[int]) -> None:
        pending = [] if self.session.pending is None else [self.session.pending]
        self.session.commit(self.session.plan(pending + tokens))
