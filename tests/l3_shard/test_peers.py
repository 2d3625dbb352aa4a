"""Who is called silent and when, among watches in virtual time; links are cut, processes are paused and
starved."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.machine import Answered, AskPeer
from kvcomm.wire.messages import Done, Failure, Message, Ping, Pong, RingGet, RingMap, RingNode
from l3_shard.desk import Desk, ShardLimits
from l3_shard.peers import PeerWatch, WatchOptions
from l3_shard.ring import Ring
from l3_shard.timers import Timers

OPTIONS = WatchOptions()
DELAY_S = 0.001


def ring_of(names: str, epoch: int = 1) -> Ring:
    shards = [RingNode(name, f"tcp://{name}:1", "", "", name, 1) for name in names]
    return Ring.from_map(RingMap(epoch, 1, 1, 1, 1, shards, []))


@dataclass
class Node:
    """One shard's watch, its desk and its clock."""

    world: World
    name: str
    paused_until: float = 0.0
    lag_s: float = 0.0
    """Whatever it does comes so much later: it has too little processor time."""
    said: list[tuple[float, str, str]] = field(default_factory=list)
    asked: int = 0
    """Pings."""
    tick_at: float = math.inf

    def __post_init__(self) -> None:
        numbers = count(1)
        self.timers, self.desk = Timers(numbers), Desk(ShardLimits(), numbers)
        self.watch = PeerWatch(
            self.name,
            OPTIONS,
            self.desk,
            self.timers,
            ring=lambda: self.world.ring,
            silenced=lambda node: self.said.append((self.world.now, "silent", node)),
            gone=lambda node: self.said.append((self.world.now, "gone", node)),
            returned=lambda node, since: self.said.append((self.world.now, "back", node)),
        )
        self.timers.at(0.0, self.watch.ring_changed)

    def do(self, action: Callable[[], None]) -> None:
        """When it comes to it."""
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, lambda: self.do(action))
            return
        self.desk.now = self.world.now
        action()
        self.timers.run(self.world.now)
        self.watch.check()
        for effect in self.desk.take():
            assert isinstance(effect, AskPeer)
            self.asked += isinstance(effect.message, Ping)
            self.world.carry(self, effect)
        self._arm()

    def _arm(self) -> None:
        due = self.timers.deadline()
        if due is None or self.tick_at <= due:
            return
        self.tick_at = due
        lag_s = self.lag_s * self.world.draw.random() if self.lag_s else 0.0
        self.world.at(due + lag_s, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        def tick() -> None:
            if self.tick_at == due:
                self.tick_at = math.inf

        self.do(tick)

    def ask(self, node: str) -> None:
        self.do(lambda: self.desk.ask(node, RingGet(), lambda _: None))


@dataclass
class World:
    names: str
    seed: int = 1
    now: float = 0.0
    cuts: set[tuple[str, str]] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.draw, self.order = Random(self.seed), count()
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.ring = ring_of(self.names)
        self.nodes = {name: Node(self, name) for name in self.names}
        for node in self.nodes.values():
            node.do(lambda: None)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (max(when, self.now), next(self.order), action))

    def carry(self, asker: Node, effect: AskPeer) -> None:
        done = False

        def answer(message: Message) -> None:
            nonlocal done
            if not done:
                done = True
                asker.do(lambda: asker.desk.answered(Answered(effect.ticket, message)))

        def arrives() -> None:
            if (asker.name, effect.node) not in self.cuts:
                reply: Message = Pong() if isinstance(effect.message, Ping) else Done()
                self.nodes[effect.node].do(lambda: self.at(self.now + DELAY_S, lambda: returns(reply)))

        def returns(reply: Message) -> None:
            if (effect.node, asker.name) not in self.cuts:
                answer(reply)

        self.at(effect.deadline, lambda: answer(Failure("unavailable", "no answer in time")))
        if effect.node in self.refusing:
            self.at(self.now + DELAY_S, lambda: answer(Failure("unavailable", "refused")))
        else:
            self.at(self.now + DELAY_S, arrives)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.agenda and self.agenda[0][0] <= until:
            self.now, _, action = heapq.heappop(self.agenda)
            action()
        self.now = until

    def split(self, *sides: str) -> None:
        self.cuts = {(a, b) for one in sides for a in one for b in self.names if b not in one}

    def silent(self, name: str) -> str:
        return "".join(self.nodes[name].watch.silent)

    def false_alarms(self) -> list[tuple[float, str, str]]:
        return [said for node in self.nodes.values() for said in node.said]


def test_who_is_whole_pings_now_and_then_and_who_talks_not_at_all() -> None:
    world = World("abc")
    world.run(60.0)
    assert not world.false_alarms()
    assert all(node.watch.mode == "whole" and 50 <= node.asked <= 80 for node in world.nodes.values())
    before = world.nodes["a"].asked
    for _ in range(600):
        world.nodes["a"].ask("b")
        world.nodes["a"].ask("c")
        world.run(0.1)
    assert world.nodes["a"].asked == before


@pytest.mark.parametrize(("sides", "modes"), [
    (("ab", "cde"), ("minority", "majority")), (("abcd", "e"), ("majority", "minority")),
    (("ab", "cd"), ("minority", "minority")), (("a", "b"), ("minority", "minority")),
])  # fmt: skip
def test_each_side_of_a_split_knows_which_it_is(sides: tuple[str, str], modes: tuple[str, str]) -> None:
    world = World("".join(sides))
    world.run(10.0)
    world.split(*sides)
    world.run(4.0)
    for side, other, mode in ((sides[0], sides[1], modes[0]), (sides[1], sides[0], modes[1])):
        for name in side:
            assert (world.silent(name), world.nodes[name].watch.mode) == (other, mode)
    world.run(20.0)
    world.cuts.clear()
    world.run(0.5)
    assert all(node.watch.mode == "whole" and not node.watch.silent for node in world.nodes.values())
    for node in world.nodes.values():
        counts = node.watch.view()
        assert counts.silenced_count == counts.returned_count and 20.0 < counts.split_s < 25.0


@pytest.mark.parametrize("cut", [("a", "b"), ("b", "a")])
def test_a_link_that_is_dead_in_one_direction_is_dead(cut: tuple[str, str]) -> None:
    world = World("abc")
    world.run(5.0)
    world.cuts = {cut}
    world.run(4.0)
    assert (world.silent("a"), world.silent("b"), world.silent("c")) == ("b", "a", "")


def test_traffic_makes_silence_known_sooner() -> None:
    world = World("abc")
    world.run(5.0)
    for name in "bc":
        world.nodes["a"].ask(name)
    world.run(0.01)
    world.split("a", "bc")
    world.refusing = set()
    asked_at = world.now
    world.nodes["a"].do(lambda: world.nodes["a"].desk.ask("b", RingGet(), lambda _: None, timeout_s=0.2))
    world.run(4.0)
    at = {who: at for at, what, who in world.nodes["a"].said}
    assert at["b"] - asked_at < 0.2 + OPTIONS.silence_s + 2 * OPTIONS.quick_s < at["c"] - asked_at + 1.0


def test_a_process_that_is_gone_is_silent_too() -> None:
    world = World("abc")
    world.run(5.0)
    world.refusing = {"c"}
    world.run(4.0)
    assert world.silent("a") == "c" and world.nodes["a"].watch.mode == "majority"
    world.refusing.clear()
    world.run(0.5)
    assert world.silent("a") == ""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_pauses_of_a_second_are_no_silence_neither_of_oneself_nor_of_others(seed: int) -> None:
    """An hour of it."""
    world = World("abc", seed)
    for _ in range(1200):
        world.run(world.draw.uniform(0.3, 5.0))
        world.nodes["b"].paused_until = world.now + 1.0
        world.run(1.0)
    assert world.false_alarms() == []


@pytest.mark.parametrize("pause_s", [3.0, 30.0])
def test_who_stood_still_suspects_itself_first(pause_s: float) -> None:
    world = World("abc")
    for _ in range(20):
        world.run(world.draw.uniform(3.0, 6.0))
        world.nodes["b"].paused_until = world.now + pause_s
        world.nodes["b"].do(world.nodes["b"].watch.resumed)
        world.run(pause_s)
    assert not world.nodes["b"].said, "it was away, not they"
    assert {who for _, _, who in world.nodes["a"].said} == {"b"}
    world.run(10.0)  # it has been so often that it must be steady for a while
    assert world.silent("a") == ""


@pytest.mark.parametrize("lag_s", [0.2, 1.0, 3.0])
def test_who_is_starved_blames_nobody(lag_s: float) -> None:
    """Whatever it does comes late; and it says so."""
    world = World("abc")
    world.nodes["b"].lag_s = lag_s
    world.run(600.0)
    assert not world.nodes["b"].said and world.nodes["b"].watch.view().late_s > 0.2 * lag_s
    assert world.nodes["a"].watch.view().late_s == 0.0


def test_a_starved_process_finds_out_about_a_real_silence_all_the_same() -> None:
    world = World("abc")
    world.nodes["b"].lag_s = 0.25
    world.run(10.0)
    world.split("b", "ac")
    world.run(12.0)
    assert world.silent("b") == "ac"


def test_a_link_that_flaps_makes_no_storm() -> None:
    world = World("ab")
    for _ in range(60):
        world.split("a", "b")
        world.run(0.5)
        world.cuts.clear()
        world.run(0.5)
    assert len(world.false_alarms()) <= 2
    changes = len(world.nodes["a"].said)
    for _ in range(60):  # slowly enough to be silence each time
        world.split("a", "b")
        world.run(3.0)
        world.cuts.clear()
        world.run(3.0)
    assert len(world.nodes["a"].said) - changes <= 30, "360 s in which it could be 120"
    world.run(15.0)
    assert world.silent("a") == ""


def test_shards_come_and_go_with_the_ring() -> None:
    world = World("abc")
    world.run(5.0)
    world.split("ab", "c")
    world.run(5.0)
    assert world.silent("a") == "c"
    world.ring = ring_of("ab", 2)
    for name in "ab":
        world.nodes[name].do(world.nodes[name].watch.ring_changed)
    assert world.silent("a") == "" and world.nodes["a"].watch.mode == "whole"
    assert world.nodes["a"].said[-1][1:] == ("gone", "c")
    world.ring = ring_of("bc", 3)
    for name in "abc":
        world.nodes[name].do(world.nodes[name].watch.ring_changed)
    world.run(5.0)
    assert (world.silent("a"), world.silent("b")) == ("", "c"), "who is in no ring watches nobody"
    asked = world.nodes["a"].asked
    world.run(10.0)
    assert world.nodes["a"].asked == asked
    world.ring = ring_of("abc", 4)
    for name in "abc":
        world.nodes[name].do(world.nodes[name].watch.ring_changed)
    world.cuts.clear()
    world.run(5.0)
    assert world.nodes["a"].asked > asked and world.silent("b") == ""


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 6))
def test_whatever_happened_it_is_known_in_time_and_over_in_time(seed: int, size: int) -> None:
    world = World("abcdef"[:size], seed)
    draw = world.draw
    for _ in range(3):
        world.run(20.0)
        assert not any(node.watch.silent for node in world.nodes.values())
        one = "".join(draw.sample(world.names, draw.randint(1, size - 1)))
        other = "".join(name for name in world.names if name not in one)
        world.split(one, other)
        world.run(4.0 + draw.uniform(0.0, 60.0))
        assert all(set(world.silent(name)) == set(other) for name in one)
        assert all(set(world.silent(name)) == set(one) for name in other)
        world.cuts.clear()
        world.run(0.5)
        assert not any(node.watch.silent for node in world.nodes.values())
