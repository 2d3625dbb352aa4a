"""A shard never falls back behind a map that it has told anybody of."""

from __future__ import annotations

import pytest

from kvcomm.wire.messages import Message, RingOffer, RingTaken, TreeDigests, TreeGet
from l3_shard import keptmap
from l3_shard.keptmap import KeptMap, kept_map
from l3_shard.ring import NO_RING, encode_map
from tests.l3_shard.cluster import NODE_TENANT, ring_map, small_rings
from tests.l3_shard.moving_world import MovingWorld

quick = pytest.fixture(autouse=True)(small_rings)


def test_a_map_that_rotted_or_contradicts_itself_is_none():
    newest = ring_map("abc", epoch=4)
    assert kept_map({b"map": encode_map(newest)}) == newest
    assert kept_map({}) == kept_map({b"map": b"rot"}) == NO_RING
    assert kept_map({b"map": encode_map(ring_map("aa", epoch=4))}) == NO_RING


def test_after_a_crash_an_older_map_is_not_taken():
    world = MovingWorld(1, "abc", "abc")
    world.run(until=1.0)
    newer = world.stable("abc")
    world.offer(newer)
    world.run(until=2.0)
    assert world.shards["a"].taken.to_map() == newer
    world.crash("a")  # whoever starts it has the first map
    assert world.shards["a"].ring.to_map() == newer
    world.offer(ring_map("abc", epoch=1), ["a"])
    assert world.shards["a"].ring.epoch == newer.epoch


def test_a_map_is_told_of_when_it_is_on_the_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keptmap, "AGAIN_S", 0.1)
    world = MovingWorld(1, "abc", "abc")
    world.run(until=1.0)
    newer = world.stable("abc")
    world.faults.full = 1.0  # no room
    answers: list[Message] = []
    world.call("a", RingOffer(newer), answers.append, NODE_TENANT)
    world.call("a", TreeGet(newer.epoch, "b", 0, [0]), answers.append, NODE_TENANT)
    world.run(until=1.3)
    shard = world.shards["a"]
    assert shard.ring.epoch == newer.epoch and shard.taken.epoch == 1 and not answers
    world.faults.full = 0.0
    world.run(until=1.8)
    assert shard.taken.epoch == newer.epoch
    assert {type(answer) for answer in answers} == {RingTaken, TreeDigests} and RingTaken(2) in answers


def test_before_it_is_comparisons_do_not_count_on_it(monkeypatch: pytest.MonkeyPatch):
    """Proof that the test above can fail."""
    monkeypatch.setattr(KeptMap, "once_taken", lambda self, then: then())
    with pytest.raises(AssertionError):
        test_a_map_is_told_of_when_it_is_on_the_disk(monkeypatch)
