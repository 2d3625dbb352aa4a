"""The toy: what is asked, and what is right."""

from __future__ import annotations

import random

import pytest

from examples.rollouts.task import (
    ANSWER_TOKENS_MAX,
    CHANCE,
    ECHOES,
    END,
    MARKUP,
    VALUES,
    VOCAB_SIZE,
    draw_episodes,
    reward,
)


def test_the_value_is_told_first_asked_last_and_said_by_nobody_between():
    for episode in draw_episodes(random.Random(1), 30, 5):
        value = episode.questions[0][1]
        assert value in VALUES
        assert episode.answers[-1] == (value, END)
        between = [*episode.questions[1:], *episode.answers[:-1]]
        assert not any(value in message for message in between)
        assert all(message[-1] == END for message in (*between, episode.questions[0]))
        assert all(len(answer) <= ANSWER_TOKENS_MAX for answer in episode.answers)


def test_no_value_stands_for_anything_else():
    marks = {*MARKUP.ends, MARKUP.filler, *range(VALUES.start)}
    assert not {*VALUES} & ({*ECHOES} | marks)
    assert max(*VALUES, *ECHOES) < VOCAB_SIZE


def test_a_batch_has_all_values_equally_often():
    values = [episode.questions[0][1] for episode in draw_episodes(random.Random(2), 2 * len(VALUES), 4)]
    assert all(values.count(value) == 2 for value in VALUES)
    assert len({tuple(values[:8]), tuple(values[8:])}) == 2, "in another order each time"


def test_the_reward_is_one_for_all_right_and_half_of_it_is_the_recall():
    assert reward([True] * 4) == 1
    assert reward([False] * 3 + [True]) == 0.5
    assert reward([True, False, True, False]) == pytest.approx(1 / 3)
    assert 0.1 < CHANCE < 0.15


def test_what_was_said_is_right_only_in_full():
    (episode,) = draw_episodes(random.Random(3), 1, 3)
    right = [[*answer] for answer in episode.answers]
    assert episode.right(right) == [True] * 3
    assert episode.right([right[0], right[1][:1], [*right[2], END]]) == [True, False, False]


def test_an_episode_without_anything_between_is_refused():
    with pytest.raises(ValueError, match="at least 3"):
        draw_episodes(random.Random(0), 1, 2)
