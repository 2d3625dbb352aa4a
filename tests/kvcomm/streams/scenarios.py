"""Rollouts to test with: who cuts what and when, written through any engine.

The scripts decide the cuts themselves, in a few dumb lines, so that a fault of a policy or of a generator is
not repeated here.  An engine is whatever has ``namespace``, ``session()`` and ``feed([(session, tokens)])``.
A script is a generator that yields what it wants fed; :func:`written` runs several side by side, so that all
of a test's rollouts come from batches of different views and lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvcomm.streams.recorder import Recorder
from kvcomm.streams.replay import log_probabilities
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.session import Session

PLAIN = Sampling()
FILLER = 3
"""The pad token of the tests' models."""

Steps = Iterator[list[int]]
"""Tokens to feed, one forward pass after the other."""


class Writer:
    """Feeds and samples one rollout."""

    def __init__(
        self, engine: Any, name: str = "rollout", *, sampling: Sampling = PLAIN, seed: int = 1
    ) -> None:
        self.session: Session = engine.session()
        self.recorder = Recorder(self.session, name)
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(seed)
        self.logits = torch.empty(0)
        """After the last row, float32 ``[vocab_size]``."""
        self._sampled: list[torch.Tensor] = []

    @property
    def rollout(self) -> Rollout:
        return self.recorder.rollout()

    @property
    def engine_logits(self) -> torch.Tensor:
        """Before its sampling's processing, float32 ``[samples, vocab_size]``."""
        return torch.stack(self._sampled)

    def sample(self) -> int:
        log_probs = log_probabilities(self.logits, self.sampling)
        if self.sampling.temperature:
            token = int(torch.multinomial(log_probs.exp(), 1, generator=self.generator))
        else:
            token = int(log_probs.argmax())
        self.record(Sample(0, token, float(log_probs[token]), self.sampling))
        return token

    def record(self, sample: Sample) -> None:
        """As if its token had just been drawn."""
        self.recorder.sampled(sample.token, sample.logprob, sample.sampling)
        self._sampled.append(self.logits)

    def end(self, last: Sequence[int], *, padded: bool) -> Steps:
        """The ``last`` tokens of a message, and filler that ends their block."""
        count = -(self.session.slot_count + len(last)) % self.session.block_tokens if padded else 0
        yield [*last, *[FILLER] * count]
        self.recorder.filler(count)

    def up(self, slots: int) -> int:
        block = self.session.block_tokens
        return -(-slots // block) * block

    def down(self, slots: int) -> int:
        return slots // self.session.block_tokens * self.session.block_tokens


Script = Callable[[Writer], Steps]


def written(engine: Any, scripts: Mapping[str, Script], *, sampling: Sampling = PLAIN) -> dict[str, Writer]:
    """All scripts at once, by name: each pass feeds all that are not done."""
    writers = {name: Writer(engine, name, sampling=sampling, seed=at + 1) for at, name in enumerate(scripts)}
    running = {name: scripts[name](writer) for name, writer in writers.items()}
    asked = {name: next(steps) for name, steps in running.items()}
    while asked:
        names = list(asked)
        for name, logits in zip(
            names, engine.feed([(writers[n].session, asked[n]) for n in names]), strict=True
        ):
            writers[name].logits = logits.float().cpu()
            tokens = next(running[name], None)
            if tokens is None:
                del asked[name]
            else:
                asked[name] = tokens
    return writers


def text(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 512) for _ in range(count)]


def conversation(turn_count: int, seed: int = 7) -> list[tuple[list[int], int]]:
    """By turn: the user's tokens, and how many the model answers."""
    draw = random.Random(seed)
    return [(text(draw.randint(9, 30), seed + turn), draw.randint(7, 25)) for turn in range(turn_count)]


def windowed(
    writer: Writer,
    *,
    prompt: int = 45,
    count: int = 240,
    window: int = 144,
    stride: int = 48,
    protected: int | None = None,
    chunk: int | None = None,
) -> Steps:
    """The oldest ``stride`` slots go whenever more than ``window`` are in view, also between the chunks of a
    prompt."""
    session, tokens = writer.session, text(prompt, 5)
    session.protect(prompt if protected is None else protected)

    def cut() -> None:
        first = session.protected
        while session.slot_count > window and session.full_slots >= first + stride:
            session.evict([(first, first + stride)], reason="window")

    step = chunk or prompt
    for start in range(0, prompt, step):
        yield tokens[start : start + step]
        cut()
    for _ in range(count - 1):
        yield [writer.sample()]
        cut()
    writer.sample()


def turned(
    writer: Writer,
    *,
    turn_count: int = 14,
    live: int = 5,
    stride: int = 2,
    padded: bool = True,
    contiguous: bool = True,
    restores: int = 0,
) -> Steps:
    """Whole turns go at the admission of the next message, before its first token is fed.

    Args:
        padded: turns end on the border of a block; else the cut is snapped inward.
        contiguous: the oldest turns go; else any.
        restores: every other cut is archived, and so many come back from the third cut on.
    """
    session, draw = writer.session, random.Random(11)
    yield from writer.end(text(37, 3), padded=padded)
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
        yield user
        for _ in range(answer - 1):
            yield [writer.sample()]
        yield from writer.end([writer.sample()], padded=padded)
        session.end_turn(start)


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


def with_settings(script: Callable[..., Steps], **settings: Any) -> Script:
    return lambda writer: script(writer, **settings)


SCENARIOS: dict[str, Script] = {
    "window": windowed,
    "chunked": with_settings(windowed, prompt=300, count=120, window=160, stride=64, protected=40, chunk=48),
    "turns": turned,
    "unpadded": with_settings(turned, padded=False),
    "scattered": with_settings(turned, contiguous=False),
    "restored": with_settings(turned, restores=2),
}
