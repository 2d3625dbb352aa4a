"""Splits of the network: their shapes, and how long the cluster needs to be whole again.

A world of this campaign goes through many splits, one after the other::

    traffic on all sides ──► heal ──► every client until it had a good call of each kind ──► all owners equal
                              └────────── first good call ──────────┘                          │
                              └────────────────────── equal replicas ──────────────────────────┘

The shape is drawn for each: who hears whom, and when that changes.  All times are of the simulation, with the
shipped time-outs, back-offs and intervals, so they are what the protocol needs, not what a machine needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcomm.chaos.draw import Draw
from kvcomm.chaos.network import Cut, Weather, bridge, everybody_alone, halves, isolate, one_way, ring
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.registers import KINDS
from kvcomm.chaos.watch import Violation
from kvcomm.chaos.workload import Act, Work, Workload

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import ClientProcess, Cluster
    from kvcomm.chaos.nemesis import Nemesis

SPLITS = 10
"""Of one world."""
SHAPES = (
    "halves", "clients apart", "bridge", "ring", "isolate", "one way", "one side deaf", "flapping", "swizzle",
    "all alone", "one way for ever",
)  # fmt: skip
FLAP_S = 0.5
LASTS_S = ((1.0, 3), (3.0, 4), (8.0, 2), (20.0, 1))
"""A split lasts up to this, with weights."""
WHOLE_S = 1.0
"""Traffic on a whole cluster before the next split: up to so long."""
EQUAL_WITHIN_S = 10.0
GOOD_WITHIN_S = 6.0
"""After a heal; anything slower is a broken promise."""
LAME_WITHIN_S = 150.0
"""Where a link stays dead in one direction, the two ends become equal through others: at the latest with
those others' regular comparisons."""
LOOK_S = 0.02
RETRY_S = 0.1
"""A client that waits for the heal tries again after so long."""

Step = tuple[float, frozenset[Cut]]
"""Seconds after the begin of the split, what is cut from then on."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One split."""

    name: str
    steps: Sequence[Step]
    lasts_s: float
    stays: frozenset[Cut] = frozenset()
    """Cut also after the heal, until the replicas are equal."""


@dataclass(frozen=True, slots=True)
class Heal:
    """What one split and its end came to; times are seconds after the heal."""

    shape: str
    lasted_s: float
    good_s: Sequence[float]
    """First good call, by client."""
    strong_s: Sequence[float]
    """First good call on a strong record, by client."""
    equal_s: float
    """From then on all owners of every record have the same; ``inf`` = never seen."""


def splits_plan(seed: int) -> Plan:
    """Five shards with the shipped times, clients with eventual and strong traffic."""
    draw = Draw(seed).fork("splits")
    weather = Weather(loss=draw.choice((0.0, 0.0, 0.0, 0.005)), late=draw.choice((0.0, 0.5, 1.0)))
    return Plan(
        seed=seed,
        shards=5,
        clients=4,
        keys=draw.choice((4, 8, 12)),
        pace_s=0.6,
        active_s=1e9,  # until the last split is over
        request_timeout_s=1.5,
        ask_timeout_s=2.0,
        weather=weather,
        strong_percent=30,
        registers=3,
        repair_interval_s=60.0,
    )


def draw_shape(draw: Draw, names: Sequence[str], clients: Sequence[str]) -> Shape:
    """A split of these shards, with the clients on its sides."""
    lasts_s = draw.uniform(0.3, 1.0) * draw.weighted(LASTS_S)
    return _SHAPES[draw.choice(SHAPES)](draw, draw.some(names, len(names)), clients, lasts_s)


def _halves(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    return _still("halves", halves(*_sides(draw, names, clients)), lasts_s)


def _clients_apart(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    """Shards hear each other; some clients reach a few of them only."""
    some, far = draw.some(clients, draw.between(1, len(clients))), names[: draw.between(1, len(names) - 1)]
    return _still("clients apart", halves(some, far), lasts_s)


def _bridge(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    return _still("bridge", bridge(names), lasts_s)


def _ring(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    return _still("ring", ring(names), lasts_s)


def _isolate(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    return _still("isolate", isolate(names[0], [*names, *clients]), lasts_s)


def _one_way(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    return _still("one way", one_way(names[0], names[1]), lasts_s)


def _deaf(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    """What one side says does not arrive on the other."""
    one, other = _sides(draw, names, clients)
    return _still("one side deaf", {(a, b) for a in one for b in other}, lasts_s)


def _flapping(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    cut, steps = frozenset(halves(*_sides(draw, names, clients))), max(2, round(lasts_s / FLAP_S))
    times = [(number * FLAP_S, frozenset() if number % 2 else cut) for number in range(steps)]
    return Shape("flapping", times, steps * FLAP_S)


def _swizzle(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    """Some are cut off one by one, and let back in another order."""
    chosen = names[: draw.between(2, len(names))]
    order = [(name, True) for name in chosen] + [(name, False) for name in draw.some(chosen, len(chosen))]
    away: list[str] = []
    steps: list[Step] = []
    for number, (name, goes) in enumerate(order[:-1]):  # the last comes back with the heal
        away = [*away, name] if goes else [each for each in away if each != name]
        cuts = frozenset().union(*(isolate(each, names) for each in away))
        steps.append((lasts_s * number / len(order), cuts))
    return Shape("swizzle", steps, lasts_s)


def _alone(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    return _still("all alone", everybody_alone(names), lasts_s)


def _for_ever(draw: Draw, names: list[str], clients: Sequence[str], lasts_s: float) -> Shape:
    """A split of halves ends, and one link stays dead in one direction."""
    cuts = frozenset(halves(*_sides(draw, names, clients)))
    return Shape("one way for ever", [(0.0, cuts)], lasts_s, frozenset(one_way(names[0], names[1])))


_SHAPES: dict[str, Callable[[Draw, list[str], Sequence[str], float], Shape]] = dict(
    zip(
        SHAPES,
        (
            _halves, _clients_apart, _bridge, _ring, _isolate, _one_way, _deaf, _flapping, _swizzle, _alone,
            _for_ever,
        ),
        strict=True,
    )
)  # fmt: skip


def _sides(draw: Draw, names: list[str], clients: Sequence[str]) -> tuple[list[str], list[str]]:
    """Shards on both sides, each client on one."""
    at = draw.between(1, len(names) - 1)
    one, other = names[:at], names[at:]
    for client in clients:
        (one if draw.chance(0.5) else other).append(client)
    return one, other


def _still(name: str, cuts: set[Cut], lasts_s: float) -> Shape:
    return Shape(name, [(0.0, frozenset(cuts))], lasts_s)


class SplitWork(Work):
    """Clients at work; after a heal each goes on until it had a good call of each kind, and waits."""

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        super().__init__(cluster, workload)
        self.good: dict[str, float] = {}
        """First good call of each client, seconds of the simulation."""
        self.strong: dict[str, float] = {}
        self._healed_at: float | None = None
        self._idle: list[ClientProcess] = []
        self._over = False

    def healed(self) -> None:
        self.good, self.strong, self._healed_at = {}, {}, self._cluster.world.now

    def split(self) -> None:
        """Back to work, all of them."""
        self._healed_at = None
        self._resume()

    def stop(self) -> None:
        self._over = True
        self._resume()

    @property
    def rests(self) -> bool:
        """Whether every client had what it waited for."""
        return len(self._idle) == len(self._cluster.clients)

    def _resume(self) -> None:
        idle, self._idle = self._idle, []
        for client in idle:
            self._rest(client)

    def _rest(self, client: ClientProcess, at_least_s: float = 0.0) -> None:
        if self._healed_at is None:
            super()._rest(client, at_least_s)
        else:
            client.host.after(client.draw.uniform(0.0, RETRY_S), lambda: self._next(client))

    def _next(self, client: ClientProcess) -> None:
        if self._over:
            return
        name = client.host.name
        if self._healed_at is not None and name in self.good and name in self.strong:
            self._idle.append(client)
            return
        super()._next(client)

    def run(self, client: ClientProcess, act: Act, then: Callable[[bool], None]) -> None:
        def heard(done: bool) -> None:
            now = self._cluster.world.now
            if done and self._healed_at is not None:
                self.good.setdefault(client.host.name, now - self._healed_at)
                if act.invoked.kind in KINDS:
                    self.strong.setdefault(client.host.name, now - self._healed_at)
            then(done)

        super().run(client, act, heard)


class Splits:
    """Plays the splits of one world; ``heals`` is what they came to."""

    def __init__(self, count: int = SPLITS) -> None:
        self.heals: list[Heal] = []
        self._count = count

    def play(self, cluster: Cluster, nemesis: Nemesis, work: SplitWork) -> list[Violation]:
        """Until the last one is healed; the broken promises are those about time."""
        found: list[Violation] = []
        for _ in range(self._count):
            cluster.world.run(cluster.world.now + nemesis.draw.uniform(0.0, WHOLE_S))
            shape = draw_shape(nemesis.draw, cluster.names, cluster.client_names())
            self._split(cluster, nemesis, shape)
            nemesis.recut(shape.stays)
            cluster.note(f"healed after {shape.lasts_s:.2f} s of {shape.name}")
            heal = self._measure(cluster, work, shape)
            self.heals.append(heal)
            found += _judge(heal, cluster.world.now)
            nemesis.recut(frozenset())
            work.split()
        work.stop()
        return found

    @staticmethod
    def _split(cluster: Cluster, nemesis: Nemesis, shape: Shape) -> None:
        begin = cluster.world.now
        cluster.note(f"split: {shape.name} {[(at, sorted(cuts)) for at, cuts in shape.steps][:1]}")
        for at, cuts in shape.steps:
            cluster.world.run(begin + at)
            nemesis.recut(cuts)
        cluster.world.run(begin + shape.lasts_s)

    @staticmethod
    def _measure(cluster: Cluster, work: SplitWork, shape: Shape) -> Heal:
        healed_at = differed_at = cluster.world.now
        work.healed()
        equal = False
        until = healed_at + (LAME_WITHIN_S if shape.stays else max(EQUAL_WITHIN_S, GOOD_WITHIN_S)) + LOOK_S
        while cluster.world.now < until:
            cluster.world.run(cluster.world.now + LOOK_S)
            equal = equal_replicas(cluster)
            if not equal:
                differed_at = cluster.world.now
            elif work.rests:
                break
        never = float("inf")
        names = cluster.client_names()
        return Heal(
            shape.name,
            shape.lasts_s,
            [work.good.get(name, never) for name in names],
            [work.strong.get(name, never) for name in names],
            differed_at - healed_at if equal else never,
        )


def equal_replicas(cluster: Cluster, prefixes: tuple[str, ...] = ("",)) -> bool:
    """Whether all owners of every eventual record have the same; of those whose names begin so."""
    from l3_shard.ring import Ring
    from l3_shard.shard import TENANT_BYTES

    place = Ring.from_map(cluster.map)
    entries = {
        name: {key: entry[0] for leaf in cluster.disks[name].index.values() for key, entry in leaf.items()}
        for name in cluster.names
    }
    begins = tuple(prefix.encode() for prefix in prefixes)
    keys = {key for held in entries.values() for key in held if key[TENANT_BYTES:].startswith(begins)}
    return all(
        len({entries[node].get(key) for node in place.keepers(key[TENANT_BYTES:])}) == 1 for key in keys
    )


def _judge(heal: Heal, now: float) -> list[Violation]:
    found: list[Violation] = []
    equal_within_s = LAME_WITHIN_S if heal.shape == "one way for ever" else EQUAL_WITHIN_S
    good_s = max([*heal.good_s, *heal.strong_s])
    if heal.equal_s > equal_within_s:
        found.append(Violation("heal", f"before {now:.3f}: unequal for {heal.equal_s:.2f} s after {heal}"))
    if good_s > (LAME_WITHIN_S if heal.shape == "one way for ever" else GOOD_WITHIN_S):
        found.append(Violation("heal", f"before {now:.3f}: no good call for {good_s:.2f} s after {heal}"))
    return found


def distribution(heals: Sequence[Heal]) -> str:
    """Median, 99th percentile and maximum, for a person."""
    if not heals:
        return ""
    lines = [f"{len(heals)} splits healed; seconds of the simulation after the heal: median, p99, max"]
    whole = [heal for heal in heals if heal.shape != "one way for ever"]
    rows = [
        ("first good call of a client", [good for heal in heals for good in heal.good_s]),
        ("first good strong call", [good for heal in heals for good in heal.strong_s]),
        ("equal replicas", [heal.equal_s for heal in whole]),
        ("equal, one link stays dead", [heal.equal_s for heal in heals if heal not in whole]),
    ]
    for name in SHAPES:
        rows.append((f"  equal after {name}", [heal.equal_s for heal in heals if heal.shape == name]))
    lines += [f"{name:34}{_spread(values)}" for name, values in rows if values]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    last = len(ordered) - 1
    middle, late = ordered[len(ordered) // 2], ordered[min(last, int(0.99 * len(ordered)))]
    return f"{middle:8.2f}{late:8.2f}{ordered[last]:8.2f}  of {len(ordered)}"
