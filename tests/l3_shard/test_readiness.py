"""A shard is ready when no write quorum of old owners can hide from it, by brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3_shard.readiness import Readiness
from l3_shard.ring import Ring
from tests.l3_shard.cluster import ring_map, small_rings
from tests.l3_shard.moving_world import transition

KEYS = [b"%d" % number for number in range(150)]


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from small_rings(monkeypatch)


def hides(ring: Ring, before: Ring, node: str, told: set[str], *, gained: bool) -> bool:
    """Whether some record that ``node`` keeps can have been acknowledged by old owners that all have not
    told; its own copies do not count."""
    for key in KEYS:
        group = before.replicas(key)
        if node not in ring.keepers(key) or (gained and node in group):
            continue
        others = [each for each in group if each != node]
        quorum = min(ring.to_map().write_quorum, len(group))
        need = quorum if node not in group else max(1, quorum - 1)
        if any(not told & {*some} for some in combinations(others, need)):
            return True
    return False


names = st.sets(st.sampled_from("abcdef"), min_size=1).map(lambda some: "".join(sorted(some)))


@given(names, names, st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_ready_is_whoever_has_heard_from_enough(
    before: str, after: str, node: str, told: set[str], write_quorum: int
) -> None:
    ring = Ring.from_map(transition(before, after, "copy", 2, write=write_quorum))
    old = Ring.from_map(ring_map(before, write=write_quorum))
    readiness = Readiness(node, ring)
    for each in sorted(told - {node}):
        readiness.compared(each, vouched=True)
    if readiness.ready:
        assert not hides(ring, old, node, told - {node}, gained=True)
    elif told - {node}:
        assert any(
            len(group & told) < len(group) - min(write_quorum, len(group)) + 1
            for group in ring.before(node)
            if node not in group
        )
    if readiness.caught_up:
        assert not hides(ring, old, node, told - {node}, gained=False)


def test_who_cannot_vouch_makes_nobody_ready_but_lets_a_new_disk_catch_up() -> None:
    readiness = Readiness("d", Ring(transition("abc", "abd", "copy", 2)))
    assert [readiness.wants(node) for node in "abcd"] == [True, True, True, False]
    readiness.compared("a", vouched=False)
    readiness.compared("b", vouched=True)
    assert (readiness.ready, readiness.caught_up) == (False, True)
    assert [readiness.wants(node) for node in "abc"] == [True, False, True]
    readiness.compared("c", vouched=True)
    assert (readiness.ready, readiness.wants("a")) == (True, False)


def test_who_gains_nothing_is_ready_at_once() -> None:
    assert Readiness("a", Ring(transition("abc", "abd", "copy", 2))).ready
    assert Readiness("a", Ring(ring_map("abc"))).ready
    assert Readiness("x", Ring(ring_map("abc"))).ready


@pytest.mark.parametrize(("members", "replicas"), [("a", 3), ("abc", 1)])
def test_a_new_disk_of_which_nobody_else_keeps_anything_has_caught_up(members: str, replicas: int) -> None:
    ring = Ring(ring_map(members, replicas=replicas, write=1, read=1))
    assert not ring.neighbours("a")
    assert Readiness("a", ring).caught_up and not Readiness("a", Ring(ring_map("ab"))).caught_up
