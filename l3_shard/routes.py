"""``Routes``: what a client knows of the shards: the newest ring, where to call, how fast each is, and who
failed a moment ago.

One object serves many threads: the ring is replaced as a whole, and the notes on shards are single dictionary
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from kvcomm.block import Buffer
from kvcomm.errors import Corrupt, OutcomeUnknown, StaleEpoch, Unavailable
from kvcomm.steps import Answer, Ask
from kvcomm.wire.frames import Sink
from kvcomm.wire.messages import Failure, Message, Ping, RingGet, RingMap, RingNode
from l3_shard.ring import Ring, RingError, decode_map
from l3_shard.speeds import Speeds

SHUN_S = 1.0
"""How long a shard that failed is passed over; twice as long each time that it fails again soon after."""
SHUN_MAX_S = 8.0
PROBE_S = 0.7
"""How long one that was silent may take to show that it is not any more."""
PROBE_EVERY_S = 0.5
"""Between two pings beside operations on blocks."""
LAG_S = 1.0
"""How long a shard that lagged behind another owner is given no copies."""
RELAPSE_S = 10.0
"""A shard that did not fail for so long after it was passed over has a clean record again."""
RING_ASKED_MAX = 3
RING_WAIT_S = 0.25
"""For maps, where nobody is left whom ours names."""
WINDOW_KEYS = 16
WINDOW_BYTES = 8 << 20
WINDOWS_IN_FLIGHT = 2
"""Windows of one shard under way: it reads the next while the network carries this one."""


@dataclass(slots=True)
class L3Counts:
    """What a client met, since start."""

    damaged_count: int = 0
    """Copies that failed verification."""
    failed_count: int = 0
    """Requests that a shard refused or did not answer."""
    stale_count: int = 0
    """Requests that were answered with a newer map."""
    hedged_count: int = 0
    """Requests of which another copy was asked for, because the first did not come in the usual time."""
    lagging_count: int = 0
    """Copies that an owner had not taken when the put was done; it gets them from the others."""


@dataclass(frozen=True, slots=True)
class _Shun:
    until: float
    for_s: float
    silent: bool
    """It gave no answer; else it said that it cannot."""


class Routes:
    """Raises ``RingError`` when the map contradicts itself."""

    def __init__(
        self,
        ring_map: RingMap,
        dial: Callable[[RingNode], str],
        timeout_s: float,
        clock: Callable[[], float],
        allocate: Callable[[int], memoryview],
    ) -> None:
        self.allocate = allocate
        self.ring = Ring.from_map(ring_map)
        self._shards = _shards_of(self.ring)
        self.counts = L3Counts()
        self.copy_bytes = WINDOW_BYTES // WINDOW_KEYS
        """Of a block copy seen lately: sizes the windows."""
        self._dial, self._clock, self.timeout_s = dial, clock, timeout_s
        self._turn = 0
        self._addresses: tuple[Ring | None, frozenset[str]] = (None, frozenset())
        self._shuns: dict[str, _Shun] = {}
        self._lags: dict[str, float] = {}
        self._pinged: dict[str, float] = {}
        self.speeds = Speeds()

    def ask(
        self,
        node: str,
        message: Message,
        payload: Sequence[Buffer] = (),
        sink: Sink | None = None,
        timeout_s: float | None = None,
    ) -> Ask:
        """A request to a shard of this ring or of the one before: another thread may have adopted a map
        meanwhile."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return Ask(self._dial(self._shards[node]), message, payload, sink, timeout_s)

    def is_shard(self, address: str) -> bool:
        """Whether one of our shards is called there."""
        ring, known = self._addresses
        if ring is not self.ring:
            ring, known = self.ring, frozenset(map(self._dial, self._shards.values()))
            self._addresses = ring, known
        return address in known

    def any_healthy(self) -> str | None:
        """Where to call one that did not fail a moment ago; another one each time."""
        well = list(filter(self.healthy, self.ring.names))
        self._turn += 1
        return self._dial(self._shards[well[self._turn % len(well)]]) if well else None

    def healthy(self, node: str) -> bool:
        """Whether it is in the ring and did not fail a moment ago."""
        shun = self._shuns.get(node)
        return (shun is None or shun.until <= self._clock()) and node in self.ring

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def block_owners(self, key: bytes) -> Iterator[str]:
        """Who should have the block, the fastest first, without those that failed a moment ago; while keys
        are being moved, behind the owners those who have it still or already."""
        ring = self.ring
        owners: Sequence[str] = ring.block_owners(key)
        if len(owners) > 1:
            owners = self.speeds.ordered(owners, self._clock())
        if ring.moving:
            owners = list(dict.fromkeys((*owners, *ring.block_keepers(key))))
        return filter(self.healthy, owners)

    def takers(self, key: bytes) -> list[str]:
        """Who should be given the block; those that lagged a moment ago only if nobody else is left."""
        keepers, now = list(filter(self.healthy, self.ring.block_keepers(key))), self._clock()
        return [node for node in keepers if self._lags.get(node, now) <= now] or keepers

    def lagged(self, node: str) -> None:
        """It took its copy much later than another owner did."""
        self._lags[node] = self._clock() + LAG_S

    def failed(self, node: str, answer: Answer) -> bool:
        """Take note of an answer that is none; True = it brought a newer map, so that asking again makes
        sense."""
        message = answer.message
        if isinstance(message, Failure) and message.code == StaleEpoch.code:
            self.counts.stale_count += 1
            return self._adopt(message.detail)
        self.counts.failed_count += 1
        if not isinstance(message, Failure) or message.code in (Unavailable.code, OutcomeUnknown.code):
            self._shun(node, self._clock(), silent=not answer.spoken)
        return False

    def silent(self, node: str) -> bool:
        """Whether it is passed over because it gave no answer."""
        shun = self._shuns.get(node)
        return shun is not None and shun.silent and self._clock() < shun.until

    def silent_shards(self) -> set[str]:
        """All that are."""
        return {node for node in list(self._shuns) if self.silent(node) and node in self.ring}

    def may_probe(self, node: str) -> bool:
        """Whether its last :meth:`ping` was long enough ago; the next one is due now."""
        now = self._clock()
        if now < self._pinged.get(node, -PROBE_EVERY_S) + PROBE_EVERY_S:
            return False
        self._pinged[node] = now
        return True

    def ping(self, node: str) -> Ask:
        """Ask one that is :meth:`silent` whether it answers again."""
        return self.ask(node, Ping(), timeout_s=PROBE_S)

    def doubtful(self, node: str) -> bool:
        """Whether it gave no answer when it was asked last, though the time to pass it over is up."""
        shun = self._shuns.get(node)
        return shun is not None and shun.silent and shun.until <= self._clock()

    def probe(self, node: str) -> Ask:
        """Ask one that is :meth:`doubtful` whether it answers again; until then it is passed over, for longer
        than before."""
        self._shun(node, self._clock(), silent=True)
        return self.ask(node, Ping(), timeout_s=PROBE_S)

    def heard(self, node: str) -> None:
        """It has answered: whatever it failed before is over."""
        shun = self._shuns.get(node)
        if shun is not None and shun.silent:
            self._shuns[node] = _Shun(min(shun.until, self._clock()), shun.for_s, silent=False)

    def beaten(self, rival: str) -> None:
        """A shard could not coordinate because ``rival`` did.  Both are well, so neither is passed over: if
        clients went round who was beaten, each another one, there would be more and more duels; as it is all
        come back to a record's first owner."""
        self.counts.failed_count += 1
        shun = self._shuns.get(rival)
        if shun is not None:
            self._shuns[rival] = _Shun(min(shun.until, self._clock()), shun.for_s, silent=False)

    def _shun(self, node: str, now: float, *, silent: bool) -> None:
        """Longer each time that it fails again: a request waits for a silent shard longer than the first
        shun lasts, so two of them would be asked in turn for ever and the third owner never."""
        before = self._shuns.get(node)
        if before is not None and now < before.until:
            self._shuns[node] = replace(before, silent=silent)
            return  # another request of the same moment
        relapsed = before is not None and now < before.until + RELAPSE_S
        for_s = min(2 * before.for_s, SHUN_MAX_S) if before is not None and relapsed else SHUN_S
        self._shuns[node] = _Shun(now + for_s, for_s, silent)

    def ask_for_ring(self, besides: Collection[str]) -> list[Ask]:
        """Ask a few shards for their map, none of ``besides`` and nobody who failed a moment ago."""
        others = [node for node in self.ring.names if node not in besides and self.healthy(node)]
        return [self.ask(node, RingGet(), timeout_s=RING_WAIT_S) for node in others[:RING_ASKED_MAX]]

    def learn(self, message: Message) -> bool:
        """Take up a map, if this is one and newer; False = it is none."""
        if not isinstance(message, RingMap):
            return False
        try:
            if message.epoch > self.ring.epoch:
                ring = Ring.from_map(message)
                self._shards = _shards_of(self.ring) | _shards_of(ring)
                self.ring = ring
        except RingError:
            return False
        return True

    def _adopt(self, detail: bytes) -> bool:
        try:
            return self.learn(decode_map(detail))
        except Corrupt:
            return False


def _shards_of(ring: Ring) -> dict[str, RingNode]:
    """Of both placements, while keys move."""
    return {name: ring.shard(name) for name in ring.names}
