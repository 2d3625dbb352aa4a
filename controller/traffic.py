"""``TrafficGraph``: who fetched whose blocks, forgetting.

An undirected graph: the weight between two agents is what either got of the other's blocks, in bytes, where
what is ``half_life_s`` old counts half.  A rack gets a block from elsewhere once and keeps it, so what counts
is what came from another rack, and of what came from the own one the blocks of those who live there: copies
that somebody else's read had brought cost nothing, and need nobody to move.

Nothing is ever recounted: a new fetch is entered with a weight that grows as the old ones should shrink
(forward decay; Cormode, Shkapenyuk, Srivastava, Xu 2009), and all weights are scaled back before they grow
too large.

Every weight is kept in two *halves*, into which reports go by turns.  A grouping that is made from one half
and judged by the other is judged by traffic that it has not seen, so what looks like a community by chance
does not count (``controller.affinity``).

At its bounds the graph forgets the agents that were not heard of for longest and the lightest pairs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

AGENTS_MAX = 4_096
PAIRS_MAX = 65_536
KEPT_SHARE = 0.75
"""Of a bound, when it is reached: room is made for many at once."""
SCALE_BACK_AT = 64.0
"""Half-lives."""
LEAST_BYTES = 1.0
"""What has decayed below is forgotten."""


class Fetches(NamedTuple):
    """What an agent got of one publisher's blocks, in bytes."""

    near_bytes: int
    """From its own rack's pools."""
    far_bytes: int
    """From elsewhere."""


@dataclass(slots=True)
class Agent:
    """One life of one agent's process.  Changed by :class:`TrafficGraph` only."""

    agent: int
    """Its incarnation."""
    name: str = ""
    rack: str = ""
    """Where it says it runs; empty = it has not reported."""
    reported_at: float = -math.inf
    seen_at: float = -math.inf
    """When it last reported or was named as a publisher."""
    report_count: int = 0
    pairs: dict[int, list[float]] = field(default_factory=dict)
    """By the other agent: both halves' weights and the sum of squares of all fetches; one list for both sides
    of a pair."""


class TrafficGraph:
    """A bounded, decaying graph.  ``now`` is monotonic seconds; not thread-safe.

    Args:
        half_life_s: how fast traffic is forgotten.  Longer = steadier advice, later noticed changes.

    Raises:
        ValueError: a half-life or a bound is not positive.
    """

    __slots__ = ("_agents", "_began_at", "_origin", "_pair_count", "agents_max", "half_life_s", "pairs_max")

    def __init__(
        self, half_life_s: float = 600.0, *, agents_max: int = AGENTS_MAX, pairs_max: int = PAIRS_MAX
    ) -> None:
        if not half_life_s > 0 or agents_max < 2 or pairs_max < 1:
            raise ValueError(f"half-life {half_life_s} s and bounds {agents_max}, {pairs_max} must be larger")
        self.half_life_s = half_life_s
        self.agents_max = agents_max
        self.pairs_max = pairs_max
        self._agents: dict[int, Agent] = {}
        self._pair_count = 0
        self._began_at: float | None = None  # the first report
        self._origin = 0.0  # the time at which a byte weighs one

    def heard(
        self, agent: int, rack: str, fetched: Mapping[int, Fetches], now: float, *, name: str = ""
    ) -> None:
        """One report: how much ``agent``, which runs in ``rack``, got from the cache since its last one.

        Args:
            fetched: by the publisher of the blocks; its own ones do not count.

        Raises:
            ValueError: a number is negative.
        """
        if any(min(each) < 0 for each in fetched.values()):
            raise ValueError(f"agent {agent:016x} reports negative traffic")
        if self._began_at is None:
            self._began_at = self._origin = now
        self._scale_back(now)
        reader = self._agent(agent, now)
        reader.name, reader.rack, reader.reported_at = name or reader.name, rack or reader.rack, now
        half = reader.report_count % 2
        reader.report_count += 1
        growth = 2.0 ** ((now - self._origin) / self.half_life_s)
        for publisher, (near_bytes, far_bytes) in fetched.items():
            known = self._agents.get(publisher)
            neighbour = known is not None and known.rack == reader.rack
            size_bytes = far_bytes + near_bytes * neighbour
            if publisher != agent and size_bytes:
                weight = self._pair(reader, self._agent(publisher, now))
                weight[half] += size_bytes * growth
                weight[2] += (size_bytes * growth) ** 2
        self._forget()

    def agents(self) -> list[Agent]:
        """All that are known, by incarnation."""
        return [self._agents[agent] for agent in sorted(self._agents)]

    def rates(self, half: int, now: float) -> dict[tuple[int, int], float]:
        """Bytes a second between two agents (smaller incarnation first), as far as ``half`` (0 or 1) saw it.

        A steady rate is told as it is, also while the graph is younger than its half-life.
        """
        if self._began_at is None:
            return {}
        age_s = max(now - self._began_at, 1e-3)
        # A rate r that began age_s ago has left r * span_s of decayed bytes.
        span_s = self.half_life_s / math.log(2) * -math.expm1(-math.log(2) * age_s / self.half_life_s)
        factor = 2.0 ** ((self._origin - now) / self.half_life_s) / span_s
        return {
            (one, other): weight[half] * factor
            for one in sorted(self._agents)
            for other, weight in sorted(self._agents[one].pairs.items())
            if one < other and weight[half]
        }

    def evidence(self, agents: Container[int]) -> float:
        """How many fetches of equal size and age would say as much as all that are remembered between
        ``agents`` (Kish's effective sample size)."""
        told = [
            weight
            for one, agent in self._agents.items()
            for other, weight in agent.pairs.items()
            if one < other and one in agents and other in agents
        ]
        squares = sum(weight[2] for weight in told)
        return sum(weight[0] + weight[1] for weight in told) ** 2 / squares if squares else 0.0

    def __len__(self) -> int:
        """Pairs held."""
        return self._pair_count

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._agents) <= self.agents_max and self._pair_count <= self.pairs_max
        ends = 0
        for agent in self._agents.values():
            for other, weight in agent.pairs.items():
                assert self._agents[other].pairs[agent.agent] is weight and min(weight) >= 0.0
                ends += 1
        assert ends == 2 * self._pair_count

    def _agent(self, agent: int, now: float) -> Agent:
        found = self._agents.get(agent)
        if found is None:
            found = self._agents[agent] = Agent(agent)
        found.seen_at = now
        return found

    def _pair(self, one: Agent, other: Agent) -> list[float]:
        weight = one.pairs.get(other.agent)
        if weight is None:
            weight = one.pairs[other.agent] = other.pairs[one.agent] = [0.0, 0.0, 0.0]
            self._pair_count += 1
        return weight

    def _scale_back(self, now: float) -> None:
        half_lives = (now - self._origin) / self.half_life_s
        if half_lives < SCALE_BACK_AT:
            return
        for agent in self._agents.values():
            for other, weight in list(agent.pairs.items()):
                if agent.agent < other:
                    shrunk = 2.0**-half_lives
                    weight[:] = [weight[0] * shrunk, weight[1] * shrunk, weight[2] * shrunk**2]
                    if weight[0] + weight[1] < LEAST_BYTES:
                        self._drop_pair(agent.agent, other)
        self._origin = now

    def _forget(self) -> None:
        if len(self._agents) > self.agents_max:
            by_age = sorted(self._agents.values(), key=lambda each: (-each.seen_at, each.agent))
            for agent in by_age[int(KEPT_SHARE * self.agents_max) :]:
                for other in list(agent.pairs):
                    self._drop_pair(agent.agent, other)
                del self._agents[agent.agent]
        if self._pair_count > self.pairs_max:
            pairs = [
                (weight[0] + weight[1], one, other)
                for one, agent in self._agents.items()
                for other, weight in agent.pairs.items()
                if one < other
            ]
            for _, one, other in sorted(pairs, reverse=True)[int(KEPT_SHARE * self.pairs_max) :]:
                self._drop_pair(one, other)

    def _drop_pair(self, one: int, other: int) -> None:
        del self._agents[one].pairs[other], self._agents[other].pairs[one]
        self._pair_count -= 1
