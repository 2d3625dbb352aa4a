"""``train``: three arms, from the same random weights, first taught, then reinforced.

Per step of an arm: several rollouts of each prompt from the engine, rewards, advantages within the group, one
policy gradient through the replay of the rollouts' records, new weights.  The rollouts of a step name its
weights in an event at row 0, so blocks that older weights computed are not taken for theirs, whatever the
pool still holds.

Reinforcement from random weights finds nothing here in minutes: an answer is drawn right too seldom.  So each
arm is *taught* first (supervised, through the same replay, from records that a teacher wrote) until its most
probable answers earn something; where that does not come, for as many steps as are allowed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.rollouts.arms import Arm, arms
from examples.rollouts.grpo import Learned, accumulate, advantages, judged, without_events
from examples.rollouts.playing import Played, Stage, play
from examples.rollouts.task import VOCAB_SIZE, Episode, draw_episodes, reward
from examples.rollouts.toys import BLOCK_TOKENS, step, toy_model
from examples.rollouts.voices import Model, Teacher
from kvcomm.engines.transformers.identity import namespace_of
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.mismatch import Mismatch, mismatch


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a training; the defaults take about two minutes of one core."""

    steps: int = 60
    prompts: int = 8
    """A step."""
    group: int = 8
    """Rollouts of each prompt."""
    turns: int = 4
    turns_max: int = 3
    """As many finished turns make an arm cut."""
    stride: int = 2
    """Turns a cut."""
    learning_rate: float = 2e-3
    lessons_max: int = 90
    """Steps of teaching, at most."""
    lesson_episodes: int = 32
    lesson_rate: float = 3e-3
    taught_at: float = 0.75
    """Reward of the most probable answers that ends the teaching."""
    seed: int = 0


QUICK = Settings(steps=3, prompts=2, group=4, lessons_max=4, lesson_episodes=8)
"""Does it run at all?"""

_BETAS = (0.9, 0.95)
_WARM_STEPS = 30
_SMOOTHED = 3
"""Lessons over which that reward is averaged."""


def train(settings: Settings, *, clock: Callable[[], float] = time.perf_counter) -> Iterator[dict[str, Any]]:
    """One record for each step of each arm, as it is done: numbers by name, ready for JSON."""
    for arm in arms(settings.turns_max, settings.stride):
        yield from _Training(arm, settings, clock).records()


class _Training:
    """Of one arm."""

    def __init__(self, arm: Arm, settings: Settings, clock: Callable[[], float]) -> None:
        self._arm, self._settings, self._clock = arm, settings, clock
        self._model = toy_model(VOCAB_SIZE, settings.seed)
        self._namespace = namespace_of(self._model, block_tokens=BLOCK_TOKENS)
        self._draw = random.Random(settings.seed)
        streams = settings.prompts * settings.group
        self._engine = StreamEngine(
            self._model, 8 * streams * settings.turns, self._namespace, lanes_max=streams
        )

    def records(self) -> Iterator[dict[str, Any]]:
        optimizer = torch.optim.AdamW(
            self._model.parameters(), self._settings.lesson_rate, betas=_BETAS, weight_decay=0.0
        )
        lessons, teach_s = self._teach(optimizer)
        settings = self._settings
        voice = Model(self._engine)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate
        for number in range(settings.steps):
            version = lessons + number
            began = self._clock()
            if version:  # the engine begins with 0
                self._engine.set_weights(version)
            stage = Stage(self._engine, voice, self._arm, self._draw)
            played = play(stage, self._episodes(settings.prompts), settings.group)
            generated = self._clock()
            learned = self._learn(played)
            done = self._clock()
            forgot = self._forgetful(played)
            step(self._model, optimizer)
            yield {
                "arm": self._arm.name, "step": number, "weights_version": version, "lessons": lessons,
                **_told(played, learned, mismatch(learned.replayed, weights_version=version), forgot),
                "teach_s": teach_s, "generate_s": generated - began, "learn_s": done - generated,
            }  # fmt: skip

    def _episodes(self, count: int) -> list[Episode]:
        return draw_episodes(self._draw, count, self._settings.turns)

    def _teach(self, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """(steps, seconds)."""
        settings, began = self._settings, self._clock()
        stage = Stage(self._engine, Teacher(self._namespace), self._arm, self._draw)
        known: list[float] = []
        while len(known) < settings.lessons_max:
            for group in optimizer.param_groups:
                group["lr"] = settings.lesson_rate * min(1.0, (len(known) + 1) / _WARM_STEPS)
            played = play(stage, self._episodes(settings.lesson_episodes))
            rollouts = [rollout for each in played for rollout in each.rollouts]
            learned = accumulate(self._model, rollouts, [1.0] * len(rollouts))
            step(self._model, optimizer)
            known.append(_reward_known(played, learned))
            if sum(known[-_SMOOTHED:]) >= _SMOOTHED * settings.taught_at:
                break
        return len(known), self._clock() - began

    def _learn(self, played: Sequence[Played]) -> Learned:
        rewards = torch.tensor([each.reward for each in played]).view(-1, self._settings.group)
        by_stream = advantages(rewards).flatten().tolist()
        rollouts = [rollout for each in played for rollout in each.rollouts]
        weights = [good for each, good in zip(played, by_stream, strict=True) for _ in each.rollouts]
        return accumulate(self._model, rollouts, weights)

    def _forgetful(self, played: Sequence[Played]) -> Mismatch:
        """The negative control: a trainer that never heard of the events."""
        rollouts = [without_events(rollout) for each in played for rollout in each.rollouts]
        return mismatch(judged(self._model, rollouts), weights_version=0)


def _reward_known(played: Sequence[Played], learned: Learned) -> float:
    """Mean reward of the taught conversations, had the model said what it found most probable."""
    replayed, found = iter(learned.replayed), 0.0
    for each in played:
        own = [next(replayed) for _ in each.rollouts]
        likeliest = torch.cat([one.logits for one in own]).argmax(-1)
        told = torch.tensor([sample.token for one in own for sample in one.rollout.samples])
        right = (likeliest == told).view(each.episode.turn_count, -1).all(-1)
        found += reward(right.tolist())
    return found / len(played)


def _told(played: Sequence[Played], learned: Learned, found: Mismatch, forgot: Mismatch) -> dict[str, Any]:
    count = len(played)
    return {
        "conversations": count,
        "reward": sum(each.reward for each in played) / count,
        "recall": sum(each.right[-1] for each in played) / count,
        "entropy_nats": learned.entropy,
        "mismatch_nats": found.k3.mean,
        "mismatch_worst_nats": found.k3.worst,
        "mismatch_after_events_nats": found.after_events.mean,
        "forgetful_nats": forgot.k3.mean,
        "forgetful_worst_nats": forgot.k3.worst,
        "sample_count": found.k3.count,
        "cut_count": sum(
            event.kind == "evict" for each in played for rollout in each.rollouts for event in rollout.events
        ),
        "rows_fed": sum(each.rows_fed for each in played),
        "rows_again": sum(each.rows_again for each in played),
        "slots_most": max(each.slots_most for each in played),
    }
