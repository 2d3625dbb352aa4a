"""``Supervisor``: keeps the processes of a launcher's nodes alive; which nodes, a plan says.

Theory of operation.  The plan is at first the configuration's, later the leader's
(``HeartbeatAnswer.plan``).  Each node of it is in one state::

    absent --StartNode--> starting --NodeUp--> up --NodeExited--> waiting --(back-off over)--> starting ...
                             |------NodeExited----------------------^
                             '--(start timeout)--> overdue: KillNode, until NodeExited

    in the plan no more: any of these --StopNode--> stopping --NodeExited--> forgotten
                                                       '--(grace over)--> KillNode

A node that ends early :data:`STARTS_MAX` times in a row before the cluster ever served will not come up by
trying once more (a wrong configuration, no shared memory, a port taken): the supervisor gives up, so that
whoever started it hears why.  Once the cluster has served it is never given up: its other nodes still serve.
From then on nodes that are new start one after the other: a start takes most of a core for a second, and
those that serve on this host want it too.  What has died starts again whoever else does.

It issues no maps and moves no data: that is the controllers' (``controller.controller``), which need not run
on its host.  With it gone, or with all controllers gone, reads and writes go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvcomm.machine import Effect, Event, Tick
from kvcomm.wire.messages import NodePlan

START_TIMEOUT_S = 20.0
"""Of the first start.  After each that took too long the next may take twice as long: memory that is
registered, or a disk that is read through, takes its time, and would never be finished."""
START_TIMEOUTS_MAX = 8
"""So many times that at most."""
STOP_GRACE_S = 5.0
"""Between asking a node to end and killing it."""
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
HEALTHY_AFTER_S = 10.0
"""A node that was up for so long starts again without back-off; one that ends before has ended early."""
STARTS_MAX = 5


@dataclass(frozen=True, slots=True)
class PlanChanged(Event):
    """This is all that is to run from now on."""

    plan: Sequence[NodePlan]


@dataclass(frozen=True, slots=True)
class NodeUp(Event):
    """The process has registered and answers."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeExited(Event):
    node: str
    code: int
    reason: str = ""
    """Why there never was a process, if so."""


@dataclass(frozen=True, slots=True)
class ClusterServes(Event):
    """A map has been issued, and all its nodes work by it."""


@dataclass(frozen=True, slots=True)
class StartNode(Effect):
    plan: NodePlan


@dataclass(frozen=True, slots=True)
class StopNode(Effect):
    """Ask it to end; its exit will be reported as ``NodeExited``."""

    node: str


@dataclass(frozen=True, slots=True)
class KillNode(Effect):
    """It did not come up, or did not end, in time; its exit will be reported as ``NodeExited``."""

    node: str


@dataclass(frozen=True, slots=True)
class GiveUp(Effect):
    """The cluster cannot be started: stop everything and say that ``node`` is why."""

    node: str
    code: int


@dataclass(slots=True)
class _Node:
    plan: NodePlan
    state: Literal["absent", "starting", "overdue", "up", "waiting", "stopping"] = "absent"
    since: float = 0.0
    patience: int = 1
    """How many times the usual time its start may take."""
    backoff_s: float = BACKOFF_FIRST_S
    restarts: int = 0
    early_ends: int = 0
    """In a row."""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node as the supervisor sees it."""

    node: str
    role: str
    state: str
    restarts: int
    exit_code: int | None


@dataclass(slots=True)
class Supervisor:
    """The machine.  ``plan`` is what is to run first.

    Raises:
        ValueError: two nodes have one name.
    """

    plan: Sequence[NodePlan]
    served: bool = field(default=False, init=False)
    """Whether the cluster has ever served."""
    _nodes: dict[str, _Node] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._follow(self.plan)

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case PlanChanged():
                effects += self._follow(event.plan, now)
            case NodeUp():
                self._came_up(event.node, now)
            case NodeExited():
                self._exited(self._nodes[event.node], event.code, now)
            case ClusterServes():
                self.served = True
            case Tick():
                pass
            case _:
                raise TypeError(f"supervisor does not know {type(event).__name__}")
        hopeless = [node for node in self._nodes.values() if self._is_hopeless(node)]
        if hopeless:
            return [GiveUp(node.plan.node, node.exit_code or 0) for node in hopeless[:1]]
        return effects + self._due(now)

    def deadline(self) -> float | None:
        times = [_deadline_of(node) for node in self._nodes.values()]
        return min((time for time in times if time is not None), default=None)

    def check(self) -> None:
        planned = {each.node for each in self.plan}
        for name, node in self._nodes.items():
            assert name in planned or node.state == "stopping", node
        assert planned <= set(self._nodes)

    def story(self, key: bytes) -> str:
        node = self._nodes.get(key.decode(errors="replace"))
        return (
            "no such node"
            if node is None
            else f"{node.plan.node} is {node.state} since {node.since:.3f}: {node}"
        )

    def report(self) -> list[NodeReport]:
        return [
            NodeReport(node.plan.node, node.plan.role, node.state, node.restarts, node.exit_code)
            for node in self._nodes.values()
        ]

    @property
    def all_up(self) -> bool:
        """Whether everything that is to run does."""
        return all(node.state == "up" for node in self._nodes.values())

    @property
    def running(self) -> list[str]:
        """Nodes that there is a process of, as far as is known."""
        return [name for name, node in self._nodes.items() if node.state not in ("absent", "waiting")]

    def fate(self, name: str) -> Literal["stopped", "starts again", "given up"]:
        """What becomes of a node that has just ended; ``stopped``: it was told to end."""
        node = self._nodes.get(name)
        if node is None or node.state != "waiting":  # forgotten, or a new one of its name is on its way
            return "stopped"
        return "given up" if self._is_hopeless(node) else "starts again"

    @property
    def _may_start_new(self) -> bool:
        return not (self.served and any(node.state == "starting" for node in self._nodes.values()))

    def _is_hopeless(self, node: _Node) -> bool:
        return not self.served and node.early_ends >= STARTS_MAX

    def _follow(self, plan: Sequence[NodePlan], now: float = 0.0) -> list[Effect]:
        """What is planned anew starts when it is due; what left the plan ends."""
        planned = {each.node: each for each in plan}
        if len(planned) != len(plan):
            raise ValueError("node names must differ")
        self.plan = list(plan)
        effects: list[Effect] = []
        for name, node in list(self._nodes.items()):
            if name in planned:
                node.plan = planned[name]
            elif node.state in ("absent", "waiting"):
                del self._nodes[name]
            elif node.state != "stopping":
                node.state, node.since = "stopping", now
                effects.append(StopNode(name))
        for name, each in planned.items():
            self._nodes.setdefault(name, _Node(each))
        return effects

    def _came_up(self, name: str, now: float) -> None:
        node = self._nodes.get(name)
        if node is not None and node.state == "starting":
            node.state, node.since = "up", now

    def _exited(self, node: _Node, code: int, now: float) -> None:
        node.exit_code = code
        if node.state == "stopping":
            del self._nodes[node.plan.node]
            again = [each for each in self.plan if each.node == node.plan.node]
            for each in again:  # it is wanted once more, since it was told to end
                self._nodes[each.node] = _Node(each)
            return
        if node.state == "up" and now - node.since >= HEALTHY_AFTER_S:
            node.backoff_s, node.early_ends, node.patience = BACKOFF_FIRST_S, 0, 1
        else:
            node.early_ends += 1
        node.state, node.since = "waiting", now

    def _due(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for node in self._nodes.values():
            due = _deadline_of(node)
            is_due = due is not None and due <= now
            if (node.state == "absent" and self._may_start_new) or (node.state == "waiting" and is_due):
                if node.state == "waiting":
                    node.restarts += 1
                    node.backoff_s = min(node.backoff_s * 2, BACKOFF_MAX_S)
                node.state, node.since = "starting", now
                effects.append(StartNode(node.plan))
            elif node.state == "starting" and is_due:
                node.patience = min(2 * node.patience, START_TIMEOUTS_MAX)
                node.state, node.since = "overdue", now
                effects.append(KillNode(node.plan.node))
            elif node.state in ("overdue", "stopping") and is_due:
                node.since = now  # even a kill may get lost
                effects.append(KillNode(node.plan.node))
        return effects


def _deadline_of(node: _Node) -> float | None:
    match node.state:
        case "starting":
            return node.since + START_TIMEOUT_S * node.patience
        case "waiting":
            return node.since + node.backoff_s
        case "overdue" | "stopping":
            return node.since + STOP_GRACE_S
    return None
