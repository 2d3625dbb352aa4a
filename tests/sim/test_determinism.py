"""The same seed gives the same history, byte for byte, in every process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from kvcomm.chaos.draw import Draw
from kvcomm.chaos.plan import CONTROLLER_FAULTS, FAULTS, ORDERS
from kvcomm.chaos.simulation import simulate
from kvcomm.chaos.swarm import draw_plan

SCRIPT = """
import hashlib, sys
from kvcomm.chaos.simulation import simulate
from kvcomm.chaos.swarm import draw_plan
for seed, mode in ((3, "safety"), (11, "safety"), (4, "liveness")):
    sys.stdout.write(hashlib.sha256(simulate(draw_plan(seed, mode)).history.encoded()).hexdigest() + "\\n")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_histories_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for hash_seed in ("0", "1", "random")
    }
    assert len(digests) == 1
    assert len(set(digests.pop().split())) == 3, "different seeds, different histories"


@pytest.mark.slow
def test_one_process_repeats_itself() -> None:
    once, again = (hashlib.sha256(simulate(draw_plan(5)).history.encoded()).hexdigest() for _ in range(2))
    assert once == again


def test_a_stream_of_its_own_is_not_shifted_by_another() -> None:
    one, two = Draw(7), Draw(7)
    first, second = one.fork("network"), two.fork("network")
    second_of_one = one.fork("disk")
    for _ in range(10):
        first.bits()
    assert [second_of_one.bits() for _ in range(3)] == [
        draw.bits() for draw in [two.fork("disk")] for _ in range(3)
    ]
    assert second.bits() != second.bits()


def test_draws_stay_in_their_ranges() -> None:
    draw = Draw(1)
    assert all(0 <= draw.unit() < 1 for _ in range(1_000))
    assert {draw.between(2, 4) for _ in range(100)} == {2, 3, 4}
    assert sorted(draw.some("abc", 5)) == ["a", "b", "c"]
    assert {draw.weighted((("a", 1), ("b", 0))) for _ in range(50)} == {"a"}


def test_the_swarm_draws_every_fault_and_every_size() -> None:
    plans = [draw_plan(seed) for seed in range(300)]
    assert {fault for plan in plans for fault in plan.faults} == {*FAULTS, *CONTROLLER_FAULTS}
    assert {order for plan in plans for order in plan.orders} == set(ORDERS)
    assert {plan.controllers for plan in plans} == {0, 1, 3}
    assert {plan.shards for plan in plans} == {1, 2, 3, 4, 5, 6, 7}
    assert {plan.fsync for plan in plans} == {"always", "interval", "never"}
    assert all(plan.losses < plan.write_need for plan in plans), "or acknowledged writes may be lost"
