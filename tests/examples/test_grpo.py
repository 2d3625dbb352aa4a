"""Advantages, and the gradient through the replay."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="the examples compute with torch")
pytest.importorskip("transformers", reason="the examples train a transformers model")

import torch
from transformers import PreTrainedModel

from examples.rollouts import grpo
from examples.rollouts.arms import arms
from examples.rollouts.grpo import accumulate, advantages, judged
from examples.rollouts.playing import Stage, play
from examples.rollouts.task import VOCAB_SIZE, draw_episodes
from examples.rollouts.toys import BLOCK_TOKENS, step, toy_model
from examples.rollouts.voices import Model
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.rollout import Rollout


def test_a_rollout_is_as_good_as_it_is_above_its_siblings():
    found = advantages(torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 0.0]]))
    assert torch.allclose(found.sum(1), torch.zeros(3), atol=1e-6)
    assert (found[0].sign() == torch.tensor([-1, 1, 1, -1])).all()
    assert (found[1] == 0).all(), "siblings that are all alike teach nothing"
    assert found[[0, 2]].std(1).tolist() == pytest.approx([1, 1], abs=1e-3), "each group by its own spread"
    assert found[2, 3] < -1.4 < 0.4 < found[2, 0], "the rare one weighs more"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return toy_model(VOCAB_SIZE, 0)


@pytest.fixture(scope="module")
def rollouts(model: PreTrainedModel) -> list[Rollout]:
    """Four of one prompt, each with a cut."""
    engine = StreamEngine(model, 256, block_tokens=BLOCK_TOKENS)
    episodes = draw_episodes(random.Random(0), 1, 4)
    played = play(Stage(engine, Model(engine), arms(3, 2)[1], random.Random(1)), episodes, group=4)
    return [rollout for each in played for rollout in each.rollouts]


def gradient(model: PreTrainedModel, rollouts: list[Rollout], weights: list[float]) -> torch.Tensor:
    model.zero_grad()
    accumulate(model, rollouts, weights)
    found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.model
@pytest.mark.slow
def test_how_rollouts_are_packed_does_not_change_the_gradient(model, rollouts, monkeypatch):
    weights = [1.0, -2.0, 0.5, 0.0]
    together = gradient(model, rollouts, weights)
    monkeypatch.setattr(grpo, "PACK_ROWS_MAX", max(rollout.row_count for rollout in rollouts))
    apart = gradient(model, rollouts, weights)
    assert float((together - apart).norm() / together.norm()) < 1e-4
    assert float(together.norm()) > 1e-3


@pytest.mark.model
@pytest.mark.slow
def test_a_step_makes_the_better_more_probable_and_the_worse_less(rollouts):
    model = toy_model(VOCAB_SIZE, 0)
    before = [float(each.log_probs.sum()) for each in judged(model, rollouts)]
    weights = [1.0, -1.0, 0.0, 0.0]
    learned = accumulate(model, rollouts, weights)
    assert [float(each.log_probs.sum()) for each in learned.replayed] == pytest.approx(before, abs=1e-3)
    step(model, torch.optim.SGD(model.parameters(), 0.05))
    after = [float(each.log_probs.sum()) for each in judged(model, rollouts)]
    assert after[0] > before[0] + 0.01
    assert after[1] < before[1] - 0.01
