"""``Rack``: which pool is the home of a key; ``Health``: which pools may be one.  Pure.

A home is found by rendezvous hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit
Rates", IEEE/ACM Transactions on Networking 1998): every pool draws a number for the key, the highest draw
wins.  All clients that see the same pools agree without talking to each other, and when a pool joins or
leaves, only the keys that it wins or has won move.  Clients that see different pools miss some blocks, and
never get wrong ones: a home is where to look, nothing more.

With weights the draw is ``-weight / ln(u)``, ``u`` uniform in (0, 1) (Schindelhauer and Schomaker, "Weighted
Distributed Hash Tables", SPAA 2005): shares are proportional to the weights, and a changed weight moves no
key between the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvcomm.tier import PoolState

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
_DRAWS = float(1 << 64)


class Pool(NamedTuple):
    """A pool of the ring as a client dials it."""

    node: str
    """Its identity, whatever its address."""
    address: str
    """``unix:///path`` or ``tcp://host:port`` of its data wire."""
    weight: int = 1


class Rack:
    """The pools that keys are spread over, for as long as they stay the same.

    Args:
        weights: by name of the pool.

    Raises:
        ValueError: a name repeats, or a weight is not positive.
    """

    def __init__(self, weights: Iterable[tuple[str, int]]) -> None:
        ranked = sorted(weights)
        self.nodes = tuple(node for node, _ in ranked)
        """Sorted."""
        if len(set(self.nodes)) != len(ranked) or any(weight < 1 for _, weight in ranked):
            raise ValueError(f"pools of a rack have a name of their own and a weight above 0: {ranked}")
        self._seeds = [xxh3_64_intdigest(node.encode()) for node in self.nodes]
        self._weights = [weight for _, weight in ranked]
        self._level = len(set(self._weights)) < 2

    def home(self, key: bytes) -> str | None:
        """The name of the pool; ``None`` in an empty rack."""
        return self.homes([key])[0]

    def homes(self, keys: Sequence[bytes]) -> Sequence[str | None]:
        """One a key.  Equal draws go to the name that sorts first."""
        nodes, seeds, draw = self.nodes, self._seeds, xxh3_64_intdigest
        if len(nodes) < 2:
            return [nodes[0] if nodes else None] * len(keys)
        if not self._level:
            return [self._weighted_home(key) for key in keys]
        found = []
        for key in keys:
            draws = [draw(key, seed) for seed in seeds]
            found.append(nodes[draws.index(max(draws))])
        return found

    def _weighted_home(self, key: bytes) -> str:
        draws = [
            -weight / log((xxh3_64_intdigest(key, seed) + 0.5) / _DRAWS)
            for seed, weight in zip(self._seeds, self._weights, strict=True)
        ]
        return self.nodes[draws.index(max(draws))]


@dataclass(frozen=True, slots=True)
class Health:
    """What a client thinks of one pool; a value, so each method gives the next one.

    ========= ======================================== ======== ===============================
    state     what happened                            a home?  do operations wait for an attach?
    ========= ======================================== ======== ===============================
    alive     it serves, or was never tried            yes      yes: they have nothing else
    suspect   it was left or ended, as in a restart    yes      yes, once
    away      it could not be reached, or was silent   no       no: attaching goes on behind them
    ========= ======================================== ======== ===============================

    So a pool that is gone costs one time-out, and after that nothing until it is back; its keys have other
    homes meanwhile.
    """

    state: PoolState = "alive"
    retry_at: float = 0.0
    """Monotonic seconds before which it is left alone."""
    backoff_s: float = BACKOFF_FIRST_S
    """How long after the next failure."""

    @property
    def is_home(self) -> bool:
        return self.state != "away"

    def may_try(self, now: float) -> bool:
        return self.state != "away" or now >= self.retry_at

    def attached(self) -> Health:
        """It has taken us in."""
        return Health()

    def ended(self) -> Health:
        """The connection ended: the process is gone, or has shown us out."""
        return replace(self, state="suspect")

    def failed(self, now: float) -> Health:
        """It could not be reached, or did not answer in time."""
        return Health("away", now + self.backoff_s, min(2 * self.backoff_s, BACKOFF_MAX_S))
