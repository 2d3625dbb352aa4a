"""The simulated traffic of load policies, in small."""

from __future__ import annotations

import numpy as np
import pytest

from bench.policies import OPS_S, SHARDS, Never, Size, Traffic, run, table
from controller.policies.greedy import Greedy
from kvcomm.wire.messages import RingMap, RingNode

TINY = Size(hours=0.1, keys=300, shifted=5, seeds=2)


def test_traffic_goes_to_the_first_owners_and_shifts() -> None:
    shards = [RingNode(f"shard-{index}", "", "", "", "rack", 1) for index in range(SHARDS)]
    ring = RingMap(1, 3, 2, 2, 1, shards, [])
    traffic = Traffic(TINY, 1)
    before = traffic.ops_s(ring)
    assert before.sum() == pytest.approx(OPS_S) and len(before) == SHARDS
    traffic.shift()
    after = traffic.ops_s(ring)
    assert after.sum() == pytest.approx(OPS_S) and not np.allclose(before, after)


@pytest.mark.slow
def test_the_same_seed_is_the_same_run() -> None:
    assert run(Greedy(), TINY, 3) == run(Greedy(), TINY, 3)


@pytest.mark.slow
def test_who_never_moves_has_the_imbalance_of_the_circle() -> None:
    never, greedy = run(Never(), TINY, 1), run(Greedy(), TINY, 1)
    assert (never.plans, never.moved_bytes, never.ranges) == (0, 0.0, 0)
    assert never.imbalance_mean > 1.0
    assert greedy.plans > 0 and greedy.moved_bytes > 0
    text = table({"never": [never, never], "greedy": [greedy, greedy]}, TINY)
    assert "| never | 0.0 ± 0.0 | 0.0 ± 0.0 |" in text
