"""Operations end to end in a world without a network: orders, moves, crashes at every step."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import pytest

from controller.controller import ControllerOptions, Note, RingRules
from kvcomm.wire.messages import (
    CancelOrder,
    ClusterGet,
    ClusterView,
    DrainOrder,
    Failure,
    Message,
    MoveOrder,
    NodePlan,
    OperationView,
    OrderAnswer,
    RebalanceOrder,
    RingRange,
    ScaleOrder,
    ShardLoad,
)
from l3_shard.ring import decode_map
from tests.controller.world import KEYS, FakeNode, NoAnswer, Outcome, World, plans

RULES = RingRules(replicas=3, write_quorum=2, read_quorum=2, block_copies=1)
OPTIONS = ControllerOptions(replace_after_s=60.0, give_up_after_s=30.0)


def started(shards: int = 4, pools: int = 1, controllers: int = 2) -> World:
    world = World(plans(shards, pools), controllers=controllers, rules=RULES, options=OPTIONS)
    world.elect()
    world.run(6)
    for key in KEYS:
        assert world.write("shard-0", key)
    return world


def last(world: World) -> OperationView:
    view = world.ask(world.leader, ClusterGet())
    assert isinstance(view, ClusterView)
    return view.operations[0]


def accepted(answer: Message) -> int:
    assert isinstance(answer, OrderAnswer), answer
    assert answer.operation
    return answer.operation


def refused(answer: Message) -> str:
    assert isinstance(answer, Failure), answer
    return answer.text


def shards(world: World) -> list[str]:
    return [node.node for node in world.ring.shards]


def settled(world: World) -> None:
    """Nothing is left over: the map is stable, exactly its nodes run, and these keep exactly what they
    should."""
    assert world.ring.transition is None
    running = sorted(name for name, node in world.nodes.items() if node.plan.role == "shard")
    assert sorted([*running, *world.dead]) == sorted(shards(world))
    for name in running:
        node = world.nodes[name]
        assert node.epoch == node.clean == world.ring.epoch, name
    world.check_records()


def test_scaling_out_adds_shards_and_moves_keys_to_them() -> None:
    world = started()
    assert accepted(world.order(ScaleOrder(6))) == 1
    world.run(30)
    assert last(world).step == "done"
    assert shards(world) == [f"shard-{index}" for index in range(6)]
    assert world.nodes["shard-5"].store
    assert [epoch for epoch, ring in world.maps.items() if ring.transition is not None], "it was a transition"
    settled(world)


def test_a_new_shard_may_turn_out_to_be_in_another_rack() -> None:
    world = started()
    start = world.start

    def elsewhere(plan: NodePlan) -> FakeNode:
        node = start(plan)
        if plan.node == "shard-4":
            node.plan = NodePlan(plan.node, plan.role, "rack-7")
        return node

    world.start = elsewhere  # type: ignore[method-assign]
    accepted(world.order(ScaleOrder(5)))
    world.run(30)
    assert last(world).step == "done"
    settled(world)


def test_scaling_in_empties_shards_before_they_stop() -> None:
    world = started(5)
    accepted(world.order(ScaleOrder(3)))
    emptied = {}
    for _ in range(30):
        world.run(1)
        emptied.update({name: len(node.store) for name, node in world.nodes.items()})
    assert last(world).step == "done"
    assert shards(world) == ["shard-0", "shard-1", "shard-2"]
    assert emptied["shard-4"] == emptied["shard-3"] == 0
    assert "shard-4" not in world.nodes
    settled(world)


def test_a_dry_run_says_what_it_would_cost_and_does_nothing() -> None:
    world = started()
    for name in shards(world):
        world.nodes[name].load = ShardLoad(
            record_count=750, record_bytes=75_000, block_count=100, block_bytes=64_000_000
        )
    world.run(3)
    answer = world.order(ScaleOrder(5, dry_run=True))
    assert isinstance(answer, OrderAnswer) and answer.operation == 0
    (joins,) = [move for move in answer.moves if move.what == "shard-4 joins"]
    assert 0.5 < joins.share < 0.7, "3 of 5 owners"
    assert joins.records == pytest.approx(1000 * joins.share, abs=1)
    assert 70 <= joins.blocks <= 90
    assert joins.seconds == pytest.approx((joins.record_bytes + joins.block_bytes) / 64e6)
    world.run(10)
    assert world.ring.epoch == 1 and len(world.nodes) == 5


def test_draining_a_shard_and_a_pool() -> None:
    world = started()
    accepted(world.order(DrainOrder("shard-1")))
    world.run(25)
    assert last(world).step == "done" and "shard-1" not in world.nodes
    accepted(world.order(DrainOrder("pool-0")))
    world.run(10)
    assert last(world).step == "done" and "pool-0" not in world.nodes
    assert not world.ring.pools
    settled(world)
    world.run(30)
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView) and view.mode == "whole", "what was drained is missed by nobody"


def test_pools_are_those_of_the_configuration_but_for_drained_ones() -> None:
    world = started(pools=2)
    accepted(world.order(DrainOrder("pool-0")))
    world.run(10)
    world.initial = plans(4, 4)
    for name in ("controller-0", "controller-1"):
        world.kill_controller(name)
        world.start_controller(name)
    world.elect()
    world.run(5)
    assert [pool.node for pool in world.ring.pools] == ["pool-1", "pool-2", "pool-3"]
    world.initial = plans(4, 2)
    world.kill_controller("controller-0")
    world.start_controller("controller-0")
    world.elect()
    world.run(5)
    assert [pool.node for pool in world.ring.pools] == ["pool-1"]
    assert "pool-3" not in world.nodes


def test_moving_a_range() -> None:
    world = started()
    accepted(world.order(MoveOrder(0, 2**63, "shard-2")))
    world.run(25)
    assert world.ring.ranges == [RingRange(0, 2**63, "shard-2")]
    accepted(world.order(MoveOrder(5, 9, "shard-3")))
    world.run(25)
    assert world.ring.ranges == [
        RingRange(0, 4, "shard-2"), RingRange(5, 9, "shard-3"), RingRange(10, 2**63, "shard-2"),
    ]  # fmt: skip
    accepted(world.order(DrainOrder("shard-2")))
    world.run(25)
    assert world.ring.ranges == [RingRange(5, 9, "shard-3")]
    settled(world)


def test_rebalancing_takes_keys_from_the_busy() -> None:
    world = started()
    for name in shards(world):
        world.nodes[name].load = ShardLoad(ops_s=4000.0 if name == "shard-1" else 1000.0)
    world.run(5)
    answer = world.order(RebalanceOrder("threshold"))
    accepted(answer)
    world.run(25)
    assert last(world).step == "done" and world.ring.ranges
    assert "shard-1" not in {each.node for each in world.ring.ranges}
    settled(world)


def test_a_standing_policy_whose_plan_cannot_be_carried_out_is_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controller.orders.RANGES_MAX", 3)
    world = World(plans(4), rules=RULES, options=ControllerOptions(policy="greedy"))
    world.elect()
    world.run(3)
    for name in shards(world):
        world.nodes[name].load = ShardLoad(ops_s=4000.0 if name == "shard-1" else 1000.0)
    world.run(20)
    assert world.ring.epoch == 1
    assert "rebalance (greedy)" in last(world).what and "at most 3 ranges" in last(world).trouble


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (ScaleOrder(0), "at least one"),
        (ScaleOrder(-1), "at least one"),
        (ScaleOrder(2), "2 shards would be left for 3 replicas"),
        (ScaleOrder(5000), "at most"),
        (DrainOrder("shard-9"), "no node of this cluster"),
        (DrainOrder("launcher"), "only shards and pools are drained"),
        (MoveOrder(9, 5, "shard-1"), "first <= last"),
        (MoveOrder(0, 5, "pool-0"), "no shard of the ring"),
        (RebalanceOrder("clever"), "no policy 'clever'"),
        (CancelOrder(4), "not under way"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(order: Message, reason: str) -> None:
    world = started()
    assert reason in refused(world.order(order))
    assert world.ring.epoch == 1


def test_nothing_to_do_is_no_operation() -> None:
    world = started()
    assert world.order(ScaleOrder(4)) == OrderAnswer(0, [])


def test_one_operation_at_a_time() -> None:
    world = started()
    accepted(world.order(ScaleOrder(5)))
    assert "operation 1 (4 to 5 shards: shard-4 join) is under way" in refused(world.order(ScaleOrder(6)))
    world.run(2)
    assert "under way" in refused(world.order(DrainOrder("shard-0")))


def test_a_standby_names_the_leader() -> None:
    world = started()
    answer = world.order(ScaleOrder(5), "controller-1")
    assert isinstance(answer, Failure)
    assert (answer.code, answer.detail) == ("not_leader", b"controller-0")


def test_an_order_is_answered_when_it_is_noted() -> None:
    world = started()
    world.note_outcome = lambda _: "unknown"
    with pytest.raises(NoAnswer):
        world.order(ScaleOrder(5))
    world.note_outcome = lambda _: "done"
    world.run(1)
    assert world.late_replies == [OrderAnswer(1, last(world).moves)]


def test_an_order_is_not_answered_for_an_earlier_note() -> None:
    world = started()
    world.note_outcome = lambda _: "unknown"
    for order in (ScaleOrder(5), CancelOrder(1)):
        with pytest.raises(NoAnswer):
            world.order(order)
    outcomes: list[Outcome] = ["done"]
    world.note_outcome = lambda _: outcomes.pop() if outcomes else "unknown"
    world.run(1)
    assert not outcomes and not world.late_replies, "only the first of the two is noted"
    world.note_outcome = lambda _: "done"
    world.run(1)
    assert [type(each) for each in world.late_replies] == [OrderAnswer, OrderAnswer]


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", range(0, 16, 1))
def test_cancelling_at_any_time_ends_where_it_began_or_where_it_went(wait_s: int) -> None:
    world = started()
    number = accepted(world.order(ScaleOrder(5)))
    for _ in range(wait_s):
        world.run(1)
        world.write("shard-1", KEYS[wait_s])
        world.check_records()
    answer = world.order(CancelOrder(number))
    for step in range(30):
        world.run(1)
        if "shard-2" in world.nodes:
            world.write("shard-2", KEYS[step % len(KEYS)])
        world.check_records()
    if isinstance(answer, OrderAnswer):
        assert last(world).step == "cancelled" and len(shards(world)) == 4
    else:
        assert last(world).step == "done" and len(shards(world)) == 5
    settled(world)


def test_cancelling_while_the_last_map_is_noted_does_not_end_the_shards_that_it_holds() -> None:
    world = started()

    def stalls(note: Note) -> Literal["done", "unknown"]:
        arrives = note.name == "ring" and len(decode_map(note.value).shards) == 5
        return "unknown" if arrives else "done"

    world.note_outcome = stalls
    number = accepted(world.order(ScaleOrder(5)))
    world.run(30)
    assert last(world).step == "serving"
    assert "being noted" in refused(world.order(CancelOrder(number)))
    world.note_outcome = lambda _: "done"
    world.run(30)
    assert last(world).step == "done" and len(shards(world)) == 5
    settled(world)


def test_cancelling_really_was_tried_in_every_stage() -> None:
    """What the test above counts on."""
    world = started()
    accepted(world.order(ScaleOrder(5)))
    seen = []
    for _ in range(16):
        seen.append(last(world).step)
        world.run(1)
    assert list(dict.fromkeys(seen))[:2] == ["planned", "copying"]
    assert {"serving", "purging", "done"} <= set(seen)


def test_a_gaining_shard_that_stays_dead_is_given_up() -> None:
    world = started()
    accepted(world.order(ScaleOrder(5)))
    while last(world).step != "copying":
        world.run(1)
    world.kill("shard-4")
    world.run(15)
    assert "shard-4 is dead" in last(world).trouble
    world.run(40)
    assert last(world).step == "rolled back"
    assert len(shards(world)) == 4 and "shard-4" not in world.dead
    settled(world)


def test_a_new_shard_that_never_comes_is_given_up() -> None:
    world = started()
    world.start = lambda plan: None  # type: ignore[method-assign,assignment,return-value]
    accepted(world.order(ScaleOrder(5)))
    world.run(20)
    assert "shard-4 has not been heard yet" in last(world).trouble
    world.run(30)
    assert last(world).step == "failed" and world.ring.epoch == 1


def test_a_dead_shard_is_gone_on_without() -> None:
    world = started(5)
    world.kill("shard-3")
    world.run(60)
    assert len(shards(world)) == 5
    world.run(30)
    assert last(world).step == "done" and "shard-3" not in shards(world)
    assert "shard-3" not in world.dead, "and is not started again"
    settled(world)


def test_too_few_shards_to_go_on_without_one_is_said() -> None:
    world = started(3)
    world.kill("shard-2")
    world.run(90)
    assert "2 shards would be left for 3 replicas" in last(world).trouble
    assert len(shards(world)) == 3


@pytest.mark.slow
def test_who_comes_back_before_a_replacement_can_start_is_kept() -> None:
    world = started(5)
    world.kill("shard-3")
    world.kill("shard-4")
    world.run(80)
    assert world.ring.epoch == 1, "some keys had both: no map without them may be made"
    assert "shard-3, shard-4 has been dead for too long" in last(world).trouble
    accepted(world.order(DrainOrder("pool-0")))
    world.run(5)
    world.start(world.dead["shard-3"].plan)
    world.run(40)
    assert shards(world) == ["shard-0", "shard-1", "shard-2", "shard-3"]
    settled(world)


def test_a_shard_that_slept_through_a_move_comes_back_clean() -> None:
    world = started(5)
    world.kill("shard-3")
    world.run(90)
    assert "shard-3" not in shards(world)
    assert accepted(world.order(ScaleOrder(5))) == 2
    world.run(30)
    assert last(world).step == "done"
    settled(world)


def test_no_transition_begins_with_a_shard_that_is_not_clean() -> None:
    world = started()
    world.nodes["shard-2"].clean = 0
    world.nodes["shard-2"].left = 10_000
    accepted(world.order(ScaleOrder(5)))
    world.run(10)
    assert world.ring.transition is None and world.ring.epoch == 1
    assert last(world).trouble == "waits for shard-2 to drop what an earlier move took away"


def test_progress_and_the_time_that_is_left() -> None:
    world = started()
    accepted(world.order(ScaleOrder(5)))
    while last(world).step != "copying":
        world.run(1)
    for name in [*shards(world), "shard-4"]:
        world.nodes[name].left = 1000
    world.run(1)
    shares = []
    for _ in range(8):
        world.run(1)
        shares.append((last(world).done_share, last(world).eta_s))
    assert [share for share, _ in shares] == sorted(share for share, _ in shares)
    assert 0.3 < shares[-1][0] < 0.6
    assert 6 <= shares[-1][1] <= 16


def leader_dies_at(world: World, at_note: int) -> None:
    """The leader is killed with its ``at_note``-th note: made or not is for its successor to find out."""
    notes = 0

    def noted(note: Note) -> None:
        nonlocal notes
        notes += 1
        if notes == at_note:
            if at_note % 2:
                world.fences[note.name], world.records[note.name] = world.term, note.value
            world.kill_controller(world.leader)

    world.on_note = noted


@pytest.mark.slow
@pytest.mark.parametrize("at_note", range(1, 16))
@pytest.mark.parametrize("order", [ScaleOrder(5), DrainOrder("shard-2")])
def test_the_leader_dies_at_every_step_of_a_move(at_note: int, order: Message) -> None:
    world = started()
    leader_dies_at(world, at_note)
    ordered = False
    for step in range(45):
        if not world.leader:
            world.on_note = lambda _: None
            world.elect("controller-1")
        if not ordered:
            ordered = True
            with suppress(NoAnswer):
                world.order(order)
            continue
        world.run(1)
        if "shard-1" in world.nodes:
            world.write("shard-1", KEYS[step % len(KEYS)])
        world.check_records()
    assert world.leader
    assert len(shards(world)) in ((4, 5) if isinstance(order, ScaleOrder) else (3, 4))
    assert at_note == 1 or last(world).step == "done"
    settled(world)


@pytest.mark.slow
@pytest.mark.parametrize("at_s", range(1, 15))
def test_all_metadata_is_lost_in_the_middle_of_a_move(at_s: int) -> None:
    world = started()
    accepted(world.order(ScaleOrder(5)))
    world.run(at_s)
    step = last(world).step
    world.records.clear()
    world.fences.clear()
    world.kill_controller("controller-0")
    world.kill_controller("controller-1")
    world.start_controller("controller-1")
    world.elect("controller-1")
    world.run(40)
    assert world.ring.epoch > 1000
    assert len(shards(world)) == (4 if step == "planned" else 5)
    settled(world)


def test_a_plan_from_before_a_scaling_stops_none_of_the_new_shards() -> None:
    """The records were rolled back, as a backup of them is: the map is the shards', and so is the plan."""
    world = started()
    before = dict(world.records)
    accepted(world.order(ScaleOrder(5)))
    world.run(25)
    assert last(world).step == "done"
    world.records, world.fences = dict(before), {}
    for name in ("controller-0", "controller-1"):
        world.kill_controller(name)
        world.start_controller(name)
    world.elect()
    world.run(10)
    assert world.ring.epoch > 1000 and len(shards(world)) == 5
    accepted(world.order(DrainOrder("pool-0")))
    world.run(20)
    assert "shard-4" in world.nodes
    settled(world)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["shard-0", "shard-4"])
@pytest.mark.parametrize("at_s", range(1, 15, 2))
def test_a_source_or_target_dies_in_the_middle_and_comes_back(victim: str, at_s: int) -> None:
    world = started()
    accepted(world.order(ScaleOrder(5)))
    world.run(at_s)
    if victim in world.nodes:
        plan = world.kill(victim).plan
        world.run(12)
        world.write("shard-1", KEYS[0])
        world.check_records()
        world.start(plan)
    for step in range(40):
        world.run(1)
        world.write("shard-1", KEYS[step % len(KEYS)])
        world.check_records()
    assert last(world).step == "done" and len(shards(world)) == 5
    settled(world)
