"""What a shard does not keep goes, and the note that says so never outlives what it says."""

from __future__ import annotations

import pytest

from l3_shard.purge import CLEAN, UNCLEAN, Purge
from l3_shard.repair import FLOOR
from tests.l3_shard.cluster import TENANT, Faults, small_rings
from tests.l3_shard.moving_world import MovingWorld

quick = pytest.fixture(autouse=True)(small_rings)


def clean(world: MovingWorld, node: str) -> bool:
    return world.shards[node].move_status().clean_epoch == world.shards[node].ring.epoch


def given_records(count: int = 40) -> MovingWorld:
    """``d`` has been given the records of a move that is not over."""
    world = MovingWorld(1, "abcd", "abc", Faults(delay_s=0.01, disk_s=0.005))
    world.run(until=1.0)
    for number in range(count):
        world.put("a", b"%d" % number, b"v", {})
    world.hand_out(world.moving("abc", "abd", "copy"))
    world.until(lambda: world.ready("abcd"))
    assert len(world.disks["d"].records) == count and not clean(world, "d")
    return world


def test_an_empty_store_is_clean_at_once_and_says_so_after_a_restart():
    world = MovingWorld(1, "abcd", "abc")
    world.run(until=1.0)
    assert all(clean(world, node) for node in "abcd")
    assert CLEAN in world.disks["d"].notes and UNCLEAN not in world.disks["d"].notes
    world.crash("d")
    world.run(until=world.now + 0.01)
    assert clean(world, "d"), "nothing was looked through"


@pytest.mark.slow
def test_what_came_with_a_move_that_is_given_up_goes():
    world = given_records()
    world.hand_out(world.stable("abc"))
    world.until(lambda: world.clean("abcd"))
    assert not world.disks["d"].records
    counts = world.shards["d"].repair_counts()
    assert counts is not None and counts.purged == 40


def restarted_under_the_old_map() -> MovingWorld:
    """It was clean by this placement once."""
    world = given_records()
    world.map = world.stable("abc")
    world.crash("d")
    world.run(until=world.now + 0.006)
    return world


@pytest.mark.slow
def test_the_note_of_before_the_move_does_not_count():
    world = restarted_under_the_old_map()
    assert not clean(world, "d") and world.disks["d"].records
    world.until(lambda: world.clean("d"))
    assert not world.disks["d"].records


@pytest.mark.slow
def test_without_the_mark_it_would(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Purge, "marks", lambda self: ())
    world = restarted_under_the_old_map()
    assert clean(world, "d") and world.disks["d"].records


@pytest.mark.slow
@pytest.mark.parametrize("when", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_crash_while_it_drops_only_begins_anew(when: float):
    world = given_records()
    world.hand_out(world.stable("abc"), spread_s=0.0)
    world.run(until=world.now + when)
    world.crash("d")
    world.until(lambda: world.clean("d"))
    assert not world.disks["d"].records


@pytest.mark.slow
def test_a_full_disk_puts_it_off():
    world = given_records()
    world.faults.full = 1.0
    world.hand_out(world.stable("abc"), spread_s=0.0)
    world.run(until=world.now + 2.0)
    assert not clean(world, "d") and world.disks["d"].records
    world.faults.full = 0.0
    world.until(lambda: world.clean("d"))
    assert not world.disks["d"].records


@pytest.mark.slow
def test_the_counters_of_what_goes_are_kept():
    world = MovingWorld(1, "abcdef", "abc")
    world.run(until=1.0)
    versions = [world.put("a", b"k", b"v", {}) for _ in range(3)]
    world.move("abc", "def")
    assert TENANT + b"k" not in world.disks["a"].records
    assert int.from_bytes(world.disks["a"].notes[FLOOR], "big") == versions[-1].counter == 3


@pytest.mark.slow
def test_an_older_note_does_not_count_again_while_a_newer_one_is_written():
    """``d`` was clean by the placement of before, and the move that gave it records is taken back while it
    notes that it is clean by the new one."""
    world = given_records()
    world.hand_out(world.stable("abd"), spread_s=0.0)
    background = world.shards["d"]._background
    assert background is not None
    while not background.purge._noting:
        world.run(until=world.now + 0.001)
    world.hand_out(world.stable("abc"), spread_s=0.0)
    world.run(until=world.now + 0.001)
    assert world.shards["d"].ring.epoch == world.epoch
    assert not clean(world, "d") and world.disks["d"].records
    world.until(lambda: world.clean("d"))
    assert not world.disks["d"].records
