"""The supervisor machine: events in, effects out, literal times."""

from __future__ import annotations

import random

import pytest

from controller.supervisor import (
    BACKOFF_FIRST_S,
    HEALTHY_AFTER_S,
    START_TIMEOUT_S,
    STARTS_MAX,
    STOP_GRACE_S,
    ClusterServes,
    GiveUp,
    KillNode,
    NodeExited,
    NodeUp,
    PlanChanged,
    StartNode,
    StopNode,
    Supervisor,
)
from kvcomm.machine import Effect, Event, Tick
from kvcomm.wire.messages import NodePlan

PLAN = [
    NodePlan("controller-0", "controller", "r0"),
    NodePlan("pool-0", "pool", "r0"),
    NodePlan("shard-0", "shard", "r0"),
    NodePlan("shard-1", "shard", "r1"),
]
MORE = NodePlan("shard-2", "shard", "r0")


def started() -> Supervisor:
    supervisor = Supervisor(PLAN)
    assert supervisor.handle(Tick(), 0.0) == [StartNode(each) for each in PLAN], "controllers first"
    return supervisor


def all_up(now: float = 1.0) -> Supervisor:
    supervisor = started()
    for each in PLAN:
        assert not supervisor.all_up
        assert supervisor.handle(NodeUp(each.node), now) == []
    assert supervisor.all_up
    return supervisor


def test_a_node_that_ends_is_started_again_after_a_while() -> None:
    supervisor = all_up()
    assert supervisor.handle(NodeExited("shard-1", -9), 2.0) == []
    assert not supervisor.all_up
    assert supervisor.running == ["controller-0", "pool-0", "shard-0"]
    assert supervisor.deadline() == pytest.approx(2.0 + BACKOFF_FIRST_S)
    assert supervisor.handle(Tick(), 2.0 + BACKOFF_FIRST_S) == [StartNode(PLAN[3])]
    supervisor.handle(NodeUp("shard-1"), 3.0)
    assert supervisor.all_up
    assert [node.restarts for node in supervisor.report()] == [0, 0, 0, 1]


def test_each_early_end_makes_the_next_start_wait_longer_and_a_long_life_none() -> None:
    supervisor = all_up()
    supervisor.handle(ClusterServes(), 1.0)
    now, waits = 2.0, []
    for life_s in (0.1, 0.1, 0.1, HEALTHY_AFTER_S):
        supervisor.handle(NodeExited("shard-1", 1), now)
        due = supervisor.deadline()
        assert due is not None
        waits.append(round(due - now, 6))
        supervisor.handle(Tick(), due)
        supervisor.handle(NodeUp("shard-1"), due)
        now = due + life_s
    supervisor.handle(NodeExited("shard-1", 1), now)
    assert waits == [BACKOFF_FIRST_S * 2**count for count in range(4)]
    assert supervisor.deadline() == pytest.approx(now + BACKOFF_FIRST_S)


def test_what_is_planned_anew_starts_and_what_left_the_plan_ends() -> None:
    supervisor = all_up()
    assert supervisor.handle(PlanChanged([*PLAN, MORE]), 2.0) == [StartNode(MORE)]
    supervisor.handle(NodeUp(MORE.node), 3.0)
    assert supervisor.handle(PlanChanged(PLAN[:-1]), 4.0) == [StopNode("shard-1"), StopNode("shard-2")]
    assert supervisor.running == [each.node for each in [*PLAN, MORE]], "until they have ended"
    assert supervisor.handle(NodeExited("shard-1", 0), 4.1) == []
    assert supervisor.handle(Tick(), 4.0 + STOP_GRACE_S) == [KillNode("shard-2")]
    assert supervisor.handle(NodeExited("shard-2", -9), 4.2 + STOP_GRACE_S) == []
    assert supervisor.running == [each.node for each in PLAN[:-1]]
    assert supervisor.deadline() is None, "nobody starts them again"
    assert supervisor.all_up


def test_beside_a_cluster_that_serves_new_nodes_start_one_after_the_other() -> None:
    supervisor, third = all_up(), NodePlan("shard-3", "shard", "r0")
    supervisor.handle(ClusterServes(), 1.5)
    assert supervisor.handle(PlanChanged([*PLAN, MORE, third]), 2.0) == [StartNode(MORE)]
    assert supervisor.handle(NodeExited("shard-0", -9), 2.1) == []
    assert supervisor.handle(Tick(), 2.1 + BACKOFF_FIRST_S) == [StartNode(PLAN[2])], (
        "it served: it need not wait"
    )
    assert supervisor.handle(NodeUp(MORE.node), 3.0) == []
    assert supervisor.handle(NodeUp("shard-0"), 3.1) == [StartNode(third)]
    supervisor.handle(NodeUp(third.node), 3.2)
    assert supervisor.all_up


def test_one_that_does_not_come_up_holds_no_other_back_for_good() -> None:
    supervisor, third = all_up(), NodePlan("shard-3", "shard", "r0")
    supervisor.handle(ClusterServes(), 1.5)
    supervisor.handle(PlanChanged([*PLAN, MORE, third]), 2.0)
    effects = supervisor.handle(Tick(), 2.0 + START_TIMEOUT_S)
    assert effects == [KillNode(MORE.node), StartNode(third)]


def test_what_becomes_of_a_node_that_ended_is_told() -> None:
    supervisor = all_up()
    supervisor.handle(PlanChanged(PLAN[:-1]), 2.0)
    supervisor.handle(NodeExited("shard-1", 0), 2.1)
    assert supervisor.fate("shard-1") == "stopped"
    supervisor.handle(PlanChanged(PLAN[:-2]), 2.2)
    supervisor.handle(PlanChanged(PLAN[:-1]), 2.3)
    supervisor.handle(NodeExited("shard-0", 0), 2.4)
    assert supervisor.fate("shard-0") == "stopped", "and its successor is on its way"
    supervisor.handle(NodeExited("pool-0", 0), 2.5)
    assert supervisor.fate("pool-0") == "starts again"


def test_one_that_is_wanted_again_while_it_ends_is_started_once_it_has() -> None:
    supervisor = all_up()
    supervisor.handle(PlanChanged(PLAN[:-1]), 2.0)
    assert supervisor.handle(PlanChanged(PLAN), 2.1) == []
    supervisor.check()
    assert supervisor.handle(NodeExited("shard-1", 0), 2.2) == [StartNode(PLAN[3])]


def test_one_that_waits_to_be_started_again_is_forgotten_with_the_plan() -> None:
    supervisor = all_up()
    supervisor.handle(NodeExited("shard-1", 1), 2.0)
    assert supervisor.handle(PlanChanged(PLAN[:-1]), 2.0) == []
    assert supervisor.deadline() is None


def test_one_that_came_up_although_it_was_told_to_end_is_not_up() -> None:
    supervisor = started()
    assert supervisor.handle(PlanChanged(PLAN[:-1]), 0.5) == [StopNode("shard-1")]
    supervisor.handle(NodeUp("shard-1"), 0.6)
    assert supervisor.handle(Tick(), 0.5 + STOP_GRACE_S) == [KillNode("shard-1")]
    assert supervisor.handle(NodeExited("shard-1", -9), 6.0) == []
    supervisor.handle(NodeUp("shard-1"), 6.1)
    supervisor.check()


def test_a_node_that_never_comes_up_is_killed_and_started_again() -> None:
    supervisor = started()
    assert supervisor.handle(Tick(), START_TIMEOUT_S) == [KillNode(each.node) for each in PLAN]
    supervisor.handle(NodeExited("pool-0", -9), START_TIMEOUT_S + 0.1)
    assert StartNode(PLAN[1]) in supervisor.handle(Tick(), START_TIMEOUT_S + 1.0)


def test_a_slow_starter_gets_more_time_after_each_try() -> None:
    supervisor = Supervisor(PLAN[:1])
    supervisor.handle(Tick(), 0.0)
    supervisor.handle(ClusterServes(), 0.0)
    began, waits = 0.0, []
    for _ in range(6):
        due = supervisor.deadline()
        assert due is not None
        waits.append(due - began)
        assert supervisor.handle(Tick(), due) == [KillNode(PLAN[0].node)]
        supervisor.handle(NodeExited(PLAN[0].node, -9), due)
        again = supervisor.deadline()
        assert again is not None
        assert supervisor.handle(Tick(), again) == [StartNode(PLAN[0])]
        began = again
    assert waits == pytest.approx([START_TIMEOUT_S * times for times in (1, 2, 4, 8, 8, 8)])


def test_a_kill_that_got_lost_is_repeated_soon_and_costs_no_patience() -> None:
    supervisor, now = Supervisor(PLAN[:1]), START_TIMEOUT_S
    supervisor.handle(Tick(), 0.0)
    for _ in range(3):
        assert supervisor.deadline() == now
        assert supervisor.handle(Tick(), now) == [KillNode(PLAN[0].node)]
        supervisor.handle(NodeUp(PLAN[0].node), now)  # too late: it is being killed
        now += STOP_GRACE_S
    supervisor.handle(NodeExited(PLAN[0].node, -9), now)
    again = supervisor.deadline()
    assert again is not None
    supervisor.handle(Tick(), again)
    assert supervisor.deadline() == again + 2 * START_TIMEOUT_S
    supervisor.handle(NodeUp(PLAN[0].node), again + 1.0)
    supervisor.handle(NodeExited(PLAN[0].node, 1), again + 1.0 + HEALTHY_AFTER_S)
    again = supervisor.deadline()
    assert again is not None
    supervisor.handle(Tick(), again)
    assert supervisor.deadline() == again + START_TIMEOUT_S, "it has been well since"


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        Supervisor([PLAN[0], PLAN[0]])


def test_random_plans_and_lives_end_with_what_is_planned() -> None:
    names = [NodePlan(f"shard-{index}", "shard", "r") for index in range(5)]
    for seed in range(60):
        draw = random.Random(seed)
        supervisor, now = Supervisor(names[:2]), 0.0
        supervisor.handle(ClusterServes(), now)
        alive: dict[str, str] = {}  # node -> what was asked of its process last

        def tell(event: Event, seed: int = seed) -> None:
            for effect in supervisor.handle(event, now):  # noqa: B023 - called in this turn
                match effect:
                    case StartNode():
                        assert effect.plan.node not in alive, (seed, "two processes of one node")  # noqa: B023
                        alive[effect.plan.node] = "start"  # noqa: B023
                    case StopNode():
                        alive[effect.node] = "stop"  # noqa: B023
                    case KillNode():
                        alive[effect.node] = "kill"  # noqa: B023

        for step in range(200):
            now += draw.random()
            quiet = step > 120
            tell(Tick())
            if not quiet and draw.random() < 0.1:
                tell(PlanChanged(draw.sample(names, draw.randint(0, 5))))
            for name, asked in list(alive.items()):
                if draw.random() < 0.3 and (asked in ("stop", "kill") or not quiet):
                    del alive[name]
                    tell(NodeExited(name, 1))
                elif asked == "start" and draw.random() < 0.5:
                    tell(NodeUp(name))
            supervisor.check()
        assert set(alive) == {each.node for each in supervisor.plan}, seed
        assert supervisor.all_up, (seed, supervisor.report())


def crash(supervisor: Supervisor, node: str, now: float, times: int) -> tuple[list[Effect], float]:
    """End a node early again and again; what the last end led to."""
    effects: list[Effect] = []
    for _ in range(times):
        effects = supervisor.handle(NodeExited(node, 2), now)
        now = supervisor.deadline() or now
        if not effects:
            supervisor.handle(Tick(), now)
    return effects, now


@pytest.mark.parametrize("node", ["shard-1", "controller-0"])
def test_a_node_that_never_comes_up_is_given_up(node: str) -> None:
    supervisor = started()
    effects, now = crash(supervisor, node, 1.0, STARTS_MAX - 1)
    assert effects == []
    assert crash(supervisor, node, now, 1)[0] == [GiveUp(node, 2)]
    assert supervisor.fate(node) == "given up"


def test_coming_up_for_a_moment_is_no_success() -> None:
    supervisor, now = started(), 1.0
    effects: list[Effect] = []
    for _ in range(STARTS_MAX):
        supervisor.handle(NodeUp("shard-1"), now)
        effects = supervisor.handle(NodeExited("shard-1", 1), now + HEALTHY_AFTER_S / 2)
        now = supervisor.deadline() or now
        if not effects:
            now = max(now, supervisor.deadline() or now) + 6.0
            supervisor.handle(Tick(), now)
    assert effects == [GiveUp("shard-1", 1)]


def test_a_cluster_that_has_served_is_never_given_up() -> None:
    supervisor = all_up()
    supervisor.handle(ClusterServes(), 1.0)
    effects, _ = crash(supervisor, "shard-1", 1.0, 3 * STARTS_MAX)
    assert not any(isinstance(effect, GiveUp) for effect in effects)
