"""``RemoteReader``: one-sided reads of a pool's region through a channel; nobody is asked and nobody is told.

Theory of operation.  A read is up to three rounds, each one batch for all keys:

1. the keys' index buckets (two of 512 bytes each, neighbours in one piece); what a lookup found a moment ago
   is not read again;
2. the slots that they name, straight into the memory that the caller will get;
3. the slots' generation words, once more, while the payloads are being verified.

::

    item:  probing ──▶ reading ──▶ checking ──▶ hit
              ▲  │         │           │
              │  └ absent  └───────────┴─ moved on or damaged: once more ──▶ miss
              └───────────────────────────────┘

The copy is this process's own, so it is verified in full each time: generation in the header as it was read
and in the word afterwards, header, key, payload checksum.  A slot that was reused while it was read shows in
one of them.  A *stable* slot that fails twice is damaged: a miss, counted, and its offset is left in one of
the region's suspect words.  Nothing needs a pin: the owner may reuse the slot at any time.

A prefix streams: at most :data:`WINDOW_BYTES` and :data:`WINDOW_BLOCKS` are under way or waiting to be
taken, and each block is there as soon as it and those before it are.  Whatever the wire does, operations have
an end (``l2_rdma.transports.port``); one that fails ends the reader's trust in the channel (unless its caller
gave it too little time), and what is left of the batch is a miss at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES, BlockHeader, BlockKey
from kvcomm.errors import KVCommError
from kvcomm.tier import Block, Presence
from l2_rdma.index import Hint, bucket_offset, candidate_buckets, find_hint, is_marked, mark_offset
from l2_rdma.layout import BUCKET_BYTES, BUCKET_ENTRIES, WORD_BYTES, suspect_word
from l2_rdma.reader import ReaderCounters, Verification
from l2_rdma.transports.port import Channel, Extent, Operation, Transport

WINDOW_BYTES = 32 << 20
WINDOW_BLOCKS = 256
"""A larger block than the window goes alone."""
VERIFY_AHEAD_BYTES = 1 << 20
"""How much is verified beyond the block that is waited for, at a time."""
HINT_AGE_S = 0.5
HINTS_MAX = 8192
"""What lookups found is remembered so long and so much of it: a get that follows needs no index."""
SILENCE_S = 0.1
"""A pool that left an operation unanswered for so long is silent; a shorter deadline says nothing of it."""
_RUN_BUCKETS_MAX = 64
_MARK = (1).to_bytes(WORD_BYTES, "little")


def _heap(size: int) -> memoryview:
    return memoryview(bytearray(size))


class RemoteReader:
    """Reads the region behind ``channel``.  Thread-safe; each :class:`Fetch` belongs to one thread at a time.

    Args:
        transport: of ``channel``.
        allocate: memory to receive into (``kvcomm.slabs.Slabs.take``).
        timeout_s: how long one round may take, whatever the operation's own deadline.
        verify: leave it alone outside tests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        channel: Channel,
        transport: Transport,
        *,
        allocate: Callable[[int], memoryview] = _heap,
        timeout_s: float = 2.0,
        window_bytes: int = WINDOW_BYTES,
        verify: Verification | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.channel = channel
        self.counters = ReaderCounters()
        self.failure: KVCommError | None = None
        """Of the first operation whose failure says that the channel is of no use any more."""
        self.silent = False
        """Whether the failure was a pool that did not answer in time."""
        self._transport = transport
        self._allocate = allocate
        self._timeout_s = timeout_s
        self._window_bytes = window_bytes
        self._verify = verify or Verification()
        self._clock = clock
        self._layout = channel.header.layout
        self._hints: dict[BlockKey, tuple[_Found, float]] = {}

    def ask(self, keys: Sequence[BlockKey], deadline: float) -> Probe:
        """Post the reads of a lookup and return; :meth:`told` waits for them."""
        return Probe(self, keys, self._until(deadline))

    def told(self, probe: Probe) -> list[Presence]:
        """Which keys the index names; ``None`` where it could not be read."""
        self._transport.wait(probe.operations)
        now = self._clock()
        presences: list[Presence] = []
        for key in probe.keys:
            failed = probe.failed(key)
            if failed is not None:
                self._failed(failed, probe.posted_at)
                presences.append(None)
                continue
            found = probe.found(key)
            presences.append(found is not None)
            if found is not None:
                self._remember(key, found, now)
        return presences

    def lookup(self, keys: Sequence[BlockKey], deadline: float) -> list[Presence]:
        """:meth:`ask` and :meth:`told`.  Blocks until ``deadline`` (monotonic seconds) at most."""
        return self.told(self.ask(keys, deadline))

    def fetch(self, keys: Sequence[BlockKey]) -> Fetch:
        """The reading of a run of blocks, to be driven by the caller."""
        return Fetch(self, keys)

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None], deadline: float) -> None:
        """Read them all; calls ``found(index, block)`` for the hits, in order, as they arrive.  Blocks until
        ``deadline`` at most."""
        fetch = self.fetch(keys)
        for index in range(len(keys)):
            fetch.advance(index, deadline)
            block = fetch.take(index)
            if block is not None:
                found(index, block)

    def read(self, key: BlockKey, deadline: float) -> Block | None:
        """One block, in memory of its own; ``None`` = a miss."""
        blocks: list[Block] = []
        self.get([key], lambda _, block: blocks.append(block), deadline)
        return blocks[0] if blocks else None

    def _until(self, deadline: float) -> float:
        return min(deadline, self._clock() + self._timeout_s)

    def _failed(self, operation: Operation, posted_at: float) -> None:
        now = self._clock()
        silent = min(now, operation.deadline) - posted_at >= SILENCE_S  # we may come to see it late
        if now >= operation.deadline and not silent and self.channel.broken is None:
            return  # it was given too little time: that says nothing of the pool
        self.failure = self.failure or operation.error
        self.silent = self.silent or silent

    def _remember(self, key: BlockKey, found: _Found, now: float) -> None:
        if len(self._hints) >= HINTS_MAX:
            self._hints.clear()
        self._hints[key] = found, now

    def _recall(self, key: BlockKey) -> _Found | None:
        found, at = self._hints.pop(key, (None, 0.0))
        return found if found is not None and self._clock() < at + HINT_AGE_S else None

    def _mark(self, entry: int) -> None:
        """A hit: the owner keeps this block longer.  Nobody waits for it."""
        extent = Extent(mark_offset(self._layout, entry), WORD_BYTES)
        self.channel.write(extent, _MARK, self._clock() + self._timeout_s)

    def _report(self, offset: int) -> None:
        extent = Extent(suspect_word(offset) * WORD_BYTES, WORD_BYTES)
        self.channel.write(extent, offset.to_bytes(WORD_BYTES, "little"), self._clock() + self._timeout_s)


class _Found(NamedTuple):
    hint: Hint
    marked: bool
    """Whether the entry was read since the owner last looked."""


class Probe:
    """One round of reads: the candidate buckets of ``keys``, each once."""

    def __init__(self, reader: RemoteReader, keys: Sequence[BlockKey], deadline: float) -> None:
        self.keys = keys
        self.posted_at = reader._clock()
        layout = self._layout = reader._layout
        candidates = {bucket for key in keys for bucket in candidate_buckets(key, layout.bucket_count)}
        buckets = sorted(candidates)
        self._memory = reader._allocate(len(buckets) * BUCKET_BYTES)
        self._place = {bucket: place for place, bucket in enumerate(buckets)}
        extents: list[Extent] = []
        views: list[memoryview] = []
        runs: list[int] = []  # by place: the piece that brings it
        for begin, end in _runs(buckets):
            at, length = begin * BUCKET_BYTES, (end - begin) * BUCKET_BYTES
            runs += [len(extents)] * (end - begin)
            extents.append(Extent(bucket_offset(layout, buckets[begin]), length))
            views.append(self._memory[at : at + length])
        self.operations = reader.channel.read(extents, views, deadline) if extents else []
        self._runs = runs

    def waits_for(self, key: BlockKey) -> list[Operation]:
        """Operations of ``key`` that are not done."""
        return [operation for operation in self._operations_of(key) if not operation.done]

    def failed(self, key: BlockKey) -> Operation | None:
        """What could not be read; the operations of ``key`` are done."""
        return next((each for each in self._operations_of(key) if each.error is not None), None)

    def found(self, key: BlockKey) -> _Found | None:
        """What the index says; the operations of ``key`` are done, without error."""
        for bucket in candidate_buckets(key, self._layout.bucket_count):
            begin = self._place[bucket] * BUCKET_BYTES
            snapshot = bytes(self._memory[begin : begin + BUCKET_BYTES])
            hint = find_hint(snapshot, bucket, key)
            if hint is not None:
                return _Found(hint, is_marked(snapshot, hint.entry % BUCKET_ENTRIES))
        return None

    def _operations_of(self, key: BlockKey) -> list[Operation]:
        buckets = candidate_buckets(key, self._layout.bucket_count)
        return [self.operations[self._runs[self._place[bucket]]] for bucket in buckets]


@dataclass(slots=True, eq=False)
class _Item:
    """One block on its way."""

    position: int
    key: BlockKey
    known: _Found | None
    """From a lookup; then the first read is not preceded by a probe, and not the last try either."""
    stage: Literal["probing", "reading", "checking"] = "probing"
    probe: Probe | None = None
    found: _Found | None = None
    copy: memoryview | None = None
    word: memoryview | None = None
    """Of the slot's generation, as it was after the copy was read."""
    wish: tuple[Extent, memoryview] | None = None
    """What is to be read next; posted together with what the others wish."""
    operation: Operation | None = None
    """Reads the slot, or the generation word."""
    posted_at: float = 0.0
    verified: bool = False
    """Whether the copy has been looked at."""
    header: BlockHeader | None = None
    """If the copy, by itself, is right."""
    intact: bool = False
    """Whether the generation as read with the copy is the one that led here."""
    last: tuple[Hint, bool] | None = None
    """Where the try before led, and whether the slot was stable."""
    tries: int = 0
    posted: bool = False
    done: bool = False
    block: Block | None = None

    @property
    def held_bytes(self) -> int:
        return self.copy.nbytes if self.copy is not None else 0

    @property
    def to_be_judged(self) -> bool:
        return self.stage == "checking" and self.operation is not None and self.operation.done

    def waits_for(self) -> list[Operation]:
        """What has to be done before it can move on."""
        if self.stage == "probing":
            return self.probe.waits_for(self.key) if self.probe is not None else []
        return [] if self.operation is None or self.operation.done else [self.operation]


class Fetch:
    """Blocks of one pool, in order: :meth:`start` it, :meth:`advance` to each, :meth:`take` it.

    ``start``, ``pump`` and ``advance`` post, verify and wait; the rest is memory.
    """

    def __init__(self, reader: RemoteReader, keys: Sequence[BlockKey]) -> None:
        self._reader = reader
        self._items = [_Item(at, key, reader._recall(key)) for at, key in enumerate(keys)]
        self._started = False
        self._next = 0  # items below have been posted
        self._active: list[_Item] = []
        self._held_bytes = 0
        """Of copies under way or not taken yet."""
        self._held_count = 0
        self._left_at = self._back_at = reader._clock()

    def start(self, deadline: float) -> None:
        """Post the first round; call it for all pools before advancing any.  Idempotent."""
        if self._started:
            self._come_back()
            return
        self._started = True
        self._left_at = self._back_at = self._reader._clock()
        lacking = [item for item in self._items if item.known is None]
        if lacking and self._reader.failure is None:
            probe = self._reader.ask([item.key for item in lacking], deadline)
            for item in lacking:
                item.probe = probe
        self._pump(-1, deadline)

    def done(self, position: int) -> bool:
        """Whether :meth:`take` may be called."""
        return self._items[position].done

    def pump(self, deadline: float) -> None:
        """Take in what has arrived and post what there is room for; does not wait."""
        self.start(deadline)
        self._pump(-1, deadline)
        self._left_at = self._reader._clock()

    def advance(self, position: int, deadline: float) -> None:
        """Wait until the block at ``position`` is there, or known not to come."""
        self.start(deadline)
        item = self._items[position]
        while not item.done:
            self._pump(position, deadline)
            if not item.done:
                before = self._items[min(self._next, position)]  # it may not have been posted yet
                self._reader._transport.wait(item.waits_for() or before.waits_for())
        self._left_at = self._reader._clock()

    def waited_with(self, other: Fetch) -> None:
        """``other`` has been advanced: a wire that both share was polled for this one too.

        What runs out of time while nobody waits, because the blocks are taken slowly, is no fault of the
        pool, and read again.
        """
        if other._reader._transport is self._reader._transport:
            self._left_at = self._reader._clock()

    def give_up(self) -> None:
        """Whatever is not there is a miss; what is under way arrives nowhere."""
        for item in self._items:
            if not item.done:
                self._give_up(item)

    def take(self, position: int) -> Block | None:
        """The block, once; ``None`` = a miss."""
        item = self._items[position]
        assert item.done, "advance to it first"
        block = item.block
        if block is not None:
            self._held_bytes -= item.held_bytes
            self._held_count -= 1
            item.block = item.copy = None
        return block

    # -- moving on -------------------------------------------------------------------------------------------

    def _come_back(self) -> None:
        now = self._reader._clock()
        if now - self._left_at >= SILENCE_S:
            self._left_at = self._back_at = now

    def _pump(self, wanted: int, deadline: float) -> None:
        """As far as it goes without waiting.

        Args:
            wanted: this one is read even if there is no room, and verified first; of the others so much that
                small blocks do not come one by one, and large ones do not hold it up.
        """
        until = self._reader._until(deadline)
        ahead_bytes = VERIFY_AHEAD_BYTES
        while True:
            for item in self._active:
                if item.to_be_judged and item.position != wanted:
                    if ahead_bytes <= 0:
                        continue
                    ahead_bytes -= item.held_bytes
                self._step(item, until)
            self._active = [item for item in self._active if not item.done]
            self._admit(wanted, until)
            some_done = self._post(until)
            mine = self._items[wanted] if wanted >= 0 else None
            if mine is not None and mine.stage == "checking" and not mine.done:
                self._verify(mine)  # while the generation word is on its way
            if not some_done:
                return

    def _admit(self, wanted: int, until: float) -> None:
        while self._next < len(self._items) and (self._next <= wanted or self._has_room()):
            item = self._items[self._next]
            if item.known is None and item.waits_for():
                return
            self._next += 1
            self._held_count += 1
            item.posted = True
            self._step(item, until)
            if not item.done:
                self._active.append(item)

    def _has_room(self) -> bool:
        if not self._held_count:
            return True
        # The next block is probably as large as the others.
        room_for = self._held_bytes + self._held_bytes // self._held_count
        return room_for <= self._reader._window_bytes and self._held_count < WINDOW_BLOCKS

    def _post(self, until: float) -> bool:
        """All that is wished for, in one batch; whether some of it is done at once."""
        wishing = [item for item in self._active if item.wish is not None]
        wishes = [item.wish for item in wishing if item.wish is not None]
        if not wishes:
            return False
        reads = self._reader.channel.read(
            [extent for extent, _ in wishes], [view for _, view in wishes], until
        )
        now = self._reader._clock()
        for item, operation in zip(wishing, reads, strict=True):
            item.operation, item.wish, item.posted_at = operation, None, now
        return any(operation.done for operation in reads)

    def _step(self, item: _Item, until: float) -> None:
        while not item.done and item.wish is None and not item.waits_for():
            if item.stage == "checking":
                self._judge(item, until)
            elif self._reader.failure is not None:
                self._give_up(item)  # nothing new is posted any more
            elif item.stage == "reading":
                self._check(item, until)
            else:
                self._read(item, until)

    def _read(self, item: _Item, until: float) -> None:
        """The index has been read: go where it leads."""
        reader = self._reader
        if item.known is not None:
            item.found, item.known, item.tries = item.known, None, -1
        else:
            assert item.probe is not None
            failed = item.probe.failed(item.key)
            if failed is not None:
                self._fail(item, failed, item.probe.posted_at, until)
                return
            item.found, item.probe = item.probe.found(item.key), None
        if item.found is None:
            self._finish(item, None)
            return
        hint = item.found.hint
        if not reader._layout.holds_copy(hint.offset, hint.copy_bytes):
            self._again(item, until, stable=False)
            return
        item.copy = reader._allocate(hint.copy_bytes)
        self._held_bytes += item.held_bytes
        item.stage, item.wish = "reading", (Extent(hint.offset, hint.copy_bytes), item.copy)

    def _check(self, item: _Item, until: float) -> None:
        """The slot has arrived: see whether it is still the same."""
        assert item.operation is not None and item.found is not None
        if item.operation.error is not None:
            self._fail(item, item.operation, item.posted_at, until)
            return
        item.word, item.verified, item.operation = memoryview(bytearray(WORD_BYTES)), False, None
        extent = Extent(item.found.hint.offset + GENERATION_OFFSET, WORD_BYTES)
        item.stage, item.wish = "checking", (extent, item.word)

    def _verify(self, item: _Item) -> None:
        """Look at the copy by itself, once."""
        if item.verified:
            return
        verify, copy = self._reader._verify, item.copy
        assert item.found is not None and copy is not None
        word = int.from_bytes(copy[GENERATION_OFFSET:HEADER_BYTES], "little")
        item.verified, item.header = True, None
        item.intact = verify.current(word, item.found.hint.generation)
        if item.intact:
            header = verify.header(copy, item.key)
            if header is not None and verify.payload(header, copy):
                item.header = header

    def _judge(self, item: _Item, until: float) -> None:
        """Everything about this try is known."""
        reader = self._reader
        assert item.operation is not None and item.word is not None and item.found is not None
        if item.operation.error is not None:
            self._fail(item, item.operation, item.posted_at, until)
            return
        self._verify(item)
        hint, marked = item.found
        word = int.from_bytes(item.word, "little")
        stable = item.intact and reader._verify.current(word, hint.generation)
        if not stable or item.header is None:
            self._again(item, until, stable=stable)
            return
        reader.counters.payloads_verified += 1
        if not marked:
            reader._mark(hint.entry)
        assert item.copy is not None
        self._finish(item, Block(item.header, item.copy.toreadonly(), "l2", pinned=False))

    def _again(self, item: _Item, until: float, *, stable: bool) -> None:
        """This try led nowhere: once more from the index, or it is a miss."""
        reader = self._reader
        assert item.found is not None
        hint = item.found.hint
        if item.tries < 1 and reader.failure is None:
            reader.counters.retries += item.tries == 0  # an old hint is no slot that moved while we looked
            item.last, item.tries = (hint, stable), item.tries + 1
            self._release(item)
            item.stage, item.operation = "probing", None
            item.probe = reader.ask([item.key], until)
            return
        if stable or (item.last is not None and item.last[0] == hint):  # an entry that leads nowhere, twice
            reader.counters.corrupt += 1
            reader._report(hint.offset)
        self._finish(item, None)

    def _fail(self, item: _Item, operation: Operation, posted_at: float, until: float) -> None:
        reader = self._reader
        reader._failed(operation, max(posted_at, self._back_at))
        if posted_at < self._back_at and reader.failure is None:
            self._release(item)
            item.stage, item.operation = "probing", None
            item.probe = reader.ask([item.key], until)
        else:
            self._give_up(item)

    def _give_up(self, item: _Item) -> None:
        self._reader.counters.unavailable += 1
        self._finish(item, None)

    def _finish(self, item: _Item, block: Block | None) -> None:
        counters = self._reader.counters
        if block is None:
            counters.misses += 1
            self._release(item)
            self._held_count -= item.posted
        else:
            counters.hits += 1
            counters.hit_bytes += len(block.copy)
        item.done, item.block = True, block
        item.probe = item.operation = item.wish = item.word = item.header = None

    def _release(self, item: _Item) -> None:
        self._held_bytes -= item.held_bytes
        item.copy = None


def _runs(buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Places ``[begin, end)`` of buckets that follow each other."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for place in range(1, len(buckets) + 1):
        ends = place == len(buckets) or buckets[place] != buckets[place - 1] + 1
        if ends or place - begin == _RUN_BUCKETS_MAX:
            runs.append((begin, place))
            begin = place
    return runs
