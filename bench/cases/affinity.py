"""Does it help to move agents to where those are whose blocks they read?

Agents are spread over racks at random, evenly; traffic is learned from, ``controller.affinity`` advises, and
*later* traffic is counted with everybody where they were and where they should be: two figures of one draw,
compared in pairs.  Traffic is planted (communities, or none) or that of public traces of several agents.

Traces: the first half of each agent's calls is learned from and the second half counted; or all are learned
from, and all are counted when the same agents begin again where they should be.  Counted are reads of blocks
that another agent made, from the own rack if anybody there has made or read them before.  Agents keep nothing
themselves (no L1): with one, hardly any such read is left in these traces.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

from bench.agent_traces import Call, absence, coders, teams
from bench.report import Report
from bench.scale import SMOKE, Scale
from bench.timing import Spread
from controller.affinity import Advice, Pricing, Survey
from controller.traffic import Fetches, TrafficGraph

DRAWS, SMOKE_DRAWS = 30, 4
MIB = 1 << 20
COMMUNITY, RACKS, INSIDE = 24, 9, 0.7
"""A community fills a rack, and of its traffic so much is its own."""
REPORTS, FETCHES = 6_000, 5
TRACE_RACKS = 4
PRICING = Pricing(move_bytes=64 * MIB, silent_after_s=1e9)
PLANTED_GAIN, NOISE_GAIN, TRACE_RISE = 50.0, 1.0, 30.0
"""Percent: of all traffic, of all traffic, of what was inside before."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One draw: shares of the later traffic that stay inside racks."""

    before: float
    after: float
    promised: float
    moved: int
    across: float
    """Bytes from other racks, after over before."""


def run(scale: Scale) -> Report:
    report = Report("affinity", "Agents moved to where their partners are")
    draws = SMOKE_DRAWS if scale is SMOKE else DRAWS
    rows = []
    for name, share in (("planted communities", INSIDE), ("no communities", 0.0)):
        pairs = [_planted(share, seed) for seed in range(draws)]
        rows.append(_row(f"{name}, {COMMUNITY * RACKS} agents, {RACKS} racks", pairs))
        gains = Spread.of([100.0 * (pair.after - pair.before) for pair in pairs])
        if share:
            report.claim(f"{name}: gain of traffic inside racks", ">=", PLANTED_GAIN, "%", gains)
        else:
            report.claim(f"{name}: gain of traffic inside racks", "<=", NOISE_GAIN, "%", gains)
    traces: tuple[tuple[str, Callable[[], list[Call]]], ...] = (
        ("teams of agents (magagent)", teams),
        ("coding agents and their sub-agents (claude_code)", coders),
    )
    for name, read in traces:
        what = f"{name}, again: rise of reads from the own rack, relative"
        reason = absence()
        if reason is not None:
            report.skip(what, reason)
            continue
        calls = read()
        agents = f"{len({call.agent for call in calls})} agents, {TRACE_RACKS} racks"
        later = [_traced(calls, seed, again=False) for seed in range(draws)]
        again = [_traced(calls, seed, again=True) for seed in range(draws)]
        rows += [
            _row(f"{name}, {agents}: second halves", later),
            _row(f"{name}, {agents}: all again", again),
        ]
        report.notes.append(f"{name}: {100 * _of_others(calls):.1f} % of all reads are of others' blocks.")
        rises = Spread.of([100.0 * (pair.after / pair.before - 1.0) for pair in again])
        report.claim(what, ">=", TRACE_RISE, "%", rises)
    report.notes.append("\n".join([*HEAD, *rows]))
    report.notes.append(
        f"{draws} draws of where agents begin, each counted both ways: means, with the 95 % of the mean. "
        "*Promised* is what the advice expected; *across* are the bytes from other racks, after over before."
    )
    return report


HEAD = (
    "| traffic | inside, at random | inside, as advised | difference | promised | agents moved | across |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def _row(what: str, pairs: Sequence[Pair]) -> str:
    promises = [pair.promised for pair in pairs if pair.moved]
    cells = (
        _percent([pair.before for pair in pairs]),
        _percent([pair.after for pair in pairs]),
        _percent([pair.after - pair.before for pair in pairs]),
        f"{100 * mean(promises):.1f} %" if promises else "nothing",
        f"{mean(pair.moved for pair in pairs):.0f}",
        f"{mean(pair.across for pair in pairs):.2f}",
    )
    return f"| {what} | {' | '.join(cells)} |"


def _percent(values: Sequence[float]) -> str:
    """Mean with its 95 % interval (normal; the draws are many)."""
    error = 1.96 * stdev(values) / math.sqrt(len(values))
    return f"{100 * mean(values):.1f} % (± {100 * error:.1f})"


def _planted(inside_share: float, seed: int) -> Pair:
    draw, graph, count = random.Random(seed), TrafficGraph(), COMMUNITY * RACKS
    homes = _spread(count, RACKS, draw)

    def partner(agent: int) -> int:
        inside = draw.random() < inside_share
        return draw.randrange(agent % RACKS, count, RACKS) if inside else draw.randrange(count)

    for agent in range(count):
        graph.heard(1 + agent, _rack(homes[agent]), {}, 0.0)
    for number in range(REPORTS):
        agent = draw.randrange(count)
        others = Counter(partner(agent) for _ in range(FETCHES))
        fetched = {
            1 + other: _fetches(homes[other] == homes[agent], blocks) for other, blocks in others.items()
        }
        graph.heard(1 + agent, _rack(homes[agent]), fetched, number / 50)
    advice = Survey.of(graph, {}, REPORTS / 50, PRICING).advice()
    places = _places(advice, homes)
    later = [(agent, partner(agent)) for agent in range(count) for _ in range(100)]
    met = [(homes[one] == homes[other], places[one] == places[other]) for one, other in later if one != other]
    before, after = (sum(each) / len(met) for each in zip(*met, strict=True))
    return Pair(before, after, advice.share_after, advice.move_count, (1 - after) / (1 - before))


@dataclass(slots=True)
class _City:
    """Where blocks lie."""

    homes: list[int]
    racks: list[set[str]] = field(default_factory=lambda: [set() for _ in range(TRACE_RACKS)])
    makers: dict[str, int] = field(default_factory=dict)

    def moved(self, homes: list[int]) -> _City:
        return _City(homes, [set(each) for each in self.racks], dict(self.makers))

    def read(self, agent: int, blocks: Sequence[str]) -> dict[int, Fetches]:
        """What came of others' blocks, by who made them."""
        rack, counts = self.racks[self.homes[agent]], Counter[tuple[int, bool]]()
        for block in blocks:
            maker = self.makers.setdefault(block, agent)
            if maker != agent:
                counts[maker, block in rack] += 1
            rack.add(block)
        return {
            1 + maker: Fetches(MIB * counts[maker, True], MIB * counts[maker, False]) for maker, _ in counts
        }


def _traced(calls: Sequence[Call], seed: int, *, again: bool) -> Pair:
    """``again``: learn from all calls, and count them all once more, by the same agents, from the start."""
    names = sorted({call.agent for call in calls})
    place = {name: index for index, name in enumerate(names)}
    homes = _spread(len(names), TRACE_RACKS, random.Random(seed))
    first, later = (calls, calls) if again else _halves(calls)
    graph, city = TrafficGraph(), _City(homes)
    for agent, home in enumerate(homes):
        graph.heard(1 + agent, _rack(home), {}, 0.0)
    for number, call in enumerate(first):
        agent = place[call.agent]
        graph.heard(1 + agent, _rack(homes[agent]), city.read(agent, call.blocks), number / 10)
    advice = Survey.of(graph, {}, len(first) / 10, PRICING).advice()
    cities = [_City(each) if again else city.moved(each) for each in (homes, _places(advice, homes))]
    before, after = (_counted(each, later, place) for each in cities)
    shares = [each.near_bytes / max(1, sum(each)) for each in (before, after)]
    across = after.far_bytes / before.far_bytes if before.far_bytes else 1.0
    return Pair(shares[0], shares[1], advice.share_after, advice.move_count, across)


def _halves(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Of each agent's calls the first half, and the rest."""
    remaining = {name: count // 2 for name, count in Counter(call.agent for call in calls).items()}
    first, later = list[Call](), list[Call]()
    for call in calls:
        (first if remaining[call.agent] > 0 else later).append(call)
        remaining[call.agent] -= 1
    return first, later


def _counted(city: _City, calls: Sequence[Call], place: dict[str, int]) -> Fetches:
    """Bytes of others' blocks."""
    near = far = 0
    for call in calls:
        for each in city.read(place[call.agent], call.blocks).values():
            near, far = near + each.near_bytes, far + each.far_bytes
    return Fetches(near, far)


def _fetches(near: bool, blocks: int) -> Fetches:
    return Fetches(MIB * blocks * near, MIB * blocks * (not near))


def _of_others(calls: Sequence[Call]) -> float:
    """Share of all reads that are of blocks which another agent made."""
    makers: dict[str, str] = {}
    reads = [makers.setdefault(block, call.agent) != call.agent for call in calls for block in call.blocks]
    return sum(reads) / len(reads)


def _spread(count: int, racks: int, draw: random.Random) -> list[int]:
    homes = [agent % racks for agent in range(count)]
    draw.shuffle(homes)
    return homes


def _places(advice: Advice, homes: Sequence[int]) -> list[int]:
    places = list(homes)
    for residence in advice.residences:
        places[residence.agent - 1] = int(residence.better_rack.removeprefix("rack-"))
    return places


def _rack(index: int) -> str:
    return f"rack-{index}"
