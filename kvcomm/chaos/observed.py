"""``Observed``: what a story on real processes left to judge.  Times are monotonic seconds of the machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Final, Literal

import msgspec

from kvcomm.chaos.eventual import Ending
from kvcomm.chaos.history import History, Operation
from kvcomm.chaos.registers import KINDS
from kvcomm.chaos.shapes import Cut, sides
from kvcomm.wire.messages import ClusterView

CallKind = Literal["eventual", "strong", "blocks"]
CallState = Literal["good", "degraded", "refused", "unknown"]
CALL_KINDS: Final[tuple[CallKind, ...]] = ("eventual", "strong", "blocks")
CALL_STATES: Final[tuple[CallState, ...]] = ("good", "degraded", "refused", "unknown")
"""``degraded``: answered, by fewer replicas than usual, or blocks that nobody reached has; ``refused``: an
error that says that nothing was done; ``unknown``: one that says that nobody knows."""

UNTYPED: Final = "untyped"
"""Begin of the error of a call that raised something else than a ``KVCommError``."""
HIT, MISS, WRONG = "hit", "miss", "wrong bytes"
"""What a fetch of blocks saw."""
LAST: Final = "last"
"""End of the names of clients that only look at what is left."""
_BLOCKS = ("publish", "fetch")


class Sample(msgspec.Struct, frozen=True):
    """What one host's processes said of the cluster at one time."""

    at: float
    node: str
    epoch: int = 0
    """Of its shard's ring; 0 = it did not answer."""
    ring: str = ""
    """Digest of that map."""
    leader: str = ""
    """That its controller knows; "" = none, or no controller answers."""
    term: int = 0
    mode: str = ""
    late_s: float = 0.0
    """The longest that the host's clients were late by themselves so far."""
    suspects: list[str] | None = None
    """Whom the leading controller calls suspect or dead; ``None`` = it is not this host's."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A step was done."""

    at: float
    what: str
    kind: Literal["fault", "heal", "order"]


@dataclass(frozen=True, slots=True)
class Episode:
    """Something was broken."""

    begin: float
    end: float
    sides: tuple[tuple[str, ...], ...]
    """Hosts that were still together; one side = the network was whole."""
    cuts: frozenset[Cut] = frozenset()
    hurt: frozenset[str] = frozenset()
    """Hosts of which something was paused, ended or throttled."""

    @property
    def parted(self) -> bool:
        """Whether it was a partition into sides."""
        return len(self.sides) > 1

    def side_of(self, node: str) -> tuple[str, ...]:
        return next(side for side in self.sides if node in side)


def hurt_by(broken: Iterable[str]) -> frozenset[str]:
    """Hosts of an :class:`Episode` that are hurt, of what is broken: ``down n1 shard``, ``slow n2``."""
    return frozenset(each.split()[1] for each in broken if " " in each)


def episode_of(
    begin: float, end: float, nodes: Sequence[str], broken: Mapping[str, frozenset[Cut]]
) -> Episode:
    """``broken``: what was, and which directions that cut."""
    cuts = frozenset[Cut]().union(*broken.values())
    return Episode(begin, end, sides(nodes, cuts), cuts, hurt_by(broken))


def suspects_of(view: ClusterView) -> list[str] | None:
    """Nodes, as in :class:`Sample`."""
    if view.leader != view.controller:
        return None
    return [each.node for each in view.nodes if each.state in ("suspect", "dead")]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one client."""

    node: str
    client: str
    kind: CallKind
    key: str
    begin: float
    end: float | None
    """``None`` = it never came back."""
    state: CallState
    error: str = ""

    @property
    def answered(self) -> bool:
        return self.state in ("good", "degraded")


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything."""

    nodes: Sequence[str]
    begin: float
    """The clients began."""
    end: float
    history: History
    marks: Sequence[Mark] = ()
    episodes: Sequence[Episode] = ()
    samples: Sequence[Sample] = ()
    ending: Ending | None = None
    """``None`` = the replicas could not all be looked at."""
    equal_s: float | None = None
    """From the last heal until the replicas of every record written before were equal; ``None`` = never."""
    unequal: Sequence[str] = ()
    """What differed at last, where they never were."""
    owners: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of a record's key: the hosts of its replicas."""
    quorums: tuple[int, int, int] = (3, 2, 2)
    """Of eventual records: replicas, write quorum, read quorum."""
    orders_taken: int = 0
    orders_done: int = 0
    orders_undone: int = 0
    """That ended otherwise: taken back, or failed."""
    orders_refused: int = 0
    orders_open: Sequence[str] = ()
    """What those were doing that were not carried out."""

    @property
    def healed_at(self) -> float | None:
        """When the last fault ended."""
        ends = [episode.end for episode in self.episodes if episode.end < self.end]
        return max(ends, default=None)


def calls_of(operations: Sequence[Operation]) -> list[Call]:
    """The calls of a history, of those who work."""
    return list(_calls(operations))


def _calls(operations: Sequence[Operation]) -> Iterator[Call]:
    for operation in operations:
        invoked, returned = operation.invoked, operation.returned
        if invoked.client.endswith(LAST):
            continue
        node = invoked.client.partition(".")[0]
        state = _state(operation)
        end = None if returned is None else returned.at
        error = "" if returned is None else returned.error
        kind = _kind(invoked.kind)
        yield Call(node, invoked.client, kind, invoked.keys[0], invoked.at, end, state, error)


def _kind(kind: str) -> CallKind:
    return "blocks" if kind in _BLOCKS else "strong" if kind in KINDS else "eventual"


def _state(operation: Operation) -> CallState:
    """A compare-and-set that met another version is an answer."""
    returned = operation.returned
    if returned is None or operation.outcome == "unknown":
        return "unknown"
    if operation.outcome == "refused" and not returned.seen:
        return "refused"
    return "degraded" if any(seen.degraded for seen in returned.seen) else "good"


def bins_of(
    calls: Collection[Call], begin: float, end: float, width_s: float
) -> dict[tuple[str, CallKind], list[dict[CallState, int]]]:
    """Answers by host and kind, in bins of ``width_s``, each where it was heard."""
    count = max(1, ceil((end - begin) / width_s))
    found: dict[tuple[str, CallKind], list[dict[CallState, int]]] = {}
    for call in calls:
        if call.end is None or not begin <= call.end < begin + count * width_s:
            continue
        row = found.setdefault((call.node, call.kind), [{} for _ in range(count)])
        at = row[int((call.end - begin) / width_s)]
        at[call.state] = at.get(call.state, 0) + 1
    return found
