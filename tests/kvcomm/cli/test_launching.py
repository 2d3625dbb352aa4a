"""What ``kvcomm up`` runs, when it is ready, and when it orders to move data; the controllers are played."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from controller.supervisor import ClusterServes
from kvcomm.cli import launching
from kvcomm.cli.launching import SHARDS_FILE, Launching, plan_of
from kvcomm.config import Config, parse_config
from kvcomm.instance import Instance
from kvcomm.wire.messages import (
    ClusterGet,
    ClusterView,
    Failure,
    Message,
    NodePlan,
    NodeView,
    OrderAnswer,
    RingMap,
    RingNode,
    RingTransition,
    ScaleOrder,
    ShardMove,
)

PATIENCE_S = 10.0


def settings(text: str) -> Config:
    return parse_config(f"cluster: {text}\n", ram_bytes=1 << 30)


def entry(node: str, port: int = 1, rack: str = "rack-0") -> RingNode:
    return RingNode(node, f"tcp://h:{port}", "", "", rack, 1)


def ring(shards: Sequence[str], epoch: int = 7, **more: Any) -> RingMap:
    return RingMap(epoch, 2, 2, 1, 1, [entry(node) for node in shards], [entry("pool-0")], **more)


def names(plan: Sequence[NodePlan]) -> list[str]:
    return [each.node for each in plan]


class Played(Launching):
    """The controllers' answers come from the test."""

    def __init__(self, instance: Instance, config: Config) -> None:
        super().__init__(
            instance, config, lambda plan: ["false"], instance.directory,
            on_ready=lambda: None, on_event=lambda event, launcher, supervisor: None,
        )  # fmt: skip
        self.view: ClusterView | None = None
        self.orders: list[Message] = []
        self.answers: list[Message] = []

    async def _ask(self, controller: str, message: Message) -> Message:
        if isinstance(message, ClusterGet):
            return self.view or Failure("unavailable", "nobody there")
        assert self.view is not None and controller == self.view.leader
        self.orders.append(message)
        return self.answers.pop(0)

    @property
    def plan(self) -> list[str]:
        return names(self._server.supervisor.plan)


@pytest.fixture
def instance(runtime_dir: Path) -> Instance:
    return Instance.create("up")


def test_controllers_are_started_first() -> None:
    assert names(plan_of(settings("{shards: 2, pools: 1, controllers: 3}"))) == [
        "controller-0", "controller-1", "controller-2", "pool-0", "shard-0", "shard-1",
    ]  # fmt: skip


def test_a_cluster_that_ran_before_begins_with_the_shards_that_it_had(instance: Instance) -> None:
    assert Played(instance, settings("{shards: 3}")).plan == [
        "controller-0", "pool-0", "shard-0", "shard-1", "shard-2",
    ]  # fmt: skip
    moving = RingTransition("copy", [entry("shard-1"), entry("shard-4", rack="r9")], [])
    instance.write_ring(ring(["shard-0", "shard-1"], transition=moving))
    again = Played(instance, settings("{shards: 3}"))
    assert again.plan == ["controller-0", "pool-0", "shard-0", "shard-1", "shard-4"]
    assert again._server.supervisor.plan[-1].rack == "r9"


def test_the_leader_plans_the_rest_and_the_configuration_its_controllers(instance: Instance) -> None:
    up = Played(instance, settings("{shards: 2, replicas: 2}"))
    other = [NodePlan("controller-7", "controller", "r"), NodePlan("shard-5", "shard", "r")]
    assert names(up._to_run(other)) == ["controller-0", "shard-5"]


def view(ring: RingMap | None, nodes: Sequence[NodeView], leader: str = "controller-0") -> ClusterView:
    return ClusterView("controller-0", leader, 1, "whole", ring, list(nodes), [])


def heard(
    node: str, epoch: int = 7, state: str = "alive", port: int = 1, strong: int | None = None
) -> NodeView:
    role = node.partition("-")[0]
    move = ShardMove(strong_epoch=epoch if strong is None else strong) if role == "shard" else None
    return NodeView(
        node, role, "rack-0", state, 0.1, epoch, 1, [], True, move=move, address=f"tcp://h:{port}"
    )


ALL = [heard("pool-0", 0), heard("shard-0"), heard("shard-1")]


@pytest.mark.parametrize(
    ("told", "serves"),
    [
        (view(ring(["shard-0", "shard-1"]), ALL), True),
        (None, False),
        (view(None, ALL), False),
        (
            view(ring(["shard-0", "shard-1"]), ALL, leader="controller-1"),
            False,
        ),  # it only knows somebody's map
        (view(ring(["shard-0"]), ALL), False),  # one is planned and has no part yet
        (view(ring(["shard-0", "shard-1"]), ALL[1:]), False),  # the pool is not heard
        (view(ring(["shard-0", "shard-1"]), [*ALL[:2], heard("shard-1", 6)]), False),
        (view(ring(["shard-0", "shard-1"]), [*ALL[:2], heard("shard-1", state="suspect")]), False),
        (view(ring(["shard-0", "shard-1"]), [*ALL[:2], heard("shard-1", port=2)]), False),  # it has moved
        (view(ring(["shard-0", "shard-1"]), [*ALL[:2], heard("shard-1", strong=6)]), False),  # has no vote
    ],
)
def test_it_is_ready_when_all_work_by_the_leaders_map(
    instance: Instance, told: ClusterView | None, serves: bool
) -> None:
    up = Played(instance, settings("{shards: 2, replicas: 2}"))
    up.view = told
    assert asyncio.run(up._serves(up._server.supervisor.plan)) is serves


def test_shards_that_never_vote_again_are_waited_for_a_while(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after most disks of a cluster were lost: its other records serve."""
    up = Played(instance, settings("{shards: 2, replicas: 2}"))
    up.view = view(ring(["shard-0", "shard-1"]), [*ALL[:2], heard("shard-1", strong=0)])
    monkeypatch.setattr(launching, "STRONG_PATIENCE_S", 0.0)
    assert asyncio.run(up._serves(up._server.supervisor.plan))


def scaled(up: Played, orders: int, done: bool = True) -> None:
    """Let it decide whether to scale, until it has given so many orders."""

    async def story() -> None:
        up._server.supervisor.handle(ClusterServes(), 0.0)
        task = asyncio.create_task(up._scale())
        async with asyncio.timeout(PATIENCE_S):
            written = up._cluster.directory / SHARDS_FILE
            text = f"{up._settings.cluster.shards}\n"
            while len(up.orders) < orders or (
                done and not (written.exists() and written.read_text() == text)
            ):
                await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "ORDER_RETRY_S", 0.01)


def test_the_first_run_orders_nothing_and_remembers_what_was_asked_for(instance: Instance) -> None:
    up = Played(instance, settings("{shards: 2, replicas: 2}"))
    up.view = view(ring(["shard-0", "shard-1"]), ALL)
    scaled(up, 0)
    assert up.orders == []
    assert (instance.directory / SHARDS_FILE).read_text() == "2\n"


def test_a_number_that_was_lost_in_a_power_cut_is_no_obstacle(instance: Instance) -> None:
    (instance.directory / SHARDS_FILE).write_text("")
    up = Played(instance, settings("{shards: 2, replicas: 2}"))
    up.view = view(ring(["shard-0", "shard-1"]), ALL)
    scaled(up, 0)
    assert (instance.directory / SHARDS_FILE).read_text() == "2\n"


def test_another_number_than_at_the_last_run_is_an_order(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    (instance.directory / SHARDS_FILE).write_text("2\n")
    up = Played(instance, settings("{shards: 4, replicas: 2}"))
    up.view = view(ring(["shard-0", "shard-1"]), ALL)
    refused = Failure("refused", "operation 3 is under way")
    up.answers = [refused, refused, OrderAnswer(4, [])]
    scaled(up, 3)
    assert up.orders == [ScaleOrder(4)] * 3
    said = capsys.readouterr().err
    assert said.count("cannot scale from 2 to 4 shards (yet): operation 3 is under way") == 1
    assert "from 2 to 4 shards, as cluster.shards asks for" in said


def test_a_number_that_was_reached_meanwhile_is_told_as_reached(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    (instance.directory / SHARDS_FILE).write_text("2\n")
    up = Played(instance, settings("{shards: 3, replicas: 2}"))
    up.view = view(ring(["shard-0", "shard-1", "shard-2"]), ALL)
    up.answers = [OrderAnswer(0, [])]
    scaled(up, 1)
    assert capsys.readouterr().err == "kvcomm: there are 3 shards already, as cluster.shards asks for\n"


def test_what_was_scaled_meanwhile_is_not_scaled_back_by_a_restart(instance: Instance) -> None:
    (instance.directory / SHARDS_FILE).write_text("2")  # told from what is written once it is decided
    up = Played(instance, settings("{shards: 2, replicas: 2}"))
    up.view = view(ring(["shard-0", "shard-1", "shard-2"]), ALL)
    scaled(up, 0)
    assert up.orders == []


def test_an_instance_made_anew_over_old_records_is_scaled_to_what_is_configured(instance: Instance) -> None:
    up = Played(instance, settings("{shards: 3, replicas: 2}"))
    up.view = view(ring(["shard-0", "shard-1"]), ALL)
    up.answers = [OrderAnswer(1, [])]
    scaled(up, 1)
    assert up.orders == [ScaleOrder(3)]
