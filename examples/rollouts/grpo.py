"""GRPO in small: advantages within a group of siblings, and a policy gradient through the replay.

After "DeepSeekMath" (Shao et al., 2024): no value network; a rollout is as good as its reward is above the
mean of those that answered the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from kvcomm.engines.transformers.replaying import Replayed, replay
from kvcomm.streams.events import ROOT_DIGEST
from kvcomm.streams.replay import bins, policy_loss
from kvcomm.streams.rollout import Rollout

PACK_ROWS_MAX = 320
"""In one forward pass: the dense mask of a pack costs rows squared, so several small ones cost less."""
EVEN = 1e-4
"""Added to a spread: a group whose rewards are all alike teaches nothing, instead of dividing by nothing."""


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards ``[prompts, group]``, normalised in each group."""
    away = rewards - rewards.mean(1, keepdim=True)
    return away / (rewards.std(1, keepdim=True) + EVEN)


@dataclass(frozen=True, slots=True)
class Learned:
    """What was seen of the rollouts on the way."""

    replayed: list[Replayed]
    """Without gradients, in order."""
    entropy: float
    """Of the distributions that tokens were drawn from, mean, in nats."""


def accumulate(model: PreTrainedModel, rollouts: Sequence[Rollout], weights: Sequence[float]) -> Learned:
    """Add the gradient of ``-mean of weight * log probability``, over all samples, to the model's.

    Args:
        weights: by rollout; its advantage, or 1 to imitate it.
    """
    found: dict[int, Replayed] = {}
    entropies = []
    count = sum(len(rollout.samples) for rollout in rollouts)
    for together in bins([rollout.row_count for rollout in rollouts], PACK_ROWS_MAX):
        replayed = replay(model, [rollouts[place] for place in together])
        losses = [
            policy_loss(each.log_probs, each.rollout, weights[place]) * len(each.rollout.samples)
            for place, each in zip(together, replayed, strict=True)
        ]
        torch.autograd.backward(torch.stack(losses).sum() / count)
        for place, each in zip(together, replayed, strict=True):
            found[place] = replace(each, logits=each.logits.detach(), log_probs=each.log_probs.detach())
            entropies.append(_entropy(found[place].logits))
    return Learned([found[place] for place in range(len(rollouts))], float(torch.cat(entropies).mean()))


def without_events(rollout: Rollout) -> Rollout:
    """As a stage would hand it on that lost the events and forged the header: the negative control."""
    return replace(rollout, events=(), event_count=0, view_digest=ROOT_DIGEST)


def judged(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> list[Replayed]:
    """Replayed without gradients."""
    found: dict[int, Replayed] = {}
    with torch.no_grad():
        for together in bins([rollout.row_count for rollout in rollouts], PACK_ROWS_MAX):
            found |= zip(together, replay(model, [rollouts[place] for place in together]), strict=True)
    return [found[place] for place in range(len(rollouts))]


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """``[samples, vocab_size]`` to nats ``[samples]``."""
    log_probs = torch.log_softmax(logits.float(), -1)
    return -(log_probs.exp() * log_probs).sum(-1)
