"""``Scenario``: what is done to a cluster, what is promised meanwhile, and how that is measured.

The same structure is the YAML file of a user's own scenario (``docs/chaos.md``): a step is ``{do: cut, at_s:
2, ...}``, a promise ``{measure: lost, at_most: 0}``.  ``scenario_of`` reads one and says what is wrong with
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec

from kvcomm.chaos.measures import MEASURES
from kvcomm.chaos.shapes import ShapeName, cuts_of
from kvcomm.errors import ConfigError

NODES_MAX = 9
LEADER = "leader"
"""In place of a node: the host of the controllers' leader when the step is done."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Count = Annotated[int, msgspec.Meta(ge=0, le=64)]
Part = Literal["all", "shard", "controller"]
"""Which processes of a host."""


OperationStep = Literal["planned", "copying", "verifying", "serving", "purging"]
"""Of an operator's order, in this order; see ``kvcomm.wire.messages.OperationView``."""
OPERATION_STEPS: tuple[OperationStep, ...] = get_args(OperationStep)


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", kw_only=True):
    """Done ``at_s`` seconds after the clients began."""

    at_s: Seconds


class Cut(Step, frozen=True, tag="cut"):
    """Cut the network.  Replaces an earlier cut."""

    shape: ShapeName
    groups: list[list[str]] = []


class Heal(Step, frozen=True, tag="heal"):
    """Undo every cut, loss and slowness of the network."""


class Pause(Step, frozen=True, tag="pause"):
    """SIGSTOP."""

    node: str
    part: Part = "all"


class Resume(Step, frozen=True, tag="resume"):
    """SIGCONT."""

    node: str
    part: Part = "all"


class Kill(Step, frozen=True, tag="kill"):
    """SIGKILL."""

    node: str
    part: Part = "all"
    when: OperationStep | None = None
    """As soon as what was ordered is at this step, or behind it."""


class Stop(Step, frozen=True, tag="stop"):
    """SIGTERM: it answers what it has begun, and ends."""

    node: str
    part: Part = "all"


class Restart(Step, frozen=True, tag="restart"):
    """Start what was killed or stopped, over what is on its disk."""

    node: str
    part: Part = "all"


class Loss(Step, frozen=True, tag="loss"):
    """Lose packets between hosts, evenly."""

    percent: Annotated[float, msgspec.Meta(ge=0, le=90)]


class Slow(Step, frozen=True, tag="slow"):
    """Limit what the network carries to and from a host."""

    node: str
    kbit_s: Annotated[int, msgspec.Meta(ge=64)]


class Throttle(Step, frozen=True, tag="throttle"):
    """Limit the processor time of a host's processes, of each part together.  Replaces an earlier limit."""

    node: str
    percent: Annotated[float, msgspec.Meta(ge=1, le=100)]
    """Of one core."""
    part: Part = "all"


class Unthrottle(Step, frozen=True, tag="unthrottle"):
    """Let them have all that there is again."""

    node: str
    part: Part = "all"


class ControllerOrder(Step, frozen=True, kw_only=True):
    """An operator's order."""

    waits: bool = True
    """Until what was ordered before has been carried out."""


class Scale(ControllerOrder, frozen=True, tag="scale", kw_only=True):
    """Order so many shards."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)]


class Move(ControllerOrder, frozen=True, tag="move", kw_only=True):
    """Order the keys of a part of the circle to a shard's host."""

    first_share: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    last_share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    node: str


class Drain(ControllerOrder, frozen=True, tag="drain", kw_only=True):
    """Order everything away from a host's shard."""

    node: str


AnyStep = (
    Cut | Heal | Pause | Resume | Kill | Stop | Restart | Throttle | Unthrottle | Loss | Slow
    | Scale | Move | Drain
)  # fmt: skip


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients on every node, each doing one thing after the other."""

    eventual: Count = 2
    strong: Count = 2
    blocks: Count = 1
    pace_s: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.1
    """A client rests half to one and a half times so long between two calls."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    """Of one call."""
    keys: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8
    """Of each kind, that all clients share; each eventual client has half as many of its own."""


class Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A limit of one measure (``kvcomm.chaos.measures``)."""

    measure: str
    at_most: float | None = None
    at_least: float | None = None

    def kept(self, value: float | None) -> bool:
        """A measure that there was nothing to measure for breaks no limit above, and keeps none below."""
        if value is None:
            return self.at_least is None
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def text(self) -> str:
        parts = [f"at most {self.at_most:g}"] if self.at_most is not None else []
        parts += [f"at least {self.at_least:g}"] if self.at_least is not None else []
        return " and ".join(parts)


SAFETY = tuple(
    Promise(measure, at_most=0)
    for measure in ("eventual_broken", "strong_broken", "wrong_bytes", "untyped_errors", "late_calls")
)
"""Promised by every scenario, whether it says so or not."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One story."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    promise: str
    """In words."""
    steps: list[AnyStep]
    promises: list[Promise] = []
    faults: list[int] = []
    """Numbers in the fault catalogue."""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 5
    """Hosts: each has one shard, and the first ones have the controllers."""
    shards: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] | None = None
    """That are in the ring at first; ``None`` = one on every host."""
    controllers: Literal[1, 3, 5] = 3
    replicas: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 3
    load: Load = Load()
    settle_s: Seconds = 3.0
    """Clients go on for so long after the last step."""
    equal_within_s: Seconds = 20.0
    """How long to wait for equal replicas after that."""
    detect_s: Seconds = 2.0
    """What is promised during a fault is measured from so long after it began."""
    skipped: str = ""
    """Why it cannot be run in this version; empty = it can."""

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    @property
    def all_promises(self) -> list[Promise]:
        named = {promise.measure for promise in self.promises}
        return [promise for promise in SAFETY if promise.measure not in named] + list(self.promises)

    @property
    def end_s(self) -> float:
        """When clients stop."""
        return max((step.at_s for step in self.steps), default=0.0) + self.settle_s


def scenario_of(document: Any) -> Scenario:
    """The scenario that a parsed YAML or JSON document describes.

    Raises:
        ConfigError: what is wrong, and where.
    """
    try:
        scenario = msgspec.convert(document, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"not a scenario: {error}") from error
    if problems := list(_problems(scenario)):
        raise ConfigError("\n".join(problems))
    return scenario


def _problems(scenario: Scenario) -> Iterator[str]:
    """What its parts say against each other."""
    if scenario.controllers > scenario.nodes:
        yield f"{scenario.controllers} controllers need as many nodes, not {scenario.nodes}"
    if (scenario.shards or 1) > scenario.nodes:
        yield f"shards is {scenario.shards}, of {scenario.nodes} nodes"
    before = 0.0
    for number, step in enumerate(scenario.steps, start=1):
        where = f"step {number} ({type(step).__name__.lower()})"
        if step.at_s < before:
            yield f"{where}: at {step.at_s:g} s, before the step that stands above it"
        before = step.at_s
        yield from (f"{where}: {problem}" for problem in _problems_of(step, scenario))
    yield from _unpaired(scenario.steps)
    for promise in scenario.promises:
        if promise.measure not in MEASURES:
            yield f"promises: no measure {promise.measure!r}; there are: {', '.join(MEASURES)}"
        if promise.at_most is None and promise.at_least is None:
            yield f"promises: {promise.measure} has neither at_most nor at_least"
        if any(limit != limit for limit in (promise.at_most, promise.at_least)):
            yield f"promises: the limit of {promise.measure} is not a number"


def _unpaired(steps: Sequence[AnyStep]) -> Iterator[str]:
    """What is to be undone was done before, to what has the same name."""
    done: set[tuple[str, str, Part]] = set()
    for number, step in enumerate(steps, start=1):
        match step:
            case Pause():
                done.add(("paused", step.node, step.part))
            case Kill() | Stop():
                done.add(("killed or stopped", step.node, step.part))
            case Throttle():
                done.add(("throttled", step.node, step.part))
            case Resume() | Restart() | Unthrottle():
                undone = {Resume: "paused", Restart: "killed or stopped", Unthrottle: "throttled"}[type(step)]
                if (undone, step.node, step.part) not in done:
                    yield (
                        f"step {number} ({type(step).__name__.lower()}): no step above it {undone} "
                        f"{step.node}, part {step.part}"
                    )


def _problems_of(step: AnyStep, scenario: Scenario) -> Iterator[str]:
    nodes = scenario.node_names
    if isinstance(step, Cut):
        try:
            cuts_of(step.shape, resolved(step.groups, nodes[0]), nodes)
        except ConfigError as error:
            yield str(error)
        return
    named = getattr(step, "node", None)
    if named is not None and named not in (*nodes, LEADER):
        yield f"no node {named!r}; there are {', '.join(nodes)} and {LEADER!r}"
    elif getattr(step, "part", "all") == "controller" and named in nodes[scenario.controllers :]:
        yield f"{named} has no controller: the first {scenario.controllers} have one"
    if isinstance(step, Scale) and step.shards > scenario.nodes:
        yield f"{step.shards} shards need as many nodes, not {scenario.nodes}"


def resolved(groups: Sequence[Sequence[str]], leader: str) -> list[list[str]]:
    """``groups`` with the leader's host named, and taken out of where it stands besides."""
    if not any(LEADER in group for group in groups):
        return [list(group) for group in groups]
    kept = [[node for node in group if node != leader] for group in groups]
    return [[leader if node == LEADER else node for node in group] for group in kept if group]
