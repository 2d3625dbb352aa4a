"""``Survey``: which agent should live in which rack, so that agents find each other's blocks nearby.

Agents report whose blocks they got (``controller.traffic``); a balanced grouping of that graph puts those
together who share much (``controller.grouping``).  Moving an agent has a price: its pinned views and its warm
L1 are lost, and its rack's pools have to get what it reads again.

Traffic of the past always has *some* grouping under which more of it would have been inside.  So the share
that advice promises is measured on traffic that the grouping has not seen: grouped by each half of the
reports, judged by the other.  In traffic without communities that is no more than now, and nobody is told to
move.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controller.grouping import Edges, Partitioner, grouped, inside, metis
from controller.traffic import TrafficGraph

RACKS_MAX = 256
"""That only agents name, and they may name any: with more, those with the most agents count."""
SIGMAS = 3.0
"""The judged gain of a grouping that means nothing is 0 on the average, not each time: a gain counts that is
so many standard errors away from it."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """When a move is worth it.

    Raises:
        ValueError: a time or a price is out of range.
    """

    horizon_s: float = 3600.0
    """How long agents and their traffic are expected to stay as they are."""
    move_bytes: float = float(1 << 30)
    """What moving one agent costs, in bytes that could be fetched inside the rack instead."""
    silent_after_s: float = 60.0
    """An agent that has not reported for so long is not moved; its blocks still lie in its rack."""

    def __post_init__(self) -> None:
        if self.horizon_s <= 0 or self.move_bytes < 0 or self.silent_after_s <= 0:
            raise ValueError("horizon and silence must be above 0 s, the price of a move at least 0 bytes")


@dataclass(frozen=True, slots=True)
class Lodger:
    """One life of one agent's process."""

    agent: int
    """Its incarnation."""
    name: str


@dataclass(frozen=True, slots=True)
class Residence:
    """An agent, where it is and where it should be."""

    agent: int
    """Its incarnation."""
    name: str
    rack: str
    better_rack: str
    """The same, if it should stay."""
    bytes_s: float
    """Of its traffic with others."""
    gain_bytes_s: float
    """Of its traffic that would come inside, all advice followed."""

    @property
    def moves(self) -> bool:
        return self.rack != self.better_rack


@dataclass(frozen=True, slots=True)
class Advice:
    """Where agents should live.  Shares are of the traffic between agents whose racks are known."""

    residences: tuple[Residence, ...]
    """Of every agent whose rack is known, by rack and name."""
    bytes_s: float
    share_before: float
    share_after: float
    """To be expected: measured on traffic that the grouping was not made from.  ``share_before`` when
    nobody is told to move."""
    share_fitted: float
    """Of the traffic that it was made from; larger by what is chance."""
    unplaced_bytes_s: float
    """Traffic with agents that never said where they are."""
    reason: str
    """Why nobody is told to move; empty = somebody is."""

    @property
    def move_count(self) -> int:
        return sum(residence.moves for residence in self.residences)


@dataclass(frozen=True, slots=True)
class Survey:
    """What is needed for advice, taken out of a graph in little time; :meth:`advice` may take seconds, and
    can run in another thread.  Agents are those whose racks are known, by index."""

    agents: Sequence[Lodger]
    racks: Sequence[str]
    rooms: Sequence[int]
    """Agents that each rack takes."""
    homes: Sequence[int]
    silent: frozenset[int]
    halves: tuple[Edges, Edges]
    """Traffic over the horizon, in bytes."""
    evidence: float
    """Fetches that it is known from."""
    unplaced_bytes_s: float
    pricing: Pricing

    @staticmethod
    def of(graph: TrafficGraph, rooms: Mapping[str, int | None], now: float, pricing: Pricing) -> Survey:
        """What ``graph`` knows.

        Args:
            rooms: racks that there are, and how many agents each takes; ``None`` = its equal share, or what
                it has.  A rack that only agents name is taken as one of these, up to :data:`RACKS_MAX`.

        Raises:
            ValueError: no room for all agents.
        """
        named = Counter(agent.rack for agent in graph.agents() if agent.rack and agent.rack not in rooms)
        racks = sorted({*rooms, *(rack for rack, _ in named.most_common(RACKS_MAX))})
        order = {rack: index for index, rack in enumerate(racks)}
        agents = [agent for agent in graph.agents() if agent.rack in order]
        homes = [order[agent.rack] for agent in agents]
        place = {agent.agent: index for index, agent in enumerate(agents)}
        rates = [graph.rates(half, now) for half in (0, 1)]
        first, second = (_edges(place, half, pricing.horizon_s) for half in rates)
        return Survey(
            [Lodger(agent.agent, agent.name) for agent in agents],
            racks,
            _rooms(racks, homes, rooms),
            homes,
            frozenset(place[a.agent] for a in agents if now - a.reported_at > pricing.silent_after_s),
            (first, second),
            graph.evidence(place),
            sum(rate for half in rates for pair, rate in half.items() if not place.keys() >= {*pair}),
            pricing,
        )

    def advice(self, partitioner: Partitioner = metis) -> Advice:
        """Where agents should live.

        Raises:
            ConfigError: the partitioner is not installed.
        """
        edges = _sum(*self.halves)
        total, before = _total(edges), inside(edges, self.homes)
        if total == 0.0:
            return self._stay(edges, "no agent got another one's blocks")
        if len(self.racks) < 2:
            return self._stay(edges, "there is one rack")
        racks = self._grouped(edges, partitioner)
        moves = sum(rack != home for rack, home in zip(racks, self.homes, strict=True))
        if moves == 0:
            return self._stay(edges, "no move is worth its price")
        after = self._judged(partitioner)
        least = max(moves * self.pricing.move_bytes, SIGMAS * self._error(before, after, total))
        if after - before <= least:
            return self._stay(edges, f"{moves} moves fit past traffic, but would not have fitted other")
        return Advice(
            self._residences(edges, racks),
            total / self.pricing.horizon_s,
            before / total,
            after / total,
            inside(edges, racks) / total,
            self.unplaced_bytes_s,
            "",
        )

    def _error(self, before: float, after: float, total: float) -> float:
        """Standard error of ``after - before``, at most: of fetches that are inside by one grouping and not
        by the other."""
        gain = (after - before) / total
        return total * math.sqrt(max(0.0, (after + before) / total - gain**2) / self.evidence)

    def _stay(self, edges: Edges, reason: str) -> Advice:
        total, before = _total(edges), inside(edges, self.homes)
        share = before / total if total else 0.0
        bytes_s = total / self.pricing.horizon_s
        return Advice(
            self._residences(edges, self.homes), bytes_s, share, share, share, self.unplaced_bytes_s, reason
        )

    def _judged(self, partitioner: Partitioner) -> float:
        """Bytes inside racks under groupings that have not seen them: each half's judged by the other."""
        pairs = (self.halves, self.halves[::-1])
        return sum(inside(judge, self._grouped(_doubled(seen), partitioner)) for seen, judge in pairs)

    def _grouped(self, edges: Edges, partitioner: Partitioner) -> list[int]:
        price = self.pricing.move_bytes
        return grouped(edges, self.homes, self.rooms, price, fixed=self.silent, partitioner=partitioner)

    def _residences(self, edges: Edges, racks: Sequence[int]) -> tuple[Residence, ...]:
        def near(index: int, at: Sequence[int]) -> float:
            return sum(weight for other, weight in edges[index].items() if at[other] == at[index])

        horizon_s = self.pricing.horizon_s
        found = [
            Residence(
                lodger.agent,
                lodger.name,
                self.racks[self.homes[index]],
                self.racks[racks[index]],
                sum(edges[index].values()) / horizon_s,
                (near(index, racks) - near(index, self.homes)) / horizon_s,
            )
            for index, lodger in enumerate(self.agents)
        ]
        return tuple(sorted(found, key=lambda each: (each.rack, each.name, each.agent)))


def _rooms(racks: Sequence[str], homes: Sequence[int], said: Mapping[str, int | None]) -> list[int]:
    equal = -(-len(homes) // max(1, len(racks)))
    rooms = []
    for index, rack in enumerate(racks):
        room = said.get(rack)
        if room is not None and room < 0:
            raise ValueError(f"rack {rack} cannot take {room} agents")
        rooms.append(max(equal, homes.count(index)) if room is None else room)
    if sum(rooms) < len(homes):
        raise ValueError(f"{len(homes)} agents, but room for {sum(rooms)} in racks {', '.join(racks)}")
    return rooms


def _edges(place: Mapping[int, int], rates: Mapping[tuple[int, int], float], horizon_s: float) -> Edges:
    edges: list[dict[int, float]] = [{} for _ in place]
    for (one, other), rate in rates.items():
        if one in place and other in place:
            mine, theirs = place[one], place[other]
            edges[mine][theirs] = edges[theirs][mine] = rate * horizon_s
    return edges


def _sum(one: Edges, other: Edges) -> Edges:
    return [
        {agent: mine.get(agent, 0.0) + theirs.get(agent, 0.0) for agent in {**mine, **theirs}}
        for mine, theirs in zip(one, other, strict=True)
    ]


def _doubled(edges: Edges) -> Edges:
    """One half of the reports is half of the traffic."""
    return [{other: 2.0 * weight for other, weight in neighbours.items()} for neighbours in edges]


def _total(edges: Iterable[Mapping[int, float]]) -> float:
    return sum(weight for neighbours in edges for weight in neighbours.values()) / 2.0
