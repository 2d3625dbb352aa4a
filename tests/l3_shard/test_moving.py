"""Records are moved between two placements while clients write: nothing acknowledged is lost, doubled or
brought back, and in the end nobody has what is not its own."""

from __future__ import annotations

import pytest

from l3_shard import ring as ring_module
from tests.l3_shard.cluster import Faults
from tests.l3_shard.moving_world import MovingWorld, Writer


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making rings would take most of the time."""
    monkeypatch.setattr(ring_module, "POINTS_PER_WEIGHT", 8)


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
