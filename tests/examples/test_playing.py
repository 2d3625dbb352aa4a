"""What the three arms write, and that a trainer can replay it."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="the examples compute with torch")
pytest.importorskip("transformers", reason="the examples train a transformers model")

from examples.rollouts.arms import arms
from examples.rollouts.grpo import judged, without_events
from examples.rollouts.playing import Played, Stage, play
from examples.rollouts.task import VOCAB_SIZE, draw_episodes
from examples.rollouts.toys import BLOCK_TOKENS, toy_model
from examples.rollouts.voices import Model, Teacher
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.events import Event
from kvcomm.streams.mismatch import EXACT, mismatch
from kvcomm.streams.rollout import Rollout

pytestmark = [pytest.mark.model, pytest.mark.slow]

VERSION = 7
FULL, CUT, AGAIN = range(3)


@pytest.fixture(scope="module")
def engine() -> StreamEngine:
    """With weights of version 7."""
    engine = new_engine()
    engine.set_weights(VERSION)
    return engine


def new_engine() -> StreamEngine:
    return StreamEngine(toy_model(VOCAB_SIZE, 0), 256, block_tokens=BLOCK_TOKENS, lanes_max=8)


@pytest.fixture(scope="module")
def played(engine: StreamEngine) -> list[list[Played]]:
    """By arm: two episodes of five turns, three times each."""
    episodes = draw_episodes(random.Random(0), 2, 5)
    return [
        play(Stage(engine, Model(engine), arm, random.Random(1)), episodes, group=3) for arm in arms(3, 2)
    ]


def test_siblings_answer_the_same_prompts_differently(played):
    for arm in played:
        assert len(arm) == 6
        assert arm[0].episode == arm[2].episode != arm[3].episode
        first, second = (each.rollouts[0] for each in arm[:2])
        assert [sample.token for sample in first.samples] != [sample.token for sample in second.samples]


def test_the_first_prompt_is_computed_once_for_all_siblings(played):
    for arm in played:
        for at, each in enumerate(arm):
            first = each.rollouts[0]
            fork = [event.at_row for event in first.events if event.kind == "fork"]
            rows = sum(rollout.row_count for rollout in each.rollouts)
            if at % 3:
                assert fork == [first.samples[0].query_row + 1], "right behind the prompt"
                assert each.rows_fed == rows - fork[0]
            else:
                assert not fork
                assert each.rows_fed == rows


def test_every_arm_keeps_what_it_says_it_keeps(played, engine):
    for each in played[FULL]:
        assert kinds(each) == [["weights"]]
        assert each.slots_most == each.rollouts[0].row_count
    for each in played[CUT]:
        assert kinds(each) == [["weights", "evict"]]
        assert each.slots_most < each.rollouts[0].row_count
    for each, cut in zip(played[AGAIN], played[CUT], strict=True):
        assert kinds(each) == [["weights"], ["weights"]]
        assert each.slots_most == cut.slots_most
    assert [each.rows_again > 0 for arm in played for each in arm] == [False] * 12 + [True] * 6
    assert engine.pool.free_count == engine.pool.block_count, "nobody holds memory when all is over"


def kinds(played: Played) -> list[list[str]]:
    """Of events, by rollout, but for forks."""
    return [[event.kind for event in each.events if event.kind != "fork"] for each in played.rollouts]


def test_an_answer_is_trained_on_once_however_often_it_is_computed(played):
    for each in played[AGAIN]:
        _, moved = each.rollouts
        assert moved.samples
        question = each.episode.questions[3]  # three turns are over, and two of them go
        assert moved.tokens[each.rows_again :][: len(question)] == question
        assert all(sample.query_row >= each.rows_again for sample in moved.samples)


def test_the_replay_is_the_generation_and_without_the_events_it_is_not(played, engine):
    for arm in (FULL, CUT, AGAIN):
        rollouts = [rollout for each in played[arm] for rollout in each.rollouts]
        found = mismatch(judged(engine.model, rollouts), weights_version=VERSION)
        assert found.beyond(EXACT) == []
        assert found.stale_count == 0
    rollouts = [rollout for each in played[CUT] for rollout in each.rollouts]
    right = mismatch(judged(engine.model, rollouts), weights_version=VERSION)
    forgot = mismatch(judged(engine.model, [without_events(each) for each in rollouts]))
    assert forgot.k3.count == right.k3.count
    assert forgot.k3.mean > 1e6 * right.k3.mean


def test_a_teacher_writes_the_record_that_the_engine_writes():
    engine = new_engine()
    episodes = draw_episodes(random.Random(4), 3, 5)
    for arm in arms(3, 2):
        for each in play(Stage(engine, Teacher(engine.namespace), arm, random.Random(0)), episodes):
            assert all(each.right)
            for rollout in each.rollouts:
                assert written(engine, rollout) == rollout.events
            last = each.rollouts[-1]
            assert last.text()[-len(each.episode.answers[-1]) :] == each.episode.answers[-1]


def written(engine: StreamEngine, rollout: Rollout) -> tuple[Event, ...]:
    """The events when an engine computes the same tokens and cuts the same slots."""
    session = engine.session()
    for event in rollout.events:
        engine.feed([(session, rollout.tokens[session.next_row : event.at_row])])
        session.evict(event.ranges, reason=event.reason)
    session.close()
    return tuple(session.events)
