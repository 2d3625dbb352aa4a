"""``Controllers``: the controllers of a simulated cluster, and what follows their word.

A :class:`ControllerProcess` does what ``controller.process`` does, without a line of asyncio: it is one
member of the metadata group (a shipped shard machine with strong records, on a ring of controllers alone),
holds or waits for the leader's lease with the shipped ``LeasePlane``, and drives the shipped ``Controller``.
A :class:`LauncherProcess` keeps the shards running that the plan names.

The metadata group is a cluster of its own to :class:`~kvcomm.chaos.cluster.ShardProcess`: it has its own
disks and its own watch, and is held to the same promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvcomm.block import Incarnation
from kvcomm.chaos.cluster import ShardProcess, meta_floor
from kvcomm.chaos.driver import run_steps
from kvcomm.chaos.hearts import Heart, Pulse
from kvcomm.chaos.network import Peers, Reply
from kvcomm.chaos.turns import Turns
from kvcomm.chaos.watch import Watch
from kvcomm.chaos.world import Host
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import Fenced, KVCommError
from kvcomm.lease import Grant, Tenure
from kvcomm.leaseplane import LeasePlane
from kvcomm.machine import (
    Answered,
    AskPeer,
    Closed,
    ConnectionId,
    Effect,
    Event,
    Origin,
    Received,
    Tick,
)
from kvcomm.machine import Reply as ReplyEffect
from kvcomm.metrics import Metrics
from kvcomm.rpc.session import Identity
from kvcomm.stateplane import record_name
from kvcomm.steps import Ask, Steps
from kvcomm.strongplane import StrongPlane, StrongValue
from kvcomm.tally import Tally
from kvcomm.wire.messages import (
    CancelOrder,
    ClusterGet,
    ClusterView,
    DrainOrder,
    Failure,
    Heartbeat,
    HeartbeatAnswer,
    Message,
    MoveOrder,
    NodePlan,
    RebalanceOrder,
    RingMap,
    RingNode,
    ScaleOrder,
    StrongState,
)

if TYPE_CHECKING:
    from controller.controller import Controller
    from kvcomm.chaos.cluster import Cluster

LEASE = "controller"
RING, PLAN = (record_name("strong", "controller", name) for name in ("ring", "plan"))
HEARTBEAT_S, TTL_S = 2.0, 6.0
CAMPAIGN_S = 1.5
"""Who waits for the lease looks at it once in so long."""
METADATA_S = 3.0
"""A read or write of the metadata is given up after so long."""
RETRY_S = 0.5
GIVE_UP_S = 20.0
"""An operation is taken back when a shard that is to get records has been dead for so long."""
ORDER_TRIES, ORDER_PAUSE_S = 12, 0.3

OVER = ("done", "cancelled", "rolled back", "failed")
_NOBODY = Origin(ConnectionId(0), 0, b"", 0)
_FOR_THE_CONTROLLER = (
    Heartbeat, ClusterGet, ScaleOrder, DrainOrder, MoveOrder, RebalanceOrder, CancelOrder,
)  # fmt: skip


class Metadata:
    """What a :class:`ShardProcess` of the metadata group takes for its cluster."""

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        count = len(names)
        self.plan = replace(
            cluster.plan,
            shards=count,
            replicas=count,
            write_quorum=count // 2 + 1,
            read_quorum=count // 2 + 1,
            repair_interval_s=None,
            controllers=0,
            fsync="always",
        )
        self.parts, self.network, self.world = cluster.parts, cluster.network, cluster.world
        self.credentials, self.draw = cluster.credentials, cluster.world.draw.fork("metadata")
        self.disks = {
            name: cluster.parts.disk(cluster.world.draw.fork(name), "always", cluster.new_replica)
            for name in names
        }
        self.strong_disks = {
            name: cluster.parts.strong_disk(cluster.world.draw.fork(name), cluster.new_replica)
            for name in names
        }
        nodes = [RingNode(name, f"tcp://{name}:1", "", "", f"rack-{name}", 1) for name in names]
        self.map = RingMap(1, count, count // 2 + 1, count // 2 + 1, 1, nodes, [])
        self.watch = Watch(
            self.disks,
            self.strong_disks,
            self.plan.write_need,
            self.plan.majority,
            partial(meta_floor, self.strong_disks),
            lambda: cluster.world.now,
        )
        self.watch.violations = cluster.watch.violations
        self._holders: dict[bytes, set[str]] = {}
        """Of each map that was ever noted, whose disks have had it."""
        for name in names:
            self.strong_disks[name].heard = partial(self._accepted, name)
        self.note, self.restart_s = cluster.note, cluster.restart_s
        self._cluster, self._kill = cluster, cluster.kill

    @property
    def calm(self) -> bool:
        return self._cluster.calm

    def kill(self, name: str, restart_after_s: float | None = None) -> None:
        self._kill(name, restart_after_s)

    def adopted(self, name: str, ring_map: RingMap) -> None:
        """The metadata group has one map for ever."""

    def noted(self, ring_map: RingMap) -> bool:
        """Whether this map has been on the disks of a majority."""
        from l3_shard.ring import encode_map

        return len(self._holders.get(encode_map(ring_map), ())) >= self.plan.majority

    def _accepted(self, name: str, key: bytes, state: StrongState) -> None:
        self.watch.accepted(name, key, state)
        if key.endswith(RING) and state.register.value is not None:
            self._holders.setdefault(state.register.value, set()).add(name)

    def heart(self, process: ShardProcess) -> None:
        """A member of the metadata group has the heart of its controller."""


class Controllers:
    """All controllers of ``cluster``, and its launcher."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.names = [f"controller{index}" for index in range(cluster.plan.controllers)]
        self.initial = [NodePlan(name, "shard", f"rack-{name}") for name in cluster.names]
        self.metadata = Metadata(cluster, self.names)
        self.terms: dict[int, str] = {}
        """Who led in each term."""
        self.wanted: dict[str, NodePlan] = {node.node: node for node in self.initial}
        """Shards that the plan names, as the launcher knows."""
        self.operator_count = 0
        self._emptied: set[str] = set()

    def start_all(self) -> None:
        for name in self.names:
            self.cluster.make_host(name)
            self.start(name)
        host = self.cluster.make_host("launcher")
        host.start(lambda host: LauncherProcess(self.cluster, self, host))

    def start(self, name: str) -> None:
        host = self.cluster.host(name)
        if not host.running and name not in self.cluster.broken:
            host.start(lambda host: ControllerProcess(self, host))

    def process(self, name: str) -> ControllerProcess | None:
        process = self.cluster.host(name).process
        return process if isinstance(process, ControllerProcess) else None

    def lost_voters(self) -> set[str]:
        """Controllers whose metadata is lost, and not learned again yet."""
        self._emptied = {name for name in self._emptied if not self._votes(name)}
        return set(self._emptied)

    def lose(self, name: str) -> None:
        """The disks of a controller are gone."""
        self.metadata.disks[name].lose()
        self.metadata.strong_disks[name].lose()
        self._emptied.add(name)

    def _votes(self, name: str) -> bool:
        process = self.process(name)
        return process is not None and process.machine.strong_counts().votes

    def leads(self, name: str) -> bool:
        """Whether ``name`` acts on a lease that it holds."""
        process = self.process(name)
        return process is not None and process.leads

    def view(self, name: str) -> ClusterView | None:
        """What ``name`` knows; ``None`` = it is down."""
        process = self.process(name)
        return None if process is None else process.view()

    def under_way(self, name: str) -> str:
        """The operation that ``name`` is at, as it says."""
        process = self.process(name)
        return "" if process is None else process.under_way()

    def lose_all(self) -> None:
        """The metadata is gone, the leader's lease with it: terms begin anew."""
        for name in self.names:
            self.metadata.disks[name].lose()
            self.metadata.strong_disks[name].lose()
        self._emptied.clear()
        self.terms = {}

    def led(self, name: str, term: int) -> None:
        """``name`` writes something down as the leader of ``term``."""
        report = self.cluster.watch.report
        first = self.terms.setdefault(term, name)
        if first != name:
            report("leases", f"{first} and {name} both lead in term {term}")
        if term < max(self.terms):
            report("leases", f"{name} leads in term {term} after {max(self.terms)} has begun")

    def operator(self) -> Operator:
        """Somebody who gives orders."""
        return Operator(self.cluster, self)

    def heart(self, process: ShardProcess) -> Heart:
        """Of a shard."""
        machine = process.machine

        def feel() -> Pulse:
            ring = machine.taken.to_map() if machine.taken.epoch else None
            move = machine.move_status()
            if move.ready_epoch and move.ready_epoch >= machine.ring.epoch:
                self.cluster.check_ready(process.host.name)
            return Pulse(machine.taken.epoch, ring, move, machine.watch_view().silent)

        def heard(answer: HeartbeatAnswer) -> None:
            from l3_shard.shard import RingChanged

            if answer.ring is not None:
                process.deliver(RingChanged(answer.ring))

        return Heart(process.host, process.peers, "shard", self.names, HEARTBEAT_S, feel, heard)


class _Tenure(Tenure):
    """Tells what it sees."""

    told: Callable[[Grant], None]

    def saw(self, grant: Grant, now: float) -> None:
        super().saw(grant, now)
        self.told(grant)


class ControllerProcess(ShardProcess):
    """One life of a controller; as a :class:`ShardProcess` it is a member of the metadata group."""

    def __init__(self, controllers: Controllers, host: Host) -> None:
        from l3_shard.shard import RingChanged

        metadata = controllers.metadata
        super().__init__(metadata, host)
        self._controllers, self._term = controllers, 0
        self.controller = controllers.cluster.parts.controller(host.name, controllers)
        self._asked: dict[tuple[ConnectionId, int], Reply] = {}
        self._leading = Turns(self.controller, host, self, self._perform)
        self._strong_plane = self._plane()
        draw = controllers.cluster.world.draw.fork(f"{host.name}.lease")
        holder = f"{host.name}/{host.life}"
        self._leases = LeasePlane(self._strong_plane, host.clock, draw.unit, lambda: holder)
        self._tenure = _Tenure(holder, TTL_S, kin=f"{host.name}/")
        self._tenure.told = self._saw
        host.soon(lambda: self.deliver(RingChanged(metadata.map)))
        host.soon(self._campaign)
        host.soon(lambda: self.tell(Tick()))
        self._beats = Heart(
            host, self.peers, "controller", controllers.names, HEARTBEAT_S, self._feel, lambda answer: None
        )

    def _plane(self) -> StrongPlane:
        from l3_shard.tier import L3Tier

        metadata, clock = self._controllers.metadata, self.host.clock
        tier = L3Tier(metadata.map, timeout_s=metadata.plan.ask_timeout_s, clock=clock)
        return StrongPlane(tier, Tally(Metrics("client"), clock), self.draw.unit)

    def _feel(self) -> Pulse:
        return Pulse(self.controller.epoch, self.controller.ring)

    @property
    def leads(self) -> bool:
        return self._tenure.valid(self.host.clock())

    def view(self) -> ClusterView:
        """What this controller knows."""
        return self.controller.view(self.host.clock())

    def under_way(self) -> str:
        """The operation that is not over."""
        newest = self.view().operations[:1]
        return "".join(f"{each}" for each in newest if each.step not in OVER)

    # -- requests

    def received(self, origin: Origin, message: Message, reply: Reply) -> None:
        if isinstance(message, _FOR_THE_CONTROLLER):
            self._asked[origin.connection, origin.request] = reply
            self.tell(Received(origin, message))
        else:
            super().received(origin, message, reply)

    def closed(self, connection: ConnectionId) -> None:
        for known in [known for known in self._asked if known[0] == connection]:
            del self._asked[known]
        super().closed(connection)
        self.tell(Closed(connection))

    # -- the machine

    def tell(self, event: Event) -> None:
        """An event for the controller."""
        self._leading.deliver(event)

    def _perform(self, effect: Effect) -> None:
        from controller.controller import Note, Publish, Recall

        match effect:
            case ReplyEffect():
                reply = self._asked.pop((effect.origin.connection, effect.origin.request), None)
                if reply is not None:
                    reply(effect.message)
            case AskPeer():
                ticket = effect.ticket
                self.peers.start(
                    [Ask(f"tcp://{effect.node}:1", effect.message)],
                    effect.deadline,
                    lambda answer: self.tell(Answered(ticket, answer.message)),
                )
            case Recall():
                self._recall(effect)
            case Note():
                self._note_down(effect)
            case Publish():
                pass
            case _:
                raise AssertionError(f"nobody performs {effect}")

    # -- metadata

    def _run(self, steps: Steps[object], done: Callable[[object, KVCommError | None], None]) -> None:
        run_steps(steps, self.peers, self.host.clock() + METADATA_S, done)

    def _recall(self, effect: Effect) -> None:
        from controller.controller import Recall, Recalled
        from l3_shard.ring import decode_map

        assert isinstance(effect, Recall)

        def done(result: object, error: KVCommError | None) -> None:
            if error is None:
                assert isinstance(result, list)
                ring, plan = (value.value for value in result)
                self.tell(Recalled(effect.ticket, None if ring is None else decode_map(ring), plan))
            else:
                self.host.after(RETRY_S, lambda: self._recall(effect))

        self._run(self._strong_plane.read([RING, PLAN]), done)

    def fence(self) -> int:
        """Of the lease that this process holds, or held last."""
        return self._term

    def _note_down(self, effect: Effect) -> None:
        from controller.controller import Note, Noted

        assert isinstance(effect, Note)
        term, ticket = self.fence(), effect.ticket
        name = RING if effect.name == "ring" else PLAN
        self._controllers.led(self.host.name, self._term)

        def done(result: object, error: KVCommError | None) -> None:
            if error is None:
                assert isinstance(result, StrongValue)
                self.tell(Noted(ticket, "done"))
            else:
                self.tell(Noted(ticket, "fenced" if isinstance(error, Fenced) else "unknown"))

        self._run(self._strong_plane.put(name, effect.value, term), done)

    # -- the lease

    def _saw(self, grant: Grant) -> None:
        from controller.controller import Follows

        holder = grant.holder.partition("/")[0]
        self.host.soon(lambda: self.tell(Follows(holder, grant.epoch)))

    def _campaign(self) -> None:
        """One look, and one try if it is free."""
        now = self.host.clock()
        run_steps(
            self._leases.acquire(LEASE, self._tenure, now), self.peers, now + METADATA_S, self._campaigned
        )

    def _campaigned(self, epoch: int | None, error: KVCommError | None) -> None:
        if error is None and self._tenure.valid(self.host.clock()):
            self._lead()
        else:
            self.host.after(CAMPAIGN_S * self.draw.uniform(0.5, 1.0), self._campaign)

    def _lead(self) -> None:
        """The lease was granted, or renewed."""
        from controller.controller import Led

        self._term = self._tenure.epoch
        self.tell(Led(self._term, self._tenure.until))
        wait_s = max(0.01, self._tenure.renew_at() - self.host.clock())
        self.host.after(wait_s, self._renew)

    def _renew(self) -> None:
        if not self._tenure.valid(self.host.clock()):
            self._deposed()
            return
        self._run(self._leases.renew(LEASE, self._tenure), self._renewed)

    def _renewed(self, result: object, error: KVCommError | None) -> None:
        if self._tenure.valid(self.host.clock()):
            self._lead()
        else:
            self._deposed()

    def _deposed(self) -> None:
        from controller.controller import Deposed

        self.tell(Deposed())
        self._campaign()


class LauncherProcess:
    """Keeps the shards running that the plan names."""

    def __init__(self, cluster: Cluster, controllers: Controllers, host: Host) -> None:
        self._cluster, self._controllers, self.host = cluster, controllers, host
        identity = Identity(cluster.credentials.token(NODE_TENANT), Incarnation(host.life))
        self._peers = Peers(cluster.network, host, identity)
        self._heart = Heart(
            host, self._peers, "launcher", controllers.names, HEARTBEAT_S, self._feel, self._heard
        )

    def killed(self) -> None:
        self._cluster.network.host_ended(self.host)

    def _feel(self) -> Pulse:
        return Pulse(running=sorted(self._controllers.wanted))

    def _heard(self, answer: HeartbeatAnswer) -> None:
        if answer.plan is None:
            return
        wanted = {node.node: node for node in answer.plan if node.role == "shard"}
        before, self._controllers.wanted = self._controllers.wanted, wanted
        for name in sorted(before.keys() - wanted.keys()):
            self._cluster.retire(name)
        for name in sorted(wanted.keys() - before.keys()):
            self._cluster.enlist(name)
        self._heart.changed()


def shipped_controller(
    name: str, controllers: Controllers, controller: type[Controller] | None = None
) -> Controller:
    """The machine of a controller; ``controller`` takes the place of the shipped class."""
    from controller.controller import Controller, ControllerOptions, RingRules

    plan = controllers.cluster.plan
    rules = RingRules(plan.replicas, plan.write_quorum, plan.read_quorum, 1)
    options = ControllerOptions(replace_after_s=plan.replace_after_s, give_up_after_s=GIVE_UP_S)
    return (controller or Controller)(name, rules, controllers.initial, options)


class Operator:
    """Gives orders, as a person would: to any controller, then to the one that it names as the leader."""

    def __init__(self, cluster: Cluster, controllers: Controllers) -> None:
        self._cluster, self._controllers = cluster, controllers
        self.host = cluster.make_host(f"operator{controllers.operator_count}")
        controllers.operator_count += 1
        self.host.start(self._boot)

    def _boot(self, host: Host) -> Operator:
        identity = Identity(self._cluster.credentials.token(NODE_TENANT), Incarnation(1))
        self._peers = Peers(self._cluster.network, host, identity)
        return self

    def killed(self) -> None:
        """Nobody kills operators."""

    def order(
        self, message: Message, then: Callable[[Message], None] = lambda answer: None, *, first: str = ""
    ) -> str:
        """To whoever leads, again and again for a while; what came of it is noted in the history, and
        ``then`` hears it.  ``first``: whom to ask first."""
        self._ask(first or self._controllers.names[0], message, ORDER_TRIES, then)
        return f"{message}"

    def cancel(self) -> str:
        """The operation under way, if there is one."""

        def seen(answer: Message) -> None:
            if isinstance(answer, ClusterView) and answer.operations:
                self.order(CancelOrder(answer.operations[0].operation))

        for name in self._controllers.names:
            ask = Ask(f"tcp://{name}:1", ClusterGet())
            self._peers.start([ask], self.host.clock() + 2.0, lambda answer: seen(answer.message))
        return "what is under way"

    def _ask(self, name: str, message: Message, tries: int, then: Callable[[Message], None]) -> None:
        names = self._controllers.names

        def answered(answer: Message) -> None:
            lost = isinstance(answer, Failure) and answer.code in ("unavailable", "not_leader")
            if isinstance(answer, Failure) and lost and tries > 1:
                known = answer.detail.decode(errors="replace") if answer.code == "not_leader" else ""
                following = known if known in names else names[(names.index(name) + 1) % len(names)]
                self.host.after(ORDER_PAUSE_S, lambda: self._ask(following, message, tries - 1, then))
            else:
                self._cluster.note(f"{name} answers {message}: {answer}")
                then(answer)

        self._peers.start(
            [Ask(f"tcp://{name}:1", message)],
            self.host.clock() + 2.0,
            lambda answer: answered(answer.message),
        )
