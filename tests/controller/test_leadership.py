"""The lease's shell and the two records, over one register each and a clock that the test moves."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from controller.leadership import LEASE, PLAN, RING, Leadership, Recollection, tenure_of
from kvcomm.errors import OutcomeUnknown, Unavailable
from kvcomm.lease import margin_s
from kvcomm.leaseplane import LeasePlane
from kvcomm.metrics import Metrics
from kvcomm.steps import Park, Steps
from kvcomm.strongplane import StrongPlane
from kvcomm.tally import Tally
from kvcomm.wire.messages import RingMap, StrongOrder, StrongOutcome
from l3_shard.acceptor import NOTHING
from l3_shard.proposer import READ, apply
from l3_shard.ring import encode_map

TTL_S = 6.0
RING_MAP = RingMap(7, 1, 1, 1, 1, [], [])


class Clock:
    """Time passes when everybody waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self.now + seconds, next(self._order), future))
        await future

    async def run(self, seconds: float) -> None:
        until = self.now + seconds
        await _settle()
        while self._waiting and self._waiting[0][0] <= until:
            at, _, future = heapq.heappop(self._waiting)
            self.now = max(self.now, at)  # later, if somebody stood still meanwhile
            if not future.done():
                future.set_result(None)
            await _settle()
        self.now = max(self.now, until)


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Registers:
    """Of the whole group; ``failures`` happen to the changes that come next, instead or after the fact."""

    def __init__(self) -> None:
        self.records = {}  # type: ignore[var-annotated]
        self.away = False
        """No majority."""
        self.lost_answers = 0
        self._ballots = count(1)

    def strong_read(self, keys: Sequence[bytes]) -> Steps[list[StrongOutcome]]:
        yield from ()
        return [self._apply(StrongOrder(key, READ)) for key in keys]

    def strong_change(self, orders: Sequence[StrongOrder]) -> Steps[list[StrongOutcome]]:
        yield from ()
        return [self._apply(order) for order in orders]

    def _apply(self, order: StrongOrder) -> StrongOutcome:
        if self.away:
            raise Unavailable("no majority")
        outcome, self.records[order.key] = apply(
            order, self.records.get(order.key, NOTHING), b"%08d" % next(self._ballots)
        )
        if self.lost_answers and order.op != READ:
            self.lost_answers -= 1
            raise OutcomeUnknown("no answer")
        return outcome


@dataclass
class Group:
    """How one controller sees the registers."""

    clock: Clock
    registers: Registers
    strong: StrongPlane = field(init=False)
    leases: LeasePlane = field(init=False)

    def __post_init__(self) -> None:
        tally = Tally(Metrics("client"), self.now)
        self.strong = StrongPlane(self.registers, tally, lambda: 0.5)
        self.leases = LeasePlane(self.strong, self.now, lambda: 0.5, lambda: "nobody")

    def now(self) -> float:
        return self.clock.now

    async def run(self, steps: Steps[Any], timeout_s: float) -> Any:
        until = self.clock.now + timeout_s
        try:
            step = next(steps)
            while True:
                assert isinstance(step, Park)
                left_s = max(0.0, until - self.clock.now)
                await self.clock.sleep(min(left_s, left_s if step.timeout_s is None else step.timeout_s))
                step = steps.send(False)
        except StopIteration as end:
            return end.value
        finally:
            steps.close()


class World:
    def __init__(self) -> None:
        self.clock, self.registers = Clock(), Registers()
        self.said: dict[str, list[Any]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def controller(self, node: str, incarnation: int = 1) -> Leadership:
        said = self.said.setdefault(f"{node}/{incarnation}", [])
        return Leadership(
            Group(self.clock, self.registers),
            tenure_of(node, incarnation, TTL_S),
            led=lambda term, until: said.append((term, until)),
            deposed=lambda: said.append("deposed"),
            follows=lambda leader, term: said.append((leader, term)),
            sleep=self.clock.sleep,
        )

    def start(self, leadership: Leadership) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(leadership.run()))
        return self.tasks[-1]


def story(tell: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        world = World()
        try:
            await tell(world)
        finally:
            for task in world.tasks:
                task.cancel()
            await asyncio.gather(*world.tasks, return_exceptions=True)

    asyncio.run(whole())


def test_the_first_one_leads_at_once_and_renews_every_third_of_the_lease() -> None:
    async def tell(world: World) -> None:
        world.start(world.controller("controller-0"))
        begin = world.clock.now
        await world.clock.run(5.0)
        assert world.said["controller-0/1"] == [(1, begin + at + TTL_S) for at in (0.0, 2.0, 4.0)]

    story(tell)


def test_others_follow_it_and_one_of_them_leads_when_it_is_gone() -> None:
    async def tell(world: World) -> None:
        leader = world.start(world.controller("controller-0"))
        await world.clock.run(1.0)
        world.start(world.controller("controller-1"))
        await world.clock.run(5.0)
        assert world.said["controller-1/1"] == [("controller-0", 1)]
        leader.cancel()  # killed: it gives nothing back
        gone_at = world.clock.now
        await world.clock.run(TTL_S + margin_s(TTL_S) + 2.0)
        term, until = world.said["controller-1/1"][1]
        assert term == 2
        assert until - TTL_S >= world.said["controller-0/1"][-1][1], "the old lease was over before"
        assert until - TTL_S <= gone_at + TTL_S + margin_s(TTL_S) + 1.0, "within ten seconds"

    story(tell)


def test_a_leader_that_is_heard_of_no_more_is_followed_no_more_even_without_a_majority() -> None:
    async def tell(world: World) -> None:
        leader = world.start(world.controller("controller-0"))
        await world.clock.run(1.0)
        world.start(world.controller("controller-1"))
        await world.clock.run(1.0)
        leader.cancel()
        world.registers.away = True
        await world.clock.run(TTL_S + margin_s(TTL_S) + 2.0)
        assert world.said["controller-1/1"] == [("controller-0", 1), ("", 1)]

    story(tell)


def test_who_gives_it_back_makes_nobody_wait() -> None:
    async def tell(world: World) -> None:
        first = world.controller("controller-0")
        running = world.start(first)
        await world.clock.run(1.0)
        world.start(world.controller("controller-1"))
        await world.clock.run(1.0)
        running.cancel()
        await first.release(1.0)
        await world.clock.run(1.5)
        assert world.said["controller-1/1"][-1][0] == 2

    story(tell)


def test_a_controller_that_was_started_again_takes_its_own_lease_back_at_once() -> None:
    async def tell(world: World) -> None:
        world.start(world.controller("controller-0")).cancel()
        running = world.start(world.controller("controller-0"))
        await world.clock.run(1.0)
        running.cancel()
        begin = world.clock.now
        world.start(world.controller("controller-0", incarnation=2))
        await world.clock.run(0.1)
        assert world.said["controller-0/2"] == [(2, begin + TTL_S)]

    story(tell)


def test_one_that_stood_still_knows_it_before_it_renews_and_its_writes_are_refused() -> None:
    async def tell(world: World) -> None:
        old = world.controller("controller-0")
        world.start(old)
        await world.clock.run(1.0)
        world.start(world.controller("controller-1"))
        await world.clock.run(0.5)
        world.clock.now += 8.0  # nobody ran: a paused process looks like this from inside
        assert await old.note("ring", b"late") == "fenced"
        await world.clock.run(TTL_S + 3.0)
        assert "deposed" in world.said["controller-0/1"]
        terms = [each[0] for each in world.said["controller-1/1"] + world.said["controller-0/1"] if each[1:]]
        assert max(term for term in terms if isinstance(term, int)) == 2, "one of them leads again"

    story(tell)


def test_the_fence_refuses_what_an_earlier_leader_still_has_under_way() -> None:
    async def tell(world: World) -> None:
        old, new = world.controller("controller-0"), world.controller("controller-1")
        running = world.start(old)
        await world.clock.run(0.1)
        late = StrongOrder(RING, "put", b"", b"late", 1)  # of term 1, on its way for a long time
        assert await old.note("plan", b"a plan") == "done"
        running.cancel()
        await old.release(1.0)
        world.start(new)
        await world.clock.run(0.1)
        assert await new.recall() == Recollection(None, b"a plan")
        assert world.registers._apply(late).code == "fenced"
        assert await new.note("ring", encode_map(RING_MAP)) == "done"
        assert await new.recall() == Recollection(RING_MAP, b"a plan")

    story(tell)


def test_who_does_not_lead_neither_reads_nor_writes() -> None:
    async def tell(world: World) -> None:
        idle = world.controller("controller-0")
        assert await idle.recall() is None
        assert await idle.note("plan", b"x") == "fenced"
        assert set(world.registers.records) == set()

    story(tell)


def test_without_a_majority_a_note_is_unknown_after_a_while_and_recalling_goes_on() -> None:
    async def tell(world: World) -> None:
        leader = world.controller("controller-0")
        world.start(leader)
        await world.clock.run(0.1)
        world.registers.lost_answers = 1
        noting = asyncio.create_task(leader.note("plan", b"written"))
        await world.clock.run(0.5)
        assert noting.done() and noting.result() == "unknown"
        world.registers.away = True
        recalling = asyncio.create_task(leader.recall())
        await world.clock.run(1.0)
        assert not recalling.done()
        world.registers.away = False
        await world.clock.run(1.0)
        assert recalling.done() and recalling.result() == Recollection(None, b"written")

    story(tell)


def test_without_a_majority_the_lease_runs_out_and_recalling_ends() -> None:
    async def tell(world: World) -> None:
        leader = world.controller("controller-0")
        world.start(leader)
        await world.clock.run(0.1)
        world.registers.away = True
        recalling = asyncio.create_task(leader.recall())
        await world.clock.run(TTL_S + 1.0)
        assert recalling.done() and recalling.result() is None
        assert world.said["controller-0/1"][-1] == "deposed"
        assert world.said["controller-0/1"].count("deposed") == 1
        world.registers.away = False
        await world.clock.run(2.0)
        assert world.said["controller-0/1"][-1][0] == 2, "and it leads again when there is one"

    story(tell)


def test_a_ring_that_cannot_be_read_is_none() -> None:
    async def tell(world: World) -> None:
        leader = world.controller("controller-0")
        world.start(leader)
        await world.clock.run(0.1)
        await leader.note("ring", b"rubbish")
        assert await leader.recall() == Recollection(None, None)

    story(tell)


def test_the_records_have_names_of_their_own() -> None:
    assert len({RING, PLAN, b"lease/" + LEASE.encode()}) == 3


@pytest.mark.parametrize("holder", ["controller-1/0000000000000001", "controller-10/0000000000000001", ""])
def test_only_an_earlier_life_of_the_same_controller_is_taken_over_at_once(holder: str) -> None:
    from kvcomm.lease import Grant

    tenure = tenure_of("controller-1", 2, TTL_S)
    tenure.saw(Grant(3, b"v", holder, 1, TTL_S), 10.0)
    waits = holder.startswith("controller-10")
    assert tenure.free_at() == (10.0 + TTL_S + margin_s(TTL_S) if waits else 10.0)
