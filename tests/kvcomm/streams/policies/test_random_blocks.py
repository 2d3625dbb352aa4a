"""Chance that comes out the same twice."""

from __future__ import annotations

from collections import Counter

from kvcomm.streams.policies.random_blocks import RandomBlocks
from tests.kvcomm.streams.policies.test_budget import look


def test_a_seed_makes_one_choice_and_seeds_make_different_ones():
    choices = {tuple(RandomBlocks(144, 48, seed=seed).select(look(320))) for seed in range(20)}
    assert len(choices) > 15
    assert RandomBlocks(144, 48, seed=3).select(look(320)) == RandomBlocks(144, 48, seed=3).select(look(320))


def test_every_block_that_may_go_goes_about_as_often():
    policy = RandomBlocks(144, 16, recent=16, seed=1)
    count = Counter(policy.select(look(slot_count))[0].start for slot_count in range(192, 208))
    for row in range(1000):
        seen = look(208)
        drawn = RandomBlocks(144, 16, recent=16, seed=row).select(seen)
        count[drawn[0].start] += 1
    assert set(count) == set(range(16, 192, 16))
    assert max(count.values()) < 1.6 * min(count.values())
