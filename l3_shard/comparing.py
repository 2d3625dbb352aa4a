"""``Comparing``: makes two replicas equal: finds the records in which we and one other shard differ, and
merges them in both (anti-entropy).

Theory of operation.  One comparison, all of it asked by us, in bounded questions one after the other::

    settle our tree ─► TreeGet from the root down ─► leaves that differ
        for some leaves at a time:  Survey ours, LeafGet theirs ─► keys whose digests differ
            for some keys at a time:  RecordFetch theirs ─► merge into ours, durable ─► RecordReplicate what
                they lack

Merging is commutative and idempotent, so nothing here has to be exact: a record that changes meanwhile, or
that two comparisons carry at once, only costs a little traffic.

A comparison also tells whether the other *vouched* for what it has: whether all that it acknowledged was in
the comparison (see ``l3_shard.readiness``).  It does not where its disk is new, or has damaged records.

After each exchange the comparison rests for as long as the exchange took, so that it never takes more than
half of what a busy shard can do.  A shard that gains records is in a *hurry*: it has several exchanges under
way, does not rest between them, and lists the next leaves meanwhile, as fast as its pace allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvcomm.errors import Corrupt, KVCommError, Refused, TooLarge, Unavailable
from kvcomm.wire.messages import (
    Done,
    Failure,
    LeafGet,
    LeafRecords,
    Message,
    RecordFetch,
    RecordReplicate,
    RecordState,
    RecordStates,
    TreeDigests,
    TreeGet,
)
from l3_shard import dvv
from l3_shard.merkle import Descent
from l3_shard.pace import Pace

if TYPE_CHECKING:
    from l3_shard.desk import Desk
    from l3_shard.forest import Forest
    from l3_shard.lines import Lines
    from l3_shard.storage import Entry
    from l3_shard.timers import Timers

NODES_MAX = 256
"""Tree nodes a question: 36 KiB of digests."""
LEAVES_MAX = 256
EXCHANGE_KEYS = 256
EXCHANGES_AT_ONCE = 4
"""In a hurry: some are being read there, are on their way, and are written here."""
KEY_BYTES = 128
"""A record takes on the network beside its values, about."""


@dataclass(slots=True)
class CompareCounts:
    """What comparisons did since start."""

    equal: int = 0
    """Comparisons that found nothing."""
    repaired: int = 0
    failed: int = 0
    """Given up: the other did not answer, or the ring changed."""
    pulled: int = 0
    """Records in which the other knew more."""
    pushed: int = 0
    """Records in which we knew more."""
    fetched_count: int = 0
    fetched_bytes: int = 0
    """Of values, in all records that were asked for."""
    contradictions: int = 0
    """Records that cannot be merged, now or later: some replica lost its state and kept its id, or too many
    wrote the record.  They do not make a comparison fail: a new store would never have caught up."""

    @property
    def mean_bytes(self) -> float:
        """Of the values of a record that was asked for."""
        return self.fetched_bytes / self.fetched_count if self.fetched_count else 0.0


class Hurry:
    """How fast a shard fetches what it gains: ``rate`` bytes a second, all its comparisons together; 0 = as
    fast as it can."""

    def __init__(self, rate: int) -> None:
        self._pace = Pace(rate, max(rate, 1)) if rate else None

    def wait_s(self, now: float) -> float:
        return 0.0 if self._pace is None else self._pace.wait_s(now)

    def spend(self, size_bytes: int, now: float) -> None:
        if self._pace is not None:
            self._pace.spend(size_bytes, now)


class Comparing:
    """One comparison with ``node``: make one, call :meth:`start` once.

    Args:
        done: hears the end; ``None`` = the replicas are equal (but for what was written meanwhile), else what
            went wrong.
        keys_max: records of an exchange.
        hurry: how fast to go; ``None`` = one exchange at a time, with rests.
        keeps: whether a stored key is ours to keep.
        merged: hears of each record that changed here, what it was before and after.
    """

    def __init__(
        self,
        node: str,
        me: str,
        epoch: int,
        desk: Desk,
        lines: Lines[RecordState],
        forest: Forest,
        timers: Timers,
        counts: CompareCounts,
        *,
        keys_max: int = EXCHANGE_KEYS,
        hurry: Hurry | None = None,
        keeps: Callable[[bytes], bool],
        merged: Callable[[bytes, RecordState, RecordState], None],
        done: Callable[[Message | None], None],
    ) -> None:
        self.vouched = True
        self.differing_count = 0
        """Records in which we differed."""
        self._node, self._me, self._epoch = node, me, epoch
        self._desk, self._lines, self._forest, self._timers = desk, lines, forest, timers
        self._counts, self._keys_max, self._keeps, self._done = counts, keys_max, keeps, done
        self._merged = merged
        self._descent = Descent(forest.tree(node), NODES_MAX)
        self._leaves: deque[int] = deque()
        self._keys: deque[bytes] = deque()
        self._found = False
        self._unmerged: Message | None = None
        """Why a record could not be merged here, if one could not: then we are not equal."""
        self._over = False
        self._hurry, self._at_once = hurry, 1 if hurry is None else EXCHANGES_AT_ONCE
        self._open_count = 0
        """Exchanges under way."""
        self._listing = self._resting = False
        self._listed_leaves = self._listed_keys = 0
        """That were told by the other, and the keys in which we differ there."""

    @property
    def left_count(self) -> int:
        """Records in which we may differ, about."""
        a_leaf = self._listed_keys / self._listed_leaves if self._listed_leaves else 1.0
        return len(self._keys) + int(a_leaf * len(self._leaves))

    def start(self) -> None:
        self._forest.settle(self._settled)

    def abandon(self) -> None:
        """Hear no more answers; ``done`` is not called."""
        self._over = True

    def _end(self, problem: Message | None) -> None:
        if self._over:
            return
        self._over = True
        problem = problem or self._unmerged
        self._counts.failed += problem is not None
        self._counts.equal += problem is None and not self._found
        self._counts.repaired += problem is None and self._found
        self._done(problem)

    # -- which leaves

    def _settled(self, read: bool) -> None:
        if self._over:
            return
        if read:
            self._descend()
        else:
            self._end(Failure("unavailable", "our own records cannot be read"))

    def _descend(self) -> None:
        question = self._descent.next()
        if question is None:
            self._leaves.extend(self._descent.leaves)
            self._go_on()
        else:
            self._ask(TreeGet(self._epoch, self._me, *question), self._told)

    def _told(self, answer: Message) -> None:
        if not isinstance(answer, TreeDigests):
            self._end(answer)
            return
        self.vouched &= not answer.degraded
        try:
            self._descent.told(answer.digests)
        except ValueError as error:
            self._end(Failure("refused", f"{self._node} answered what cannot be: {error}"))
        else:
            self._descend()

    # -- which records

    def _go_on(self) -> None:
        """Have as many exchanges under way as may be, and keys listed for the next ones."""
        while self._keys and self._open_count < self._at_once and not self._resting and not self._over:
            self._exchange()
        few = len(self._keys) <= (self._at_once - 1) * self._keys_max
        if self._over or self._listing or not few or (self._open_count and self._hurry is None):
            return
        if self._leaves:
            self._listing = True
            leaves = list(self._leaves)[:LEAVES_MAX]
            self._forest.list_leaves(leaves, partial(self._listed, leaves))
        elif not self._keys and not self._open_count:
            self._end(None)

    def _listed(self, leaves: Sequence[int], ours: Sequence[Sequence[Entry]] | None) -> None:
        if self._over:
            return
        if ours is None:
            self._end(Failure("unavailable", "our own records cannot be read"))
        else:
            self._ask(LeafGet(self._epoch, self._me, list(leaves)), partial(self._compare, ours))

    def _compare(self, ours: Sequence[Sequence[Entry]], answer: Message) -> None:
        if not isinstance(answer, LeafRecords):
            self._end(answer)
            return
        if not 1 <= answer.leaf_count <= len(ours) or len(answer.keys) != len(answer.digests):
            self._end(Failure("refused", f"{self._node} answered what cannot be: {answer.leaf_count} leaves"))
            return
        for _ in range(answer.leaf_count):
            self._leaves.popleft()
        self._listing = False
        theirs = dict(zip(answer.keys, answer.digests, strict=True))
        mine = {
            entry.key: entry.digest
            for entries in ours[: answer.leaf_count]
            for entry in self._forest.shared(entries, self._node)
        }
        differing = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
        self._keys.extend(differing)
        self._listed_leaves += answer.leaf_count
        self._listed_keys += len(differing)
        self._found |= bool(differing)
        self.differing_count += len(differing)
        self._go_on()

    # -- exchange

    def _exchange(self) -> None:
        wait_s = 0.0 if self._hurry is None else self._hurry.wait_s(self._desk.now)
        if wait_s:
            self._rest(wait_s)
            return
        keys = [self._keys.popleft() for _ in range(min(self._keys_max, len(self._keys)))]
        self._open_count += 1
        message = RecordFetch(self._epoch, keys, compares=True)
        self._ask(message, partial(self._fetched, keys, self._desk.now))

    def _fetched(self, keys: Sequence[bytes], began_at: float, answer: Message) -> None:
        if isinstance(answer, Failure) and answer.code == TooLarge.code and len(keys) > 1:
            self._keys_max = min(self._keys_max, len(keys) // 2)
            self._keys.extendleft(reversed(keys))
            self._open_count -= 1
            self._go_on()
            return
        if not isinstance(answer, RecordStates) or len(answer.states) != len(keys):
            self._end(answer)
            return
        self.vouched &= not answer.degraded
        size = sum(dvv.value_bytes(state) for state in answer.states if state is not None)
        self._counts.fetched_count += len(keys)
        self._counts.fetched_bytes += size
        if self._hurry is not None:
            self._hurry.spend(size + KEY_BYTES * len(keys), self._desk.now)
        exchange = _Exchange(self, len(keys), began_at)
        for key, state in zip(keys, answer.states, strict=True):
            self._merge(exchange, key, state or dvv.EMPTY)

    def _merge(self, exchange: _Exchange, key: bytes, state: RecordState) -> None:
        try:
            merge = _Merge(exchange, key, dvv.checked(state), self._keeps, self._merged)
            self._lines.change(key, merge, passing=True)
        except (Refused, Corrupt) as error:
            exchange.failed(error)

    def merged(self, exchange: _Exchange) -> None:
        """All of an exchange is durable here: send what the other lacks."""
        if self._over:
            return
        self._counts.pulled += exchange.pulled_count
        self._counts.contradictions += exchange.contradiction_count
        if exchange.refusal is not None:
            self._unmerged = Failure(exchange.refusal.code, exchange.refusal.message)
        self._push(exchange.began_at, list(exchange.lacking.items()))

    def _push(self, began_at: float, lacking: list[tuple[bytes, RecordState]]) -> None:
        if not lacking:
            self._open_count -= 1
            if self._hurry is None:
                self._rest(self._desk.now - began_at)
            else:
                self._go_on()
            return
        count = size = 0
        for _, state in lacking:
            size += dvv.value_bytes(state)
            if count and size > self._desk.limits.message_bytes:
                break
            count += 1
        now, later = lacking[:count], lacking[count:]
        message = RecordReplicate(self._epoch, [key for key, _ in now], [state for _, state in now])
        held_bytes = sum(map(dvv.value_bytes, message.states))
        self._ask(message, partial(self._pushed, began_at, count, later), held_bytes)

    def _pushed(
        self, began_at: float, count: int, later: list[tuple[bytes, RecordState]], answer: Message
    ) -> None:
        if isinstance(answer, Done):
            self._counts.pushed += count
            self._push(began_at, later)
        else:
            self._end(answer)

    def _rest(self, rest_s: float) -> None:
        self._resting = True
        self._timers.at(self._desk.now + rest_s, self._rested)

    def _rested(self) -> None:
        self._resting = False
        self._go_on()

    def _ask(self, message: Message, then: Callable[[Message], None], held_bytes: int = 0) -> None:
        def unless_over(answer: Message) -> None:
            if not self._over:
                then(answer)

        self._desk.ask(self._node, message, unless_over, held_bytes)


class _Exchange:
    """Records being merged into ours."""

    def __init__(self, comparing: Comparing, open_count: int, began_at: float) -> None:
        self.began_at = began_at
        self.lacking: dict[bytes, RecordState] = {}
        """What the other does not know yet."""
        self.pulled_count = 0
        self.contradiction_count = 0
        self.refusal: KVCommError | None = None
        """Of a record that may be merged later: it is busy, or the disk is full."""
        self._comparing = comparing
        self._open_count = open_count

    def failed(self, error: KVCommError) -> None:
        if isinstance(error, Corrupt | TooLarge):
            self.contradiction_count += 1
        else:
            self.refusal = error
        self.settled()

    def settled(self) -> None:
        self._open_count -= 1
        if not self._open_count:
            self._comparing.merged(self)


class _Merge:
    """A ``Change``: the other's state into ours."""

    def __init__(
        self,
        exchange: _Exchange,
        key: bytes,
        theirs: RecordState,
        keeps: Callable[[bytes], bool],
        merged: Callable[[bytes, RecordState, RecordState], None],
    ) -> None:
        self._exchange, self._key, self._theirs, self._keeps = exchange, key, theirs, keeps
        self._tell_merged = merged
        self._before: RecordState | None = None
        """What was here, if the other knew more."""

    def apply(self, state: RecordState) -> RecordState:
        """The ring may have changed since the record was asked for."""
        if not self._keeps(self._key):
            raise Unavailable("the record has other owners by now")
        merged = dvv.merge(state, self._theirs)
        self._before = state if merged != state else None
        return merged

    def durable(self, state: RecordState) -> None:
        if self._before is not None:
            self._exchange.pulled_count += 1
            self._tell_merged(self._key, self._before, state)
        if state != self._theirs:
            self._exchange.lacking[self._key] = state
        self._exchange.settled()

    def failed(self, error: KVCommError) -> None:
        self._exchange.failed(error)
