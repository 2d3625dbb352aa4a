"""Rollouts to test with: who cuts what and when, written through any engine.

The drivers decide the cuts themselves, in a few dumb lines, so that a fault of a policy or of a generator is
not repeated here.  An engine is whatever has ``namespace``, ``session()`` and ``feed([(session, tokens)])``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcomm.streams.replay import log_probabilities
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.session import Session

PLAIN = Sampling()
FILLER = 3
"""The pad token of the tests' models."""


@dataclass
class Writer:
    """Feeds and samples one rollout."""

    engine: Any
    sampling: Sampling = PLAIN
    seed: int = 1
    name: str = "rollout"
    samples: list[Sample] = field(default_factory=list)
    filler_rows: list[int] = field(default_factory=list)
    engine_logits: list[torch.Tensor] = field(default_factory=list)
    """Of each sample, float32 ``[vocab_size]``, before its sampling's processing."""

    def __post_init__(self) -> None:
        self.session: Session = self.engine.session()
        self.generator = torch.Generator().manual_seed(self.seed)
        self.logits = torch.empty(0)

    @property
    def block(self) -> int:
        return self.engine.namespace.block_tokens

    def up(self, slots: int) -> int:
        return -(-slots // self.block) * self.block

    def down(self, slots: int) -> int:
        return slots // self.block * self.block

    def feed(self, tokens: Sequence[int]) -> None:
        (logits,) = self.engine.feed([(self.session, list(tokens))])
        self.logits = logits.float().cpu()

    def sample(self) -> int:
        log_probs = log_probabilities(self.logits, self.sampling)
        if self.sampling.temperature:
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.generator))
        else:
            token = int(log_probs.argmax())
        self.session.sampled(token)
        row = self.session.next_row - 1
        self.samples.append(Sample(row, token, float(log_probs[token]), self.sampling))
        self.engine_logits.append(self.logits)
        return token

    def fill(self) -> list[int]:
        """Filler that ends the block which one more token would leave open."""
        count = -(self.session.slot_count + 1) % self.block
        first = self.session.next_row + 1
        self.filler_rows += range(first, first + count)
        return [FILLER] * count

    def rollout(self) -> Rollout:
        events = tuple(self.session.events)
        return Rollout(
            name=self.name,
            namespace=bytes(32),
            block_tokens=self.block,
            tokens=tuple(self.session.tokens),
            filler_rows=tuple(self.filler_rows),
            events=events,
            samples=tuple(self.samples),
            event_count=len(events),
            view_digest=self.session.view.digest,
        )


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 512) for _ in range(count)]


def conversation(turn_count: int, seed: int = 7) -> list[tuple[list[int], int]]:
    """By turn: the user's tokens, and how many the model answers."""
    draw = random.Random(seed)
    return [(tokens(draw.randint(9, 30), seed + turn), draw.randint(7, 25)) for turn in range(turn_count)]


def windowed(
    writer: Writer,
    *,
    prompt: int = 45,
    count: int = 240,
    window: int = 144,
    stride: int = 48,
    protected: int | None = None,
    chunk: int | None = None,
) -> Writer:
    """The oldest ``stride`` slots go whenever more than ``window`` are in view, also between the chunks of a
    prompt."""
    session, text = writer.session, tokens(prompt, 5)
    session.protect(prompt if protected is None else protected)

    def cut() -> None:
        first = session.protected
        while session.slot_count > window and session.full_slots >= first + stride:
            session.evict([(first, first + stride)], reason="window")

    step = chunk or prompt
    for start in range(0, prompt, step):
        writer.feed(text[start : start + step])
        cut()
    token = writer.sample()
    for _ in range(count - 1):
        writer.feed([token])
        cut()
        token = writer.sample()
    return writer


def turned(
    writer: Writer,
    *,
    turn_count: int = 14,
    live: int = 5,
    stride: int = 2,
    padded: bool = True,
    contiguous: bool = True,
    restores: int = 0,
) -> Writer:
    """Whole turns go at the admission of the next message, before its first token is fed.

    Args:
        padded: turns end on the border of a block; else the cut is snapped inward.
        contiguous: the oldest turns go; else any.
        restores: every other cut is archived, and so many come back from the third cut on.
    """
    session, draw = writer.session, random.Random(11)
    system = tokens(37, 3)
    if padded:
        writer.filler_rows += range(len(system), writer.up(len(system)))
        system += [FILLER] * (writer.up(len(system)) - len(system))
    writer.feed(system)
    session.protect(session.slot_count)
    cuts = 0
    for user, answer in conversation(turn_count):
        while len(session.turns) >= live:
            chosen = range(stride) if contiguous else sorted(draw.sample(range(live - 1), stride))
            cuts += _cut_turns(writer, chosen, archive=bool(restores) and cuts % 2 == 1)
        if restores and session.archive and cuts >= 3:
            restores -= 1
            session.restore(next(iter(session.archive)))
        start = session.slot_count
        writer.feed(user)
        for _ in range(answer - 1):
            writer.feed([writer.sample()])
        last = writer.sample()
        writer.feed([last, *(writer.fill() if padded else [])])
        session.end_turn(start)
    return writer


def _cut_turns(writer: Writer, chosen: Sequence[int], *, archive: bool) -> int:
    """Whole blocks of the chosen turns, neighbours as one range; those turns are no turns any more."""
    session = writer.session
    joined: list[list[int]] = []
    for at in chosen:
        start, end = session.turns[at]
        if joined and joined[-1][1] == start:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    ranges = [(max(writer.up(start), session.protected), writer.down(end)) for start, end in joined]
    ranges = [(start, end) for start, end in ranges if start < end]
    session.turns = [turn for at, turn in enumerate(session.turns) if at not in chosen]
    if not ranges:
        return 0
    session.evict(ranges, archive=archive, reason="turns")
    return 1


SCENARIOS: dict[str, Callable[[Writer], Writer]] = {
    "window": windowed,
    "chunked": lambda writer: windowed(
        writer, prompt=300, count=120, window=160, stride=64, protected=40, chunk=48
    ),
    "turns": turned,
    "unpadded": lambda writer: turned(writer, padded=False),
    "scattered": lambda writer: turned(writer, contiguous=False),
    "restored": lambda writer: turned(writer, restores=2),
}
