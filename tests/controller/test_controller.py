"""The controller machine in a world without a network."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controller.controller import Controller, ControllerOptions, Deposed, Follows, Led, Note, Recall
from controller.journal import decode_journal
from kvcomm.machine import ConnectionId, Origin, Received, Reply, Resumed
from kvcomm.wire.messages import (
    ClusterGet,
    ClusterView,
    Failure,
    HeartbeatAnswer,
    Message,
    Ping,
    RingGet,
    ScaleOrder,
)
from tests.controller.world import RULES, FakeNode, NoAnswer, World, plans


def started(shards: int = 3, pools: int = 1, **words) -> World:
    world = World(plans(shards, pools), **words)
    world.elect()
    world.run(3)
    return world


def test_the_first_map_waits_for_every_shard_and_is_handed_out_once_noted() -> None:
    world = World(plans(3, 1))
    world.elect()
    for name in ("shard-0", "shard-1", "pool-0"):
        world.beat(name)
    assert not world.records
    world.beat("shard-2")
    assert world.ring.epoch == 1
    assert [node.node for node in world.ring.shards] == ["shard-0", "shard-1", "shard-2"]
    assert [node.node for node in world.ring.pools] == ["pool-0"]
    assert [world.nodes[f"shard-{index}"].epoch for index in range(3)] == [1, 1, 1], "offered at once"
    assert world.nodes["pool-0"].epoch == 0
    world.beat("pool-0")
    assert world.nodes["pool-0"].epoch == 1, "by the answer to its heartbeat"
    assert world.published == [world.ring]


def test_the_first_map_waits_for_pools_a_while() -> None:
    world = World(plans(2, 1))
    world.elect()
    world.kill("pool-0")
    world.run(15)
    assert "ring" not in world.records
    world.run(10)
    assert world.ring.epoch == 1 and not world.ring.pools
    world.start(world.initial[0])
    world.run(2)
    assert world.ring.epoch == 2 and [pool.node for pool in world.ring.pools] == ["pool-0"]


def test_a_map_is_repeated_until_it_is_known_to_be_noted() -> None:
    world = World(plans(2))
    world.elect()
    world.note_outcome = lambda note: "unknown" if note.name == "ring" else "done"
    world.run(3)
    assert not world.maps and not world.published
    world.note_outcome = lambda _: "done"
    world.run(2)
    assert set(world.maps) == {1}


def test_a_restarted_node_makes_a_new_epoch_with_the_same_placement() -> None:
    world = started()
    before = world.ring
    world.kill("shard-1")
    world.start(world.initial[2])
    world.run(2)
    after = world.ring
    assert after.epoch == before.epoch + 1
    assert after.shards[1].address != before.shards[1].address
    assert [node.node for node in after.shards] == [node.node for node in before.shards]
    assert {node.epoch for node in world.nodes.values()} == {after.epoch}


def test_nodes_that_come_back_together_get_one_epoch() -> None:
    world = started(4)
    for name in ("shard-0", "shard-1", "shard-2", "pool-0"):
        world.kill(name)
    for plan in world.initial[:4]:
        world.start(plan)
    world.run(2)
    assert world.ring.epoch == 2


def begins_badly(*, killed: tuple[str, ...]) -> World:
    """Three shards; some die after they were heard, before they have the first map."""
    world = World(plans(3, 1))
    world.elect()
    for name in (*killed, "pool-0"):
        world.beat(name)
        if name in killed:
            world.kill(name)
    world.run(1)
    assert world.ring.epoch == 1
    return world


def test_no_other_map_is_issued_before_all_shards_have_the_first() -> None:
    """A shard whose first map is a later one waits for the others to tell it what it had."""
    world = begins_badly(killed=("shard-0", "shard-1"))
    world.start(world.initial[1])  # at another address
    world.run(3)
    assert world.ring.epoch == 1 and world.nodes["shard-0"].epoch == 1
    world.run(60)
    assert world.ring.epoch == 2, "two can tell the third"
    world.start(world.initial[2])
    world.run(2)
    assert world.ring.epoch == 3 and {node.epoch for node in world.nodes.values()} == {3}


def test_not_while_too_many_are_gone_without_it() -> None:
    world = begins_badly(killed=("shard-0", "shard-1"))
    world.kill("pool-0")
    world.start(world.initial[0])
    world.run(60)
    assert world.ring.epoch == 1
    for plan in world.initial[1:3]:
        world.start(plan)
    world.beat("shard-0")
    world.beat("shard-1")
    assert world.nodes["shard-0"].epoch == world.nodes["shard-1"].epoch == 1
    world.run(2)
    assert world.ring.epoch == 2


def test_a_new_leader_does_not_wait_for_one_that_is_gone() -> None:
    world = started()
    world.kill("shard-0")
    world.kill_controller("controller-0")
    world.start_controller("controller-0")
    world.elect()
    world.kill("pool-0")
    world.start(world.initial[0])
    world.run(3)
    assert world.ring.epoch == 1, "it may never have had the first map"
    world.run(10)
    assert world.ring.epoch == 2


def test_nothing_is_done_after_the_lease() -> None:
    world = World(plans(2))
    world.elect()
    world.now += 7
    world.beat("shard-0")
    world.beat("shard-1")
    assert "ring" not in world.records
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView) and view.mode == "leaderless"


def test_a_standby_tells_of_the_leader_and_hands_out_what_it_has_heard() -> None:
    world = started(controllers=2)
    late = FakeNode(plans(4)[3])
    answer = world.ask("controller-1", late.beat())
    assert answer.leader == "controller-0"  # type: ignore[attr-defined]
    assert answer.ring == world.ring  # type: ignore[attr-defined]
    assert answer.plan is None  # type: ignore[attr-defined]


def test_a_second_leader_goes_on_with_the_noted_map() -> None:
    world = started(controllers=2)
    world.kill_controller("controller-0")
    world.elect("controller-1")
    world.run(3)
    assert world.ring.epoch == 1
    world.kill("shard-1")
    world.start(world.initial[2])
    world.run(2)
    assert world.ring.epoch == 2


def test_lost_records_are_made_from_the_shards_maps() -> None:
    world = started()
    world.records.clear()
    world.fences.clear()
    world.kill_controller("controller-0")
    world.start_controller("controller-0")
    world.elect()
    world.beat("pool-0")
    world.beat("pool-0")
    world.beat("shard-0")
    assert "ring" not in world.records, "one shard of three is no majority"
    world.run(3)
    assert world.ring.epoch == 1001
    assert [node.node for node in world.ring.shards] == ["shard-0", "shard-1", "shard-2"]
    assert {node.epoch for node in world.nodes.values()} == {1001}
    assert set(world.nodes) == {"pool-0", "shard-0", "shard-1", "shard-2"}, "and all of it is planned again"


def test_records_lost_under_a_leader_are_made_again() -> None:
    world = started()
    newer = replace(world.ring, epoch=7)
    for node in world.nodes.values():
        node.take(newer)
    world.run(4)
    assert world.ring.epoch == 1007


def test_while_records_are_lost_nothing_is_planned() -> None:
    """What runs may be more than the plan that was found knows of, and part of a newer map."""
    world = started()
    assert answer(world).plan is not None
    world.nodes["shard-0"].take(replace(world.ring, epoch=7))
    world.note_outcome = lambda _: "unknown"
    world.run(1)
    assert answer(world).plan is None


def answer(world: World) -> HeartbeatAnswer:
    """To the launcher."""
    told = world.ask("controller-0", world.launcher.beat())
    assert isinstance(told, HeartbeatAnswer)
    return told


def test_the_first_epoch_is_never_issued_twice() -> None:
    """A cluster whose only witness is a shard with an old map."""
    world = started()
    world.records.clear()
    world.fences.clear()
    for name in ("shard-1", "shard-2"):
        world.kill(name)
        del world.dead[name]
    world.kill_controller("controller-0")
    world.start_controller("controller-0")
    world.elect()
    world.beat("shard-0")
    for plan in world.initial[2:]:
        world.start(plan)
    world.run(3)
    assert world.ring.epoch == 1001


def test_a_view_tells_who_is_missing() -> None:
    world = started()
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView)
    assert (view.mode, view.leader, view.term) == ("whole", "controller-0", 1)
    world.kill("shard-2")
    world.run(5)
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView) and view.mode == "partitioned"
    assert {node.node: node.state for node in view.nodes}["shard-2"] == "suspect"


def test_a_view_misses_controllers_that_were_never_heard() -> None:
    world = started(options=ControllerOptions(members=("controller-1",)))
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView) and view.mode == "partitioned"
    [missed] = [node for node in view.nodes if node.node == "controller-1"]
    assert (missed.role, missed.state) == ("controller", "unknown")


def test_a_controller_that_stood_still_judges_nobody() -> None:
    world = started()
    world.now += 30
    world.deliver("controller-0", Resumed())
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView)
    assert {node.state for node in view.nodes} == {"alive"}


def test_late_ticks_are_lateness_of_our_own() -> None:
    world = started()
    world.now += 30
    world.tick("controller-0")
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView)
    assert {node.state for node in view.nodes} == {"alive"}


@pytest.mark.parametrize("message", [Ping(), RingGet()])
def test_what_no_controller_answers_is_refused(message: Message) -> None:
    """Rings least of all: whoever asks for one means that of the metadata's group."""
    world = started()
    answer = world.ask("controller-0", message)
    assert isinstance(answer, Failure) and answer.code == "refused"


def test_a_fenced_leader_stops() -> None:
    world = World(plans(2), controllers=2)
    world.elect("controller-0")
    world.term += 1
    world.fences["plan"] = world.fences["ring"] = world.term
    world.leader = "controller-1"
    world.beat("shard-0")
    world.beat("shard-1")
    assert not world.maps


def test_a_recall_without_an_answer_is_repeated() -> None:
    machine = Controller("controller-0", RULES, plans(2), ControllerOptions())
    first = machine.handle(Led(1, 100.0), 0.0)
    assert [type(effect) for effect in first] == [Recall]
    assert machine.handle(Led(1, 100.0), 1.0) == []
    due = machine.deadline()
    assert due is not None and due <= 5.0
    again = machine.handle(Led(1, 100.0), 5.0)
    assert [type(effect) for effect in again] == [Recall] and again != first


def test_ticks_never_spin() -> None:
    machine = Controller("controller-0", RULES, plans(2), ControllerOptions())
    machine.handle(Led(1, 100.0), 0.0)
    for step in range(40):
        due = machine.deadline()
        assert due is not None
        effects = machine.handle(Received(Origin(ConnectionId(1), step, b"", 1), ClusterGet()), due)
        assert isinstance(effects[0], Reply)
        assert not any(isinstance(effect, Note) for effect in effects)
        after = machine.deadline()
        assert after is not None and after > due


@pytest.mark.parametrize("leader", ["", "controller-7"])
def test_who_leads_is_what_the_lease_says(leader: str) -> None:
    world = World(plans(1))
    world.deliver("controller-0", Follows(leader, 4))
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView)
    assert (view.leader, view.term) == (leader, 4)


@pytest.mark.parametrize(
    ("heartbeat_s", "suspect_s", "dead_s"), [(2.0, 4.0, 6.0), (0.5, 1.0, 6.0), (10.0, 20.0, 30.0)]
)
def test_nobody_is_dead_within_three_heartbeats(heartbeat_s: float, suspect_s: float, dead_s: float) -> None:
    patience = ControllerOptions(heartbeat_s=heartbeat_s).patience
    assert (patience.suspect_s, patience.dead_s) == (suspect_s, dead_s)


def test_the_racks_are_those_of_nodes_that_are_heard_of() -> None:
    world = World(plans(4, racks=2))
    world.elect()
    world.run(3)
    controller = world.controllers["controller-0"]
    assert controller.racks == {"rack-0", "rack-1"}
    beat = controller.beat("shard-3")
    assert beat is not None and beat.rack == "rack-1" and controller.beat("shard-9") is None
    overtaken = replace(beat, number=0, rack="old")
    controller.handle(Received(Origin(ConnectionId(1), 1, b"node", 1), overtaken), world.now)
    assert controller.beat("shard-3") == beat, "one that was overtaken says nothing"


def test_who_left_is_forgotten() -> None:
    world = started()
    world.beat("launcher")
    world.nodes.pop("pool-0")
    world.launcher.plan = replace(world.launcher.plan, node="launcher-2")
    world.run(70)
    view = world.ask("controller-0", ClusterGet())
    assert isinstance(view, ClusterView)
    names = [node.node for node in view.nodes]
    assert "launcher" not in names and "launcher-2" in names
    assert "pool-0" in names, "it is planned"


def test_an_order_that_was_not_noted_when_the_lease_ended_is_unknown() -> None:
    world = started(4)
    world.note_outcome = lambda _: "unknown"
    with pytest.raises(NoAnswer):
        world.order(ScaleOrder(5))
    world.deliver("controller-0", Deposed())
    (answer,) = world.late_replies
    assert isinstance(answer, Failure) and answer.code == "outcome_unknown"


def test_a_leader_that_has_not_begun_takes_no_orders() -> None:
    world = World(plans(2))
    world.elect()
    answer = world.order(ScaleOrder(3))
    assert isinstance(answer, Failure) and answer.code == "unavailable"


def test_a_plan_that_cannot_be_read_is_made_again_from_the_map() -> None:
    world = started()
    world.records["plan"] = b"not a plan"
    world.kill_controller("controller-0")
    world.start_controller("controller-0")
    world.elect()
    world.run(5)
    assert world.ring.epoch == 1
    assert {node.node for node in decode_journal(world.records["plan"]).nodes} == set(world.nodes)
