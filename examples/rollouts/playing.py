"""``play``: episodes side by side, one forward pass for all of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from examples.rollouts.arms import Arm
from examples.rollouts.talk import Talk
from examples.rollouts.task import GENERATION_PREFIX, SYSTEM_MESSAGE, Episode, reward
from examples.rollouts.voices import Voice
from kvcomm.engines.transformers.generating import Prompt
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.rollout import Rollout
from kvcomm.streams.session import Session


@dataclass(frozen=True, slots=True)
class Played:
    """One conversation to its end."""

    episode: Episode
    rollouts: tuple[Rollout, ...]
    """One, or as many as streams that it moved through."""
    right: tuple[bool, ...]
    """By turn."""
    rows_fed: int
    rows_again: int
    slots_most: int

    @property
    def reward(self) -> float:
        return reward(self.right)


def play(
    engine: StreamEngine,
    voice: Voice,
    arm: Arm,
    episodes: Sequence[Episode],
    draw: Random,
    *,
    group: int = 1,
    weights_version: int = 0,
) -> list[Played]:
    """Each episode ``group`` times, in order.  All episodes have equally many turns."""

    def begin() -> Session:
        session = voice.session()
        if weights_version:
            session.set_weights(weights_version)  # at row 0: all rows are of these weights
        return session

    given = [episode for episode in episodes for _ in range(group)]
    talks = [Talk(engine, arm, str(at), draw.getrandbits(32), begin()) for at in range(len(given))]
    for turn in range(given[0].turn_count):
        carries = [(talk, carry, begin()) for talk in talks if (carry := talk.due()) is not None]
        if carries:
            voice.feed([(session, carry.tokens) for _, carry, session in carries])
        for talk, carry, session in carries:
            talk.move(session, carry)
        first = [] if turn else [SYSTEM_MESSAGE]
        prompts = [Prompt([*first, episode.questions[turn]], GENERATION_PREFIX) for episode in given]
        answers = [episode.answers[turn] for episode in given]
        said = voice.answer([talk.stream for talk in talks], prompts, answers)
        for talk, tokens in zip(talks, said, strict=True):
            talk.answered(tokens)
    return [_played(episode, talk) for episode, talk in zip(given, talks, strict=True)]


def _played(episode: Episode, talk: Talk) -> Played:
    rollouts = talk.close()
    right = tuple(episode.right(talk.said))
    return Played(episode, rollouts, right, talk.rows_fed, talk.rows_again, talk.slots_most)
