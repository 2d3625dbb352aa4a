"""Drawing by inversion: each token as often as it is probable, and never one outside the processed set."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kvcomm.engines.transformers.sampling import draw
from kvcomm.streams.replay import log_probabilities
from kvcomm.streams.rollout import Sampling

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(top_k=3),
    Sampling(temperature=1.5, top_p=0.6),
    Sampling(temperature=2.0, top_k=9, top_p=0.9),
]
ROWS = 2000


def logits(seed: int = 0, vocab: int = 40) -> torch.Tensor:
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_evenly_spread_numbers_draw_every_token_as_often_as_it_is_probable(sampling):
    row = logits()
    spread = [(at + 0.5) / ROWS for at in range(ROWS)]
    found = draw(row.expand(ROWS, -1), [sampling] * ROWS, spread)
    counts = Counter(each.token for each in found)
    expected = log_probabilities(row.double(), sampling)
    for token, probability in enumerate(expected.exp().tolist()):
        assert counts[token] == pytest.approx(ROWS * probability, abs=1.01)
    assert all(each.logprob == pytest.approx(float(expected[each.token]), abs=1e-12) for each in found)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("number", [0.0, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_interval_draw_tokens_that_have_a_probability(sampling, number):
    for seed in range(20):
        ((token, logprob),) = draw(logits(seed)[None], [sampling], [number])
        assert math.isfinite(logprob) and 0 <= token < 40


def test_edge_20_no_temperature_is_the_most_probable_token_with_its_log_probability_at_one():
    row = logits(3)
    ((token, logprob),) = draw(row[None], [Sampling(temperature=0.0)], [0.7])
    assert token == int(row.argmax())
    assert logprob == pytest.approx(float(row.double().log_softmax(-1)[token]), abs=1e-12)


def test_a_row_is_drawn_alike_in_any_batch():
    rows = torch.stack([logits(seed) for seed in range(10)])
    samplings = [SAMPLINGS[seed % len(SAMPLINGS)] for seed in range(10)]
    numbers = [seed / 10 for seed in range(10)]
    together = draw(rows, samplings, numbers)
    for at in range(10):
        assert draw(rows[at : at + 1], samplings[at : at + 1], numbers[at : at + 1]) == [together[at]]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.5)])
def test_where_the_model_computed_no_number_the_log_probability_says_so(sampling):
    ((token, logprob),) = draw(torch.full((1, 8), torch.nan), [sampling], [0.3])
    assert math.isnan(logprob) and 0 <= token < 8
