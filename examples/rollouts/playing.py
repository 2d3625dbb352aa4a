"""Play episodes: many conversations side by side, one forward pass for all of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from examples.rollouts.arms import Arm
from examples.rollouts.stream import Cost, Stream
from examples.rollouts.task import ANSWER_TOKENS_MAX, END, Episode, reward
from examples.rollouts.writers import Writer
from kvcomm.streams.conversation import Chunk
from kvcomm.streams.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Played:
    """One conversation to its end."""

    episode: Episode
    rollouts: tuple[Rollout, ...]
    """One, or as many as the arm began anew."""
    right: tuple[bool, ...]
    """By turn."""
    cost: Cost

    @property
    def reward(self) -> float:
        return reward(self.right)


class Speaker(Protocol):
    """Who chooses the next token of each answer."""

    def next(self, streams: Sequence[Stream], logits: Sequence[Any]) -> list[tuple[int, float]]:
        """By stream: a token and its log probability."""
        ...


class Sampler:
    """Draws from what the model says."""

    def __init__(self, draw: torch.Generator) -> None:
        self._draw = draw

    def next(self, streams: Sequence[Stream], logits: Sequence[Any]) -> list[tuple[int, float]]:
        log_probs = torch.log_softmax(torch.stack(list(logits)), -1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=self._draw)
        found = log_probs.gather(-1, drawn)
        return list(zip(drawn[:, 0].tolist(), found[:, 0].tolist(), strict=True))


class Teacher:
    """Says what is right."""

    def __init__(self, episodes: Sequence[Episode], streams_per_episode: int = 1) -> None:
        self._episodes = [each for each in episodes for _ in range(streams_per_episode)]
        self._place: dict[str, int] = {}

    def next(self, streams: Sequence[Stream], logits: Sequence[Any]) -> list[tuple[int, float]]:
        said = [(int(stream.name), stream.said) for stream in streams]
        return [(self._episodes[place].answers[len(told) - 1][len(told[-1])], 0.0) for place, told in said]


def play(
    writer: Writer,
    arm: Arm,
    episodes: Sequence[Episode],
    speaker: Speaker,
    *,
    group: int = 1,
    weights_version: int = 0,
) -> list[Played]:
    """Each episode ``group`` times, in order.  All episodes have equally many turns."""
    streams = [Stream(writer, arm, weights_version, str(at)) for at in range(len(episodes) * group)]
    leaders = set(streams[::group])
    for turn in range(episodes[0].turn_count):
        asked = [
            (stream, stream.admit(episodes[at // group].questions[turn])) for at, stream in enumerate(streams)
        ]
        logits: dict[Stream, Any] = {}
        for which in (True, False):  # siblings find what the first of them has computed
            logits |= _feed(writer, [each for each in asked if (each[0] in leaders) is which])
        _answer(writer, speaker, streams, logits)
    for stream in streams:
        stream.close()
    return [
        Played(episode, tuple(stream.rollouts), tuple(episode.right(stream.said)), stream.cost)
        for stream, episode in zip(streams, (each for each in episodes for _ in range(group)), strict=True)
    ]


def _answer(writer: Writer, speaker: Speaker, streams: Sequence[Stream], logits: dict[Stream, Any]) -> None:
    speaking = list(streams)
    for place in range(ANSWER_TOKENS_MAX):
        drawn = speaker.next(speaking, [logits[stream] for stream in speaking])
        chunks = [
            (stream, stream.say(token, log_prob), token)
            for stream, (token, log_prob) in zip(speaking, drawn, strict=True)
        ]
        going_on = [(stream, chunk) for stream, chunk, token in chunks if token != END]
        if place + 1 == ANSWER_TOKENS_MAX or not going_on:
            break
        logits = _feed(writer, going_on)
        speaking = [stream for stream, _ in going_on]
    _feed(writer, [(stream, stream.finish(END)) for stream in streams])


def _feed(writer: Writer, chunks: Sequence[tuple[Stream, Chunk]]) -> dict[Stream, Any]:
    """What each stream's last token says of the next."""
    if not chunks:
        return {}
    fresh = [(stream, chunk, stream.adopt(chunk)) for stream, chunk in chunks]
    logits = writer.feed([(stream.session, chunk.tokens[held:]) for stream, chunk, held in fresh])
    for stream, chunk, held in fresh:
        stream.fed(chunk, len(chunk.tokens) - held)
    return {stream: each for (stream, _, _), each in zip(fresh, logits, strict=True)}
