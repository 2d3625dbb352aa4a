"""``Cluster``: the shipped shard machines and the shipped client on simulated hosts.

:class:`ShardProcess` does for a machine what ``l3_shard.server`` and ``kvcomm.runtime`` do, without a line of
asyncio: one event at a time, timers, replies by connection, peers, a database for each kind of record.
:class:`ClientProcess` runs the steps of ``StatePlane`` and ``StrongPlane`` over ``l3_shard.tier.L3Tier``.
What is put together comes from :class:`Parts`, so that a test can put a broken part in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvcomm.block import Incarnation
from kvcomm.chaos.commits import Commits
from kvcomm.chaos.disk import Disk, Entry, Fsync
from kvcomm.chaos.driver import Done, run_steps
from kvcomm.chaos.history import Happened, History
from kvcomm.chaos.network import Network, Peers, Reply
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.turns import Turns
from kvcomm.chaos.watch import Place, Violation, Watch
from kvcomm.chaos.witness import Witness
from kvcomm.chaos.world import Host, World
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.hotcopies import HotCopies
from kvcomm.machine import (
    Answered,
    AskPeer,
    Closed,
    ConnectionId,
    Effect,
    Event,
    Origin,
    Received,
    Stop,
    Tick,
)
from kvcomm.machine import Reply as ReplyEffect
from kvcomm.metrics import Metrics
from kvcomm.rpc.session import Identity
from kvcomm.stateplane import StatePlane
from kvcomm.steps import Ask, Steps
from kvcomm.strongplane import StrongPlane
from kvcomm.tally import Tally
from kvcomm.wire.messages import (
    Failure,
    Message,
    RecordState,
    RingMap,
    RingNode,
    RingTransition,
    StrongState,
)

if TYPE_CHECKING:
    from controller.controller import Controller
    from kvcomm.chaos.controllers import Controllers
    from kvcomm.chaos.draw import Draw
    from kvcomm.chaos.hearts import Heart
    from l3_shard.shard import Shard
    from l3_shard.tier import L3Tier

CLIENT_TENANT = "sim"
FRAGILE_UNTIL_S = 5.0
"""Into the founding of a cluster."""
RESTART_S = (0.05, 2.0)
"""A shard that died by itself comes back after so long."""
ANSWER_SLACK_S = 0.05
"""Over a shard's own time-out, for an answer that is due."""


@dataclass(frozen=True, slots=True)
class Birth:
    """What a shard machine starts with."""

    node: str
    replica: str
    notes: Mapping[bytes, bytes]
    node_tenant: bytes
    origin_ms: int
    plan: Plan
    member: str
    """Of the database with the strong records."""
    incarnation: Incarnation
    jitter: Callable[[], float]
    strong_notes: Mapping[bytes, bytes] = field(default_factory=dict)


def shipped_shard(birth: Birth, shard: type[Shard] | None = None) -> Shard:
    """A shard; ``shard`` takes the place of the shipped class."""
    from l3_shard.desk import ShardLimits, strong_wait_s
    from l3_shard.peers import WatchOptions
    from l3_shard.repair import RepairOptions
    from l3_shard.ring import NO_RING
    from l3_shard.scrub import ScrubOptions
    from l3_shard.shard import Shard
    from l3_shard.strong import StrongIdentity

    plan = birth.plan
    interval_s, age_s = plan.repair_interval_s, plan.burial_age_s
    shipped = RepairOptions()
    hint_age_s, tombstone_age_s = (
        (shipped.hint_age_s, shipped.tombstone_age_s) if age_s is None else (age_s / 2, age_s)
    )
    return (shard or Shard)(
        birth.node,
        birth.replica,
        NO_RING,
        node_tenant=birth.node_tenant,
        origin_ms=birth.origin_ms,
        limits=ShardLimits(
            request_timeout_s=plan.request_timeout_s,
            strong_timeout_s=min(plan.request_timeout_s, 0.75 * strong_wait_s(plan.ask_timeout_s)),
        ),
        repair=(
            None
            if interval_s is None
            else RepairOptions(
                interval_s=interval_s,
                scrub=ScrubOptions(interval_s=2.0 * interval_s),
                hint_age_s=hint_age_s,
                tombstone_age_s=tombstone_age_s,
            )
        ),
        notes=birth.notes,
        strong=StrongIdentity(
            birth.member, birth.incarnation, birth.jitter, plan.tombstone_age_s, birth.strong_notes
        ),
        watch=WatchOptions(),
    )


def shipped_tier(
    ring_map: RingMap, timeout_s: float, clock: Callable[[], float], dial: Callable[[RingNode], str]
) -> L3Tier:
    from l3_shard.tier import L3Tier

    return L3Tier(ring_map, timeout_s=timeout_s, clock=clock, dial=dial)


def shipped_disk(
    draw: Draw,
    fsync: Fsync,
    new_replica: Callable[[], str],
    disk: type[Disk[RecordState]] = Disk[RecordState],
) -> Disk[RecordState]:
    """A database with eventual records."""
    import msgspec

    from kvcomm.errors import Corrupt
    from l3_shard.envelope import decode_value, encode_value
    from l3_shard.merkle import leaf_of, state_digest
    from l3_shard.replica import later
    from l3_shard.tombstones import dead_since

    def decode(key: bytes, value: bytes) -> RecordState:
        state = decode_value(key, value)
        assert isinstance(state, RecordState)
        return state

    def entry(key: bytes, state: RecordState) -> tuple[int, Entry]:
        return leaf_of(key), (state_digest(key, state), dead_since(state))

    return disk(
        draw,
        fsync,
        encode=encode_value,
        decode=decode,
        removes=lambda state: not state.context,
        entry=entry,
        damage=(Corrupt, msgspec.DecodeError),
        later=later,
        new_replica=new_replica,
    )


def shipped_strong_disk(
    draw: Draw, new_member: Callable[[], str], disk: type[Disk[StrongState]] = Disk[StrongState]
) -> Disk[StrongState]:
    """A database with strong records: every write is synced."""
    import msgspec

    from kvcomm.errors import Corrupt
    from l3_shard.acceptor import EMPTY
    from l3_shard.envelope import decode_value, encode_value
    from l3_shard.replica import later

    def decode(key: bytes, value: bytes) -> StrongState:
        state = decode_value(key, value, "strong")
        assert isinstance(state, StrongState)
        return state

    return disk(
        draw,
        "always",
        encode=encode_value,
        decode=decode,
        removes=lambda state: state == EMPTY,
        entry=None,
        damage=(Corrupt, msgspec.DecodeError),
        later=later,
        new_replica=new_member,
    )


def shipped_process(cluster: Cluster, host: Host) -> ShardProcess:
    return ShardProcess(cluster, host)


def shipped_controller(name: str, controllers: Controllers) -> Controller:
    """A controller's machine."""
    from kvcomm.chaos.controllers import shipped_controller

    return shipped_controller(name, controllers)


def meta_floor(disks: Mapping[str, Disk[StrongState]], name: str) -> bytes:
    """What the shard's disk promises for all strong records that it does not have."""
    import msgspec

    from l3_shard.entering import MEMBERSHIP_KEY, Member

    membership = disks[name].states().get(MEMBERSHIP_KEY)
    if membership is None or membership.register.value is None:
        return b""
    return msgspec.msgpack.decode(membership.register.value, type=Member).floor


def run_once(
    cluster: Cluster, client: ClientProcess, steps: Callable[[], Steps[object]], done: Done[object]
) -> None:
    """How a client runs an operation: once."""
    run_steps(steps(), client.peers, client.host.clock() + cluster.plan.operation_timeout_s, done)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a cluster is made of."""

    shard: Callable[[Birth], Shard] = shipped_shard
    tier: Callable[[RingMap, float, Callable[[], float], Callable[[RingNode], str]], L3Tier] = shipped_tier
    disk: Callable[[Draw, Fsync, Callable[[], str]], Disk[RecordState]] = shipped_disk
    strong_disk: Callable[[Draw, Callable[[], str]], Disk[StrongState]] = shipped_strong_disk
    process: Callable[[Cluster, Host], ShardProcess] = shipped_process
    run: Callable[[Cluster, ClientProcess, Callable[[], Steps[object]], Done[object]], None] = run_once
    controller: Callable[[str, Controllers], Controller] = shipped_controller


class Home(Protocol):
    """What a shard's process finds around it: a cluster, or the group that keeps the metadata of one."""

    plan: Plan
    parts: Parts
    world: World
    network: Network
    credentials: Credentials
    draw: Draw
    disks: dict[str, Disk[RecordState]]
    strong_disks: dict[str, Disk[StrongState]]
    watch: Watch

    @property
    def calm(self) -> bool: ...

    def note(self, what: str) -> None: ...

    def kill(self, name: str, restart_after_s: float | None = None) -> None: ...

    def restart_s(self) -> float: ...

    def adopted(self, name: str, ring_map: RingMap) -> None: ...

    def heart(self, process: ShardProcess) -> Heart | None: ...


class Cluster:
    """One simulated cluster, running."""

    def __init__(
        self, plan: Plan, parts: Parts | None = None, *, client_names: Sequence[str] | None = None
    ) -> None:
        self.plan = plan
        self.parts = parts or Parts()
        self.world = World(plan.seed)
        self.draw = self.world.draw.fork("cluster")
        self.history = History()
        self.credentials = Credentials(bytes(range(32)))
        self.network = Network(self.world, plan.weather, self.credentials)
        self.names = [f"shard{index}" for index in range(plan.shards)]
        self.map = self.make_map(0 if plan.controllers else 1, self.names)
        self.maps: dict[int, RingMap] = {self.map.epoch: self.map}
        """Every map that some shard has worked by."""
        self._replica_count = 0
        self.disks = {
            name: self.parts.disk(self.world.draw.fork(name), plan.fsync, self.new_replica)
            for name in self.names
        }
        self.strong_disks = {
            name: self.parts.strong_disk(self.world.draw.fork(name), self.new_replica) for name in self.names
        }
        self.watch = Watch(
            self.disks,
            self.strong_disks,
            plan.write_need,
            plan.majority,
            partial(meta_floor, self.strong_disks),
            lambda: self.world.now,
            self._places if plan.controllers else None,
        )
        self.broken: set[str] = set()
        """Nodes that stay down."""
        self._emptied: set[str] = set()
        self.calm = False
        """Nobody dies at a bad moment any more."""
        self.retired: set[str] = set()
        """Shards that are not to run: the plan does not name them any more."""
        self.controllers: Controllers | None = None
        if plan.controllers:
            from kvcomm.chaos.controllers import Controllers

            self.controllers = Controllers(self)
        for name in self.names:
            self.disks[name].heard = partial(self.watch.written, name)
            self.strong_disks[name].heard = partial(self.watch.accepted, name)
            self.make_host(name)
            self.start(name)
        if self.controllers is not None:
            self.controllers.start_all()
        self.clients: list[ClientProcess] = []
        for index, name in enumerate(client_names or [f"client{index}" for index in range(plan.clients)]):
            host = self.make_host(name)
            host.start(partial(self._client, index))

    def client_names(self) -> list[str]:
        return [client.host.name for client in self.clients]

    @property
    def violations(self) -> list[Violation]:
        return self.watch.violations

    def note(self, what: str) -> None:
        self.history.add(Happened(round(self.world.now, 6), what))

    # -- nodes

    def host(self, name: str) -> Host:
        return self.world.hosts[name]

    def shard(self, name: str) -> ShardProcess | None:
        process = self.host(name).process
        return process if isinstance(process, ShardProcess) else None

    def start(self, name: str) -> None:
        """Start a shard, or a controller, that is down; a shard hears of the ring a moment later."""
        if self.controllers is not None and name in self.controllers.names:
            self.controllers.start(name)
            return
        host = self.host(name)
        if host.running or name in self.broken or name in self.retired:
            return
        host.start(lambda host: self.parts.process(self, host))
        if self.controllers is None:
            self.hand_out(name)

    def enlist(self, name: str) -> None:
        """A shard that is to run from now on, with the disks that it had before, if it was here before."""
        self.retired.discard(name)
        if name not in self.names:
            self.names.append(name)
            self.disks[name] = self.parts.disk(self.world.draw.fork(name), self.plan.fsync, self.new_replica)
            self.strong_disks[name] = self.parts.strong_disk(self.world.draw.fork(name), self.new_replica)
            self.disks[name].heard = partial(self.watch.written, name)
            self.strong_disks[name].heard = partial(self.watch.accepted, name)
            self.make_host(name)
        self.note(f"{name} is to run")
        self.start(name)

    def retire(self, name: str) -> None:
        """A shard that is not to run any more; its disks stay where they are."""
        self.retired.add(name)
        self.note(f"{name} is not to run any more")
        if name in self.names:
            self.kill(name)

    def adopted(self, name: str, ring_map: RingMap) -> None:
        """``name`` works by this map from now on."""
        known = self.maps.setdefault(ring_map.epoch, ring_map)
        if known != ring_map:
            self.watch.report("maps", f"{name} works by {ring_map}, others of that epoch by {known}")
        if self.controllers is not None and not self.controllers.metadata.noted(ring_map):
            self.watch.report(
                "noted", f"{name} works by epoch {ring_map.epoch}, which was never written down"
            )
        if ring_map.epoch > self.map.epoch:
            self.map = ring_map

    def check_ready(self, name: str) -> None:
        """A shard says that it has all that it gains by the transition under way: it has everything that was
        acknowledged before, if it was not lost since."""
        from l3_shard.place import place_of
        from l3_shard.shard import TENANT_BYTES

        shard = self.shard(name)
        if shard is None or not shard.machine.ring.moving or self.plan.burial_age_s is not None:
            return
        ring = shard.machine.ring
        first = _first_alike(self.maps, ring.to_map())
        for key, dots in sorted(self.watch.acknowledged.items()):
            if not place_of(ring, name, ring.write_groups(key[TENANT_BYTES:])).gained:
                continue
            held = self.disks[name].held(key)
            for replica, counter, epoch in dots:
                if epoch < first and not any(state.context.get(replica, 0) >= counter for state in held):
                    self.watch.report(
                        "ready", f"{name} is ready for {ring.epoch} without ({replica}, {counter}) of {key!r}"
                    )

    def _places(self, node: str, key: bytes, epoch: int) -> list[Place]:
        from l3_shard.ring import Ring
        from l3_shard.shard import TENANT_BYTES

        shard = self.shard(node)
        last = 0 if shard is None else shard.machine.ring.epoch
        rings = [Ring.from_map(self.maps[each]) for each in sorted(self.maps) if epoch <= each <= last]
        groups = [ring.write_groups(key[TENANT_BYTES:]) for ring in rings]
        return [frozenset(frozenset(group) for group in place) for place in groups]

    def heart(self, process: ShardProcess) -> Heart | None:
        return None if self.controllers is None else self.controllers.heart(process)

    def found(self, within_s: float) -> None:
        """Run until every shard votes on strong records: nothing is promised to a cluster that is not there
        yet.  Fragile shards die in the first seconds; then nobody does, for where one dies at every second
        word of another there is no end.  Where it is not there in time nothing is lost on the way
        any more: a frame that is lost takes a whole time-out, and a leader has little more than that to note
        the first map in."""
        self._run_until_founded(FRAGILE_UNTIL_S)
        self.calm = True
        self._run_until_founded(within_s)
        weather, self.network.weather = self.network.weather, replace(self.network.weather, loss=0.0)
        self._run_until_founded(2.0 * within_s)
        self.calm, self.network.weather = False, weather
        if not self._founded():
            self.watch.report("founding", f"after {2.0 * within_s} s not all of {self.names} vote")

    def recover(self, within_s: float) -> None:
        """After all have lost power: run until every shard votes again and has its map, if there is time."""
        self._run_until_founded(self.world.now + within_s)

    def _run_until_founded(self, until_s: float) -> None:
        while not self._founded() and self.world.now < until_s:
            self.world.run(self.world.now + 0.02)

    def _founded(self) -> bool:
        running = [name for name in self.names if name not in self.retired]
        return all(self.votes(name) and self._placed(name) for name in running)

    def _placed(self, name: str) -> bool:
        """Where there are controllers: whether a shard has been told the newest map again."""
        shard = self.shard(name)
        return self.controllers is None or (shard is not None and shard.machine.ring.epoch >= self.map.epoch)

    def votes(self, name: str) -> bool:
        """Whether a shard is up and votes on strong records."""
        shard = self.shard(name)
        return shard is not None and shard.machine.strong_counts().votes

    def lost_voters(self) -> set[str]:
        """Shards whose strong records are lost or damaged, and not learned again yet.

        At most a minority of any record's owners may be at the same time: with more, what was acknowledged
        can be gone, and that is out of every promise.
        """
        self._emptied = {name for name in self._emptied if not self.votes(name)}
        return self._emptied | {name for name in self.names if not self.strong_disks[name].sound()}

    def lose_strong(self, name: str) -> None:
        """The shard's database with strong records is gone."""
        self.strong_disks[name].lose()
        self._emptied.add(name)

    def kill(self, name: str, restart_after_s: float | None = None) -> None:
        """As ``kill -9``; comes back by itself after ``restart_after_s``."""
        self.host(name).kill()
        if restart_after_s is not None:
            self.world.after(restart_after_s, lambda: self.start(name))

    def power_cut(self) -> None:
        """All machines at once; they come back by themselves."""
        self.note("everybody loses power")
        for name in self.names:
            self.kill(name, self.restart_s())
            self.disks[name].power_cut()
            self.strong_disks[name].power_cut()
        for name in self.controllers.names if self.controllers is not None else ():
            self.kill(name, self.restart_s())  # their disks sync every write

    def restart_s(self) -> float:
        return self.draw.uniform(*RESTART_S)

    # -- the ring

    def make_map(self, epoch: int, names: list[str]) -> RingMap:
        plan = self.plan
        shards = [RingNode(name, f"tcp://{name}:1", "", "", f"rack-{name}", 1) for name in names]
        return RingMap(epoch, plan.replicas, plan.write_quorum, plan.read_quorum, 1, shards, [])

    def next_epoch(self, names: list[str]) -> None:
        """Make a new map, and hand it to every node, one after the other."""
        self.map = self.make_map(self.map.epoch + 1, names)
        for name in self.names:
            self.hand_out(name)

    def hand_out(self, name: str) -> None:
        """The controller's word reaches a node after a while, if it is up."""
        delay_s = self.draw.uniform(0.0, 0.3)
        self.world.after(delay_s, lambda: self._offer(name))

    def _offer(self, name: str) -> None:
        from l3_shard.shard import RingChanged

        shard = self.shard(name)
        if shard is not None:
            ring_map = self.map
            shard.host.soon(lambda: shard.deliver(RingChanged(ring_map)))

    def dialler(self, index: int) -> Callable[[RingNode], str]:
        """Where a client calls shards.  Any owner may coordinate; if the plan says so, each client has
        another one take the first owner's part, and proposers of one record meet."""
        names = self.names
        if not self.plan.spread or self.plan.copies < len(names) or self.plan.controllers:
            return lambda shard: shard.address
        turned = {name: names[(at + index) % len(names)] for at, name in enumerate(names)}
        return lambda shard: f"tcp://{turned[shard.node]}:1"

    # -- making

    def make_host(self, name: str) -> Host:
        origin_s = float(self.draw.between(0, 100_000))
        return self.world.host(name, origin_s=origin_s, skew_ms=self.draw.between(-500, 500))

    def _client(self, index: int, host: Host) -> ClientProcess:
        client = ClientProcess(self, host, index)
        self.clients.append(client)
        return client

    def new_replica(self) -> str:
        """An id for a database that nobody has."""
        from l3_shard.replica import first_replica

        self._replica_count += 1
        return first_replica(f"replica{self._replica_count:03}")


def _first_alike(maps: Mapping[int, RingMap], ring_map: RingMap) -> int:
    """The first epoch of the transition that ``ring_map`` is in."""
    first, target = ring_map.epoch, ring_map.transition
    for epoch in sorted(maps, reverse=True):
        moving = maps[epoch].transition
        if epoch > first:
            continue
        if moving is None or target is None or _target(moving) != _target(target):
            break
        first = epoch
    return first


def _target(moving: RingTransition) -> object:
    return sorted(shard.node for shard in moving.shards), moving.ranges


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that is being worked on."""

    message: Message
    epoch: int
    """Of the shard, when it came."""
    since: float
    pause_count: int
    reply: Reply


class ShardProcess:
    """One life of a shard."""

    def __init__(self, cluster: Home, host: Host) -> None:
        self.cluster, self.host = cluster, host
        self.disk, self.strong_disk = cluster.disks[host.name], cluster.strong_disks[host.name]
        self.draw = cluster.draw
        node_tenant = cluster.credentials.tenant_digest(NODE_TENANT)
        self.machine = cluster.parts.shard(
            Birth(
                host.name,
                self.disk.replica,
                dict(self.disk.notes),
                node_tenant,
                host.wall_origin_ms(),
                cluster.plan,
                self.strong_disk.replica,
                Incarnation(host.life),
                self.draw.unit,
                dict(self.strong_disk.notes),
            )
        )
        identity = Identity(cluster.credentials.token(NODE_TENANT), Incarnation(host.life))
        self.peers = Peers(cluster.network, host, identity)
        self._turns = Turns(self.machine, host, self, self._carry_out, self._look_at_ring)
        self._dying = False
        self._requests: dict[tuple[ConnectionId, int], _Open] = {}
        self._records = Commits(self.disk, host, self.draw, cluster.plan, self.deliver)
        self._strong = Commits(self.strong_disk, host, self.draw, cluster.plan, self.deliver)
        self._epoch = self.machine.ring.epoch
        self._heart = cluster.heart(self)
        cluster.network.listen(host, self)
        host.after(cluster.plan.wall_interval_s, self._follow_wall)
        host.soon(lambda: self.deliver(Tick()))  # as the shell does: repair begins

    # -- kvcomm.chaos.network.Server, kvcomm.chaos.world.Process

    def received(self, origin: Origin, message: Message, reply: Reply) -> None:
        self._requests[origin.connection, origin.request] = _Open(
            message, self.machine.ring.epoch, self.cluster.world.now, self.host.pause_count, reply
        )
        self.deliver(Received(origin, message))

    def closed(self, connection: ConnectionId) -> None:
        for known in [known for known in self._requests if known[0] == connection]:
            del self._requests[known]
        self.deliver(Closed(connection))

    def killed(self) -> None:
        self.disk.crashed()
        self.strong_disk.crashed()
        self.cluster.network.host_ended(self.host)

    # -- kvcomm.runtime

    def deliver(self, event: Event) -> None:
        """An event for the shard's machine."""
        self._turns.deliver(event)

    def _look_at_ring(self) -> None:
        ring = self.machine.ring
        if ring.epoch < self._epoch:
            self.cluster.watch.report(
                "maps", f"{self.host.name} went back from {self._epoch} to {ring.epoch}"
            )
        if ring.epoch != self._epoch:
            self._epoch = ring.epoch
            self.cluster.adopted(self.host.name, ring.to_map())
        if self._heart is not None:
            self._heart.changed()

    def check_answers(self) -> None:
        """Whoever asked and is still there has been answered, or has not waited long."""
        for request in self._requests.values():
            self._check_age(request)

    def _check_age(self, request: _Open) -> None:
        """A paused process cannot keep its time."""
        age_s = self.cluster.world.now - request.since
        late = age_s > self.cluster.plan.request_timeout_s + ANSWER_SLACK_S
        if late and request.pause_count == self.host.pause_count:
            self.cluster.watch.unanswered(self.host.name, request.message, age_s)

    def _carry_out(self, effect: Effect) -> None:
        from l3_shard.storage import Audit, Load, Persist, Scan, Survey, Sweep

        match effect:
            case ReplyEffect():
                self._reply(effect.origin, effect.message)
            case AskPeer():
                self._ask(effect)
                self._perhaps_die()
            case Stop():
                self.cluster.note(f"{self.host.name} stops: {effect.reason}")
                self.cluster.kill(self.host.name, self.cluster.restart_s())
            case Load():
                (self._strong if effect.database == "strong" else self._records).load(effect)
            case Scan():
                (self._strong if effect.database == "strong" else self._records).scan(effect)
            case Survey():
                self._records.survey(effect)
            case Sweep():
                self._records.sweep(effect)
            case Audit():
                (self._strong if effect.database == "strong" else self._records).audit(effect)
            case Persist():
                (self._strong if effect.database == "strong" else self._records).persist(effect)
                self._perhaps_die()
            case _:
                raise AssertionError(f"nobody performs {effect}")

    def _reply(self, origin: Origin, message: Message) -> None:
        known = self._requests.pop((origin.connection, origin.request), None)
        if known is None:
            return  # its connection has ended
        self._check_age(known)
        epochs = (known.epoch, self.machine.ring.epoch)
        self.cluster.watch.answered(self.host.name, origin.tenant, known.message, epochs, message)
        known.reply(message)
        self._perhaps_die()

    def _ask(self, effect: AskPeer) -> None:
        try:
            address = self.machine.shard(effect.node).address
        except KeyError:
            failure = Failure("unavailable", f"no address of {effect.node}")
            self.deliver(Answered(effect.ticket, failure))
            return
        self.peers.start(
            [Ask(address, effect.message)],
            effect.deadline,
            lambda answer: self.deliver(Answered(effect.ticket, answer.message)),
        )

    def _follow_wall(self) -> None:
        from l3_shard.shard import WallAdjusted

        self.deliver(WallAdjusted(self.host.wall_origin_ms()))
        self.host.after(self.cluster.plan.wall_interval_s, self._follow_wall)

    def _perhaps_die(self) -> None:
        """The worst moments, often: right after something was said or ordered."""
        if not self._dying and not self.cluster.calm and self.draw.chance(self.cluster.plan.fragile):
            self._dying = True
            self.host.soon(self._die)

    def _die(self) -> None:
        self.cluster.note(f"{self.host.name} dies at a bad moment")
        self.cluster.kill(self.host.name, self.cluster.restart_s())


class ClientProcess:
    """One client; its operations are a workload's."""

    def __init__(self, cluster: Cluster, host: Host, index: int) -> None:
        self.cluster, self.host = cluster, host
        self.draw = cluster.world.draw.fork(host.name)
        identity = Identity(cluster.credentials.token(CLIENT_TENANT), Incarnation(1_000 + index))
        self.peers = Peers(cluster.network, host, identity)
        tier = cluster.parts.tier(cluster.map, cluster.plan.ask_timeout_s, host.clock, cluster.dialler(index))
        self.records = Witness(tier)
        tally = Tally(Metrics("client"), host.clock)
        self.plane = StatePlane(self.records, tally, copies=HotCopies(), clock=host.clock)
        self.strong = StrongPlane(tier, tally, self.draw.fork("backoff").unit)

    def killed(self) -> None:
        self.cluster.network.host_ended(self.host)

    def run(self, steps: Callable[[], Steps[object]], done: Done[object]) -> None:
        """Run an operation under the plan's time-out."""
        self.cluster.parts.run(self.cluster, self, steps, done)
