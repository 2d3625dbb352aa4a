"""``Launching``: what ``kvcomm up`` does after its checks: it starts the nodes, keeps them running as the
leading controller plans it, and says when the cluster serves.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcomm.block import Incarnation
from kvcomm.cli.node import rack_of
from kvcomm.controllers import Controllers
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import KVCommError
from kvcomm.heart import Face, Heart, Vitals
from kvcomm.wire.messages import ClusterGet, ClusterView, Failure, Message, NodePlan, OrderAnswer, ScaleOrder

if TYPE_CHECKING:
    from controller.launcher import LocalLauncher
    from controller.supervisor import Supervisor
    from kvcomm.config import Config
    from kvcomm.instance import Instance
    from kvcomm.machine import Event

LAUNCHER = "launcher-0"
ASK_S = 1.0
ORDER_RETRY_S = 1.0
STRONG_PATIENCE_S = 5.0
"""How long strong records are waited for once all else serves: where disks were lost there may be none."""
SHARDS_FILE = "shards"
"""In the instance's directory: how many shards its configuration asked for when it ran last."""


def plan_of(settings: Config) -> list[NodePlan]:
    """What the configuration names: controllers, pools, shards."""
    cluster = settings.cluster
    counts = (("controller", cluster.controllers), ("pool", cluster.pools), ("shard", cluster.shards))
    rack = rack_of(settings)
    return [NodePlan(f"{role}-{index}", role, rack) for role, count in counts for index in range(count)]


class Launching:
    """One run of a cluster's processes on this host.

    Args:
        command: that starts a node.
        on_ready: called once, when every node works by the leader's map.
        on_event: sees every event once the supervisor has handled it.
    """

    def __init__(
        self,
        cluster: Instance,
        settings: Config,
        command: Callable[[NodePlan], Sequence[str]],
        logs: Path,
        *,
        on_ready: Callable[[], None],
        on_event: Callable[[Event, LocalLauncher, Supervisor], None],
    ) -> None:
        from controller.launcher import LocalLauncher
        from controller.server import SupervisorServer
        from controller.supervisor import Supervisor
        from kvcomm.rpc import AsyncPeers, Identity

        self._cluster, self._settings = cluster, settings
        self._controllers = Controllers(cluster, settings)
        incarnation = Incarnation(secrets.randbits(64) | 1)
        identity = Identity(cluster.credentials().token(NODE_TENANT), incarnation)
        self._peers = AsyncPeers(identity, connect_timeout_s=settings.network.connect_timeout_s)
        launcher = LocalLauncher(command, logs)
        self._strong_by: float | None = None
        self._server = SupervisorServer(
            Supervisor(self._first_plan()),
            launcher,
            registered=self._registered,
            serves=self._serves,
            on_ready=on_ready,
            on_change=self._changed,
            on_event=lambda event: on_event(event, launcher, self._server.supervisor),
        )
        self._heart = Heart(
            Face(LAUNCHER, "launcher", rack_of(settings), incarnation),
            self._controllers.names,
            self._controllers.locate,
            self._peers,
            period_s=settings.cluster.heartbeat_s,
            vitals=lambda: Vitals(running=self._server.supervisor.running),
            took_plan=self._took_plan,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set and every node has ended.

        Raises:
            StartFailed: a node does not come up.
        """
        beside = [asyncio.create_task(self._heart.run()), asyncio.create_task(self._scale())]
        for task in beside:
            task.add_done_callback(self._server.watch)
        ending = asyncio.create_task(stop.wait())  # then controllers end, and that is nothing to tell
        ending.add_done_callback(lambda _: [task.cancel() for task in beside])
        try:
            await self._server.run(stop)
        finally:
            ending.cancel()
            await asyncio.gather(ending, *beside, return_exceptions=True)
            await self._peers.close()

    def _first_plan(self) -> list[NodePlan]:
        """Until the leader says: what the configuration names, and of a cluster that ran before the shards of
        its last map, which may have been scaled since."""
        ring = self._cluster.ring()
        plan = plan_of(self._settings)
        if ring is None or not ring.shards:
            return plan
        moving = ring.transition.shards if ring.transition is not None else []
        shards = {each.node: each for each in (*ring.shards, *moving)}
        kept = [NodePlan(each.node, "shard", each.rack, each.weight) for each in shards.values()]
        return [each for each in plan if each.role != "shard"] + kept

    def _took_plan(self, plan: Sequence[NodePlan]) -> None:
        self._server.follow(self._to_run(plan))

    def _to_run(self, plan: Sequence[NodePlan]) -> list[NodePlan]:
        """The controllers are the configuration's in any case: who else could plan?"""
        controllers = [each for each in plan_of(self._settings) if each.role == "controller"]
        return controllers + [each for each in plan if each.role in ("pool", "shard")]

    def _registered(self, node: str, pid: int) -> bool:
        record = self._cluster.node(node)
        return record is not None and record.pid == pid

    async def _serves(self, plan: Sequence[NodePlan]) -> bool:
        """Whether the leader has a map of all that is planned, where it is now, and the shards work by it,
        for strong records too."""
        view = await self._view()
        if view is None or view.ring is None:
            return False
        ring, moving = view.ring, view.ring.transition
        shards = [*ring.shards, *(moving.shards if moving is not None else ())]
        planned = {each.node for each in plan if each.role != "controller"}
        alive = {each.node: each for each in view.nodes if each.state == "alive"}
        at = {name: each.address for name, each in alive.items()}
        if not (
            planned <= {each.node for each in (*shards, *ring.pools)}
            and all(at.get(each.node) == each.address for each in (*shards, *ring.pools))
            and all(alive[each.node].epoch >= ring.epoch for each in shards)
        ):
            return False
        if self._strong_by is None:
            self._strong_by = time.monotonic() + STRONG_PATIENCE_S
        moves = [alive[each.node].move for each in shards]
        voting = all(move is not None and move.strong_epoch >= ring.epoch for move in moves)
        return voting or time.monotonic() >= self._strong_by

    async def _view(self) -> ClusterView | None:
        """The leader's."""
        for name in self._controllers.names:
            answer = await self._ask(name, ClusterGet())
            if isinstance(answer, ClusterView) and answer.leader == name:
                return answer
        return None

    async def _scale(self) -> None:
        """When the configuration asks for another number of shards than when the cluster ran last, that is an
        order to move the data."""
        wanted, path = self._settings.cluster.shards, self._cluster.directory / SHARDS_FILE
        before = _number_in(path)
        while not self._server.supervisor.served:
            await asyncio.sleep(0.1)
        refusal = ""
        while before != wanted:
            view = await self._view()
            if view is not None and view.ring is not None:
                before = before or len((view.ring.transition or view.ring).shards)
                answer = await self._ask(view.leader, ScaleOrder(wanted)) if before != wanted else None
                if answer is None or isinstance(answer, OrderAnswer):
                    _say_scaling(before, wanted, answer)
                    break
                if isinstance(answer, Failure) and answer.text != refusal:
                    refusal = answer.text
                    _say(f"cannot scale from {before} to {wanted} shards (yet): {refusal}")
            await asyncio.sleep(ORDER_RETRY_S)
        draft = path.with_suffix(".draft")
        draft.write_text(f"{wanted}\n")
        draft.replace(path)
        await asyncio.Event().wait()

    def _changed(self) -> None:
        self._heart.beat()

    async def _ask(self, controller: str, message: Message) -> Message:
        from kvcomm.rpc.asynchronous import run_async
        from kvcomm.steps import Ask, ask_all

        try:
            asks = [Ask(self._controllers.locate(controller), message)]
            (answer,) = await run_async(ask_all(asks), self._peers, time.monotonic() + ASK_S)
        except KVCommError as error:
            return Failure(error.code, error.message)
        return answer.message


def _number_in(path: Path) -> int | None:
    """``None`` = nothing is written there, or nothing that can be read, as after a power cut."""
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _say_scaling(before: int, wanted: int, answer: OrderAnswer | None) -> None:
    if answer is not None and not answer.operation:
        _say(f"there are {wanted} shards already, as cluster.shards asks for")
    elif answer is not None:
        moves = "; ".join(each.what for each in answer.moves) or "nothing is to be moved"
        _say(f"from {before} to {wanted} shards, as cluster.shards asks for: {moves}")


def _say(text: str) -> None:
    sys.stderr.write(f"kvcomm: {text}\n")
    sys.stderr.flush()
