"""``Core``: a part of the cluster is healed for good, the rest broken for good; then operations must succeed.

The core is as small as the quorums allow: every record keeps enough owners in it for a write quorum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcomm.chaos.history import History, Operation
from kvcomm.chaos.network import halves
from kvcomm.chaos.registers import KINDS, READS
from kvcomm.chaos.watch import Violation
from kvcomm.errors import Conflict

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import Cluster
    from kvcomm.chaos.nemesis import Nemesis

GRACE_S = 3.0
"""After the healing: restarts, reconnections and the time-outs of what was begun before."""
WINDOW_S = 5.0
"""In every window of so long every client has a put and a get of eventual records done, if it tried some; of
strong records, whose proposers meet and give way to each other, all clients together have."""
TRIED_MIN = 3
STARVED_MIN = 5
"""And nobody gives way for ever: of so many tries of a client, from the healing to the end, one was done."""
EVERYBODY = "all clients"


class Core:
    """Settles ``cluster`` when told to."""

    def __init__(self, cluster: Cluster, nemesis: Nemesis) -> None:
        self._cluster, self._nemesis = cluster, nemesis
        self.healthy_from_s = 0.0

    def settle(self) -> None:
        cluster, draw = self._cluster, self._nemesis.draw
        plan = cluster.plan
        self._nemesis.heal()
        broken = draw.some(cluster.names, draw.between(0, plan.copies - plan.write_need))
        if plan.strong_percent:
            broken = self._few_enough(broken)
        core = [name for name in cluster.names if name not in broken]
        for name in broken:
            if draw.chance(0.4):
                cluster.broken.add(name)
                cluster.kill(name)
            elif draw.chance(0.5):
                cluster.host(name).pause()
            else:
                cluster.network.cuts |= halves([name], [*core, *cluster.client_names()])
        self.healthy_from_s = cluster.world.now + GRACE_S
        cluster.note(f"the core is {core}, {broken} are broken for good")

    def _few_enough(self, broken: list[str]) -> list[str]:
        """So that, with those that have lost their strong records, they are a minority everywhere."""
        lost = self._cluster.lost_voters()
        while len(lost.union(broken)) > self._cluster.plan.spare and broken:
            broken = broken[:-1]
        return broken


def check_liveness(history: History, healthy_from_s: float) -> list[Violation]:
    """Where clients tried to write (or read) for long enough and never could."""
    tried: dict[_Stretch, int] = {}
    done: dict[_Stretch, int] = {}
    for operation in history.operations():
        if operation.invoked.at >= healthy_from_s:
            for stretch in _stretches(operation, healthy_from_s):
                tried[stretch] = tried.get(stretch, 0) + 1
                done[stretch] = done.get(stretch, 0) + _answered(operation)
    found: list[Violation] = []
    for stretch in sorted(tried):
        if tried[stretch] >= stretch.tried_min and not done[stretch]:
            what = f"{stretch.who} tried {tried[stretch]} {stretch.what}"
            found.append(Violation("progress", f"{what} from {stretch.since_s:.1f} on, none done"))
    return found


class _Stretch(NamedTuple):
    """A time in which one of these must be done."""

    who: str
    what: str
    since_s: float
    tried_min: int


def _stretches(operation: Operation, healthy_from_s: float) -> list[_Stretch]:
    invoked = operation.invoked
    strong, does = invoked.kind in KINDS, "reads" if invoked.kind in ("get", *READS) else "writes"
    since_s = healthy_from_s + WINDOW_S * int((invoked.at - healthy_from_s) / WINDOW_S)
    if not strong:
        return [_Stretch(invoked.client, f"eventual {does}", since_s, TRIED_MIN)]
    return [
        _Stretch(EVERYBODY, f"strong {does}", since_s, TRIED_MIN),
        _Stretch(invoked.client, f"strong {does}", healthy_from_s, STARVED_MIN),
    ]


def _answered(operation: Operation) -> bool:
    """Done, or the record had too many siblings or another version: an answer, not the cluster's fault."""
    if operation.outcome == "ok":
        return True
    return operation.returned is not None and operation.returned.error.startswith(Conflict.code)
