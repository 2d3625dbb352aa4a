"""Heartbeats over peers that a test answers for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

from kvcomm.block import Incarnation
from kvcomm.heart import GAP_S, Face, Heart, Vitals
from kvcomm.steps import Answer, Ask
from kvcomm.wire.messages import (
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    HotReport,
    Message,
    NodePlan,
    RingMap,
    ShardLoad,
)

FACE = Face("shard-1", "shard", "r1", Incarnation(9), "tcp://h:1", "unix:///s", "h:2")
PERIOD_S = 0.05
LONG_S = 30.0
"""A period that no test waits for: what comes in time came at once."""
PATIENCE_S = 10.0
NAMES = ("controller-0", "controller-1")


def ring(epoch: int) -> RingMap:
    return RingMap(epoch, 1, 1, 1, 1, [], [])


class Peers:
    """Stands for ``AsyncPeers``: ``answers`` say what each address says, ``Failure`` where there is none."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self.answers: dict[str, HeartbeatAnswer] = {}
        self.sent: list[tuple[str, Message, float]] = []
        self.skipped_s = 0.0
        """By how much time jumps: the process stood still."""

    def clock(self) -> float:
        return time.monotonic() + self.skipped_s

    def start(
        self, asks: Sequence[Ask], deadline: float, done: Callable[[Answer], None] | None = None
    ) -> list[None]:
        assert deadline <= self.clock() + self.period_s, "no beat waits longer than for the next one"
        for ask in asks:
            self.sent.append((ask.address, ask.message, self.clock()))
            said = self.answers.get(ask.address, Failure("unavailable", "nobody there"))
            if done is not None:
                asyncio.get_running_loop().call_soon(done, Answer(said, [], self.clock()))
        return []

    def beats(self, name: str) -> list[Heartbeat]:
        return [each for at, each, _ in self.sent if at == f"at {name}" and isinstance(each, Heartbeat)]

    def times(self, name: str) -> list[float]:
        return [sent_at for at, _, sent_at in self.sent if at == f"at {name}"]


def told(peers: Peers, **answers: HeartbeatAnswer) -> None:
    for name, answer in answers.items():
        peers.answers[f"at {name.replace('_', '-')}"] = answer


def run(
    tell: Callable[[Peers, Heart], Coroutine[Any, Any, None]], period_s: float = PERIOD_S, **options: Any
) -> tuple[Peers, list[RingMap], list[Sequence[NodePlan]]]:
    peers, rings, plans = Peers(period_s), list[RingMap](), list[Sequence[NodePlan]]()

    async def story() -> None:
        fake: Any = peers
        heart = Heart(
            FACE, NAMES, lambda name: f"at {name}", fake, period_s=period_s,
            took_ring=rings.append, took_plan=plans.append, **options,
        )  # fmt: skip
        running = asyncio.create_task(heart.run())
        async with asyncio.timeout(PATIENCE_S):
            await tell(peers, heart)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())
    return peers, rings, plans


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


QUIET = HeartbeatAnswer("", 0)


def test_every_controller_hears_at_once_and_then_every_period() -> None:
    async def tell(peers: Peers, heart: Heart) -> None:
        told(peers, controller_0=QUIET, controller_1=QUIET)
        await until(lambda: len(peers.beats("controller-1")) == 3)

    begin = time.monotonic()
    peers, _, _ = run(tell, vitals=lambda: Vitals(silent=["x"], load=ShardLoad(2.0), running=["y"]))
    for name in NAMES:
        first = peers.beats(name)[0]
        assert (first.node, first.role, first.rack, first.incarnation) == ("shard-1", "shard", "r1", 9)
        assert (first.address, first.local_address, first.control) == ("tcp://h:1", "unix:///s", "h:2")
        assert (first.silent, first.load, first.running, first.epoch) == (["x"], ShardLoad(2.0), ["y"], 0)
    times = peers.times("controller-1")
    assert times[0] - begin < times[1] - begin
    assert all(after - before >= PERIOD_S for before, after in pairwise(times))
    numbers = [each.number for _, each, _ in peers.sent if isinstance(each, Heartbeat)]
    assert numbers == sorted(set(numbers))


def test_a_change_is_told_at_once_and_many_of_one_moment_once() -> None:
    async def tell(peers: Peers, heart: Heart) -> None:
        told(peers, controller_0=QUIET, controller_1=QUIET)
        await until(lambda: len(peers.beats("controller-0")) == 1)
        for _ in range(5):
            heart.beat()
        await until(lambda: len(peers.beats("controller-0")) == 2)
        await asyncio.sleep(5 * GAP_S)

    peers, _, _ = run(tell, LONG_S)
    assert [len(peers.beats(name)) for name in NAMES] == [2, 2]


def test_one_that_does_not_answer_is_tried_sooner_than_the_others() -> None:
    async def tell(peers: Peers, heart: Heart) -> None:
        told(peers, controller_0=QUIET)
        await until(lambda: len(peers.beats("controller-1")) >= 2)
        told(peers, controller_1=HeartbeatAnswer("controller-1", 0))
        await until(lambda: heart.leader)

    peers, _, _ = run(tell, LONG_S)
    assert len(peers.beats("controller-0")) == 1


def test_a_newer_ring_is_handed_on_once_and_told_from_then_on() -> None:
    async def tell(peers: Peers, heart: Heart) -> None:
        told(
            peers, controller_0=HeartbeatAnswer("", 7, ring(7)), controller_1=HeartbeatAnswer("", 5, ring(5))
        )
        await until(lambda: len(peers.beats("controller-1")) == 3)
        assert heart.newest == ring(7)

    peers, rings, _ = run(tell)
    assert rings == [ring(7)]
    assert [each.epoch for each in peers.beats("controller-0")] == [0, 7, 7]


def test_who_works_by_a_ring_of_its_own_tells_that_one() -> None:
    ours = ring(9)

    async def tell(peers: Peers, heart: Heart) -> None:
        told(peers, controller_0=HeartbeatAnswer("", 7, ring(7)), controller_1=QUIET)
        await until(lambda: len(peers.beats("controller-0")) == 2)

    peers, rings, _ = run(tell, ring=lambda: ours)
    assert [each.epoch for each in peers.beats("controller-0")] == [9, 9]
    assert rings == []


def test_a_controller_that_lost_its_ring_is_sent_ours_at_once_and_not_again_and_again() -> None:
    ours = ring(9)

    async def tell(peers: Peers, heart: Heart) -> None:
        told(peers, controller_0=HeartbeatAnswer("", 0, wants_ring=True), controller_1=QUIET)
        await until(lambda: len(peers.beats("controller-0")) == 2)
        await asyncio.sleep(5 * GAP_S)

    peers, _, _ = run(tell, LONG_S, ring=lambda: ours)
    assert [each.ring for each in peers.beats("controller-0")] == [None, ours]
    assert [each.ring for each in peers.beats("controller-1")] == [None]


def test_the_leader_is_believed_about_itself() -> None:
    async def tell(peers: Peers, heart: Heart) -> None:
        told(
            peers,
            controller_0=HeartbeatAnswer(
                "controller-0", 1, suspects=["pool-0"], plan=[NodePlan("n", "r", "k")]
            ),
            controller_1=HeartbeatAnswer("controller-9", 1, suspects=["all"]),
        )
        await until(lambda: len(peers.beats("controller-1")) == 2)
        assert (heart.leader, heart.suspects) == ("controller-0", ["pool-0"])
        told(peers, controller_0=QUIET, controller_1=HeartbeatAnswer("controller-1", 1))
        await until(lambda: heart.leader == "controller-1")

    _, _, plans = run(tell)
    assert plans[0] == [NodePlan("n", "r", "k")]


def test_a_beat_knows_by_how_much_it_is_late() -> None:
    async def tell(peers: Peers, heart: Heart) -> None:
        told(peers, controller_0=QUIET, controller_1=QUIET)
        await until(lambda: len(peers.beats("controller-0")) == 1)
        peers.skipped_s = 5.0
        await until(lambda: len(peers.beats("controller-0")) == 2)

    peers, _, _ = run(tell)
    first, second = peers.beats("controller-0")
    assert first.late_s < 2.0
    assert 4.0 < second.late_s < 6.0


def test_a_report_goes_to_every_controller_once_a_period_whoever_is_told_at_once() -> None:
    asked: list[float] = []

    def reports(now: float) -> Sequence[Message]:
        asked.append(now)
        return [HotReport(float(len(asked)), [], [])]

    async def tell(peers: Peers, heart: Heart) -> None:
        told(peers, controller_0=QUIET)  # the other one is tried again and again
        await until(lambda: len(peers.beats("controller-1")) >= 3)
        heart.beat()
        await until(lambda: len(peers.beats("controller-0")) == 2)

    peers, _, _ = run(tell, LONG_S, reports=reports)
    sent = [(at, message) for at, message, _ in peers.sent if isinstance(message, HotReport)]
    assert sent == [(f"at {name}", HotReport(1.0, [], [])) for name in NAMES]
