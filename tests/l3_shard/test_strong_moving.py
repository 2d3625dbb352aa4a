"""Strong records change owners when a transition comes to be served by them, and back when it is given up."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvcomm.wire.messages import RingMap
from tests.l3_shard.cluster import Faults, ring_map
from tests.l3_shard.moving_world import transition
from tests.l3_shard.strong_world import History, StrongClient, StrongWorld
from tests.l3_shard.test_strong import calm, done


def moving(before: str, after: str, stage: str, epoch: int) -> RingMap:
    return transition(before, after, stage, epoch, write=1)


def stable(names: str, epoch: int) -> RingMap:
    return ring_map(names, epoch=epoch, write=1)


def moved(world: StrongWorld, names: str) -> bool:
    """Whether all of these say that their strong records are where the newest map wants them."""
    return all(world.shards[name].move_status().strong_epoch >= world.map.epoch for name in names)


def with_three_more() -> StrongWorld:
    """Three owners with a record, and three shards that have just been started."""
    world = calm("abc")
    assert done(world, "a", "put", b"1").code == ""
    for name in "def":
        world.join(name, stable("abc", 1))
    return world


def test_new_shards_vote_before_they_own_anything():
    """They have entered when the record comes to be theirs: nobody waits for that."""
    world = with_three_more()
    world.until(lambda: all(world.shards[name].strong_counts().votes for name in "def"))


def test_while_records_are_copied_the_old_owners_decide_alone():
    world = with_three_more()
    world.adopt(moving("abc", "def", "copy", 2))
    world.run(world.now + 2)
    for name in "def":
        world.isolate(name)
    assert done(world, "a", "put", b"2").code == ""
    refusal = done(world, "d", "read")
    assert refusal.code == "refused" and "owners" in refusal.text
    assert moved(world, "abc"), "nothing had to be settled"


def test_once_they_are_served_the_new_owners_decide_and_soon_alone():
    world = with_three_more()
    world.adopt(moving("abc", "def", "copy", 2))
    world.run(world.now + 2)
    assert done(world, "a", "put", b"2").code == ""
    world.adopt(moving("abc", "def", "serve", 3))
    began_at = world.now
    assert done(world, "d", "put", b"3").code == ""
    world.until(partial(moved, world, "abcdef"))
    assert world.now - began_at < 1.0, "nothing stands still for so long"
    world.adopt(stable("def", 4))
    for name in "abc":
        world.isolate(name)
    assert done(world, "e", "read").value == b"3"
    assert moved(world, "def") and not world.shards["d"].move_status().clean_epoch, (
        "it is asked to drop first"
    )


@pytest.mark.parametrize("settled", [False, True])
def test_back_from_serving_the_old_owners_decide_again(settled: bool):
    world = with_three_more()
    world.run(world.now + 2)
    world.adopt(moving("abc", "def", "serve", 2))
    assert done(world, "d", "put", b"2").code == ""
    if settled:
        world.until(partial(moved, world, "abcdef"))
    world.adopt(moving("abc", "def", "copy", 3))
    began_at = world.now
    while done(world, "a", "put", b"3").code:  # maps are settled in the middle of its rounds
        assert world.now < began_at + 2.0
    world.until(partial(moved, world, "abcdef"))
    world.adopt(stable("abc", 4))
    for name in "def":
        world.isolate(name)
    assert done(world, "b", "read").value == b"3"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_records_that_move_to_and_fro_under_faults_stay_linearizable(seed: int):
    draw = random.Random(seed)
    faults = Faults(loss=draw.choice((0.0, 0.05)), delay_s=0.05, disk_s=0.02)
    world, history = StrongWorld(seed, "abcdef", faults, twice=0.1, write=1), History()
    world.settle()
    keys = [b"key/%d" % index for index in range(3)]
    for client in range(3):
        StrongClient(world, history, seed * 7 + client).act(keys, 0.1, 80)
    maps = [
        moving("abc", "def", "copy", 3), moving("abc", "def", "serve", 4), moving("abc", "def", "copy", 5),
        moving("abc", "def", "serve", 6), stable("def", 7), moving("def", "abcdef", "copy", 8),
        moving("def", "abcdef", "serve", 9), stable("abcdef", 10), moving("abcdef", "abc", "serve", 11),
        stable("abc", 12),
    ]  # fmt: skip
    world.adopt(stable("abc", 2))
    for newest in maps:
        world.run(world.now + draw.uniform(0.0, 1.0))
        world.map = newest
        for name in world.names:
            world.after(draw.uniform(0.0, 0.3), partial(world.adopt, newest, name))
        if draw.random() < 0.3:
            world.after(draw.uniform(0.0, 0.3), partial(world.crash, draw.choice(world.names)))
    world.run(world.now + 20)
    history.check()
    world.faults = Faults()
    world.until(partial(moved, world, "abcdef"))
    assert history.outcomes.get("done", 0) > 40
