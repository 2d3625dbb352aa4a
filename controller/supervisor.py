"""``Supervisor``: keeps a cluster's node processes alive and is the only issuer of ring epochs.

Theory of operation.  Each node of the plan is in one state::

    absent --StartNode--> starting --NodeUp--> up --NodeExited--> waiting --(back-off over)--> starting ...
                             '------NodeExited / start timeout-------^

When every shard has been up once, epoch 1 (or the stored epoch + 1) is issued.  A node that comes back
elsewhere makes a new epoch with the same placement: the ring is made of node *names*, so no key moves
because of a restart.  A dead shard stays in the map; its keys are served by its replicas.  An epoch is
written down (``IssueRing``) before any node hears of it, so a restarted supervisor never issues the same
number twice.

A node that ends early :data:`STARTS_MAX` times in a row before the cluster was ever ready will not come up
by trying once more (a wrong configuration, no shared memory, a port taken): the supervisor gives up, so that
whoever started it hears why.  Once ready, a cluster is never given up: its other nodes still serve.

The data path does not come here: with the supervisor gone, reads and writes go on under the last map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvcomm.machine import Effect, Event, Tick
from kvcomm.wire.messages import RingMap, RingNode

START_TIMEOUT_S = 20.0
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
HEALTHY_AFTER_S = 10.0
"""A node that was up for so long starts again without back-off; one that ends before has ended early."""
RETRY_S = 0.25
STARTS_MAX = 5


@dataclass(frozen=True, slots=True)
class NodeSpec:
    node: str
    role: Literal["pool", "shard"]
    rack: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class RingRules:
    """How many copies of what the map promises."""

    replicas: int
    write_quorum: int
    read_quorum: int
    block_copies: int


@dataclass(frozen=True, slots=True)
class NodeUp(Event):
    """The process has registered and answers."""

    node: str
    address: str
    local_address: str
    control: str


@dataclass(frozen=True, slots=True)
class NodeExited(Event):
    node: str
    code: int
    reason: str = ""
    """Why there never was a process, if so."""


@dataclass(frozen=True, slots=True)
class RingTaken(Event):
    """A node has the map of this epoch; ``taken`` False = it could not be reached."""

    node: str
    epoch: int
    taken: bool


@dataclass(frozen=True, slots=True)
class StartNode(Effect):
    spec: NodeSpec


@dataclass(frozen=True, slots=True)
class KillNode(Effect):
    """The node did not come up in time; its exit will be reported as ``NodeExited``."""

    node: str


@dataclass(frozen=True, slots=True)
class GiveUp(Effect):
    """The cluster cannot be started: stop everything and say that ``node`` is why."""

    node: str
    code: int


@dataclass(frozen=True, slots=True)
class IssueRing(Effect):
    """Write the map down durably; only then perform the ``HandRing`` s that follow."""

    ring: RingMap


@dataclass(frozen=True, slots=True)
class HandRing(Effect):
    """Tell one shard the map; answered by ``RingTaken``."""

    node: str
    control: str
    ring: RingMap


@dataclass(slots=True)
class _Node:
    spec: NodeSpec
    state: Literal["absent", "starting", "up", "waiting"] = "absent"
    since: float = 0.0
    backoff_s: float = BACKOFF_FIRST_S
    restarts: int = 0
    early_ends: int = 0
    """In a row."""
    exit_code: int | None = None
    up: NodeUp | None = None
    ring_epoch: int = 0
    """Newest epoch this process has taken."""
    handing: bool = False
    hand_after: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """For ``status``: one node as the supervisor sees it."""

    node: str
    role: str
    state: str
    restarts: int
    exit_code: int | None


@dataclass(slots=True)
class Supervisor:
    """The machine.  ``last_epoch`` is the newest epoch ever issued for this cluster (0 = none)."""

    specs: Sequence[NodeSpec]
    rules: RingRules
    last_epoch: int = 0
    ring: RingMap | None = field(default=None, init=False)
    _nodes: dict[str, _Node] = field(init=False)
    _was_ready: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._nodes = {spec.node: _Node(spec) for spec in self.specs}
        if len(self._nodes) != len(self.specs):
            raise ValueError("node names must differ")

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case NodeUp():
                self._came_up(self._nodes[event.node], event, now)
            case NodeExited():
                self._exited(self._nodes[event.node], event.code, now)
            case RingTaken():
                self._taken(self._nodes[event.node], event, now)
            case Tick():
                pass
            case _:
                raise TypeError(f"supervisor does not know {type(event).__name__}")
        self._was_ready = self._was_ready or self.ready
        hopeless = [node for node in self._nodes.values() if node.early_ends >= STARTS_MAX]
        if hopeless and not self._was_ready:
            return [GiveUp(node.spec.node, node.exit_code or 0) for node in hopeless[:1]]
        return [*self._start_due(now), *self._issue(), *self._hand_out(now)]

    def deadline(self) -> float | None:
        times = [self._node_deadline(node) for node in self._nodes.values()]
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        for node in self._nodes.values():
            assert (node.up is not None) == (node.state == "up"), node
            assert node.ring_epoch <= self.last_epoch, node
        assert self.ring is None or self.ring.epoch == self.last_epoch

    def story(self, key: bytes) -> str:
        node = self._nodes.get(key.decode(errors="replace"))
        return (
            "no such node"
            if node is None
            else f"{node.spec.node} is {node.state} since {node.since:.3f}: {node}"
        )

    def report(self) -> list[NodeReport]:
        return [
            NodeReport(node.spec.node, node.spec.role, node.state, node.restarts, node.exit_code)
            for node in self._nodes.values()
        ]

    @property
    def ready(self) -> bool:
        """Every node is up and every shard serves the newest map."""
        return self.ring is not None and all(
            node.state == "up" and (node.spec.role != "shard" or node.ring_epoch == self.last_epoch)
            for node in self._nodes.values()
        )

    def _came_up(self, node: _Node, event: NodeUp, now: float) -> None:
        node.state, node.since, node.up = "up", now, event
        node.ring_epoch, node.handing, node.hand_after = 0, False, now

    def _exited(self, node: _Node, code: int, now: float) -> None:
        if node.state == "up" and now - node.since >= HEALTHY_AFTER_S:
            node.backoff_s, node.early_ends = BACKOFF_FIRST_S, 0
        else:
            node.early_ends += 1
        node.state, node.since, node.up, node.exit_code = "waiting", now, None, code
        node.ring_epoch, node.handing = 0, False

    def _taken(self, node: _Node, event: RingTaken, now: float) -> None:
        node.handing = False
        if event.taken:
            node.ring_epoch = max(node.ring_epoch, event.epoch)
        else:
            node.hand_after = now + RETRY_S

    def _start_due(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node in self._nodes.values():
            due = self._node_deadline(node)
            if node.state == "absent" or (node.state == "waiting" and due is not None and due <= now):
                if node.state == "waiting":
                    node.restarts += 1
                    node.backoff_s = min(node.backoff_s * 2, BACKOFF_MAX_S)
                node.state, node.since = "starting", now
                effects.append(StartNode(node.spec))
            elif node.state == "starting" and due is not None and due <= now:
                node.since = now  # ask again if even the kill gets lost
                effects.append(KillNode(node.spec.node))
        return effects

    def _issue(self) -> list[Effect]:
        """A new epoch when the map would differ from the last one; the first only when every shard has been
        up."""
        shards = [
            self._ring_node(spec, self.ring.shards if self.ring else ()) for spec in self._of_role("shard")
        ]
        pools = [
            self._ring_node(spec, self.ring.pools if self.ring else ()) for spec in self._of_role("pool")
        ]
        known_shards = [shard for shard in shards if shard]
        known_pools = [pool for pool in pools if pool]
        if len(known_shards) < len(shards) or len(known_pools) < len(pools):
            return []
        if self.ring and self.ring.shards == known_shards and self.ring.pools == known_pools:
            return []
        self.last_epoch += 1
        self.ring = RingMap(
            self.last_epoch, self.rules.replicas, self.rules.write_quorum, self.rules.read_quorum,
            self.rules.block_copies, known_shards, known_pools,
        )  # fmt: skip
        return [IssueRing(self.ring)]

    def _hand_out(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node in self._nodes.values():
            lacks = self.ring is not None and node.ring_epoch < self.ring.epoch and node.spec.role == "shard"
            if node.up and self.ring and lacks and not node.handing and node.hand_after <= now:
                node.handing = True
                effects.append(HandRing(node.spec.node, node.up.control, self.ring))
        return effects

    def _of_role(self, role: str) -> list[NodeSpec]:
        return [spec for spec in self.specs if spec.role == role]

    def _ring_node(self, spec: NodeSpec, before: Sequence[RingNode]) -> RingNode | None:
        """Where the node is now, else where the last map had it, else unknown."""
        up = self._nodes[spec.node].up
        if up is None:
            return next((node for node in before if node.node == spec.node), None)
        return RingNode(spec.node, up.address, up.local_address, up.control, spec.rack, spec.weight)

    def _node_deadline(self, node: _Node) -> float | None:
        match node.state:
            case "starting":
                return node.since + START_TIMEOUT_S
            case "waiting":
                return node.since + node.backoff_s
            case "up" if self.ring and node.spec.role == "shard" and node.ring_epoch < self.ring.epoch:
                return None if node.handing else node.hand_after
        return None
