"""``Core``: a part of the cluster is healed for good, the rest broken for good; then operations must succeed.

The core is as small as the quorums allow: every record keeps enough owners in it for a write quorum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
"""Every client has a put and a get of eventual records done in every window of so long, if it tried some."""
STRONG_WINDOW_S = 10.0
"""The same of strong records, whose proposers may meet and give way to each other."""
TRIED_MIN = 3


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
    """Windows of a client in which it tried to write (or read) and never could."""
    tried: dict[tuple[str, bool, bool, int], int] = {}
    done: dict[tuple[str, bool, bool, int], int] = {}
    for operation in history.operations():
        invoked = operation.invoked
        if invoked.at < healthy_from_s:
            continue
        strong = invoked.kind in KINDS
        number = int((invoked.at - healthy_from_s) / _window_s(strong))
        window = (invoked.client, strong, invoked.kind not in ("get", *READS), number)
        tried[window] = tried.get(window, 0) + 1
        done[window] = done.get(window, 0) + _answered(operation)
    found: list[Violation] = []
    for window in sorted(tried):
        client, strong, writes, number = window
        if tried[window] >= TRIED_MIN and not done[window]:
            what = f"{tried[window]} {'strong' if strong else 'eventual'} {'writes' if writes else 'reads'}"
            since_s = healthy_from_s + number * _window_s(strong)
            found.append(Violation("progress", f"{client} tried {what} from {since_s:.1f} on, none done"))
    return found


def _window_s(strong: bool) -> float:
    return STRONG_WINDOW_S if strong else WINDOW_S


def _answered(operation: Operation) -> bool:
    """Done, or the record had too many siblings or another version: an answer, not the cluster's fault."""
    if operation.outcome == "ok":
        return True
    return operation.returned is not None and operation.returned.error.startswith(Conflict.code)
