"""Controllers as tasks of one loop, over real sockets and disks; the nodes are played by the test."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from controller import metadata
from controller.controller import Controller, ControllerOptions
from controller.metadata import metadata_ring
from controller.placement import RingRules
from controller.process import ControllerSettings, RunningController, _Publisher, run_controller
from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import ConfigError, Refused
from kvcomm.rpc import AsyncPeers, Identity
from kvcomm.rpc.asynchronous import run_async
from kvcomm.steps import Ask, ask_all
from kvcomm.wire.messages import (
    BlockPut,
    ClusterGet,
    ClusterView,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Message,
    NodePlan,
    RingGet,
    RingMap,
    Want,
)
from tests.peers import CREDENTIALS

pytestmark = pytest.mark.slow

NODE = Identity(CREDENTIALS.token(NODE_TENANT), Incarnation(7))
STRANGER = Identity(CREDENTIALS.token("acme"), Incarnation(8))
SHARD = NodePlan("shard-0", "shard", "r0")
LEASE_S = 1.0
PATIENCE_S = 20.0
lives = count(1)


class Group:
    """Controllers of one directory and what they publish."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory, self.names = directory, names
        self.published: list[RingMap] = []

    def locate(self, name: str) -> str:
        return f"unix://{self.directory}/{name}.sock"

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[RunningController]:
        stop = asyncio.Event()
        up: asyncio.Future[RunningController] = asyncio.get_running_loop().create_future()
        machine = Controller(name, RingRules(1, 1, 1, 1), [SHARD], ControllerOptions(0.2, LEASE_S))
        settings = ControllerSettings(
            self.names,
            self.directory / name,
            self.locate,
            dial=lambda beat: beat.address,
            publish=self.published.append,
            lease_s=LEASE_S,
        )
        task = asyncio.create_task(
            run_controller(
                machine,
                settings,
                instance="test",
                incarnation=Incarnation(next(lives)),
                credentials=CREDENTIALS,
                addresses=[self.locate(name)],
                stop=stop,
                ready=up.set_result,
            )
        )
        task.add_done_callback(lambda _: up.cancel())
        try:
            await asyncio.wait([up])
            if up.cancelled():
                task.result()  # it ended before it was up, and says why
            yield up.result()
        finally:
            stop.set()
            await task

    async def ask(self, name: str, message: Message, identity: Identity = NODE) -> Message:
        peers = AsyncPeers(identity)
        try:
            asks = ask_all([Ask(self.locate(name), message)])
            return (await run_async(asks, peers, time.monotonic() + PATIENCE_S))[0].message
        finally:
            await peers.close()

    async def beat(self, name: str, number: int, epoch: int = 0) -> HeartbeatAnswer:
        beat = Heartbeat("shard-0", "shard", "r0", 9, number, f"unix://{self.directory}/none", "", "", epoch)
        answer = await self.ask(name, beat)
        assert isinstance(answer, HeartbeatAnswer), answer
        return answer


def story(names: Sequence[str], tell: Callable[[Group], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        directory = Path(tempfile.mkdtemp(prefix="kvc-"))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await tell(Group(directory, names))
        finally:
            shutil.rmtree(directory)

    asyncio.run(whole())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_one_controller_leads_and_issues_the_map_as_soon_as_the_nodes_are_heard() -> None:
    async def tell(group: Group) -> None:
        async with group.running("controller-0") as running:
            await until(lambda: running.term == 1)
            assert (await group.beat("controller-0", 1)).leader == "controller-0"
            await until(lambda: group.published)
            assert [(ring.epoch, ring.shards[0].node) for ring in group.published] == [(1, "shard-0")]
            answer = await group.beat("controller-0", 2)
            assert answer.ring == group.published[0]
            view = await group.ask("controller-0", ClusterGet())
            assert isinstance(view, ClusterView) and view.ring == group.published[0] and view.term == 1

    story(["controller-0"], tell)


def test_one_that_ends_in_order_gives_its_lease_back_and_finds_what_it_wrote() -> None:
    async def tell(group: Group) -> None:
        async with group.running("controller-0") as running:
            await until(lambda: running.term)
            await group.beat("controller-0", 1)
            await until(lambda: group.published)
        async with group.running("controller-0") as again:
            await until(lambda: again.term == 2)
            await until(lambda: again.machine.epoch == 1)

    story(["controller-0"], tell)


def test_of_three_one_leads_and_another_when_that_one_ends() -> None:
    names = ["controller-0", "controller-1", "controller-2"]

    async def tell(group: Group) -> None:
        async with (
            group.running(names[0]) as first,
            group.running(names[1]) as second,
            group.running(names[2]) as third,
        ):
            everybody = (first, second, third)
            await until(lambda: any(each.term for each in everybody))
            (leader,) = [each for each in everybody if each.term]
            await until(lambda: all(each.metadata.counts().votes for each in everybody))
            await leader.shell.step_down()
            await until(lambda: any(each.term == 2 for each in everybody))
            assert leader.term == 0
            view = await group.ask(leader.machine.node, ClusterGet())
            assert isinstance(view, ClusterView) and view.leader != leader.machine.node

    story(names, tell)


def test_only_the_clusters_own_nodes_are_answered() -> None:
    async def tell(group: Group) -> None:
        async with group.running("controller-0"):
            for message in (ClusterGet(), RingGet()):
                refused = await group.ask("controller-0", message, STRANGER)
                assert isinstance(refused, Failure) and refused.code == Refused.code
                assert "ask a shard" in refused.text
            put = await group.ask("controller-0", BlockPut(1, [Want(bytes(32), 1)]))
            assert isinstance(put, Failure) and put.code == Refused.code

    story(["controller-0"], tell)


def test_the_groups_ring_is_never_the_clusters() -> None:
    """A member that stood still asks the others for their ring: it would vote by what it was told."""

    async def tell(group: Group) -> None:
        async with group.running("controller-0") as running:
            await until(lambda: running.term)
            await group.beat("controller-0", 1)
            await until(lambda: group.published)
            assert await group.ask("controller-0", RingGet()) == metadata_ring(["controller-0"])

    story(["controller-0"], tell)


def test_a_controller_that_waits_for_the_others_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "VOTE_PATIENCE_S", 0.05)

    async def tell(group: Group) -> None:
        async with group.running("controller-1") as running:
            await until(lambda: "controller-1 has no vote yet" in caplog.text)
            assert running.term == 0
            assert (await group.beat("controller-1", 1)).leader == ""

    story(["controller-0", "controller-1", "controller-2"], tell)


def test_two_processes_never_are_one_controller() -> None:
    async def tell(group: Group) -> None:
        async with group.running("controller-0"):
            with pytest.raises(Refused):
                async with group.running("controller-0"):
                    pass

    story(["controller-0"], tell)


def test_the_members_are_fixed_for_the_life_of_a_directory() -> None:
    async def tell(group: Group) -> None:
        async with group.running("controller-0"):
            pass
        group.names = ["controller-0", "controller-1", "controller-2"]
        with pytest.raises(ConfigError, match=r"cluster\.controllers is 3, but .* one of 1"):
            async with group.running("controller-0"):
                pass
        with pytest.raises(ConfigError, match="none of the controllers"):
            async with group.running("controller-9"):
                pass

    story(["controller-0"], tell)


def test_what_is_published_late_is_the_newest() -> None:
    begun, told = asyncio.Event(), list[int]()

    async def tell() -> None:
        loop = asyncio.get_running_loop()
        go_on: asyncio.Future[None] = loop.create_future()

        def publish(ring: RingMap) -> None:
            told.append(ring.epoch)
            if ring.epoch == 1:
                loop.call_soon_threadsafe(begun.set)
                asyncio.run_coroutine_threadsafe(asyncio.wait_for(go_on, PATIENCE_S), loop).result()

        publisher = _Publisher(publish)
        first = asyncio.create_task(publisher.tell(RingMap(1, 1, 1, 1, 1, [], [])))
        await begun.wait()
        for epoch in (2, 3, 4):
            await publisher.tell(RingMap(epoch, 1, 1, 1, 1, [], []))
        go_on.set_result(None)
        await first

    asyncio.run(tell())
    assert told == [1, 4]
