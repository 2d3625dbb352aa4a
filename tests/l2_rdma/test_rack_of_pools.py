"""Several pools and their clients: homes, losses and pauses, joins and leaves, over each way into memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcomm.rpc import AsyncPeers, run_async, run_blocking
from kvcomm.steps import Park, Work
from l2_rdma.rack import Pool, Rack
from l2_rdma.remote import RemoteReader
from l2_rdma.tier import L2Tier
from l2_rdma.wires import Wires
from tests.l2_rdma.pools import PoolProcess, PoolThread, pool_process, pool_thread
from tests.l2_rdma.regions import key_of, payload_of
from tests.l2_rdma.test_tier import LARGE, SMALL, Agent, attachment_of, copy_of
from tests.peers import IDENTITY, dead_address, soon, until

NODES = ("pool-0", "pool-1", "pool-2")
WAYS = ["shm", "tcp", pytest.param("verbs", marks=pytest.mark.rdma)]
TIMEOUT_S = 0.3


class RackAgent(Agent):
    """A client of several pools; ``pools`` may change."""

    def __init__(self, pools: Sequence[Pool], transports: Sequence[str], **options: Any) -> None:
        super().__init__("", transports=tuple(transports), request_timeout_s=TIMEOUT_S, **options)
        self.pools = list(pools)

    def transports(self) -> list[str]:
        return [view.transport for view in self.tier.stats().pools]

    def view(self, node: str) -> Any:
        return {view.node: view for view in self.tier.stats().pools}[node]

    def numbers(self, node: str, count: int, nodes: Sequence[str] = NODES) -> list[int]:
        """Blocks whose home is ``node``."""
        rack = Rack([(each, 1) for each in nodes])
        return [number for number in range(40 * count) if rack.home(key_of(number)) == node][:count]


def agent_of(
    pools: Sequence[PoolThread | PoolProcess], way: str, stack: contextlib.ExitStack, **options: Any
) -> RackAgent:
    """A client that is attached to all of them: loading a transport's libraries may take a while."""
    named = [Pool(node, pool.address) for node, pool in zip(NODES, pools, strict=False)]
    agent = RackAgent(named, [way], **options)
    stack.callback(agent.close)
    until(lambda: agent.lookup(0) is not None and agent.transports() == [way] * len(named))
    return agent


def test_pools_are_known_before_anything_is_asked_of_them() -> None:
    agent = RackAgent([Pool("pool-0", dead_address()), Pool("pool-1", dead_address())], ["tcp"])
    with contextlib.closing(agent):
        views = agent.tier.stats().pools
    assert [(view.node, view.state, view.transport, view.problem) for view in views] == [
        ("pool-0", "alive", "", ""),
        ("pool-1", "alive", "", ""),
    ]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def offered(way: str) -> list[str]:
    """What pools offer: the way under test and others, which must not be used."""
    return list(dict.fromkeys(("shm", "tcp", way)))


def threads(
    directory: Path, stack: contextlib.ExitStack, way: str = "tcp", count: int = 3
) -> list[PoolThread]:
    return [
        stack.enter_context(
            pool_thread(directory, incarnation=31 + place, node=node, transports=offered(way))
        )
        for place, node in enumerate(NODES[:count])
    ]


@pytest.mark.parametrize("way", WAYS)
def test_blocks_are_spread_over_the_pools_and_come_back_in_order(
    tmp_path: Path, stack: contextlib.ExitStack, way: str
) -> None:
    pools = threads(tmp_path, stack, way)
    writer, reader = agent_of(pools, way, stack), agent_of(pools, way, stack)
    copies = [copy_of(number, SMALL if number % 5 == 0 else LARGE) for number in range(60)]

    assert writer.put(*copies) == ["stored"] * 60
    assert writer.put(*copies[:6]) == ["present"] * 6

    stored = [pool.usage().block_count for pool in pools]
    assert sum(stored) == 60 and min(stored) > 8
    assert reader.lookup(*range(58, 64)) == [True, True, False, False, False, False]
    order = [*range(59, -1, -1), 77, 78]
    found = reader.get(*order)
    assert list(found) == order[:60]
    for number, block in found.items():
        assert bytes(block.payload) == payload_of(number, block.payload.nbytes)
    reads = reader.tier.stats().reads_by_transport
    assert list(reads) == [way] and reads[way].hits == 60


def test_the_cheapest_way_is_used_for_each_pool(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    here = stack.enter_context(pool_thread(tmp_path, node="pool-0", transports=("shm", "tcp")))
    there = stack.enter_context(pool_thread(tmp_path, incarnation=32, node="pool-1", transports=("tcp",)))
    agent = RackAgent(
        [Pool("pool-0", here.address), Pool("pool-1", there.address)], ("shm", "cuda", "verbs", "tcp")
    )
    stack.callback(agent.close)
    copies = [copy_of(number) for number in range(40)]
    assert agent.put(*copies) == ["stored"] * 40

    found = agent.get(*range(40))
    assert list(found) == list(range(40))
    here_count = len(set(agent.numbers("pool-0", 40, NODES[:2])) & set(range(40)))
    reads = agent.tier.stats().reads_by_transport
    assert (reads["shm"].hits, reads["tcp"].hits) == (here_count, 40 - here_count)
    assert 8 < here_count < 32
    assert agent.view("pool-0").transport == "shm"
    remote = agent.view("pool-1")
    assert remote.transport == "tcp" and {"shm", "cuda", "verbs"} <= set(remote.refused)
    assert "does not offer it" in remote.refused["shm"]
    assert agent.tier.stats().fallbacks[("shm", "tcp")] == 1


def test_where_nothing_reaches_a_pool_the_reasons_are_told(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    pool = stack.enter_context(pool_thread(tmp_path, transports=("shm",)))
    agent = RackAgent([Pool("pool-0", pool.address)], ["tcp"])
    stack.callback(agent.close)

    assert agent.put(copy_of(1)) == ["unavailable"]
    view = agent.view("pool-0")
    assert (view.state, view.transport) == ("away", "")
    assert "does not offer it" in view.refused["tcp"] and "does not offer it" in view.problem
    assert agent.tier.stats().fallbacks == {("tcp", "none"): 1}


@pytest.mark.parametrize("way", WAYS)
def test_a_pool_that_is_not_there_costs_its_keys_another_home(
    tmp_path: Path, stack: contextlib.ExitStack, way: str
) -> None:
    pools = threads(tmp_path, stack, way, count=2)
    agent = agent_of(pools, way, stack)
    agent.pools = [*agent.pools, Pool("pool-2", dead_address())]
    lost = agent.numbers("pool-2", 5)

    assert agent.put(*(copy_of(number) for number in lost)) == ["stored"] * 5
    assert sorted(agent.get(*lost)) == sorted(lost)
    assert agent.view("pool-2").state == "away" and agent.view("pool-2").problem
    assert sum(pool.usage().block_count for pool in pools) == 5


@pytest.mark.parametrize("way", WAYS)
def test_pools_join_leave_and_move(tmp_path: Path, stack: contextlib.ExitStack, way: str) -> None:
    pools = threads(tmp_path, stack, way)
    agent = agent_of(pools, way, stack)
    three, two = list(agent.pools), agent.pools[:2]
    agent.pools = two
    copies = [copy_of(number) for number in range(40)]
    assert agent.put(*copies) == ["stored"] * 40

    agent.pools = three
    there = agent.lookup(*range(40))
    moved = [number for number in range(40) if not there[number]]
    assert moved == [number for number in range(40) if number in agent.numbers("pool-2", 40)]
    assert there.count(True) + len(moved) == 40

    agent.pools = list(three)  # another map with the same pools
    attach_count = agent.tier.stats().attach_count
    agent.lookup(1)
    assert agent.tier.stats().attach_count == attach_count == 4, "the third one twice"

    agent.pools = two
    assert agent.lookup(*range(40)) == [True] * 40
    assert [view.node for view in agent.tier.stats().pools] == ["pool-0", "pool-1"]
    until(lambda: pools[2].running.server.connection_count == 0)
    assert agent.tier.stats().lost_count == 0, "it was we who left"

    agent.pools = [two[0], two[1]._replace(address=dead_address())]
    agent.lookup(*range(40))
    assert agent.view("pool-1").state == "away"
    agent.pools = []
    assert agent.lookup(*range(3)) == [None] * 3
    assert agent.put(copy_of(1)) == ["unavailable"]


def test_lookups_go_to_all_homes_before_any_is_waited_for(
    tmp_path: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_of(threads(tmp_path, stack), "tcp", stack)
    agent.put(*(copy_of(number) for number in range(30)))
    story: list[str] = []

    def noted(name: str) -> None:
        method = getattr(RemoteReader, name)

        def call(self: RemoteReader, *arguments: Any) -> Any:
            story.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(RemoteReader, name, call)

    noted("ask")
    noted("told")

    assert agent.lookup(*range(30)) == [True] * 30
    assert story == ["ask"] * 3 + ["told"] * 3


def test_a_steady_get_takes_few_steps(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """Each ``Work`` is a change of threads on an event loop: what has arrived is handed out without one."""
    agent = agent_of(threads(tmp_path, stack), "tcp", stack)
    agent.put(*(copy_of(number) for number in range(60)))
    steps = agent.tier.get([key_of(number) for number in range(60)], lambda index, block: None)
    works = emitted = 0
    answer: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            step = steps.send(answer)
            answer = None
            if isinstance(step, Work):
                works += 1
                answer = step.call(soon())
            else:
                assert not isinstance(step, Park)
                emitted += 1

    assert emitted == 60
    assert works <= 30


@pytest.mark.parametrize("way", WAYS)
def test_it_works_on_an_event_loop(tmp_path: Path, stack: contextlib.ExitStack, way: str) -> None:
    pools = [
        Pool(node, pool.address) for node, pool in zip(NODES, threads(tmp_path, stack, way), strict=True)
    ]

    async def main() -> None:
        tier, peers = L2Tier(lambda: pools, IDENTITY, wires=Wires((way,))), AsyncPeers(IDENTITY)
        try:
            copies = [copy_of(number) for number in range(30)]
            assert await run_async(tier.put(copies), peers, soon()) == ["stored"] * 30
            found: dict[int, bytes] = {}
            keys = [key_of(number) for number in range(32)]

            async def get() -> None:
                steps = tier.get(keys, lambda index, block: found.update({index: bytes(block.payload)}))
                await run_async(steps, peers, soon())

            await asyncio.gather(get(), get(), run_async(tier.lookup(keys), peers, soon()))
            assert found == {number: payload_of(number, LARGE) for number in range(30)}
            abandoned = asyncio.create_task(get())
            await asyncio.sleep(0)
            abandoned.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await abandoned
            assert await run_async(tier.lookup(keys[:2]), peers, soon()) == [True, True]
        finally:
            tier.close()
            await peers.close()

    asyncio.run(main())


def test_a_tier_that_is_closed_in_the_middle_gives_misses(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    agent = agent_of(threads(tmp_path, stack), "tcp", stack)
    agent.put(*(copy_of(number) for number in range(30)))
    seen: list[int] = []

    def found(index: int, block: Any) -> None:
        seen.append(index)
        agent.tier.close()

    run_blocking(agent.tier.get([key_of(number) for number in range(30)], found), agent.peers, soon())
    assert seen[0] == 0
    assert agent.lookup(1) == [None]
    assert agent.put(copy_of(1)) == ["unavailable"]


# -- with processes ------------------------------------------------------------------------------------------


@pytest.fixture
def processes(tmp_path: Path, stack: contextlib.ExitStack) -> Callable[[str], list[PoolProcess]]:
    def start(way: str) -> list[PoolProcess]:
        return [
            stack.enter_context(
                pool_process(tmp_path, incarnation=41 + place, node=node, transports=offered(way))
            )
            for place, node in enumerate(NODES)
        ]

    return start


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_a_pool_that_is_killed_in_the_middle_of_a_get(
    tmp_path: Path,
    stack: contextlib.ExitStack,
    processes: Callable[[str], list[PoolProcess]],
    way: str,
) -> None:
    pools = processes(way)
    agent = agent_of(pools, way, stack)
    numbers = list(range(90))
    assert agent.put(*(copy_of(number) for number in numbers)) == ["stored"] * 90
    victims = set(agent.numbers("pool-1", 90)) & set(numbers)
    killed_at: list[int] = []

    def found(index: int, block: Any) -> None:
        assert bytes(block.payload) == payload_of(index, LARGE)
        if index == 30:
            pools[1].signal(signal.SIGKILL)
        killed_at.append(index)

    begun = time.monotonic()
    run_blocking(agent.tier.get([key_of(number) for number in numbers], found), agent.peers, soon())
    assert time.monotonic() - begun < 5
    missed = set(numbers) - set(killed_at)
    assert missed <= victims, "the others' blocks are all there"
    assert killed_at == sorted(killed_at)

    # Its keys move on to other homes; nothing else is touched.
    until(lambda: agent.put(copy_of(min(victims))) == ["stored"])
    untouched = [number for number in numbers if number not in victims]
    assert agent.lookup(*untouched) == [True] * len(untouched)
    assert agent.view("pool-1").state == "away"

    # It comes back, as another incarnation with an empty region, and is a home again.
    stack.enter_context(pool_process(tmp_path, incarnation=77, node="pool-1", transports=offered(way)))
    until(lambda: agent.lookup(1) is not None and agent.view("pool-1").transport == way)
    assert attachment_of(agent.tier, "pool-1").reader is not None
    fresh = agent.numbers("pool-1", 3)
    assert agent.lookup(*fresh) == [False] * 3
    assert agent.put(*(copy_of(number) for number in fresh)) == ["stored"] * 3
    assert sorted(agent.get(*fresh)) == sorted(fresh)
    assert agent.tier.stats().lost_count == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_paused_pool_is_a_miss_within_the_time_out_once(
    stack: contextlib.ExitStack, processes: Callable[[str], list[PoolProcess]]
) -> None:
    pools = processes("tcp")
    agent = agent_of(pools, "tcp", stack, attach_timeout_s=0.2)
    numbers = list(range(60))
    agent.put(*(copy_of(number) for number in numbers))
    victims = [number for number in numbers if number in set(agent.numbers("pool-1", 60))]
    others = [number for number in numbers if number not in victims]
    pools[1].signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert list(agent.get(*numbers)) == others
        first_s = time.monotonic() - begun
        assert TIMEOUT_S <= first_s < 4 * TIMEOUT_S
        assert agent.tier.stats().reads.unavailable == len(victims)
        assert agent.view("pool-1").state == "away"
        # Not once more: its keys have other homes, and it is tried in the background.
        begun = time.monotonic()
        for _ in range(20):
            assert list(agent.get(*others)) == others
            agent.lookup(*numbers)
        assert agent.put(copy_of(victims[0])) == ["stored"]
        assert time.monotonic() - begun < 4 * TIMEOUT_S
    finally:
        pools[1].signal(signal.SIGCONT)

    until(lambda: agent.lookup(*victims) == [True] * len(victims))
    assert list(agent.get(*numbers)) == numbers, "nothing was lost by the pause"


@pytest.mark.slow
@pytest.mark.processes
def test_a_paused_pool_of_this_host_is_read_on_and_its_puts_are_left_out_for_a_while(
    stack: contextlib.ExitStack, processes: Callable[[str], list[PoolProcess]]
) -> None:
    pools = processes("shm")
    agent = agent_of(pools, "shm", stack)
    there = agent.numbers("pool-1", 12)
    agent.put(*(copy_of(number) for number in there[:4]))
    agent.get(*there)
    pools[1].signal(signal.SIGSTOP)
    try:
        assert sorted(agent.get(*there)) == sorted(there[:4])
        begun = time.monotonic()
        assert agent.put(copy_of(there[5])) == ["unavailable"]
        once_s = time.monotonic() - begun
        assert once_s >= TIMEOUT_S
        begun = time.monotonic()
        assert agent.put(copy_of(there[6])) == ["unavailable"]
        assert time.monotonic() - begun < once_s / 2
        assert sorted(agent.get(*there)) == sorted(there[:4])
    finally:
        pools[1].signal(signal.SIGCONT)
    until(lambda: agent.put(copy_of(there[7])) in (["stored"], ["present"]))


@pytest.mark.slow
@pytest.mark.processes
def test_a_pool_that_stops_in_the_middle_of_a_put_through_a_channel(
    stack: contextlib.ExitStack, processes: Callable[[str], list[PoolProcess]]
) -> None:
    pools = processes("tcp")
    agent = agent_of(pools, "tcp", stack)
    mine = agent.numbers("pool-1", 6)
    assert agent.put(copy_of(mine[0])) == ["stored"]
    pools[1].signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        statuses = agent.put(*(copy_of(number) for number in [*mine[1:], *agent.numbers("pool-2", 2)]))
        assert statuses == ["unavailable"] * 5 + ["stored"] * 2
        assert time.monotonic() - begun < 6 * TIMEOUT_S
    finally:
        pools[1].signal(signal.SIGCONT)
    until(lambda: agent.view("pool-1").transport == "tcp" or agent.lookup(1) is None)
    until(lambda: agent.put(copy_of(mine[5])) in (["stored"], ["present"]))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_forked_child_attaches_to_all_for_itself(
    tmp_path: Path, stack: contextlib.ExitStack, way: str
) -> None:
    agent = agent_of(threads(tmp_path, stack, way), way, stack)
    numbers = list(range(30))
    assert agent.put(*(copy_of(number) for number in numbers)) == ["stored"] * 30
    assert list(agent.get(*numbers)) == numbers
    child = os.fork()
    if child == 0:
        status = 1
        try:
            until(lambda: list(agent.get(*numbers)) == numbers)  # a busy host attaches slowly
            right = agent.put(copy_of(99)) == ["stored"] and agent.transports() == [way] * 3
            agent.close()
            status = 0 if right else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert list(agent.get(*numbers, 99)) == [*numbers, 99]
    assert agent.tier.stats().lost_count == 0, "what the child closed was its own"


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_call_without_time_costs_nobody_their_pools(
    tmp_path: Path, stack: contextlib.ExitStack, way: str
) -> None:
    agent = agent_of(threads(tmp_path, stack, way), way, stack)
    assert agent.put(*(copy_of(number) for number in range(12))) == ["stored"] * 12
    attach_count = agent.tier.stats().attach_count
    keys, found = [key_of(number) for number in range(12)], list[int]()
    for _ in range(3):
        steps = agent.tier.get(keys, lambda index, block: found.append(index))
        run_blocking(steps, agent.peers, time.monotonic())
    assert found == ([*range(12)] * 3 if way == "shm" else [])
    assert list(agent.get(*range(12))) == list(range(12))
    stats = agent.tier.stats()
    assert (stats.attach_count, stats.lost_count) == (attach_count, 0)


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_put_without_time_costs_nobody_their_pools(
    tmp_path: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    agent = agent_of(threads(tmp_path, stack, way), way, stack)
    attach_count = agent.tier.stats().attach_count
    copies = [copy_of(number) for number in range(12)]
    monkeypatch.setattr(agent.tier, "_clock", lambda: 100.0)  # however busy this host is
    for _ in range(3):
        told = run_blocking(agent.tier.put(copies), agent.peers, time.monotonic())
        assert told == ["unavailable"] * 12
    assert all(member.may_put() for member in agent.tier._members.values()), "none is left out now"
    until(lambda: set(agent.put(*copies)) <= {"stored", "present"})
    stats = agent.tier.stats()
    assert (stats.attach_count, stats.lost_count) == (attach_count, 0)


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_what_has_its_home_in_a_pool_that_is_not_attached_is_unknown_not_absent(
    tmp_path: Path, stack: contextlib.ExitStack, way: str
) -> None:
    agent = agent_of(threads(tmp_path, stack, way, count=2), way, stack)
    mine, theirs = (agent.numbers(node, 2, NODES[:2]) for node in NODES[:2])
    agent.put(copy_of(mine[0]))
    agent.tier._members["pool-1"].close()

    assert agent.lookup(*mine, *theirs) == [True, False, None, None]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_a_forked_child_leaves_whatever_the_parents_threads_were_doing(
    tmp_path: Path, stack: contextlib.ExitStack, way: str
) -> None:
    agent = agent_of(threads(tmp_path, stack, way), way, stack)
    assert agent.put(copy_of(1)) == ["stored"]
    tier = agent.tier
    locks = [tier._lock, tier._ledger._lock, tier._wires._lock]
    locks += [member._lock for member in tier._members.values()]
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            status = 1
            try:
                status = 0 if not tier.stats().attached else 2
                tier.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(agent.get(1)) == [1] and tier.stats().lost_count == 0


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_closes_without_a_word_takes_nothing_from_its_parent(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    agent = agent_of(threads(tmp_path, stack), "tcp", stack)
    assert agent.put(copy_of(1)) == ["stored"]
    child = os.fork()
    if child == 0:
        try:
            agent.tier.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert list(agent.get(1)) == [1] and agent.tier.stats().lost_count == 0
