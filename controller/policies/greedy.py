"""``Greedy``: halves the gap between the busiest and the idlest shard, whenever there is one.

It asks neither whether the load will stay nor what the move costs: what ``Threshold`` is measured against,
and what an operator may order once.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.policies.giving import STRETCHES_MAX, give
from controller.policies.port import Move
from controller.policies.view import LoadView


@dataclass(frozen=True, slots=True)
class GreedyOptions:
    tolerance: float = 1.05
    """The busiest may have so much of the mean."""
    ops_s_min: float = 1.0
    stretches_max: int = STRETCHES_MAX


class Greedy:
    """See the module; a policy (``controller.policies.port``)."""

    def __init__(self, options: GreedyOptions | None = None) -> None:
        self._options = options or GreedyOptions()

    def plan(self, view: LoadView) -> list[Move]:
        if view.mean_ops_s < self._options.ops_s_min or view.imbalance <= self._options.tolerance:
            return []
        busiest = max(view.shards, key=lambda shard: (shard.ops_s, shard.node))
        idlest = min(view.shards, key=lambda shard: (shard.ops_s, shard.node))
        share = busiest.share * (busiest.ops_s - idlest.ops_s) / 2 / busiest.ops_s
        return give(view, busiest.node, idlest.node, share, self._options.stretches_max)
