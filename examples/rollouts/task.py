"""The toy: keep a value in mind while doing other things.

::

    system  <system> <end>
    turn 0  tell 11 <end>      <assistant> noted <end>
    turn 1  echo 31 <end>      <assistant> 31 <end>
    turn 2  echo 28 <end>      <assistant> 28 <end>
    turn 3  recall <end>       <assistant> 11 <end>       right only for who still knows what turn 0 said

Answers of turns between say nothing about the value, so text that is kept cannot carry it; K/V can.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.streams.conversation import Markup

FILLER, SYSTEM, TELL, ECHO, RECALL, NOTED, ASSISTANT, END = range(8)
VALUES = range(8, 16)
"""What is told and recalled."""
ECHOES = range(16, 32)
"""What is repeated at once."""
VOCAB_SIZE = 32

MARKUP = Markup(frozenset({END}), filler=FILLER)
SYSTEM_MESSAGE = (SYSTEM, END)
GENERATION_PREFIX = (ASSISTANT,)
ANSWER_TOKENS_MAX = 2
RECALL_SHARE = 0.5
"""Of the reward; the other turns share the rest."""
CHANCE = 1 / len(VALUES)
"""Of naming the value without knowing it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One conversation's part that is given: what is said to the model, and what it should answer."""

    questions: tuple[tuple[int, ...], ...]
    """By turn, each with its end."""
    answers: tuple[tuple[int, ...], ...]
    """By turn, without the assistant's mark, each with its end."""

    @property
    def turn_count(self) -> int:
        return len(self.questions)

    def right(self, said: Sequence[Sequence[int]]) -> list[bool]:
        """By turn, whether what was said is the answer."""
        return [tuple(one) == other for one, other in zip(said, self.answers, strict=True)]


def draw_episodes(draw: random.Random, count: int, turn_count: int) -> list[Episode]:
    """Whose values are as different as there are, so that a mean over them is one over all values.

    Raises ``ValueError`` without a turn to tell in, one to echo in and one to recall in.
    """
    if turn_count < 3:
        raise ValueError("an episode has a turn that tells, some that echo and one that asks: at least 3")
    values = [value for _ in range(-(-count // len(VALUES))) for value in draw.sample(VALUES, len(VALUES))]
    return [_episode(value, [draw.choice(ECHOES) for _ in range(turn_count - 2)]) for value in values[:count]]


def _episode(value: int, echoes: Sequence[int]) -> Episode:
    questions = [(TELL, value, END), *((ECHO, each, END) for each in echoes), (RECALL, END)]
    answers = [(NOTED, END), *((each, END) for each in echoes), (value, END)]
    return Episode(tuple(questions), tuple(answers))


def reward(right: Sequence[bool]) -> float:
    """In ``[0, 1]``."""
    others = right[:-1]
    return RECALL_SHARE * right[-1] + (1 - RECALL_SHARE) * sum(others) / len(others)
