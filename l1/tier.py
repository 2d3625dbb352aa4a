"""``L1Tier``: what an agent's process remembers, and who of its readers loads what it does not.

A reader's way through it::

    claim = l1.claim(keys, now, deadline)  # one step: hits, known absences, the rest shared among the readers
    try:
        ...                                # emit claim.blocks, load claim.mine from the other tiers, and say
        claim.landed(block, now)           #   of each block that arrives: here it is, as it arrives
        claim.missed(keys, now)            #   of those that no tier has
        claim.failed(keys, now)            #   of those of which a dead tier left it unclear
        while claim.follows:
            yield Park(claim, claim.patience() - now)
            news = claim.take(now)         # what others landed; keys to load instead of a failed leader
    finally:
        claim.close(now)

Load what is yours before you park, and make one claim at a time: that order is why readers cannot wait for
each other in a circle (``l1.flight``).

One lock guards everything and is held for microseconds.  Three things happen outside of it: callbacks of
waiting readers run (they may be anybody's code), evicted blocks die (the last reference to a pinned view runs
code), and copies are made.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvcomm.block import GENERATION_OFFSET, BlockKey, header_names
from kvcomm.tier import Block, PutStatus, TierName
from l1.flight import Flights, News, Party
from l1.lru import Lru
from l1.negative import ABSENT_ENTRIES, Moment, NegativeCache

LOGGER = logging.getLogger("kvcomm.l1")

BACKING_RATIO_MAX = 2
"""A private copy inside a buffer more than this many times its size is copied out of it."""

_GENERATION = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class L1Stats:
    """Gauges as of now; everything that ends in ``_total`` counts since start."""

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    """Part of ``used_bytes`` that is views of pinned pool memory."""
    block_count: int
    hits_total: int
    misses_total: int
    evicted_total: int
    refused_total: int
    """Blocks larger than the whole cache."""
    rejected_total: int
    """Pinned views that were no longer what they had been, and were answered as misses."""
    absent_count: int
    absent_hits_total: int
    flight_count: int
    led_total: int
    """Keys that a reader began to load."""
    followed_total: int
    """Keys that a reader got from another one's load, or waited for."""
    handed_over_total: int
    stalled_total: int


class L1Tier:
    """The block cache of one process.  Thread-safe; no method blocks or does I/O.

    ``now`` and ``deadline`` are monotonic seconds, of one clock for all calls.

    Args:
        capacity_bytes: bound on the bytes of all copies held, pinned views included; 0 holds nothing, and
            single flight and negative cache still work.
        negative_ttl_s: how long a key that no tier had is not asked for again; a put here ends it at once.
        negative_entries: bound on such keys.
        jitter: draws from ``[0, 1)``, spreads the ends of those times; ``None`` = no spread.
        stall_s, attempts_max: see :class:`l1.flight.Flights`.

    Raises:
        ConfigError: a size or a time is out of range.
    """

    name: TierName = "l1"

    def __init__(
        self,
        capacity_bytes: int,
        negative_ttl_s: float = 5.0,
        *,
        negative_entries: int = ABSENT_ENTRIES,
        jitter: Callable[[], float] | None = None,
        stall_s: float = 3.0,
        attempts_max: int = 2,
    ) -> None:
        self._gate = _Gate(self._see_out)
        self._lru: Lru[Block] = Lru(capacity_bytes)
        self._negative = NegativeCache(negative_ttl_s, entries_max=negative_entries, jitter=jitter)
        self._flights: Flights[Block] = Flights(stall_s=stall_s, attempts_max=attempts_max)
        self._pinned_bytes = 0
        self._rejected = 0
        self._waiting: dict[Party[Block], list[Callable[[], None]]] = {}

    # -- blocks ----------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[BlockKey]) -> list[Block | None]:
        """One block or ``None`` a key; ``keys`` are one key or a run of one prefix, head first.

        A pinned view is answered only while the slot still holds this block in this generation: an owner that
        wants its slot back retires it, and the next look here lets go of the pin.
        """
        with self._gate:
            blocks, gone = self._look(keys)
        _let_go(gone)
        return blocks

    def put(self, block: Block) -> PutStatus:
        """Remember a verified block: ``stored``, ``present`` (the first copy stays) or ``too_large``.

        A run that is put block by block should be :meth:`touch`-ed at its end.
        """
        block = self._adopt(block)
        with self._gate:
            status, gone = self._put(block)
        _let_go(gone)
        return status

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make a run the youngest, its head the very youngest."""
        with self._gate:
            self._lru.touch_run(keys)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Forget these blocks, if they are here."""
        with self._gate:
            gone = [block for key in keys if (block := self._drop(key)) is not None]
        _let_go(gone)

    def clear(self) -> None:
        """Forget all blocks: the end of every pin that only this cache held."""
        self.discard(self.keys())

    def forked(self) -> None:
        """In a forked child: forget all blocks, readers and the lock; what was counted stays.

        The pins of the views are the parent's, who may end them while the child still reads, and neither the
        readers that load nor the thread that may have held the lock are here.  To be called when the pins
        know of the fork already: here the views die.
        """
        lru, flights = self._lru, self._flights
        self._gate = _Gate(self._see_out)
        self._lru, self._pinned_bytes = Lru(lru.capacity_bytes), 0
        self._lru.hits, self._lru.misses = lru.hits, lru.misses
        self._lru.evicted, self._lru.refused = lru.evicted, lru.refused
        self._flights = Flights(stall_s=flights.stall_s, attempts_max=flights.attempts_max)
        self._flights.led, self._flights.followed = flights.led, flights.followed
        self._flights.handed_over, self._flights.stalled = flights.handed_over, flights.stalled
        self._waiting = {}

    def keys(self) -> list[BlockKey]:
        """What is here, in the order in which it would be evicted."""
        return self._keys(self._lru)

    # -- absences --------------------------------------------------------------------------------------------

    @property
    def moment(self) -> Moment:
        """To be read before other tiers are asked, and handed to :meth:`mark_absent`."""
        return self._negative.moment

    def known_absent(self, keys: Sequence[BlockKey], now: float) -> list[bool]:
        """Which keys no tier had when last asked, less than a TTL ago."""
        with self._gate:
            return [self._negative.known_absent(key, now) for key in keys]

    def mark_absent(self, keys: Sequence[BlockKey], now: float, since: Moment) -> None:
        """No tier had these keys.  Not for keys of which a failure left it unclear."""
        with self._gate:
            self._negative.mark(keys, now, since)

    def forget_absent(self, keys: Sequence[BlockKey]) -> None:
        """These keys exist, says somebody.  A put here, of whatever outcome, says so itself."""
        with self._gate:
            self._negative.forget(keys)

    # -- single flight ---------------------------------------------------------------------------------------

    def claim(self, keys: Sequence[BlockKey], now: float, deadline: float) -> Claim:
        """Look, and share the loading of what is missing, in one step: a key is either here or in one flight.

        ``deadline`` is the caller's own: after it, what it leads goes to a follower.
        """
        with self._gate:
            blocks, gone = self._look(keys)
            missing = [key for key, block in zip(keys, blocks, strict=True) if block is None]
            absent = [key for key in missing if self._negative.known_absent(key, now)]
            if absent:
                known = frozenset(absent)
                missing = [key for key in missing if key not in known]
            party, woken = self._flights.claim(missing, now, deadline)
            claim = Claim(self, party, blocks, absent, self._negative.moment)
            calls = self._callbacks(woken)
        _let_go(gone)
        _wake(calls)
        return claim

    # -- seeing it -------------------------------------------------------------------------------------------

    def stats(self) -> L1Stats:
        with self._gate:
            lru, flights = self._lru, self._flights
            return L1Stats(
                capacity_bytes=lru.capacity_bytes,
                used_bytes=lru.used_bytes,
                pinned_bytes=self._pinned_bytes,
                block_count=len(lru),
                hits_total=lru.hits - self._rejected,
                misses_total=lru.misses + self._rejected,
                evicted_total=lru.evicted,
                refused_total=lru.refused,
                rejected_total=self._rejected,
                absent_count=len(self._negative),
                absent_hits_total=self._negative.hits,
                flight_count=len(flights),
                led_total=flights.led,
                followed_total=flights.followed,
                handed_over_total=flights.handed_over,
                stalled_total=flights.stalled,
            )

    def check(self) -> None:
        """Assert the invariants."""
        with self._gate:
            self._lru.check()
            self._flights.check()
            blocks = [block for key in self._lru if (block := self._lru.peek(key)) is not None]
            assert self._pinned_bytes == sum(block.copy.nbytes for block in blocks if block.pinned)
            assert not any(party.has_news for party in self._waiting), "somebody waits for news that is there"

    # -- under the lock --------------------------------------------------------------------------------------

    def _look(self, keys: Sequence[BlockKey]) -> tuple[list[Block | None], list[Block]]:
        """Blocks by key, and the ones to let go of."""
        blocks = self._lru.get_run(keys)
        gone: list[Block] = []
        if self._pinned_bytes:
            for index, block in enumerate(blocks):
                if block is not None and block.pinned and not _intact(block):
                    self._rejected += 1
                    self._drop(block.key)
                    gone.append(block)
                    blocks[index] = None
        return blocks, gone

    def _put(self, block: Block) -> tuple[PutStatus, list[Block]]:
        """What became of it, and the blocks to let go of."""
        self._negative.forget((block.key,))
        here = self._lru.peek(block.key)
        if here is not None and (not here.pinned or _intact(here)):
            self._lru.touch_run((block.key,))
            return "present", []
        gone = self._lru.put(block.key, block, block.copy.nbytes)
        if gone is None:
            return "too_large", []
        self._pinned_bytes += _pinned_bytes(block) - sum(map(_pinned_bytes, gone))
        return "stored", gone

    def _drop(self, key: BlockKey) -> Block | None:
        block = self._lru.discard(key)
        if block is not None:
            self._pinned_bytes -= _pinned_bytes(block)
        return block

    def _callbacks(self, woken: list[Party[Block]]) -> list[Callable[[], None]]:
        return [call for party in woken for call in self._waiting.pop(party, ())]

    # -- for Claim -------------------------------------------------------------------------------------------

    def _landed(self, party: Party[Block], block: Block, now: float) -> None:
        mine = self._adopt(block)
        with self._gate:
            _, gone = self._put(mine)
            calls = self._callbacks(self._flights.land(party, block.key, block, now))
        _let_go(gone)
        _wake(calls)

    def _missed(self, party: Party[Block], keys: Sequence[BlockKey], now: float, since: Moment) -> None:
        with self._gate:
            self._negative.mark(keys, now, since)
            woken = {other: None for key in keys for other in self._flights.land(party, key, None, now)}
            calls = self._callbacks(list(woken))
        _wake(calls)

    def _failed(self, party: Party[Block], keys: Sequence[BlockKey], now: float) -> None:
        with self._gate:
            calls = self._callbacks(self._flights.hand_over(party, keys, now))
        _wake(calls)

    def _take(self, party: Party[Block], now: float) -> News[Block]:
        with self._gate:
            self._waiting.pop(party, None)  # it is awake: calls left over from waits that timed out
            news, woken = self._flights.take(party, now)
            calls = self._callbacks(woken)
        _wake(calls)
        return news

    def _keys(self, keys: Iterable[bytes]) -> list[BlockKey]:
        with self._gate:
            return [BlockKey(key) for key in keys]

    def _patience(self, party: Party[Block]) -> float:
        with self._gate:
            return self._flights.patience(party)

    def _await_news(self, party: Party[Block], call: Callable[[], None]) -> None:
        with self._gate:
            ready = party.has_news
            if not ready:
                self._waiting.setdefault(party, []).append(call)
        _wake([call] if ready else [])

    def _leave(self, party: Party[Block], now: float) -> None:
        self._gate.leave(party, now)

    def _see_out(self, leaving: Iterable[tuple[Party[Block], float]]) -> list[Callable[[], None]]:
        woken: list[Party[Block]] = []
        for party, now in leaving:
            woken += self._flights.leave(party, now)
            self._waiting.pop(party, None)
        return self._callbacks(woken)

    def _adopt(self, block: Block) -> Block:
        """``block`` as it is kept: found in L1, in memory that ends with it.

        Readers slice many copies out of one received buffer.  One such slice keeps the whole buffer alive, so
        a cache of slices would hold many times the bytes it counts.
        """
        copy = block.copy
        if copy.nbytes > self._lru.capacity_bytes:
            return block
        if not block.pinned and memoryview(copy.obj).nbytes > BACKING_RATIO_MAX * copy.nbytes:
            copy = memoryview(bytearray(copy))
        return replace(block, copy=copy, tier=self.name)


class Claim:
    """One reader's look into L1 and its share of loading what is missing; made by :meth:`L1Tier.claim`.

    It is a ``Waiter``: done when there is news to take or nothing left to wait for.  One reader uses it, from
    one thread or task at a time; it must be closed.
    """

    __slots__ = ("_party", "_since", "_tier", "absent", "blocks")

    def __init__(
        self,
        tier: L1Tier,
        party: Party[Block],
        blocks: list[Block | None],
        absent: list[BlockKey],
        since: Moment,
    ) -> None:
        self._tier = tier
        self._party = party
        self._since = since
        self.blocks = blocks
        """What L1 had, one a key of the claim."""
        self.absent = absent
        """Keys that no tier had a moment ago; nobody loads them."""

    @property
    def mine(self) -> list[BlockKey]:
        """Keys to load, in order; shrinks as they land, grows by what is inherited."""
        return self._tier._keys(self._party.leads)

    @property
    def follows(self) -> list[BlockKey]:
        """Keys that others load, until :meth:`take` has told what became of them."""
        with self._tier._gate:
            return [BlockKey(key) for key in self._party.untold]

    def landed(self, block: Block, now: float) -> None:
        """Put a verified block into L1 and hand it to the followers."""
        self._tier._landed(self._party, block, now)

    def missed(self, keys: Sequence[BlockKey], now: float) -> None:
        """No tier has these keys: followers get a miss, and later readers too for the negative TTL."""
        self._tier._missed(self._party, keys, now, self._since)

    def failed(self, keys: Sequence[BlockKey], now: float) -> None:
        """A tier that might have them did not answer: a follower may try, nothing is remembered as absent."""
        self._tier._failed(self._party, keys, now)

    def take(self, now: float) -> News[Block]:
        """What followed keys became, once each, and what this reader must load now instead of another one."""
        return self._tier._take(self._party, now)

    def patience(self) -> float:
        """When to :meth:`take` even without being called back, in monotonic seconds."""
        return self._tier._patience(self._party)

    def add_callback(self, call: Callable[[], None]) -> None:
        """Call once there is news: at once, or from the thread that makes it.  Dropped by :meth:`close`."""
        self._tier._await_news(self._party, call)

    def close(self, now: float) -> None:
        """Hand over what is not loaded and wait for nothing more.  Idempotent, never blocks."""
        self._tier._leave(self._party, now)


class _Gate:
    """The tier's lock, which a finalizer can leave through.

    The collector may close a forgotten reader at any allocation, so also while this very thread holds the
    lock.  Therefore :meth:`leave` only queues the party, and whoever holds the lock sees it out.  None is
    overlooked: the holder finds it when it looks after letting go, or the one who queued it gets the lock.
    """

    __slots__ = ("_leaving", "_lock", "_see_out")

    def __init__(
        self, see_out: Callable[[Iterable[tuple[Party[Block], float]]], list[Callable[[], None]]]
    ) -> None:
        self._lock = threading.Lock()
        self._leaving: deque[tuple[Party[Block], float]] = deque()
        self._see_out = see_out

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._leaving:
            self._empty()

    def leave(self, party: Party[Block], now: float) -> None:
        """Never blocks."""
        self._leaving.append((party, now))
        self._empty()

    def _empty(self) -> None:
        while self._leaving and self._lock.acquire(blocking=False):
            try:
                calls = self._see_out(self._taken())
            finally:
                self._lock.release()
            _wake(calls)

    def _taken(self) -> Iterable[tuple[Party[Block], float]]:
        while self._leaving:
            yield self._leaving.popleft()


def _intact(block: Block) -> bool:
    """Whether a pinned slot still holds the block, in the generation that was verified."""
    (generation,) = _GENERATION.unpack_from(block.copy, GENERATION_OFFSET)
    return bool(generation == block.header.generation) and header_names(block.copy, block.key)


def _pinned_bytes(block: Block) -> int:
    return block.copy.nbytes if block.pinned else 0


def _wake(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            # A reader whose event loop is gone must not take the leader and the other followers down with it.
            LOGGER.exception("a waiting reader could not be woken")


def _let_go(gone: list[Block]) -> None:
    """Where blocks die: after the lock, as the last reference to a pinned view runs code."""
    gone.clear()
