"""``L3Tier``: the client's side of the shards: blocks by the ring, records by a coordinator.

Theory of operation.  The ring says which shards hold a key; a request carries the ring's epoch, and a shard
that knows a newer map sends it along instead of an answer, which is adopted and the request repeated.  A
shard that failed is passed over for a while (``routes``).

* **Blocks** (``locating``, ``fetching``, ``storing``): windows of at most ``WINDOW_KEYS`` keys and about
  ``WINDOW_BYTES``, a few under way a shard.  Of several owners the fastest is asked, and another one too when
  it takes longer than usual (``speeds``).  Every copy is verified after it arrived; what is missing or
  damaged is asked from the next owner, and is a miss when there is none.  A put is done with one copy of each
  block; an owner that lags gets its own from the others.
* **Records** (``coordination``): the first owner that can be reached coordinates.  A write whose outcome is
  unknown is never sent again.
* **Strong records** go the same way; their shards vote on every change (``strong``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvcomm.block import BlockKey
from kvcomm.errors import (
    KVCommError,
    OutcomeUnknown,
    Refused,
    TooLarge,
    Unavailable,
    WriteOutcome,
    batch_error,
    failure_to_error,
)
from kvcomm.steps import Steps, ask_all
from kvcomm.tier import Block, BlockCopy, Presence, PutStatus, RecordAnswer, TierName
from kvcomm.wire.messages import (
    Dots,
    Failure,
    Message,
    RecordFates,
    RecordGet,
    RecordKeys,
    RecordPut,
    RecordScan,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordVersions,
    RecordWrite,
    RingMap,
    RingNode,
    StrongChange,
    StrongOrder,
    StrongOutcome,
    StrongOutcomes,
    StrongRead,
)
from l3_shard.coordination import NOTHING_WRONG, PLACED_MAX, Batch, Coordination, Problems
from l3_shard.desk import strong_wait_s
from l3_shard.fetching import Fetching
from l3_shard.filters import Filters
from l3_shard.locating import Locating
from l3_shard.probing import Probing
from l3_shard.ring import Ring
from l3_shard.routes import L3Counts, Routes
from l3_shard.storing import Storing

SCAN_KEYS = 4_096
"""Names of one scan answer."""


class L3Tier:
    """A ``kvcomm.tier.Tier`` and ``kvcomm.tier.Records``; one may serve many threads.

    Args:
        ring_map: a map of the cluster, not necessarily the newest.
        dial: where to call a shard.
        timeout_s: a request is given up after so long, and its shard counts as failed.
        clock: monotonic seconds, for how long a shard is passed over.
        allocate: memory to receive a copy of so many bytes into.
        filter_age_s: see ``l3_shard.filters``; 0 = shards are asked for everything.

    Raises:
        RingError: the map contradicts itself.
    """

    name: TierName = "l3"

    def __init__(
        self,
        ring_map: RingMap,
        *,
        dial: Callable[[RingNode], str] = lambda shard: shard.address,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
        filter_age_s: float = 0.0,
    ) -> None:
        self._routes = Routes(ring_map, dial, timeout_s, clock, allocate)
        self.filters = Filters(self._routes, filter_age_s)

    @property
    def ring(self) -> Ring:
        """The newest ring that this tier has heard of."""
        return self._routes.ring

    def newest_map(self) -> RingMap:
        """The map of that ring; the same object as long as there is no newer one."""
        return self._routes.ring.to_map()

    @property
    def counts(self) -> L3Counts:
        return self._routes.counts

    # -- ``kvcomm.heat.Shards``

    def shard_address(self, address: str) -> bool:
        """Whether a shard of this ring, or of the one before, is called there."""
        return self._routes.is_shard(address)

    def any_shard(self) -> str | None:
        """Where to call a shard that did not fail a moment ago; another one each time."""
        return self._routes.any_healthy()

    # -- blocks

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        """Which keys some owner has; ``None`` where not all owners could say.  One round trip where the first
        owners have them, one more for each further owner and when our map is old."""
        absent = yield from self.filters.ruled_out(keys)
        rest = [key for key, gone in zip(keys, absent, strict=True) if not gone]
        locating = Locating(self._routes, rest)
        asked = iter((yield from Probing(self._routes, rest).around(locating.steps())) if rest else [])
        said = [False if gone else next(asked) for gone in absent]
        self.filters.answered(said)
        return said

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        """See ``Tier.get``.  Never raises for lost, damaged or unreachable copies: they are skipped."""
        yield from Probing(self._routes, keys).around(Fetching(self._routes, keys, found).steps())

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        """See ``Tier.put``.  A copy goes to all its owners; the best that one of them said is its status."""
        keys = [copy.header.key for copy in copies]
        self.filters.put(keys)
        try:
            return (yield from Probing(self._routes, keys).around(Storing(self._routes, copies).steps()))
        finally:
            self.filters.put(keys)  # a filter that came meanwhile may lack them

    # -- records

    def record_get(self, keys: Sequence[bytes], least: Sequence[Dots] = ()) -> Steps[list[RecordAnswer]]:
        """See ``Records.record_get``.

        Raises:
            Unavailable: no owner of some key answered.
        """
        hot: set[int] = set()
        found = yield from self._read(keys, least, hot)
        return [_record_answer(*found[index], index in hot) for index in range(len(keys))]

    def record_states(self, keys: Sequence[bytes]) -> Steps[RecordStates]:
        """The replicated states themselves, one a key; raises as :meth:`record_get`."""
        found = yield from self._read(keys)
        states = [found[index][0] for index in range(len(keys))]
        return RecordStates(states, any(degraded for _, degraded in found.values()))

    def _read(
        self, keys: Sequence[bytes], least: Sequence[Dots] = (), hot: set[int] | None = None
    ) -> Steps[dict[int, tuple[RecordState | None, bool]]]:
        """By index: the state, and whether the shard that was asked for it called its answer degraded.
        ``hot`` is given those that it called hot."""
        found: dict[int, tuple[RecordState | None, bool]] = {}

        def request(epoch: int, indices: Sequence[int]) -> Message:
            asked = [least[index] for index in indices] if any(least) else []
            return RecordGet(epoch, [keys[index] for index in indices], asked)

        def take(indices: Sequence[int], message: Message) -> Problems | None:
            if not isinstance(message, RecordStates) or len(message.states) != len(indices):
                return None
            for index, state in zip(indices, message.states, strict=True):
                found[index] = state, message.degraded
            if hot is not None and message.hot:
                hot.update(indices[index] for index in message.hot if index < len(indices))
            return NOTHING_WRONG

        yield from Coordination(self._routes, Batch(keys, [0] * len(keys), request, take)).steps()
        return found

    def record_put(self, writes: Sequence[RecordWrite]) -> Steps[list[RecordVersion]]:
        """See ``Records.record_put``.

        Raises:
            PartlyDone: some of the batch was written and some not, or is unknown; ``outcomes`` of it, as of
                every other error of a batch, say what became of each write.
            OutcomeUnknown: the only write may have been done.
            Unavailable: no owner could be reached; nothing was written.
            Conflict: a record has its most siblings already, or a context was not read from it.
            Rejected: a value breaks a rule of the coordinator.
            TooLarge: a value, a name or a record is over its limit.
        """
        versions: dict[int, RecordVersion] = {}

        def request(epoch: int, indices: Sequence[int]) -> Message:
            return RecordPut(epoch, [writes[index] for index in indices])

        def take(indices: Sequence[int], message: Message) -> Problems | None:
            if isinstance(message, RecordVersions) and len(message.versions) == len(indices):
                versions.update(zip(indices, message.versions, strict=True))
                return NOTHING_WRONG
            if not isinstance(message, RecordFates) or len(message.fates) != len(indices):
                return None
            problems: dict[int, KVCommError] = {}
            for index, fate in zip(indices, message.fates, strict=True):
                if fate.version is not None:
                    versions[index] = fate.version
                else:
                    problems[index] = failure_to_error(fate.code, fate.text)
            return problems

        sizes = [len(write.key) + len(write.value or b"") + len(write.delta or b"") for write in writes]
        batch = Batch([write.key for write in writes], sizes, request, take)
        problems = yield from Coordination(self._routes, batch).outcomes()
        if problems:
            raise batch_error(
                [
                    _outcome(write.key, versions.get(index), problems.get(index))
                    for index, write in enumerate(writes)
                ]
            )
        return [versions[index] for index in range(len(writes))]

    def strong_read(self, keys: Sequence[bytes]) -> Steps[list[StrongOutcome]]:
        """See ``Registers.strong_read``: any owner coordinates, the first one as long as it answers."""

        def request(epoch: int, indices: Sequence[int]) -> Message:
            return StrongRead(epoch, [keys[index] for index in indices])

        return (yield from self._strong(keys, [0] * len(keys), request))

    def strong_change(self, orders: Sequence[StrongOrder]) -> Steps[list[StrongOutcome]]:
        """See ``Registers.strong_change``.  One after the other: each may wait for its record's turn."""
        outcomes: list[StrongOutcome] = []
        for order in orders:

            def request(epoch: int, indices: Sequence[int], order: StrongOrder = order) -> Message:
                return StrongChange(epoch, [order])

            size = len(order.key) + len(order.value or b"")
            outcomes += yield from self._strong([order.key], [size], request)
        return outcomes

    def _strong(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        request: Callable[[int, Sequence[int]], Message],
    ) -> Steps[list[StrongOutcome]]:
        found: dict[int, StrongOutcome] = {}

        def take(indices: Sequence[int], message: Message) -> Problems | None:
            if not isinstance(message, StrongOutcomes) or len(message.outcomes) != len(indices):
                return None
            found.update(zip(indices, message.outcomes, strict=True))
            return NOTHING_WRONG

        timeout_s = strong_wait_s(self._routes.timeout_s, len(keys))
        batch = Batch(keys, sizes, request, take, majority=True)
        yield from Coordination(self._routes, batch, timeout_s=timeout_s).steps()
        return [found[index] for index in range(len(keys))]

    def record_scan(self, prefix: bytes) -> Steps[list[bytes]]:
        """Names of the records under ``prefix``, sorted: what all shards together name.

        An acknowledged record is on a write quorum of its owners (by each placement, while keys move), so no
        write quorum may be missing from the answers.

        Raises:
            Unavailable: too many shards did not answer, or have new stores and may lack names.
            TooLarge, Refused: the prefix is too long, or a shard is busy.
        """
        for _ in range(PLACED_MAX):
            found = yield from self._scan(prefix)
            if found is not None:
                return found
        raise Unavailable(f"the ring changed {PLACED_MAX} times during one scan; try again")

    def _scan(self, prefix: bytes) -> Steps[list[bytes] | None]:
        """``None``: the shards are others by now, and we know them."""
        ring = self._routes.ring
        names: set[bytes] = set()
        missing: list[str] = []
        after: dict[str, bytes] = dict.fromkeys(ring.names, b"")
        while after:
            asks = [
                self._routes.ask(node, RecordScan(prefix, last, SCAN_KEYS, ring.epoch))
                for node, last in after.items()
            ]
            answers = yield from ask_all(asks)
            further: dict[str, bytes] = {}
            for node, answer in zip(after, answers, strict=True):
                if isinstance(answer.message, Failure) and answer.message.code in (
                    Refused.code,
                    TooLarge.code,
                ):
                    raise failure_to_error(answer.message.code, answer.message.text)
                if not isinstance(answer.message, RecordKeys):
                    if self._routes.failed(node, answer):
                        return None
                    missing.append(node)
                    continue
                names.update(answer.message.keys)
                if len(answer.message.keys) >= SCAN_KEYS:
                    further[node] = answer.message.keys[-1]
            after = further
        if missing and not ring.covers({*ring.names}.difference(missing)):
            raise Unavailable(f"the names may be incomplete: {', '.join(missing)} did not answer")
        return sorted(names)


def _outcome(key: bytes, version: RecordVersion | None, error: KVCommError | None) -> WriteOutcome:
    if version is None:
        return WriteOutcome(key, "unknown" if isinstance(error, OutcomeUnknown) else "not_done", error=error)
    dot = (version.replica, version.counter)
    return WriteOutcome(key, "done", dot, version.context, own=version.own)


def _record_answer(state: RecordState | None, degraded: bool, hot: bool) -> RecordAnswer:
    if state is None:
        return RecordAnswer((), {}, degraded, hot)
    values = tuple(sibling.value for sibling in state.siblings if sibling.value is not None)
    return RecordAnswer(values, state.context, degraded, hot)
