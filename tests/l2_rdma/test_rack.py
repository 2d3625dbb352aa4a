"""Homes against a naive oracle, and what a join or a leave moves."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from l2_rdma.rack import BACKOFF_FIRST_S, BACKOFF_MAX_S, Health, Rack
from tests.l2_rdma.regions import key_of

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=9, unique=True)


def rack(*nodes: str, **weights: int) -> Rack:
    return Rack([(node, 1) for node in nodes] + sorted(weights.items()))


def naive_home(nodes: list[str], key: bytes) -> str:
    return max(sorted(nodes), key=lambda node: xxh3_64_intdigest(key, xxh3_64_intdigest(node.encode())))


@given(NAMES, st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_homes_are_the_highest_draws(nodes: list[str], keys: list[bytes]) -> None:
    homes = rack(*nodes).homes(keys)

    assert homes == [naive_home(nodes, key) for key in keys]
    assert homes == [rack(*reversed(nodes)).home(key) for key in keys], "the order of the pools is nothing"


@given(NAMES, st.text(min_size=9, max_size=12))
def test_a_join_moves_only_what_the_new_pool_wins(nodes: list[str], newcomer: str) -> None:
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(200)]
    before, after = rack(*nodes).homes(keys), rack(*nodes, newcomer).homes(keys)

    moved = [now for then, now in zip(before, after, strict=True) if then != now]
    assert set(moved) <= {newcomer}
    assert after.count(newcomer) == len(moved)


def test_a_join_moves_its_share_and_a_leave_brings_it_back() -> None:
    keys = [key_of(number) for number in range(20_000)]
    five = rack(*(f"pool-{number}" for number in range(5)))
    six = rack(*(f"pool-{number}" for number in range(6)))

    moved = sum(one != two for one, two in zip(five.homes(keys), six.homes(keys), strict=True))
    shares = Counter(six.homes(keys))

    assert moved == shares["pool-5"]
    assert moved / len(keys) == pytest.approx(1 / 6, rel=0.1)
    assert all(count / len(keys) == pytest.approx(1 / 6, rel=0.1) for count in shares.values())


def test_shares_go_by_weight_and_another_weight_moves_nothing_between_the_rest() -> None:
    keys = [key_of(number) for number in range(20_000)]
    before, after = rack(a=1, b=2, c=3), rack(a=1, b=2, c=6)

    shares = Counter(before.homes(keys))
    assert [shares[node] / len(keys) for node in "abc"] == pytest.approx([1 / 6, 2 / 6, 3 / 6], rel=0.1)
    moves = zip(before.homes(keys), after.homes(keys), strict=True)
    assert {now for then, now in moves if then != now} == {"c"}


def test_equal_weights_are_as_good_as_none() -> None:
    keys = [key_of(number) for number in range(500)]

    assert rack(a=3, b=3, c=3).homes(keys) == rack("a", "b", "c").homes(keys)


def test_every_process_finds_the_same_home() -> None:
    here = rack("pool-0", "pool-1", "pool-2").homes([key_of(number) for number in range(64)])
    script = (
        "from l2_rdma.rack import Rack; from tests.l2_rdma.regions import key_of;"
        "print(','.join(Rack([('pool-2', 1), ('pool-1', 1), ('pool-0', 1)])"
        ".homes([key_of(n) for n in range(64)])))"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert there.stdout.strip().split(",") == here


def test_a_rack_of_one_and_of_none() -> None:
    assert rack("only").homes([key_of(1), key_of(2)]) == ["only", "only"]
    assert rack().homes([key_of(1)]) == [None]


@pytest.mark.parametrize("weights", [[("a", 1), ("a", 2)], [("a", 0)]])
def test_a_rack_that_contradicts_itself_is_refused(weights: list[tuple[str, int]]) -> None:
    with pytest.raises(ValueError, match="name of their own"):
        Rack(weights)


# -- health --------------------------------------------------------------------------------------------------


def test_a_pool_that_ended_stays_a_home_until_it_cannot_be_reached() -> None:
    health = Health().ended()
    assert (health.state, health.is_home, health.may_try(5.0)) == ("suspect", True, True)

    health = health.failed(5.0)
    assert (health.state, health.is_home) == ("away", False)
    assert not health.may_try(5.0 + BACKOFF_FIRST_S / 2)
    assert health.may_try(5.0 + BACKOFF_FIRST_S)


def test_failures_in_a_row_are_further_and_further_apart_and_a_success_forgets_them() -> None:
    health, waits = Health(), []
    for _ in range(8):
        health = health.failed(100.0)
        waits.append(health.retry_at - 100.0)

    assert waits[:3] == pytest.approx([BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S])
    assert waits[-1] == pytest.approx(BACKOFF_MAX_S)
    assert health.attached() == Health()
