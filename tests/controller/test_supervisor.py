"""The supervisor machine: events in, effects out, literal times."""

from __future__ import annotations

import random

import pytest

from controller.supervisor import (
    BACKOFF_FIRST_S,
    HEALTHY_AFTER_S,
    START_TIMEOUT_S,
    STARTS_MAX,
    GiveUp,
    HandRing,
    IssueRing,
    KillNode,
    NodeExited,
    NodeSpec,
    NodeUp,
    RingRules,
    RingTaken,
    StartNode,
    Supervisor,
)
from kvcomm.machine import Effect, Tick

RULES = RingRules(replicas=2, write_quorum=2, read_quorum=1, block_copies=1)
SPECS = [
    NodeSpec("pool-0", "pool", "r0"),
    NodeSpec("shard-0", "shard", "r0"),
    NodeSpec("shard-1", "shard", "r1"),
]


def up(node: str, port: int = 1) -> NodeUp:
    return NodeUp(node, f"tcp://127.0.0.1:{port}", f"unix:///{node}", f"127.0.0.1:{port + 1}")


def started(last_epoch: int = 0) -> Supervisor:
    supervisor = Supervisor(SPECS, RULES, last_epoch)
    assert supervisor.handle(Tick(), 0.0) == [StartNode(spec) for spec in SPECS]
    return supervisor


def test_first_epoch_waits_for_every_node_and_goes_to_every_shard() -> None:
    supervisor = started()
    assert supervisor.handle(up("pool-0"), 1.0) == []
    assert supervisor.handle(up("shard-0"), 1.0) == []
    effects = supervisor.handle(up("shard-1"), 1.0)
    ring = supervisor.ring
    assert ring is not None and ring.epoch == 1
    assert effects == [
        IssueRing(ring),
        HandRing("shard-0", "127.0.0.1:2", ring),
        HandRing("shard-1", "127.0.0.1:2", ring),
    ]
    assert not supervisor.ready
    assert supervisor.handle(RingTaken("shard-0", 1, True), 1.1) == []
    assert supervisor.handle(RingTaken("shard-1", 1, True), 1.1) == []
    assert supervisor.ready


def test_epochs_go_on_from_the_last_one_ever_issued() -> None:
    supervisor = started(last_epoch=41)
    for spec in SPECS:
        supervisor.handle(up(spec.node), 1.0)
    assert supervisor.ring is not None and supervisor.ring.epoch == 42


def test_restart_after_backoff_makes_an_epoch_with_the_same_placement() -> None:
    supervisor = started()
    for spec in SPECS:
        supervisor.handle(up(spec.node), 1.0)
    for node in ("shard-0", "shard-1"):
        supervisor.handle(RingTaken(node, 1, True), 1.0)
    assert supervisor.handle(NodeExited("shard-1", -9), 2.0) == []
    assert supervisor.deadline() == pytest.approx(2.0 + BACKOFF_FIRST_S)
    assert supervisor.handle(Tick(), 2.0 + BACKOFF_FIRST_S) == [StartNode(SPECS[2])]
    effects = supervisor.handle(up("shard-1", port=9), 3.0)
    assert isinstance(effects[0], IssueRing) and effects[0].ring.epoch == 2
    assert [effect.node for effect in effects[1:] if isinstance(effect, HandRing)] == ["shard-0", "shard-1"]
    assert [node.node for node in effects[0].ring.shards] == ["shard-0", "shard-1"]


def test_a_node_that_comes_back_at_the_same_address_hears_the_old_epoch() -> None:
    supervisor = started()
    for spec in SPECS:
        supervisor.handle(up(spec.node), 1.0)
    for node in ("shard-0", "shard-1"):
        supervisor.handle(RingTaken(node, 1, True), 1.0)
    supervisor.handle(NodeExited("shard-0", 1), 2.0)
    supervisor.handle(Tick(), 3.0)
    assert [type(effect) for effect in supervisor.handle(up("shard-0"), 4.0)] == [HandRing]
    assert supervisor.last_epoch == 1


def test_unreachable_shard_is_told_again() -> None:
    supervisor = started()
    for spec in SPECS:
        supervisor.handle(up(spec.node), 1.0)
    supervisor.handle(RingTaken("shard-0", 1, False), 2.0)
    due = supervisor.deadline()
    assert due is not None and due > 2.0
    assert [effect.node for effect in supervisor.handle(Tick(), due) if isinstance(effect, HandRing)] == [
        "shard-0"
    ]


def test_a_node_that_never_comes_up_is_killed_and_started_again() -> None:
    supervisor = started()
    assert supervisor.handle(Tick(), START_TIMEOUT_S) == [KillNode(spec.node) for spec in SPECS]
    supervisor.handle(NodeExited("pool-0", -9), START_TIMEOUT_S + 0.1)
    assert StartNode(SPECS[0]) in supervisor.handle(Tick(), START_TIMEOUT_S + 1.0)


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        Supervisor([SPECS[0], SPECS[0]], RULES)


def test_random_lives_keep_the_invariants_and_end_ready() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        supervisor, now = started(), 0.0
        epochs: list[int] = []
        starting, running = {spec.node for spec in SPECS}, set[str]()
        for step in range(200):
            now += draw.random()
            quiet = step > 150  # no more faults: the cluster must become ready
            if starting and (quiet or draw.random() < 0.5):
                node = sorted(starting)[0]
                starting.discard(node)
                running.add(node)
                effects = supervisor.handle(up(node, port=draw.randint(1, 3)), now)
            elif running and not quiet and draw.random() < 0.3:
                node = draw.choice(sorted(running))
                running.discard(node)
                effects = supervisor.handle(NodeExited(node, -9), now)
            else:
                effects = supervisor.handle(Tick(), now)
            while effects:
                effect = effects.pop(0)
                if isinstance(effect, StartNode):
                    starting.add(effect.spec.node)
                elif isinstance(effect, IssueRing):
                    epochs.append(effect.ring.epoch)
                elif isinstance(effect, HandRing) and effect.node in running:
                    taken = quiet or draw.random() < 0.7
                    effects += supervisor.handle(RingTaken(effect.node, effect.ring.epoch, taken), now)
            supervisor.check()
        assert epochs == list(range(1, len(epochs) + 1)), seed
        assert supervisor.ready, (seed, supervisor.report())


def crash(supervisor: Supervisor, node: str, now: float, times: int) -> tuple[list[Effect], float]:
    """End a node early again and again; what the last end led to."""
    effects: list[Effect] = []
    for _ in range(times):
        effects = supervisor.handle(NodeExited(node, 2), now)
        now = supervisor.deadline() or now
        if not effects:
            supervisor.handle(Tick(), now)
    return effects, now


def test_a_node_that_never_comes_up_is_given_up() -> None:
    supervisor = started()
    effects, now = crash(supervisor, "shard-1", 1.0, STARTS_MAX - 1)
    assert effects == []
    assert crash(supervisor, "shard-1", now, 1)[0] == [GiveUp("shard-1", 2)]


def test_coming_up_for_a_moment_is_no_success() -> None:
    supervisor, now = started(), 1.0
    effects: list[Effect] = []
    for _ in range(STARTS_MAX):
        supervisor.handle(up("shard-1"), now)
        effects = supervisor.handle(NodeExited("shard-1", 1), now + HEALTHY_AFTER_S / 2)
        now = supervisor.deadline() or now
        if not effects:
            now = max(now, supervisor.deadline() or now) + 6.0
            supervisor.handle(Tick(), now)
    assert effects == [GiveUp("shard-1", 1)]


def test_a_cluster_that_was_ready_is_never_given_up() -> None:
    supervisor = started()
    for spec in SPECS:
        supervisor.handle(up(spec.node), 1.0)
    for node in ("shard-0", "shard-1"):
        supervisor.handle(RingTaken(node, 1, True), 1.0)
    assert supervisor.ready
    effects, _ = crash(supervisor, "shard-1", 1.0, 3 * STARTS_MAX)
    assert not any(isinstance(effect, GiveUp) for effect in effects)
