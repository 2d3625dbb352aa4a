"""Records are moved between two placements while clients write: nothing acknowledged is lost, doubled or
brought back, and in the end nobody has what is not its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcomm.wire.messages import (
    Failure,
    Message,
    RecordPut,
    RecordVersion,
    RecordVersions,
    RecordWrite,
)
from l3_shard.purge import Purge
from l3_shard.repair import Repair
from l3_shard.shard import Shard
from l3_shard.writing import Writing
from tests.l3_shard.cluster import Faults, small_rings
from tests.l3_shard.moving_world import OPTIONS, MovingWorld, Writer

Race = Callable[[], tuple[MovingWorld, list[Message]]]
Plant = Callable[[pytest.MonkeyPatch], None]

quick = pytest.fixture(autouse=True)(small_rings)


def written(world: MovingWorld, count: int = 2, seconds: float = 2.0) -> list[Writer]:
    writers = [Writer(world, f"writer{index}").begin() for index in range(count)]
    world.run(until=world.now + seconds)
    return writers


def finish(world: MovingWorld, writers: list[Writer], members: str) -> None:
    for writer in writers:
        writer.over = True
    world.run(until=world.now + 12.0)
    for writer in writers:
        writer.check(members)
        writer.read_all()
    world.check_clean(members)


MOVES = {
    "one is added": ("abcd", "abc", "abcd"),
    "one is taken away": ("abcd", "abcd", "abc"),
    "one is replaced": ("abcd", "abc", "abd"),
    "all are others": ("abcdef", "abc", "def"),
}


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("seed", range(2))
def test_a_move_under_writes_loses_nothing_and_leaves_nothing_behind(move: str, seed: int) -> None:
    names, before, after = MOVES[move]
    world = MovingWorld(seed, names, before, Faults(delay_s=0.05, disk_s=0.05))
    writers = written(world)
    world.move(before, after)
    finish(world, writers, after)
    assert not any(writer.failures for writer in writers), "one retry suffices"
    assert sum(len(writer.acknowledged) for writer in writers) > 10


STEPS = ("clean", "copying", "ready", "serving", "served", "flipped", "over")


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", "abcd")
def test_a_crash_at_any_step_is_harmless(step: str, victim: str) -> None:
    """Of an owner that stays, one that goes (c) or the one that comes (d); it is back half a second later."""
    world = MovingWorld(STEPS.index(step), "abcd", "abc")
    writers = written(world, seconds=1.0)
    for at in world.steps("abc", "abd"):
        if at == step:
            world.run(until=world.now + world.draw.uniform(0.0, 0.2))
            world.fail(victim, 0.5)
    finish(world, writers, "abd")


@pytest.mark.slow
@pytest.mark.parametrize("serving", [False, True])
def test_a_move_that_is_given_up_leaves_everything_where_it_was(serving: bool) -> None:
    world = MovingWorld(3, "abcdef", "abc")
    writers = written(world, seconds=1.0)
    for step in world.steps("abc", "def"):
        if step == ("served" if serving else "copying"):
            break
    world.run(until=world.now + 0.5)
    world.roll_back("abc", "def", serving=serving)
    finish(world, writers, "abc")
    assert not any(world.disks[node].records for node in "def")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_moves_to_and_fro_under_faults_lose_nothing(seed: int) -> None:
    faults = Faults(loss=0.05, delay_s=0.1, disk_s=0.05, double=0.1, full=0.02)
    world = MovingWorld(seed, "abcde", "abc", faults)
    writers = written(world)
    for before, after in (("abc", "abcde"), ("abcde", "cde"), ("cde", "abc")):
        for _ in world.steps(before, after):
            if world.draw.random() < 0.5:
                world.fail(world.draw.choice(world.names), world.draw.uniform(0.1, 1.0))
    world.faults = Faults()
    finish(world, writers, "abc")


# -- why a write is placed when it is durable


def acknowledged(world: MovingWorld, node: str, key: bytes = b"k") -> list[Message]:
    answers: list[Message] = []
    world.call(node, RecordPut(1, [RecordWrite(key, b"v", {})]), answers.append)
    return answers


def durable_after_the_comparison() -> tuple[MovingWorld, list[Message]]:
    """The coordinator has the write on its disk when the shards to come have compared themselves with it
    already; then it is taken away."""
    world = MovingWorld(1, "abcdef", "abc", write=1)
    world.run(until=1.0)
    world.slow["a"] = 0.8
    answers = acknowledged(world, "a")
    world.run(until=1.05)
    world.hand_out(world.moving("abc", "def", "copy"), spread_s=0.0)
    world.until(lambda: world.ready("abcdef") and world.heard("abcdef"))
    assert world.now < 1.8 and not answers
    world.run(until=2.2)
    return world, answers


def acknowledged_after_another_ring() -> tuple[MovingWorld, list[Message]]:
    """A replica has the write on its disk when it has taken the next map, and been compared with; the
    coordinator, which has not, dies."""
    world = MovingWorld(1, "abcdef", "abc")
    world.run(until=1.0)
    world.slow["b"] = 0.7
    world.slow["c"] = 10.0
    answers = acknowledged(world, "a")
    world.run(until=1.1)
    world.offer(world.moving("abc", "def", "copy"), "bcdef")
    while not all(world.shards[node].move_status().ready_epoch for node in "def"):
        world.run(until=world.now + 0.05)
        assert world.now < 1.7 and not answers
    world.run(until=2.2)
    world.away = {"a"}
    return world, answers


RACES = [durable_after_the_comparison, acknowledged_after_another_ring]


def end_of(race: Race) -> None:
    world, answers = race()
    world.hand_out(world.moving("abc", "def", "serve"), spread_s=0.0)
    world.until(lambda: world.heard("abcdef"))
    world.hand_out(world.stable("def"), spread_s=0.0)
    world.until(lambda: world.clean("abcdef"))
    (answer,) = answers
    if isinstance(answer, RecordVersions):
        copies = world.copies(b"k").keys() - world.away
        assert len(copies) >= world.map.write_quorum and copies <= set("def")
    else:
        assert isinstance(answer, Failure) and answer.code == "outcome_unknown"


@pytest.mark.parametrize("race", RACES)
def test_a_write_that_overtakes_a_ring_is_kept_by_the_new_owners(race: Race) -> None:
    end_of(race)


def placed_when_asked(patch: pytest.MonkeyPatch) -> None:
    spread = Writing.spread

    def by_then(self: Writing, write: Any, *, have: bool) -> None:
        patch.setattr(self, "place", lambda key: write.place)
        spread(self, write, have=have)

    patch.setattr(Writing, "spread", by_then)


def acknowledged_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "_overtaken", lambda self, merges: None)


@pytest.mark.parametrize(
    ("race", "plant"), list(zip(RACES, [placed_when_asked, acknowledged_all_the_same], strict=True))
)
def test_without_the_rule_it_is_lost(race: Race, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="copies"):
        end_of(race)


# -- what an old owner could bring back


def deleted_while_one_is_away() -> MovingWorld:
    """A record of four shards; ``d`` has a value of it and sleeps while the others delete it, go on without
    ``d``, and bury the tombstone; then ``d`` is back and becomes an owner again."""
    world = MovingWorld(1, "abcd", "abcd", replicas=4)
    world.run(until=1.0)
    first = world.put("a", b"k", b"v", {})
    assert world.copies(b"k").keys() == set("abcd")
    world.away = {"d"}
    world.put("a", b"k", None, first.context)
    world.move("abcd", "abc")
    world.run(until=world.now + OPTIONS.tombstone_age_s + 4 * OPTIONS.interval_s)
    assert world.copies(b"k").keys() == {"d"}, "buried by the others"
    world.away = set()
    world.move("abc", "abcd")
    world.run(until=world.now + 3 * OPTIONS.interval_s)
    return world


@pytest.mark.slow
def test_who_slept_through_a_move_brings_nothing_back() -> None:
    assert not deleted_while_one_is_away().copies(b"k")


@pytest.mark.slow
def test_who_is_not_made_clean_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Purge, "clean", property(lambda self: not self._ring().moving))
    monkeypatch.setattr(Purge, "swept", lambda self, event: event.ticket == self._sweep)
    assert deleted_while_one_is_away().copies(b"k")


def written_before_and_after_a_move() -> tuple[RecordVersion, RecordVersion]:
    """By the same shard, which dropped the record in between; nobody else has it any more either."""
    world = MovingWorld(1, "abcdef", "abc", replicas=3)
    world.run(until=1.0)
    first = world.put("a", b"k", b"v", {})
    world.move("abc", "def")
    world.put("d", b"k", None, first.context)
    world.run(until=world.now + OPTIONS.tombstone_age_s + 4 * OPTIONS.interval_s)
    assert not world.copies(b"k"), "buried"
    world.move("def", "abc")
    return first, world.put("a", b"k", b"w", {})


@pytest.mark.slow
def test_who_did_not_hear_that_a_move_was_taken_back_is_not_ready_for_the_next_like_it() -> None:
    """What is written by the map that it missed is not sent to it."""
    world = MovingWorld(1, "abcd", "abc")
    world.run(until=1.0)
    world.hand_out(world.moving("abc", "abd", "copy"))
    world.until(lambda: world.ready("d"))
    world.away = {"d"}
    world.map = world.stable("abc")
    world.offer(world.map, "abc")
    world.put("a", b"k", b"v", {})
    world.away = set()
    world.map = world.moving("abc", "abd", "copy")
    world.offer(world.map)
    assert world.shards["d"].ring.epoch == world.epoch and not world.ready("d")
    world.until(lambda: world.ready("d"))
    assert "d" in world.copies(b"k")


def test_a_counter_is_not_given_out_again_after_a_move() -> None:
    first, second = written_before_and_after_a_move()
    assert first.replica == second.replica and second.counter > first.counter


@pytest.mark.slow
def test_without_the_floor_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repair, "_raise_floor", lambda self, states, told: told(True))
    monkeypatch.setattr(Purge, "may_go", lambda self, key, state: not self._keeps(key))
    first, second = written_before_and_after_a_move()
    assert (first.replica, first.counter) == (second.replica, second.counter)
