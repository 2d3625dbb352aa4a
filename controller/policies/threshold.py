"""``Threshold``: moves when one shard has been far busier than the others for a while, and rests after that.

Against going to and fro: the load is smoothed (``LoadView``); a shard is too busy above ``high`` and gives
only until it is at ``low`` (hysteresis); for ``sustain_s`` before anything is moved; never two plans within
``cool_down_s``; and only if it pays (cost model): taking over costs the taker as many seconds of its
throughput cap as the bytes need, giving relieves the giver, for as long as the load stays as it is, which is
taken to be ``horizon_s``.

A load that wanders would still be run after, once in a cool-down.  So when a shard is to give that took
within ``memory_s``, or to take that gave, the rest after it is twice as long as the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.policies.giving import STRETCHES_MAX, give, given_share
from controller.policies.port import Move
from controller.policies.view import LoadView, ShardView


@dataclass(frozen=True, slots=True)
class ThresholdOptions:
    """Loads are shares of the mean.  Raises ``ValueError``: no hysteresis."""

    high: float = 1.3
    low: float = 1.1
    sustain_s: float = 60.0
    cool_down_s: float = 90.0
    cool_down_s_max: float = 7200.0
    memory_s: float = 900.0
    """A move that takes back an older one than this follows a load that has changed, and no wave."""
    horizon_s: float = 1800.0
    ops_s_min: float = 50.0
    """A mean load below this is no reason to move anything."""
    moves_max: int = 1
    """Pairs of giver and taker in one plan."""
    stretches_max: int = STRETCHES_MAX
    """Of one pair."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.low < self.high:
            raise ValueError(f"a shard gives above {self.high} of the mean until it is at {self.low}: no gap")


@dataclass(frozen=True, slots=True)
class Gift:
    """From the busiest shard to the idlest, and what it is thought to bring."""

    giver: str
    taker: str
    ops_s: float
    moves: tuple[Move, ...]


class Threshold:
    """See the module; a policy (``controller.policies.port``)."""

    def __init__(self, options: ThresholdOptions | None = None) -> None:
        self._options = options or ThresholdOptions()
        self._over_since: dict[str, float] = {}
        self._rest_s = self._options.cool_down_s
        self._rest_until = 0.0
        self._gave: dict[str, float] = {}
        self._took: dict[str, float] = {}
        """Shard -> when its last rest was over in which it had just given, or taken."""

    def plan(self, view: LoadView) -> list[Move]:
        options = self._options
        limit = options.high * view.mean_ops_s
        busy = {shard.node for shard in view.shards if shard.ops_s > limit}
        self._over_since = {node: self._over_since.get(node, view.now) for node in sorted(busy)}
        if view.mean_ops_s < options.ops_s_min or view.now < self._rest_until:
            return []
        ripe = {node for node, since in self._over_since.items() if view.now - since >= options.sustain_s}
        gifts = [gift for gift in gifts_of(view, ripe, options) if self._pays(gift, view)]
        if not gifts:
            return []
        self._rest(gifts, view.now)
        self._over_since.clear()
        return [move for gift in gifts for move in gift.moves]

    def _rest(self, gifts: list[Gift], now: float) -> None:
        """After these; longer when they take back some of what was done before."""
        options = self._options
        givers, takers = [gift.giver for gift in gifts], [gift.taker for gift in gifts]
        since = now - options.memory_s
        wave = any(self._took.get(node, since) > since for node in givers) or any(
            self._gave.get(node, since) > since for node in takers
        )
        self._rest_s = min(2 * self._rest_s, options.cool_down_s_max) if wave else options.cool_down_s
        self._rest_until = now + self._rest_s
        self._gave.update(dict.fromkeys(givers, self._rest_until))
        self._took.update(dict.fromkeys(takers, self._rest_until))

    def _pays(self, gift: Gift, view: LoadView) -> bool:
        share = given_share(gift.moves)
        moved_bytes = share * view.held_bytes
        cost_s = moved_bytes / view.move_rate_bytes_s if view.move_rate_bytes_s else 0.0
        relief = gift.ops_s / view.mean_ops_s
        return relief * self._options.horizon_s > cost_s


def gifts_of(view: LoadView, givers: set[str], options: ThresholdOptions) -> list[Gift]:
    """From each giver, busiest first, to whoever is idlest by then."""
    mean = view.mean_ops_s
    ops_s = {shard.node: shard.ops_s for shard in view.shards}
    shards = {shard.node: shard for shard in view.shards}
    gifts: list[Gift] = []
    given: set[str] = set()
    while len(gifts) < options.moves_max:
        waiting = sorted(givers - given, key=lambda node: (-ops_s[node], node))
        if not waiting:
            break
        giver = waiting[0]
        taker = min(ops_s, key=lambda node: (ops_s[node], node))
        room = min(ops_s[giver] - options.low * mean, options.low * mean - ops_s[taker])
        gift = _gift(view, shards[giver], taker, room, options) if room > 0 else None
        given.add(giver)
        if gift is None:
            continue
        gifts.append(gift)
        ops_s[giver] -= gift.ops_s
        ops_s[taker] += gift.ops_s
    return gifts


def _gift(
    view: LoadView, giver: ShardView, taker: str, ops_s: float, options: ThresholdOptions
) -> Gift | None:
    if giver.ops_s <= 0 or giver.share <= 0:
        return None
    share = giver.share * min(0.5, ops_s / giver.ops_s)
    moves = give(view, giver.node, taker, share, options.stretches_max)
    if not moves:
        return None
    return Gift(giver.node, taker, giver.ops_s * given_share(moves) / giver.share, tuple(moves))
