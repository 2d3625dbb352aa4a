"""Any order of orders, deaths, restarts and lost records: nothing acknowledged is lost, no two maps of one
epoch, and nothing is left over in the end.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.controller import ControllerOptions, Note, RingRules
from controller.moving import Moving
from kvcomm.wire.messages import (
    CancelOrder,
    ClusterGet,
    ClusterView,
    DrainOrder,
    Message,
    MoveOrder,
    NodePlan,
    ScaleOrder,
)
from tests.controller.world import KEYS, NoAnswer, Outcome, World, plans

RULES = RingRules(replicas=3, write_quorum=2, read_quorum=2, block_copies=1)
OPTIONS = ControllerOptions(replace_after_s=40.0, give_up_after_s=20.0)


@dataclass
class Story:
    """A world in which at most one shard is away at a time: more would be no quorum of three."""

    world: World
    away: NodePlan | None = None
    written: int = 0

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            if not self.world.leader:
                self.elect()
            self.world.run(1)
            shards = sorted(name for name, node in self.world.nodes.items() if node.plan.role == "shard")
            self.written += 1
            busy = KEYS[self.written % (len(KEYS) // 2)]  # the others keep what was written at first
            self.world.write(shards[self.written % len(shards)], busy, missed=True)
            self.world.check_records()

    def elect(self) -> None:
        self.world.on_note = lambda _: None
        for name in ("controller-0", "controller-1"):
            if name not in self.world.controllers:
                self.world.start_controller(name)
        self.world.elect("controller-1" if self.world.term % 2 else "controller-0")

    def order(self, message: Message) -> None:
        """It may die before it has answered."""
        with suppress(NoAnswer):
            self.world.order(message)

    def kill_leader(self, at_note: int, *, made: bool) -> None:
        """With a note of his that is still to come."""
        notes = 0

        def noted(note: Note) -> None:
            nonlocal notes
            notes += 1
            if notes == at_note and self.world.leader:
                if made:
                    self.world.fences[note.name] = self.world.term
                    self.world.records[note.name] = note.value
                self.world.kill_controller(self.world.leader)

        self.world.on_note = noted

    def hold(self, notes: int) -> None:
        """After so many more notes nobody knows what becomes of any, until they are let go on."""
        made = 0

        def outcome(_: Note) -> Outcome:
            nonlocal made
            made += 1
            return "done" if made <= notes else "unknown"

        self.world.note_outcome = outcome

    def release(self) -> None:
        self.world.note_outcome = lambda _: "done"

    def kill(self, index: int) -> None:
        shards = sorted(name for name, node in self.world.nodes.items() if node.plan.role == "shard")
        if self.away is None:
            self.away = self.world.kill(shards[index % len(shards)]).plan

    def split(self, index: int) -> None:
        """One shard or two are cut off from everything but clients."""
        shards = sorted(name for name, node in self.world.nodes.items() if node.plan.role == "shard")
        self.world.cut = {
            shards[each % len(shards)] for each in range(index // 2, index // 2 + 1 + index % 2)
        }

    def restart(self) -> None:
        if self.away is not None and self.away.node in self.world.dead:
            self.world.start(self.away)
        self.away = None

    def lose_records(self) -> None:
        """And all controllers: those that are left would still know the newest map."""
        for name in list(self.world.controllers):
            self.world.kill_controller(name)
        self.world.records.clear()
        self.world.fences.clear()

    def finish(self) -> None:
        self.restart()
        self.release()
        self.world.cut.clear()
        self.run(5)
        for _ in range(105):
            if not self.unfinished():
                break
            self.run(1)
        assert not self.unfinished()
        self.world.check_records()

    def unfinished(self) -> str:
        """What is not as it should be when nothing has happened for a while."""
        world = self.world
        if world.ring.transition is not None:
            return f"epoch {world.ring.epoch} is still a transition"
        running = sorted(name for name, node in world.nodes.items() if node.plan.role == "shard")
        if running != sorted(node.node for node in world.ring.shards):
            return f"{running} run"
        for name in running:
            node = world.nodes[name]
            if not node.epoch == node.clean == world.ring.epoch:
                return f"{name} works by {node.epoch} and is clean by {node.clean}, not {world.ring.epoch}"
        view = world.ask(world.leader, ClusterGet())
        assert isinstance(view, ClusterView)
        if view.mode != "whole":
            return f"the cluster is {view.mode}: {view.nodes}"
        return "".join(
            f"{each.what}: {each.step} {each.trouble}"
            for each in view.operations
            if each.step not in ("done", "cancelled", "rolled back", "failed")
        )


Kind = Literal[
    "run", "scale", "drain", "move", "cancel", "kill", "restart", "split", "heal", "leader", "lose"
]
actions = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.integers(1, 14)),
        st.tuples(st.just("scale"), st.integers(3, 6)),
        st.tuples(st.just("drain"), st.integers(0, 6)),
        st.tuples(st.just("move"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.just(0)),
        st.tuples(st.just("kill"), st.integers(0, 5)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("split"), st.integers(0, 7)),
        st.tuples(st.just("heal"), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 5)),
        st.tuples(st.just("release"), st.just(0)),
        st.tuples(st.just("leader"), st.integers(1, 5)),
        st.tuples(st.just("lose"), st.just(0)),
    ),
    max_size=14,
)


def told(story: Story, kind: str, number: int) -> None:
    """One thing happens."""
    world = story.world
    if kind in ("scale", "drain", "move", "cancel") and not world.leader:
        story.run(1)
    match kind:
        case "run":
            story.run(number)
        case "scale":
            story.order(ScaleOrder(number))
        case "drain":
            story.order(DrainOrder(f"shard-{number}"))
        case "move":
            story.order(MoveOrder(number << 62, (number << 62) + (1 << 61), f"shard-{number}"))
        case "cancel":
            view = world.ask(world.leader, ClusterGet())
            assert isinstance(view, ClusterView)
            if view.operations:
                story.order(CancelOrder(view.operations[0].operation))
        case "kill":
            story.kill(number)
        case "restart":
            story.restart()
        case "split":
            story.split(number)
        case "heal":
            world.cut.clear()
        case "hold":
            story.hold(number)
        case "release":
            story.release()
        case "leader":
            story.kill_leader(number, made=number % 2 == 0)
        case "lose":
            story.lose_records()


def story_begins() -> Story:
    story = Story(World(plans(4), controllers=2, rules=RULES, options=OPTIONS))
    story.run(5)
    for key in KEYS:
        assert story.world.write("shard-0", key, missed=True)
    return story


def tell(happenings: list[tuple[str, int]]) -> None:
    """From a cluster of four shards to where nothing happens any more."""
    story = story_begins()
    for kind, number in happenings:
        told(story, kind, number)
    story.finish()


@pytest.mark.slow
@given(actions)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_story_ends_well(happenings: list[tuple[str, int]]) -> None:
    tell(happenings)


def _never(*_: object, **__: object) -> str:
    """Nothing stands in the way."""
    return ""


def _without_readiness(moving: Moving) -> str:
    trouble = SERVE(moving)
    return "" if "get all that they gain" in trouble else trouble


SERVE = Moving._serve
SPLIT_AS_IT_SERVES = [
    ("scale", 5), ("hold", 2), ("run", 9), ("split", 1), ("release", 0), ("run", 14), ("heal", 0),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "planted", "story"),
    [
        ("_serve", _never, [("scale", 5)]),
        ("_serve", _without_readiness, [("scale", 5)]),
        ("_settled", _never, SPLIT_AS_IT_SERVES),
        ("_uncovered", _never, SPLIT_AS_IT_SERVES),
    ],
)
def test_every_condition_of_a_move_is_needed(
    condition: str, planted: object, story: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same story ends well with the condition and loses records without it."""
    tell(story)
    monkeypatch.setattr(Moving, condition, planted)
    with pytest.raises(AssertionError, match="misses"):
        tell(story)
