"""``python -m bench.policies [--smoke] [--json FILE] [--write-docs]``: load policies on the same simulated
traffic: what they move, and how even the load is for that.

Not a measurement of this machine: a computation, the same everywhere.  Keys have Zipf popularity; every half
hour another few become the popular ones, and the load of each two seconds wavers.  A policy sees what the
controller would see of it (``controller.policies.view``), is asked every ten seconds, and its moves take as
long as their bytes need at the throughput cap; meanwhile it is not asked, and the keys are where they were.

"Fewer moves" alone proves nothing, for who never moves has none.  So each policy is run with several
settings, and those are to be compared that leave the load about equally even.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bench.document import DOCUMENT, begin, written_into
from controller.conductor import POLICY_S
from controller.journal import first_journal
from controller.orders import rebalance
from controller.policies.giving import given_share
from controller.policies.greedy import Greedy, GreedyOptions
from controller.policies.port import Move, Policy
from controller.policies.threshold import Threshold, ThresholdOptions
from controller.policies.view import LoadHistory, LoadView
from kvcomm.wire.messages import NodePlan, RingMap, RingNode, ShardLoad
from l3_shard.ring import Ring, point_of

SHARDS = 8
OPS_S = 40_000.0
SKEW = 0.9
SHIFT_S = 1800.0
"""So often other keys become the popular ones."""
WAVER = 0.1
"""Relative standard deviation of a shard's load within one step."""
BLOCK_BYTES = 200e9
"""In the cluster, one copy of each."""
RATE_BYTES_S = 64e6
STUDENT_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@dataclass(frozen=True, slots=True)
class Size:
    hours: float
    keys: int
    shifted: int
    """Popular keys that change with each shift."""
    seeds: int


FULL = Size(hours=3.0, keys=20_000, shifted=100, seeds=5)
SMOKE = Size(hours=1.0, keys=500, shifted=20, seeds=2)


class Run(msgspec.Struct, frozen=True):
    """One policy, one seed."""

    plans: int
    ranges: int
    """In the map in the end."""
    moved_bytes: float
    imbalance_mean: float
    """Busiest shard against the mean, over time."""
    imbalance_p99: float


class Never:
    """The placement of the circle, whatever happens."""

    def plan(self, view: LoadView) -> list[Move]:
        return []


def _threshold(high: float) -> Callable[[], Policy]:
    return lambda: Threshold(ThresholdOptions(high=high, low=1 + (high - 1) / 3))


def _greedy(tolerance: float) -> Callable[[], Policy]:
    return lambda: Greedy(GreedyOptions(tolerance=tolerance))


POLICIES: dict[str, Callable[[], Policy]] = {
    "never": Never,
    "threshold 1.5": _threshold(1.5),
    "threshold 1.3": _threshold(1.3),
    "threshold 1.15": _threshold(1.15),
    "greedy 1.5": _greedy(1.5),
    "greedy 1.3": _greedy(1.3),
    "greedy 1.05": _greedy(1.05),
}


class Traffic:
    """The load of each shard over time, for one seed."""

    def __init__(self, size: Size, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._size = size
        self._points = np.array([point_of(b"key/%d" % key) for key in range(size.keys)], dtype=np.uint64)
        shares = 1 / np.arange(1, size.keys + 1) ** SKEW
        self._shares = self._draw.permutation(shares / shares.sum())

    def shift(self) -> None:
        """The most popular keys change places with keys drawn from all."""
        popular = np.argsort(-self._shares)[: self._size.shifted]
        others = self._draw.choice(self._size.keys, self._size.shifted, replace=False)
        for one, other in zip(popular, others, strict=True):
            self._shares[one], self._shares[other] = self._shares[other], self._shares[one]

    def ops_s(self, ring: RingMap) -> NDArray[np.float64]:
        """Of each shard of the ring, in its order, without what wavers."""
        order = {node.node: index for index, node in enumerate(ring.shards)}
        stretches = Ring.from_map(ring).stretches
        ends = np.array([last for _, last, _ in stretches], dtype=np.uint64)
        owners = np.array([order[owner] for _, _, owner in stretches])
        at = np.searchsorted(ends, self._points)
        busy = np.bincount(owners[at], weights=self._shares * OPS_S, minlength=len(order))
        return busy.astype(np.float64)

    def wavering(self, ops_s: NDArray[np.float64]) -> NDArray[np.float64]:
        return ops_s * np.maximum(0.0, self._draw.normal(1.0, WAVER, len(ops_s)))


def run(policy: Policy, size: Size, seed: int) -> Run:
    """All hours of it."""
    traffic, history = Traffic(size, seed), LoadHistory()
    shards = [RingNode(f"shard-{index}", "", "", "", "rack", 1) for index in range(SHARDS)]
    ring = RingMap(1, 3, 2, 2, 1, shards, [])
    ops_s = traffic.ops_s(ring)
    moving: tuple[float, RingMap] | None = None
    plans, moved_bytes = 0, 0.0
    imbalances = []
    for step in range(1, round(size.hours * 3600 / POLICY_S)):
        now = step * POLICY_S
        if now % SHIFT_S == 0:
            traffic.shift()
            ops_s = traffic.ops_s(ring)
        if moving is not None and now >= moving[0]:
            ring, moving = moving[1], None
            ops_s = traffic.ops_s(ring)
            history.forget()
        imbalances.append(float(ops_s.max() / ops_s.mean()))
        for node, busy in zip(ring.shards, traffic.wavering(ops_s), strict=True):
            load = ShardLoad(ops_s=float(busy), block_bytes=int(BLOCK_BYTES / SHARDS))
            history.saw(node.node, load, now)
        if moving is None:
            planned = _planned(policy, history, ring, now)
            if planned is not None:
                plans, moved_bytes = plans + 1, moved_bytes + planned.moved_bytes
                moving = (now + planned.seconds, planned.ring)
    return Run(
        plans,
        len(ring.ranges),
        moved_bytes,
        float(np.mean(imbalances)),
        float(np.percentile(imbalances, 99)),
    )


@dataclass(frozen=True, slots=True)
class Planned:
    ring: RingMap
    moved_bytes: float
    seconds: float


def _planned(policy: Policy, history: LoadHistory, ring: RingMap, now: float) -> Planned | None:
    """What the policy wants now, as the controller would make it."""
    view = history.view(ring, RATE_BYTES_S, now)
    moves = policy.plan(view) if view is not None else []
    journal = first_journal([NodePlan(node.node, "shard", node.rack) for node in ring.shards])
    operation = rebalance("policy", moves, ring, journal)
    if operation is None:
        return None
    following = replace(ring, epoch=ring.epoch + 3, ranges=operation.ranges)
    taken = [
        given_share([move for move in moves if move.node == node.node]) * BLOCK_BYTES for node in ring.shards
    ]
    return Planned(following, sum(taken), max(taken) / RATE_BYTES_S)


def table(found: dict[str, list[Run]], size: Size) -> str:
    """As Markdown; means over the seeds with 95 % intervals."""
    lines = [
        f"{SHARDS} shards, {size.keys:,} keys of Zipf popularity {SKEW} of which {size.shifted} change every "
        f"{SHIFT_S / 60:.0f} minutes, {BLOCK_BYTES / 1e9:.0f} GB of blocks, moves at most at "
        f"{RATE_BYTES_S / 1e6:.0f} MB/s a shard; {size.hours:g} simulated hours, {size.seeds} seeds, "
        "95 % intervals.",
        "",
        "| policy | plans | GB moved | busiest / mean, on average | at its p99 | ranges in the end |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in found.items():
        lines.append(
            f"| {name} | {_interval([each.plans for each in runs], 1)} "
            f"| {_interval([each.moved_bytes / 1e9 for each in runs], 1)} "
            f"| {_interval([each.imbalance_mean for each in runs], 3)} "
            f"| {_interval([each.imbalance_p99 for each in runs], 3)} "
            f"| {_interval([each.ranges for each in runs], 0)} |"
        )
    return "\n".join(lines)


def _interval(values: Sequence[float], digits: int) -> str:
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half = STUDENT_95[len(values) - 1] * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="also write what was found there")
    parser.add_argument("--write-docs", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    size = SMOKE if options.smoke else FULL
    found = {name: [run(make(), size, seed) for seed in range(size.seeds)] for name, make in POLICIES.items()}
    text = table(found, size)
    print(text)
    if options.json:
        Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    if options.write_docs:
        DOCUMENT.write_text(written_into(DOCUMENT.read_text(), text, begin("bench.policies")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
