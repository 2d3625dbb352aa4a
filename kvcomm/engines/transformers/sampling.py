"""``draw``: tokens from logits, and how probable they were in the distribution that they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcomm.streams.replay import log_probabilities
from kvcomm.streams.rollout import Sampling


class Drawn(NamedTuple):
    token: int
    logprob: float
    """Natural logarithm, after temperature, top-k and top-p."""


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[Drawn]:
    """One token a row, by inversion: row ``i`` is decided by its logits, its sampling and its number alone,
    whatever else is in the batch.

    Args:
        logits: ``[n, vocab_size]``; computed in float64.
        uniforms: in [0, 1), one a row; not looked at where the temperature is 0.

    Log probabilities are NaN where the logits hold one.
    """
    found: dict[int, Drawn] = {}
    for sampling in dict.fromkeys(samplings):
        rows = [row for row, each in enumerate(samplings) if each == sampling]
        mine = logits if len(rows) == len(samplings) else logits[rows]
        numbers = [uniforms[row] for row in rows]
        found |= zip(rows, _drawn(mine.double(), sampling, numbers), strict=True)
    return [found[row] for row in range(len(samplings))]


def _drawn(logits: torch.Tensor, sampling: Sampling, uniforms: Sequence[float]) -> list[Drawn]:
    log_probs = log_probabilities(logits, sampling)
    if sampling.temperature:
        below = log_probs.exp().cumsum(-1)
        # Just below the sum, so that the token found has a probability.
        numbers = torch.tensor(uniforms, dtype=below.dtype, device=below.device)[:, None] * (1 - 1e-12)
        tokens = torch.searchsorted(below, numbers * below[:, -1:], right=True)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # where no number is larger, as behind NaN
    else:
        tokens = logits.argmax(-1, keepdim=True)
    chosen = torch.cat([tokens.to(log_probs.dtype), log_probs.gather(-1, tokens)], dim=-1)
    return [Drawn(int(token), logprob) for token, logprob in chosen.tolist()]  # one wait for the device
