"""``grouped``: agents into racks that each take so many, with much traffic inside and few moves.

What is maximised is::

    sum of weights between agents of one rack  -  price * agents that are not where they were

METIS (Karypis, Kumar 1998; the optional extra ``affinity``) cuts the graph with regard to the weights alone
and finds structure that no step-by-step search would.  Its parts are given to the racks where most of their
members already are, made to fit the racks' rooms, and improved by single moves and exchanges of two
(Kernighan, Lin 1970) with regard to the price.  The same search also starts from where the agents are; the
better of the two is taken, so the result is never worse than moving nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvcomm.errors import ConfigError

Edges = Sequence[Mapping[int, float]]
"""By agent: its neighbours and the weight to each; symmetric, no loops, weights above 0."""
Partitioner = Callable[[Edges, Sequence[float]], list[int]]
"""Parts of a graph, one an agent, whose sizes are about the given shares of all; see :func:`metis`."""

PASSES_MAX = 16
"""Of the search; it stops when a pass changes nothing, which takes a few."""
WEIGHT_SUM = 1 << 28
"""METIS counts in 32-bit integers."""
SEED = 1


def metis(edges: Edges, shares: Sequence[float]) -> list[int]:
    """Parts by METIS, the same for the same graph.

    Raises:
        ConfigError: pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError as error:
        raise ConfigError(
            "grouping agents needs pymetis, which is not installed: pip install 'kvcomm[affinity]'"
        ) from error
    total = sum(weight for neighbours in edges for weight in neighbours.values()) or 1.0
    starts, adjacent, weights = [0], list[int](), list[int]()
    for neighbours in edges:
        for other, weight in sorted(neighbours.items()):
            adjacent.append(other)
            weights.append(max(1, round(weight / total * WEIGHT_SUM)))
        starts.append(len(adjacent))
    _, parts = pymetis.part_graph(
        len(shares),
        pymetis.CSRAdjacency(starts, adjacent),
        eweights=weights,
        tpwgts=[share / sum(shares) for share in shares],
        options=pymetis.Options(seed=SEED, ncuts=4),
    )
    return list(parts)


def grouped(
    edges: Edges,
    homes: Sequence[int],
    rooms: Sequence[int],
    price: float,
    *,
    fixed: frozenset[int] = frozenset(),
    partitioner: Partitioner = metis,
) -> list[int]:
    """The rack of each agent.

    Args:
        edges: traffic between the agents, in the unit of ``price``.
        homes: the rack in which each agent is now, an index of ``rooms``.
        rooms: agents that each rack takes.  One that holds more already may keep them; it gets no others.
        price: of moving one agent.
        fixed: agents that stay where they are.

    Raises:
        ValueError: the graph, ``homes`` and ``rooms`` do not fit each other.
        ConfigError: the partitioner is not installed.
    """
    if len(edges) != len(homes) or any(not 0 <= home < len(rooms) for home in homes):
        raise ValueError(f"{len(edges)} agents, {len(homes)} homes, racks 0 to {len(rooms) - 1}")
    linked = [agent for agent in range(len(edges)) if edges[agent]]
    if len(rooms) < 2 or len(linked) <= len(rooms):
        return list(homes)
    search = _Search(edges, homes, rooms, price, fixed)
    stayed = search.improved(homes)
    parted = search.improved(_parted(edges, homes, rooms, linked, fixed, partitioner))
    return max(stayed, parted, key=search.worth)  # the first, should they be equal


def inside(edges: Edges, racks: Sequence[int]) -> float:
    """Weight between agents of one rack, each pair once."""
    return sum(
        weight
        for agent, neighbours in enumerate(edges)
        for other, weight in neighbours.items()
        if agent < other and racks[agent] == racks[other]
    )


def _parted(
    edges: Edges,
    homes: Sequence[int],
    rooms: Sequence[int],
    linked: Sequence[int],
    fixed: frozenset[int],
    partitioner: Partitioner,
) -> list[int]:
    """Racks by the partitioner; who has no traffic or is fixed stays."""
    place = {agent: index for index, agent in enumerate(linked)}
    graph = [{place[other]: weight for other, weight in edges[agent].items()} for agent in linked]
    parts = partitioner(graph, [max(room, 1) / sum(max(each, 1) for each in rooms) for room in rooms])
    members: list[list[int]] = [[] for _ in rooms]
    for agent, part in zip(linked, parts, strict=True):
        members[part].append(agent)
    racks = list(homes)
    for part, rack in _racks_of(members, homes, rooms).items():
        for agent in members[part]:
            if agent not in fixed:
                racks[agent] = rack
    return racks


def _racks_of(members: Sequence[Sequence[int]], homes: Sequence[int], rooms: Sequence[int]) -> dict[int, int]:
    """Which part becomes which rack: the one where most of it is already, if it fits there."""
    pairs = sorted(
        (
            (-sum(homes[agent] == rack for agent in part), index, rack)
            for index, part in enumerate(members)
            for rack in range(len(rooms))
            if len(part) <= rooms[rack]
        )
    )
    chosen: dict[int, int] = {}
    for _, part, rack in pairs:
        if part not in chosen and rack not in chosen.values():
            chosen[part] = rack
    parts = sorted(set(range(len(members))) - set(chosen), key=lambda part: -len(members[part]))
    racks = sorted(set(range(len(rooms))) - set(chosen.values()), key=lambda rack: -rooms[rack])
    return chosen | dict(zip(parts, racks, strict=True))


class _Search:
    """Improves where agents are, never beyond a rack's room."""

    def __init__(
        self,
        edges: Edges,
        homes: Sequence[int],
        rooms: Sequence[int],
        price: float,
        fixed: frozenset[int],
    ) -> None:
        self._edges, self._homes, self._price = edges, homes, price
        self._rooms = [max(room, homes.count(rack)) for rack, room in enumerate(rooms)]
        self._free = [agent for agent in range(len(edges)) if edges[agent] and agent not in fixed]

    def worth(self, racks: Sequence[int]) -> float:
        moved = sum(rack != home for rack, home in zip(racks, self._homes, strict=True))
        return inside(self._edges, racks) - self._price * moved

    def improved(self, start: Sequence[int]) -> list[int]:
        """``start`` made to fit, then changed by moves and exchanges as long as they gain."""
        self._racks = list(start)
        self._counts = [self._racks.count(rack) for rack in range(len(self._rooms))]
        self._movable: list[dict[int, None]] = [{} for _ in self._rooms]
        for agent in self._free:
            self._movable[self._racks[agent]][agent] = None
        self._pull = [[0.0] * len(self._rooms) for _ in self._edges]
        for agent, neighbours in enumerate(self._edges):
            for other, weight in neighbours.items():
                self._pull[agent][self._racks[other]] += weight
        self._make_fit()
        for _ in range(PASSES_MAX):
            changes = sum(self._step(agent) for agent in self._free)
            if not changes:
                break
        return self._racks

    def _make_fit(self) -> None:
        """Those leave an overfull rack who lose least."""
        for rack, room in enumerate(self._rooms):
            while self._counts[rack] > room:
                free = [to for to, room in enumerate(self._rooms) if self._counts[to] < room]
                _, agent, to = max(
                    (self._gain(agent, to), agent, to) for agent in self._movable[rack] for to in free
                )
                self._move(agent, to)

    def _step(self, agent: int) -> bool:
        """Do the best thing with one agent; whether there was one."""
        best, home = (0.0, -1, -1), self._racks[agent]
        for to, room in enumerate(self._rooms):
            if to == home:
                continue
            gain = self._gain(agent, to)
            if self._counts[to] < room:
                best = max(best, (gain, to, -1))
            elif gain > 0:
                best = max(best, self._exchange(agent, to, gain))
        gain, to, other = best
        if gain <= 1e-9 * max(1.0, self._price):  # a rounding error must not go round for ever
            return False
        self._move(agent, to)
        if other >= 0:
            self._move(other, home)
        return True

    def _exchange(self, agent: int, to: int, gain: float) -> tuple[float, int, int]:
        """The best agent of a full rack to change places with."""
        home, neighbours = self._racks[agent], self._edges[agent]
        return max(
            (
                (gain + self._gain(other, home) - 2.0 * neighbours.get(other, 0.0), to, other)
                for other in self._movable[to]
            ),
            default=(0.0, to, -1),
        )

    def _gain(self, agent: int, to: int) -> float:
        """Of moving one agent, all others staying."""
        at, home = self._racks[agent], self._homes[agent]
        pull = self._pull[agent]
        return pull[to] - pull[at] + self._price * ((to == home) - (at == home))

    def _move(self, agent: int, to: int) -> None:
        at = self._racks[agent]
        self._racks[agent] = to
        self._counts[at] -= 1
        self._counts[to] += 1
        del self._movable[at][agent]
        self._movable[to][agent] = None
        for other, weight in self._edges[agent].items():
            self._pull[other][at] -= weight
            self._pull[other][to] += weight
