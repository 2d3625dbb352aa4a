"""The conditions of a move, one at a time, and the words for what stands in their way."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from controller.moving import Heading, Moving, ShardReport, Verdict
from controller.operating import at_target, go_on, resumed
from controller.placement import abandoned, arrived, copying, going_back, serving
from kvcomm.wire.messages import RingMap, RingNode, ShardMove

NODES = [RingNode(f"shard-{index}", "", "", "", "rack", 1) for index in range(5)]
STABLE = RingMap(5, 3, 2, 2, 1, NODES[:4], [])
COPY = copying(STABLE, 6, NODES, [])
SERVE = serving(COPY, 7)


def report(epoch: int, **words: int) -> ShardReport:
    move = ShardMove(**{"ready_epoch": epoch, "strong_epoch": epoch, "clean_epoch": epoch, **words})
    return ShardReport("alive", -1.0, epoch, epoch, move)


def dead(for_s: float = 10.0, epoch: int = 0) -> ShardReport:
    return ShardReport("dead", for_s, epoch, epoch, ShardMove())


def world(ring: RingMap, **others: ShardReport) -> dict[str, ShardReport]:
    """All five alive and well by this map, but for ``shard_3=...``."""
    shards = {node.node: report(ring.epoch) for node in NODES}
    shards.update({name.replace("_", "-"): each for name, each in others.items()})
    return shards


TARGET = [node.node for node in NODES]


@pytest.mark.parametrize(
    ("others", "trouble"),
    [
        ({}, ""),
        ({"shard_4": dead()}, "shard-4 is dead"),
        ({"shard_1": dead()}, "shard-1 is dead"),
        ({"shard_2": report(4)}, "waits for shard-2 to work by epoch 5"),
        ({"shard_2": report(5, clean_epoch=4)}, "waits for shard-2 to drop what an earlier move took away"),
        (
            {"shard_2": ShardReport("suspect", -1.0, 5, 5, ShardMove(5, 5, 5))},
            "shard-2 has not been heard for a while",
        ),
    ],
)
def test_start(others: dict[str, ShardReport], trouble: str) -> None:
    verdict = Moving(STABLE, world(STABLE, **others), target=TARGET).judge_start()
    assert verdict == Verdict(None if trouble else "start", trouble)


def test_no_start_without_owners_of_everything_that_is_to_move() -> None:
    three = Moving(
        replace(STABLE, replicas=1, write_quorum=1, read_quorum=1),
        world(STABLE, shard_3=dead()),
        target=TARGET[:3],
    )
    assert "too few owners of some keys are there without shard-3" in three.judge_start().trouble


@pytest.mark.parametrize(
    ("others", "trouble"),
    [
        ({}, ""),
        ({"shard_4": report(6, ready_epoch=5)}, "waits for shard-4 to get all that they gain"),
        ({"shard_4": dead()}, "shard-4 is dead"),
        ({"shard_0": report(5)}, "waits for shard-0 to work by epoch 6"),
        ({"shard_0": dead(epoch=5)}, ""),
        (
            {"shard_0": dead(epoch=5), "shard_1": dead(epoch=5)},
            "too few owners of some keys are there without shard-0, shard-1",
        ),
    ],
)
def test_serve(others: dict[str, ShardReport], trouble: str) -> None:
    verdict = Moving(COPY, world(COPY, **others)).judge("forth")
    assert verdict == Verdict(None if trouble else "serve", trouble)


@pytest.mark.parametrize(
    ("others", "trouble"),
    [
        ({}, ""),
        ({"shard_4": dead()}, ""),
        ({"shard_3": report(7, strong_epoch=6)}, "waits for shard-3 to settle their strong records"),
        ({"shard_0": report(6)}, "waits for shard-0 to work by epoch 7"),
        (
            {"shard_0": dead(epoch=7), "shard_1": dead(epoch=7)},
            "too few owners of some keys are there without shard-0, shard-1",
        ),
    ],
)
def test_arrive(others: dict[str, ShardReport], trouble: str) -> None:
    verdict = Moving(SERVE, world(SERVE, **others)).judge("forth")
    assert verdict == Verdict(None if trouble else "arrive", trouble)


@pytest.mark.parametrize(
    ("stage", "heading", "turn"),
    [
        ("serve", "back", "back"),
        ("copy", "back unserved", "abandon"),
        ("copy", "back", None),
    ],
)
def test_going_back(stage: Literal["copy", "serve"], heading: Heading, turn: str | None) -> None:
    """Once it was read from the new placement, the way back is as careful as the way there."""
    ring = COPY if stage == "copy" else SERVE
    behind = world(ring, shard_0=report(ring.epoch - 1))
    assert Moving(ring, behind).judge(heading).turn == turn
    assert Moving(ring, world(ring)).judge(heading).turn is not None


def test_who_has_been_dead_for_long_does_not_stop_the_way_back() -> None:
    """With one replica the keys of a dead shard would otherwise stay unwritable for as long as it is dead."""
    ring = replace(COPY, replicas=1, write_quorum=1, read_quorum=1)
    for for_s, turn in ((10.0, None), (130.0, "abandon")):
        moving = Moving(ring, world(ring, shard_4=dead(for_s)), patience_s=120.0)
        assert moving.judge("back").turn == turn


def test_purge_waits_for_the_living() -> None:
    ring = arrived(SERVE, 8)
    assert Moving(ring, world(ring)).judge_purge() == Verdict("purged")
    assert Moving(ring, world(ring, shard_0=dead())).judge_purge() == Verdict("purged")
    unclean = world(ring, shard_0=report(8, clean_epoch=7), shard_1=report(8, clean_epoch=0))
    assert Moving(ring, unclean).judge_purge() == Verdict(
        None, "waits for shard-0, shard-1 to drop what moved away"
    )


def test_maps_of_each_step() -> None:
    assert COPY.transition is not None and COPY.transition.stage == "copy"
    assert going_back(SERVE, 8) == replace(COPY, epoch=8)
    assert abandoned(COPY, 9) == replace(STABLE, epoch=9)
    assert arrived(SERVE, 8) == replace(STABLE, epoch=8, shards=NODES)
    with pytest.raises(AssertionError):
        copying(COPY, 7, NODES, [])


def test_what_no_journal_tells_of_is_found_in_the_map() -> None:
    operation = resumed(SERVE, 3)
    assert (operation.joins, operation.leaves, operation.served) == (["shard-4"], [], True)
    assert at_target(operation, arrived(SERVE, 8)) and not at_target(operation, STABLE)
    onward = go_on(operation, SERVE, world(SERVE), {}, patience_s=60.0)
    assert onward.ring == arrived(SERVE, 7), "the caller gives the epoch"


def test_that_it_was_served_is_noted_with_the_step() -> None:
    operation = replace(resumed(COPY, 3), step="copying")
    onward = go_on(operation, COPY, world(COPY), {}, patience_s=60.0)
    assert onward.operation.served and onward.ring == serving(COPY, 6)


@pytest.mark.parametrize(("for_s", "back"), [(10.0, ""), (61.0, "rolled back")])
def test_a_dead_gainer_is_given_up_in_time(for_s: float, back: str) -> None:
    operation = replace(resumed(COPY, 3), step="copying")
    onward = go_on(operation, COPY, world(COPY, shard_4=dead(for_s)), {}, patience_s=60.0)
    assert (onward.operation.back, onward.ring) == (back, None)


def test_a_gainer_that_dies_when_all_is_there_does_not_stop_it() -> None:
    onward = go_on(resumed(SERVE, 3), SERVE, world(SERVE, shard_4=dead(1000.0)), {}, patience_s=60.0)
    assert onward.ring is not None and not onward.operation.back
