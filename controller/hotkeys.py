"""``HotKeys``: which keys are hot in the whole cluster, and what the leader orders about them.

Every controller hears the reports of all shards, so that a new leader knows what the last one knew; the
leader alone gives orders::

    HotReport ──► sketches (decaying) ──► hot sets, with hysteresis ──► HotRecords to every shard
                                                                   └──► WarmOrder to one pool of each rack

* **How hot** is a rate: reads a second, decaying with ``half_life_s``.  What clients report about records
  contains the reads that copies answered, what shards count does not, and not every client reports: the
  larger of the two counts.
* **Hysteresis**: in above ``enter``, out below ``leave`` and not before ``stay_s``; when the set is full, a
  key needs twice the rate of the coldest one to take its place.  Nothing enters that could be the sketch's
  own noise.
* **Blocks**: each rack's home pool of a hot block is asked to have a copy (``l2_rdma.rack`` says which pool
  that is for the clients there).  Nothing is pinned by that, and nothing taken back: a block that is not hot
  any more is not asked for again, and goes as any other.
* **Records**: shards are told the list, each time with an end; without a leader it lapses.

**Memory** is bounded whatever comes: three sketches of ``sketch_bytes`` with ``names_max`` names each, two
sets of at most ``blocks_max`` and ``records_max`` keys, and what each pool was told of the first; about 2 MB
with the defaults and names of the greatest length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import NamedTuple

from kvcomm.sketch import Hotness
from kvcomm.wire.messages import (
    HOT_KEYS_MAX,
    HotKey,
    HotRecords,
    HotReport,
    HotView,
    Message,
    RingMap,
    WarmOrder,
)
from l2_rdma.rack import Rack

DISPLACES = 2.0
"""How much hotter than the coldest one a key must be to take its place."""
NOISE = 2.0
"""A key is believed to be hot above so many times what an average cell of its sketch holds of others."""
TTL_WINDOWS = 3
"""Lists of hot records are void when so many of them have not come."""
REPEAT_WINDOWS = 5
"""After so many a pool is asked again for what is still hot: it may have been restarted, or have had no
room."""


@dataclass(frozen=True, slots=True)
class HotOptions:
    """When a key is hot."""

    block_enter_s: float = 2.0
    """Fetches a second, of all clients."""
    record_enter_s: float = 50.0
    """Reads a second."""
    leave_share: float = 0.5
    """Of the rate that it takes to enter."""
    stay_s: float = 10.0
    blocks_max: int = 256
    records_max: int = 64
    window_s: float = 2.0
    """Between two looks at the sketches."""
    half_life_s: float = 10.0
    sketch_bytes: int = 128 << 10
    names_max: int = 512
    warm_rate_bytes: int = 32 << 20
    """What one pool may fetch a second; 0 = pools are asked for nothing."""

    def __post_init__(self) -> None:
        if not 0 < self.leave_share <= 1:
            raise ValueError(f"a key leaves below a share of what it takes to enter, got {self.leave_share}")
        if max(self.blocks_max, self.records_max) > HOT_KEYS_MAX:
            raise ValueError(f"at most {HOT_KEYS_MAX} keys are named at once")


class Order(NamedTuple):
    """What to tell a node of the ring; nobody waits for its answer."""

    node: str
    message: Message


class HotSet:
    """The hot ones of many keys, with hysteresis.

    Args:
        enter_s, leave_s: reads a second.
        stay_s: how long a key is in at least.
    """

    def __init__(self, enter_s: float, leave_s: float, stay_s: float, keys_max: int) -> None:
        self._enter_s, self._leave_s, self._stay_s, self._keys_max = enter_s, leave_s, stay_s, keys_max
        self._entered: dict[bytes, float] = {}
        self.keys: tuple[bytes, ...] = ()
        """Hottest first."""
        self.entered_count = 0
        """Since start."""

    def update(
        self,
        hottest: Iterable[tuple[bytes, float]],
        rate_of: Callable[[bytes], float],
        now: float,
        noise_s: float = 0.0,
    ) -> None:
        """
        Args:
            hottest: candidates and their rates, hottest first.
            rate_of: of any key.
            noise_s: a rate that a key may seem to have though it never came.
        """
        rates = {key: rate_of(key) for key in self._entered}
        for key, rate in rates.items():
            if rate < self._leave_s and self._may_go(key, now):
                del self._entered[key]
        coldest = sorted((key for key in self._entered if self._may_go(key, now)), key=rates.__getitem__)
        for key, rate in hottest:
            if rate < max(self._enter_s, noise_s):
                break
            if key in self._entered:
                continue
            if len(self._entered) >= self._keys_max:
                if not coldest or rate < DISPLACES * rates[coldest[0]]:
                    break
                del self._entered[coldest.pop(0)]
            self._entered[key], rates[key] = now, rate
            self.entered_count += 1
        self.keys = tuple(sorted(self._entered, key=lambda key: (-rates[key], key)))

    def _may_go(self, key: bytes, now: float) -> bool:
        return now - self._entered[key] >= self._stay_s

    def __contains__(self, key: bytes) -> bool:
        return key in self._entered

    def for_s(self, key: bytes, now: float) -> float:
        """How long ``key`` has been in.  Raises ``KeyError``: it is not."""
        return now - self._entered[key]


class HotKeys:
    """See the module.  ``now`` is monotonic seconds of this controller."""

    def __init__(self, options: HotOptions | None = None) -> None:
        self._options = options = options or HotOptions()
        self.window_s = options.window_s
        self._blocks, self._reported, self._served = [
            Hotness.of_size(options.sketch_bytes, options.names_max, options.half_life_s) for _ in range(3)
        ]
        self.blocks = HotSet(
            options.block_enter_s,
            options.block_enter_s * options.leave_share,
            options.stay_s,
            options.blocks_max,
        )
        self.records = HotSet(
            options.record_enter_s,
            options.record_enter_s * options.leave_share,
            options.stay_s,
            options.records_max,
        )
        self._due_at: float | None = None
        self._listed = False
        """Whether shards may hold a list that is not empty."""
        self._warmed: dict[str, dict[bytes, float]] = {}
        """When each pool was asked for what."""

    def heard(self, report: HotReport, now: float) -> None:
        """A shard says what its clients read and what it was asked for."""
        for sketch, told in (
            (self._blocks, report.blocks), (self._reported, report.records), (self._served, report.served),
        ):  # fmt: skip
            for each in told[:HOT_KEYS_MAX]:
                if (sure := each.count - each.error) > 0:  # the rest may be another key's
                    sketch.add(each.key, now, sure)

    def orders(self, ring: RingMap, now: float) -> list[Order]:
        """What the leader tells the nodes of ``ring`` now; nothing between two windows."""
        if self._due_at is not None and now < self._due_at:
            return []
        self._due_at = now + self._options.window_s
        self._settle(now)
        return [*self._lists(ring), *self._warmings(ring, now)]

    def deadline(self) -> float | None:
        """When to ask for orders again; ``None`` = at once."""
        return self._due_at

    def hottest_blocks(self, count: int, now: float) -> list[bytes]:
        """By what was reported, hot enough to be in the set or not."""
        return [each.key for each in self._blocks.top(count, now)]

    def view(self, controller: str, now: float) -> HotView:
        """What is hot, for a person; as of the last orders."""
        blocks, records = (
            [HotKey(key, rate_of(key, now), hot.for_s(key, now)) for key in hot.keys]
            for hot, rate_of in ((self.blocks, self._block_rate), (self.records, self._record_rate))
        )
        return HotView(controller, blocks, records)

    def rate(self, sketch: Hotness, key: bytes, now: float) -> float:
        """Reads a second: what comes in steadily adds up to ``half_life_s / ln 2`` seconds of it."""
        return sketch.estimate(key, now) * log(2) / self._options.half_life_s

    def _block_rate(self, key: bytes, now: float) -> float:
        return self.rate(self._blocks, key, now)

    def _record_rate(self, key: bytes, now: float) -> float:
        return max(self.rate(self._reported, key, now), self.rate(self._served, key, now))

    def _settle(self, now: float) -> None:
        for hot, sketches, rate_at in (
            (self.blocks, (self._blocks,), self._block_rate),
            (self.records, (self._reported, self._served), self._record_rate),
        ):
            named: dict[bytes, float] = {}
            for sketch in sketches:
                top = sketch.top(self._options.names_max, now)
                named |= {each.key: rate_at(each.key, now) for each in top}
            hottest = sorted(named.items(), key=lambda item: (-item[1], item[0]))
            noise_s = max(self._noise_s(sketch, now) for sketch in sketches)
            hot.update(hottest, partial(rate_at, now=now), now, noise_s)

    def _noise_s(self, sketch: Hotness, now: float) -> float:
        return NOISE * sketch.total(now) / sketch.width * log(2) / self._options.half_life_s

    def _lists(self, ring: RingMap) -> list[Order]:
        if not self.records.keys and not self._listed:
            return []
        self._listed = bool(self.records.keys)
        order = HotRecords(list(self.records.keys), TTL_WINDOWS * self._options.window_s)
        joining = ring.transition.shards if ring.transition is not None else []
        nodes = dict.fromkeys(shard.node for shard in [*ring.shards, *joining])
        return [Order(node, order) for node in nodes]

    def _warmings(self, ring: RingMap, now: float) -> list[Order]:
        """Each pool is asked for what it is the home of in its rack, and was not asked for lately."""
        if not self._options.warm_rate_bytes:
            return []
        before, self._warmed = self._warmed, {}
        orders: list[Order] = []
        for rack in _racks(ring):
            wanted: dict[str, list[bytes]] = {}
            for key, home in zip(self.blocks.keys, rack.homes(self.blocks.keys), strict=True):
                assert home is not None, "a rack that is here has a pool"
                asked_at = before.get(home, {}).get(key)
                if asked_at is None or now - asked_at >= REPEAT_WINDOWS * self.window_s:
                    wanted.setdefault(home, []).append(key)
                    asked_at = now
                self._warmed.setdefault(home, {})[key] = asked_at
            orders += [
                Order(node, WarmOrder(keys, self._options.warm_rate_bytes)) for node, keys in wanted.items()
            ]
        return orders


def _racks(ring: RingMap) -> Sequence[Rack]:
    pools: dict[str, list[tuple[str, int]]] = {}
    for pool in ring.pools:
        pools.setdefault(pool.rack, []).append((pool.node, max(1, pool.weight)))
    return [Rack(weights) for _, weights in sorted(pools.items())]
