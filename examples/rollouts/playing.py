"""``play``: episodes side by side, one forward pass for all of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from examples.rollouts.arms import Arm
from examples.rollouts.talk import Talk
from examples.rollouts.task import GENERATION_PREFIX, MARKUP, SYSTEM_MESSAGE, Episode, reward
from examples.rollouts.voices import Voice
from kvcomm.engines.transformers.generating import Prompt, Stream
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.rollout import Rollout


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


@dataclass(frozen=True, slots=True)
class Stage:
    """Where episodes are played."""

    engine: StreamEngine
    voice: Voice
    arm: Arm
    draw: Random


def play(stage: Stage, episodes: Sequence[Episode], group: int = 1) -> list[Played]:
    """Each episode ``group`` times, in order.  All episodes have equally many turns.

    The first prompt is computed once for a group: the siblings fork behind it.
    """
    voice = stage.voice
    talks = [talk for talks in _opened(stage, episodes, group) for talk in talks]
    given = [episode for episode in episodes for _ in range(group)]
    for turn in range(given[0].turn_count):
        if turn:
            _move(stage, talks)
            prompts = [Prompt([episode.questions[turn]], GENERATION_PREFIX) for episode in given]
            voice.ask([talk.stream for talk in talks], prompts)
        right = [episode.answers[turn] for episode in given]
        for talk, tokens in zip(talks, voice.answer([talk.stream for talk in talks], right), strict=True):
            talk.answered(tokens)
    return [_played(episode, talk) for episode, talk in zip(given, talks, strict=True)]


def _opened(stage: Stage, episodes: Sequence[Episode], group: int) -> list[list[Talk]]:
    """By episode its siblings, with the first question asked."""
    streams = [
        Stream(
            stage.engine, f"{at}/0", policy=stage.arm.policy, markup=MARKUP,
            seed=stage.draw.getrandbits(32), session=stage.voice.session(),
        )
        for at in range(len(episodes))
    ]  # fmt: skip
    prompts = [Prompt([SYSTEM_MESSAGE, episode.questions[0]], GENERATION_PREFIX) for episode in episodes]
    stage.voice.ask(streams, prompts)
    opened = []
    for at, stream in enumerate(streams):
        forks = [
            stream.fork(f"{at}/{sibling}", seed=stage.draw.getrandbits(32)) for sibling in range(1, group)
        ]
        shared = stream.session.next_row
        opened.append([Talk(stage.arm, stream), *(Talk(stage.arm, fork, shared) for fork in forks)])
    return opened


def _move(stage: Stage, talks: Sequence[Talk]) -> None:
    """Those that begin anew."""
    carries = [(talk, carry, stage.voice.session()) for talk in talks if (carry := talk.due()) is not None]
    if carries:
        stage.voice.feed([(session, carry.tokens) for _, carry, session in carries])
    for talk, carry, session in carries:
        talk.move(session, carry)


def _played(episode: Episode, talk: Talk) -> Played:
    rollouts = talk.close()
    right = tuple(episode.right(talk.said))
    return Played(episode, rollouts, right, talk.rows_fed, talk.rows_again, talk.slots_most)
