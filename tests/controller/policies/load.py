"""Traffic for load policies: keys with a popularity each, served by the first owner on the ring."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from controller.journal import first_journal
from controller.orders import rebalance
from controller.policies.port import Move, Policy
from controller.policies.view import LoadHistory
from kvcomm.wire.messages import NodePlan, RingMap, RingNode, ShardLoad
from l3_shard.ring import Ring

SHARDS = 6
OPS_S = 6000.0
HELD_BYTES = 10**9
KEYS = [b"key/%d" % index for index in range(1_500)]


def ring_of(count: int = SHARDS) -> RingMap:
    shards = [RingNode(f"shard-{index}", "", "", "", "r", 1) for index in range(count)]
    return RingMap(1, 3, 2, 2, 1, shards, [])


def zipf(skew: float, seed: int, keys: Sequence[bytes] = KEYS) -> dict[bytes, float]:
    """Shares of the load; which keys are the popular ones is drawn."""
    order = list(keys)
    random.Random(seed).shuffle(order)
    weights = [1 / (rank + 1) ** skew for rank in range(len(order))]
    total = sum(weights)
    return {key: weight / total for key, weight in zip(order, weights, strict=True)}


class Cluster:
    """Shards under a load, a policy that is asked every ten seconds, and moves that are carried out."""

    def __init__(self, policy: Policy, ring: RingMap | None = None, rate_bytes_s: float = 64e6) -> None:
        self.policy, self.ring = policy, ring or ring_of()
        self.history = LoadHistory()
        self.now = 1000.0
        self.rate_bytes_s = rate_bytes_s
        self.plans: list[tuple[float, list[Move]]] = []
        self.factors = dict.fromkeys((node.node for node in self.ring.shards), 1.0)
        """How much busier each shard is than its keys make it."""

    def ops_s(self, popularity: dict[bytes, float]) -> dict[str, float]:
        """Of each shard."""
        ring = Ring.from_map(self.ring)
        busy = dict.fromkeys(self.factors, 0.0)
        for key, share in popularity.items():
            (owner,) = ring.owners(key, 1)
            busy[owner] += share * OPS_S
        return {node: ops_s * self.factors[node] for node, ops_s in busy.items()}

    def imbalance(self, popularity: dict[bytes, float]) -> float:
        busy = self.ops_s(popularity)
        return max(busy.values()) * len(busy) / sum(busy.values())

    def run(self, seconds: float, popularity: dict[bytes, float]) -> None:
        busy = self.ops_s(popularity)
        for _ in range(round(seconds / 2)):
            self.now += 2
            for node, ops_s in busy.items():
                load = ShardLoad(ops_s=ops_s, block_bytes=HELD_BYTES // len(busy))
                self.history.saw(node, load, self.now)
            if self.now % 10 == 0 and self.ask():
                busy = self.ops_s(popularity)

    def ask(self) -> bool:
        """Whether the policy has moved something."""
        view = self.history.view(self.ring, self.rate_bytes_s, self.now)
        moves = self.policy.plan(view) if view is not None else []
        journal = first_journal([NodePlan(node.node, "shard", node.rack) for node in self.ring.shards])
        operation = rebalance("policy", moves, self.ring, journal)
        if operation is None:
            return False
        self.plans.append((self.now, list(moves)))
        self.ring = replace(self.ring, epoch=self.ring.epoch + 3, ranges=operation.ranges)
        self.history.forget()
        return True


EVEN = zipf(0.0, 0)
