"""``Owner``: the single allocator, index writer and judge of evictions of one region; implements
``BlockStore``.

Theory of operation.  A slot goes through these states; the word is its generation word, which readers and
writers compare::

    free ──reserve──▶ reserved ──publish──▶ published ──evict / quarantine──▶ retired ──collect──▶ free
                      word = g|R             word = g                          word = 0
                          └────────── expire / abort / holder gone ──────────────▲

* Generations count up from the region's random base, one a reservation, and are never used twice in a life of
  the region, so a stale reference matches nothing.  The generation is also the reservation's token.
* **Retired** slots rest until nobody can be looking at or writing to them: no hazard names them (scanned
  after the word was cleared and fenced, see ``l2_rdma.hazards``), no lease is open, no socket receives into
  them, and ``grace_s`` has passed where fences are weak.  Only then is the memory handed out again.
* **Eviction** (``kvcomm.sieve``) asks only slots that are not pinned or leased, leaves before parents.
  :meth:`tick` keeps 1/64 of each full class free, so that a put rarely evicts inline.
* A size class that starves takes a slab from another class: at once when it has none, otherwise in
  :meth:`tick` from a class that evicted nothing for a while.

Time and randomness come from outside; nothing here waits, and no decision depends on the order of a set.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcomm.block import (
    GENERATION_OFFSET,
    HEADER_BYTES,
    NO_PARENT,
    NO_TENANT,
    BlockHeader,
    BlockKey,
    Generation,
)
from kvcomm.blockstore import ANY_TENANT, StoreUsage
from kvcomm.errors import Corrupt
from kvcomm.shelves import KeyShelves
from kvcomm.sieve import Sieve
from kvcomm.wire.messages import BlockItem, Grant, Want
from l2_rdma.allocator import Place, SlabAllocator
from l2_rdma.hazards import HazardTable
from l2_rdma.index import IndexWriter
from l2_rdma.layout import (
    BACKED_WORD,
    PIN_SHARE_WORD,
    RESERVED_FLAG,
    SUSPECT_COUNT,
    SUSPECT_FIRST_WORD,
    WORD_BYTES,
    RegionHeader,
)
from l2_rdma.slotmemory import FileSlots, SlotMemory

LOOK_INTERVAL_S = 0.25
"""Readers speak to the owner through memory (suspects, marks, hazards), so it looks so often.  Who needs a
slot does not wait for it: a reserve looks for slots that have become free itself."""
REBALANCE_INTERVAL_S = 1.0
EVICT_BATCH = 16
SLABS_COMPARED = 4
"""Slabs of a class that are weighed against each other when one must be emptied."""
RESERVE_SHARE = 64
"""One slot in so many is kept free."""
INSPECT_BYTES_MAX = 64 << 20
"""Suspected copies that are verified at a time, about 10 ms (the last one may overshoot)."""


@dataclass(slots=True, eq=False)
class _Slot:
    place: Place
    key: BlockKey
    copy_bytes: int
    tenant: bytes
    generation: Generation
    holder: int
    expires_at: float
    state: Literal["reserved", "published", "retired"] = "reserved"
    receiving: bool = False
    """A socket of this process may be writing to it."""
    by_channel: bool = False
    """Its holder may be writing to it through a one-sided channel."""
    leases: int = 0
    parent: BlockKey = NO_PARENT
    entry: int | None = None
    """Of the index; ``None`` = both buckets were full: found over the wire only."""
    marked: bool = False
    """Used through a lease since the hand last passed."""
    rests_until: float | None = None

    @property
    def offset(self) -> int:
        return self.place.offset

    @property
    def exposed(self) -> bool:
        """Somebody may be writing to it who is seen by no hazard."""
        return self.receiving or self.by_channel

    def cover(self) -> None:
        """Nobody is any more."""
        self.receiving = self.by_channel = False


class SlotLease:
    """A copy that stays where it is until released.  ``copy`` is read-only: ``header | payload``."""

    def __init__(self, slot: _Slot, memory: SlotMemory) -> None:
        self._slot: _Slot | None = slot
        self._memory = memory
        self._copy: memoryview | None = None
        self.copy_bytes = slot.copy_bytes
        slot.leases += 1

    @property
    def copy(self) -> memoryview:
        if self._copy is None:
            assert self._slot is not None, "a copy is looked at before it is released"
            self._copy = self._memory.copy(self._slot.offset, self.copy_bytes)
        return self._copy

    def release(self) -> None:
        """Idempotent."""
        if self._slot is not None:
            self._slot.leases -= 1
            self._slot = None


class Owner:
    """One region's ``BlockStore``.  Not thread-safe: one event loop owns it.

    Args:
        memory: the whole region, writable, 8-byte aligned.
        header: what was written at its start.  A region whose tenant is all zero takes blocks of every tenant
            and shows each only its own.
        locked: whether a process holds the lock on hazard words ``[first, first + count)``.
        barrier: orders our stores before our loads against all readers
            (``l2_rdma.fence.barrier_everywhere``).
        reservation_ttl_s: a writer that takes longer loses its reservation; the key is writable again.
        pin_budget_bytes: what clients may keep pinned, all together; by default half of the slots.
        grace_s: how long retired slots rest (``l2_rdma.fence.grace_s``).
        backed_bytes: how much of the region has memory behind it; more with :meth:`grow`.
        more: asked before anything is evicted: puts memory behind more of the region and returns how far it
            reaches now; ``None`` = there is no more.
        slot_memory: where the slots' bytes are; by default in ``memory``.
    """

    def __init__(
        self,
        memory: memoryview,
        header: RegionHeader,
        *,
        locked: Callable[[int, int], bool] = lambda first, count: False,
        barrier: Callable[[], None] = lambda: None,
        reservation_ttl_s: float = 10.0,
        pin_budget_bytes: int | None = None,
        grace_s: float = 0.0,
        backed_bytes: int | None = None,
        more: Callable[[], int | None] = lambda: None,
        slot_memory: SlotMemory | None = None,
    ) -> None:
        layout = header.layout
        self._slot_memory = FileSlots(memory) if slot_memory is None else slot_memory
        self._words = memory.cast("Q")
        self._header = header
        self._tenant = bytes(header.tenant)
        self._barrier = barrier
        self._reservation_ttl_s = reservation_ttl_s
        self._grace_s = grace_s
        self._more = more
        self._allocator = SlabAllocator(layout.slots_offset, layout.slab_bytes, 0)
        self._index = IndexWriter(memory, layout)
        first = layout.hazard_offset // WORD_BYTES
        self._hazards = HazardTable(self._words[first : first + layout.hazard_count], locked)
        self._generations = itertools.count(header.generation_base)
        self._slots: dict[int, _Slot] = {}  # by offset: every slot that is not free
        self._published: dict[BlockKey, _Slot] = {}
        self._listed = KeyShelves()  # the keys of _published
        self._reserved: dict[int, _Slot] = {}  # by token, in order of expiry
        self._pending: dict[BlockKey, _Slot] = {}
        self._late: dict[int, _Slot] = {}  # expired while exposed: they may still be written to
        self._unseen: set[int] = set()  # holders that write through channels
        self._retired: list[_Slot] = []
        self._by_entry: dict[int, _Slot] = {}
        self._children: dict[BlockKey, int] = {}  # published children of a key, itself published or not
        self._queues: dict[int, Sieve[_Slot]] = {}
        self._reserved_bytes = 0
        self._evicted_count = 0
        self._quarantined_count = 0
        self._slabs_compared = 0
        self._class_evictions: dict[int, int] = {}  # since the last rebalancing
        self._heard: Callable[[BlockKey, bytes], None] = lambda key, tenant: None
        self._ticked_at: float | None = None
        self._rebalanced_at: float | None = None
        self.grow(layout.region_bytes if backed_bytes is None else backed_bytes)
        self._pin_budget_bytes = layout.slab_count * layout.slab_bytes // 2
        if pin_budget_bytes is not None:
            self._pin_budget_bytes = pin_budget_bytes
        self._share_pins()

    def watch(self, heard: Callable[[BlockKey, bytes], None]) -> None:
        """Call with the key and the tenant of each block before it becomes visible."""
        self._heard = heard

    # -- BlockStore ------------------------------------------------------------------------------------------

    def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]:
        return [self._visible(key, tenant) is not None for key in keys]

    def reserve(
        self, wants: Sequence[Want], holder: int, tenant: bytes, now: float, *, evict: bool = True
    ) -> list[Grant]:
        self._expire(now)
        full: set[int] = set()
        return [self._reserve(want, holder, tenant, now, full, evict) for want in wants]

    def extent(self, token: int) -> memoryview:
        slot = self._reserved[token]
        slot.receiving, slot.by_channel = True, False
        return self._slot_memory.landing(slot.offset, slot.copy_bytes)

    def expose(self, holder: int) -> None:
        self._unseen.add(holder)
        for slot in self._reserved.values():
            if slot.holder == holder and not slot.receiving:
                slot.by_channel = True

    def late_writers(self) -> list[int]:
        return sorted({slot.holder for slot in self._late.values() if slot.by_channel})

    def fenced(self, holder: int) -> None:
        self._unseen.discard(holder)
        for slot in [*self._late.values(), *self._reserved.values()]:
            if slot.holder == holder and slot.by_channel:
                slot.by_channel = False
                self._written(slot.generation, holder)

    def publish(self, tokens: Sequence[int], holder: int, now: float, *, verify: bool) -> list[str]:
        self._expire(now)
        return [self._publish(token, holder, verify) for token in tokens]

    def abort(self, tokens: Sequence[int], holder: int) -> None:
        for token in tokens:
            late = self._late.get(token)
            if late is not None and not late.by_channel:  # else what it has sent may still be on its way
                self._written(token, holder)
            slot = self._reserved.get(token)
            if slot is not None and slot.holder == holder:
                self._retire_reserved(slot)

    def lease(self, key: BlockKey, tenant: bytes, *, use: bool = True) -> SlotLease | None:
        slot = self._visible(key, tenant)
        if slot is None:
            return None
        slot.marked = slot.marked or use
        return SlotLease(slot, self._slot_memory)

    def used(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self._published and self._marked(self._published[key]) for key in keys]

    def quarantine(self, keys: Sequence[BlockKey], tenant: bytes) -> None:
        """A report is not believed blindly: the owner verifies the copy itself, so a broken reader cannot
        empty the pool.  What is over :data:`INSPECT_BYTES_MAX` is left for the next report."""
        inspected_bytes = 0
        for key in keys:
            slot = self._visible(key, tenant)
            if slot is not None and inspected_bytes < INSPECT_BYTES_MAX:
                inspected_bytes += self._inspect(slot)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if (slot := self._published.get(key)) is not None:
                self._retire_published(slot)

    def open_pins(self, holder: int, slots: int) -> tuple[int, int, int]:
        given = self._hazards.open(holder, slots)
        self._share_pins()
        return (given.first, given.count, self._pin_share) if given is not None else (0, 0, 0)

    def release_holder(self, holder: int) -> None:
        for slot in [slot for slot in self._reserved.values() if slot.holder == holder]:
            slot.cover()
            self._retire_reserved(slot)
        self._unseen.discard(holder)
        for token in [token for token, slot in self._late.items() if slot.holder == holder]:
            self._written(token, holder)
        self._hazards.release(holder)
        self._share_pins()

    def tick(self, now: float) -> None:
        self._ticked_at = now
        self._expire(now)
        self._hazards.sweep()
        self._share_pins()
        self._inspect_suspects()
        self._rebalance(now)
        self._top_up()
        self._collect(now)

    def deadline(self) -> float | None:
        if self._ticked_at is None:
            return 0.0
        next_look = self._ticked_at + LOOK_INTERVAL_S
        return min([next_look, *(slot.expires_at for slot in itertools.islice(self._reserved.values(), 1))])

    def listing(self, after: bytes, limit: int, tenant: bytes) -> list[BlockItem]:
        slots = (self._published[key] for key in self._listed.after(after))
        mine = (slot for slot in slots if tenant in (ANY_TENANT, slot.tenant))
        return [BlockItem(slot.key, slot.copy_bytes) for slot in itertools.islice(mine, limit)]

    def usage(self) -> StoreUsage:
        pinned = self._hazards.pinned()
        held = (
            slot.place.slot_bytes for slot in self._slots.values() if slot.leases or slot.offset in pinned
        )
        return StoreUsage(
            self._allocator.capacity_bytes,
            self._allocator.used_bytes,
            self._reserved_bytes,
            sum(held),
            len(self._published),
            self._evicted_count,
            self._quarantined_count,
        )

    def check(self) -> None:
        """Assert every invariant."""
        self._allocator.check()
        self._hazards.check()
        live = sorted(
            offset
            for size in self._allocator.classes()
            for slab in self._allocator.slabs(size)
            for offset in self._allocator.live(slab)
        )
        assert live == sorted(self._slots), "a slot is held by the allocator alone, or by us alone"
        assert sum(slot.place.slot_bytes for slot in self._reserved.values()) == self._reserved_bytes
        assert len(self._published) + len(self._reserved) + len(self._retired) == len(self._slots)
        for slot in self._slots.values():
            word = self._words[_generation_word(slot)]
            leaf = slot.state == "published" and not self._children.get(slot.key)
            queue = self._queues.get(slot.place.slot_bytes)
            assert leaf == (queue is not None and slot in queue), (
                "the eviction queue does not hold exactly the leaves"
            )
            match slot.state:
                case "published":
                    assert word == slot.generation and self._published[slot.key] is slot
                    assert slot.entry is None or self._by_entry[slot.entry] is slot
                case "reserved":
                    assert slot.exposed or word == slot.generation | RESERVED_FLAG
                    assert self._pending[slot.key] is slot
                case "retired":
                    assert word == 0 or slot.exposed
        assert len(self._by_entry) <= len(self._published)
        assert list(self._listed.after(b"")) == sorted(self._published)

    # -- beyond the port -------------------------------------------------------------------------------------

    @property
    def spare_bytes(self) -> int:
        """Memory that is there and not used; the shell keeps some ahead of need."""
        return self._allocator.capacity_bytes - self._allocator.used_bytes

    def grow(self, backed_bytes: int) -> None:
        """The first ``backed_bytes`` of the region have memory behind them now: their slabs may be used."""
        layout = self._header.layout
        slabs = max(0, min(backed_bytes, layout.slots_end) - layout.slots_offset) // layout.slab_bytes
        self._allocator.grow(slabs)
        self._words[BACKED_WORD] = max(backed_bytes, self._words[BACKED_WORD])

    # -- reserve, publish ------------------------------------------------------------------------------------

    def _reserve(
        self, want: Want, holder: int, tenant: bytes, now: float, full: set[int], evict: bool
    ) -> Grant:
        """``full``: classes in which this batch found nothing to evict.  Finding that out takes a look at
        every slot, and it stays so within a batch."""
        key = BlockKey(want.key)
        if len(key) != 32 or want.copy_bytes < HEADER_BYTES or not self._admits(tenant):
            return Grant("refused")
        if (there := self._published.get(key)) is not None:
            self._repair_entry(there)
            return Grant("present" if tenant in (ANY_TENANT, there.tenant) else "refused")
        if key in self._pending:
            return Grant("pending")
        slot_bytes = self._allocator.slot_bytes_for(want.copy_bytes)
        if slot_bytes is None:
            return Grant("too_large")
        if not evict and not self._has_spare(slot_bytes):
            return Grant("full")
        place = self._allocator.allocate(slot_bytes)
        if place is None and slot_bytes not in full:
            place = self._make_room(slot_bytes, now)
        if place is not None and not self._slot_memory.admit(place.offset):
            self._allocator.free(place)
            place = None
        if place is None:
            full.add(slot_bytes)
            return Grant("full")
        generation = Generation(next(self._generations))
        slot = _Slot(place, key, want.copy_bytes, tenant, generation, holder, now + self._reservation_ttl_s)
        slot.by_channel = holder in self._unseen
        self._slot_memory.mark(slot.offset, generation | RESERVED_FLAG)
        self._slots[slot.offset] = self._reserved[generation] = self._pending[key] = slot
        self._reserved_bytes += place.slot_bytes
        return Grant("granted", generation, slot.offset, generation)

    def _publish(self, token: int, holder: int, verify: bool) -> str:
        slot = self._reserved.get(token)
        if slot is None or slot.holder != holder:
            self._written(token, holder)
            return "expired"
        slot.cover()
        header = self._read_header(slot, verify)
        if header is None:
            self._retire_reserved(slot)
            return "corrupt"
        self._forget_reservation(slot)
        self._heard(slot.key, header.tenant)
        slot.state, slot.tenant, slot.parent = "published", header.tenant, header.parent
        self._slot_memory.mark(slot.offset, slot.generation)
        self._published[slot.key] = slot
        self._listed.add(slot.key)
        self._link_family(slot)
        self._enter_index(slot)
        return "published"

    def _read_header(self, slot: _Slot, verify: bool) -> BlockHeader | None:
        """The header that a writer left, if it is the one that was reserved for."""
        try:
            header = BlockHeader.unpack(self._slot_memory.header(slot.offset, slot.copy_bytes))
        except Corrupt:
            return None
        admitted = slot.tenant in (ANY_TENANT, header.tenant) and self._tenant in (NO_TENANT, header.tenant)
        if header.key != slot.key or HEADER_BYTES + header.payload_bytes != slot.copy_bytes or not admitted:
            return None
        if verify and self._slot_memory.digest(slot.offset, slot.copy_bytes) != header.payload_checksum:
            return None
        return header

    def _written(self, token: int, holder: int) -> None:
        """The writer of an expired reservation is done with it (it spoke of it, or is gone)."""
        slot = self._late.get(token)
        if slot is not None and slot.holder == holder:
            del self._late[token]
            slot.cover()
            self._slot_memory.mark(slot.offset, 0)  # the socket may have received a header over it

    def _expire(self, now: float) -> None:
        while self._reserved:
            slot = next(iter(self._reserved.values()))
            if now < slot.expires_at:
                return
            self._retire_reserved(slot)

    # -- visibility ------------------------------------------------------------------------------------------

    def _admits(self, tenant: bytes) -> bool:
        return tenant == ANY_TENANT or self._tenant in (NO_TENANT, tenant)

    def _visible(self, key: BlockKey, tenant: bytes) -> _Slot | None:
        slot = self._published.get(key)
        return slot if slot is not None and tenant in (ANY_TENANT, slot.tenant) else None

    def _inspect(self, slot: _Slot) -> int:
        """Verify a published copy and hide it if it is damaged; how many bytes were looked at."""
        if not self._intact(slot):
            self._quarantined_count += 1
            self._retire_published(slot)
        return slot.copy_bytes

    def _intact(self, slot: _Slot) -> bool:
        whole = self._read_header(slot, verify=True) is not None
        return whole and self._words[_generation_word(slot)] == slot.generation

    def _enter_index(self, slot: _Slot) -> None:
        entry = self._index.insert(slot.key, slot.generation, slot.offset, slot.copy_bytes)
        if entry is None and self._displace(slot.key):
            entry = self._index.insert(slot.key, slot.generation, slot.offset, slot.copy_bytes)
        if entry is not None:
            slot.entry = entry
            self._by_entry[entry] = slot

    def _displace(self, key: BlockKey) -> bool:
        """Evict a block whose entry stands where ``key``'s could; leaves before parents, unread before
        read."""
        pinned = self._hazards.pinned()
        there = [self._by_entry[entry] for entry in self._index.candidates(key) if entry in self._by_entry]
        free_to_go = [slot for slot in there if not slot.leases and slot.offset not in pinned]
        if not free_to_go:
            return False
        self._retire_published(
            min(free_to_go, key=lambda slot: (slot.key in self._children, self._marked(slot)))
        )
        self._evicted_count += 1
        return True

    def _repair_entry(self, slot: _Slot) -> None:
        """A writer came with a block that is present: perhaps because readers cannot find it."""
        if slot.entry is None:
            self._enter_index(slot)
        elif not self._index.intact(slot.entry, slot.key, slot.generation, slot.offset, slot.copy_bytes):
            self._index.rewrite(slot.entry, slot.key, slot.generation, slot.offset, slot.copy_bytes)

    def _inspect_suspects(self) -> None:
        inspected_bytes = 0
        for word in range(SUSPECT_FIRST_WORD, SUSPECT_FIRST_WORD + SUSPECT_COUNT):
            if inspected_bytes >= INSPECT_BYTES_MAX:
                return  # the rest in the next tick
            if offset := self._words[word]:
                self._words[word] = 0
                slot = self._slots.get(offset)
                if slot is not None and slot.state == "published":
                    inspected_bytes += self._inspect(slot)

    # -- families and retirement -----------------------------------------------------------------------------

    def _link_family(self, slot: _Slot) -> None:
        if slot.parent == slot.key:
            slot.parent = NO_PARENT
        if not self._children.get(slot.key):
            self._queue(slot).add(slot)
        if slot.parent == NO_PARENT:
            return
        self._children[slot.parent] = self._children.get(slot.parent, 0) + 1
        parent = self._published.get(slot.parent)
        if parent is not None and self._children[slot.parent] == 1:
            self._queue(parent).remove(parent)

    def _unlink_family(self, slot: _Slot) -> None:
        if not self._children.get(slot.key):
            self._queue(slot).remove(slot)
        if slot.parent == NO_PARENT:
            return
        self._children[slot.parent] -= 1
        if self._children[slot.parent]:
            return
        del self._children[slot.parent]
        if (parent := self._published.get(slot.parent)) is not None:
            self._queue(parent).add_at_hand(parent)

    def _queue(self, slot: _Slot) -> Sieve[_Slot]:
        return self._queues.setdefault(slot.place.slot_bytes, Sieve())

    def _retire_published(self, slot: _Slot) -> None:
        self._unlink_family(slot)
        del self._published[slot.key]
        self._listed.discard(slot.key)
        if slot.entry is not None:
            self._index.remove(slot.entry)
            del self._by_entry[slot.entry]
            slot.entry = None
        self._retire(slot)

    def _retire_reserved(self, slot: _Slot) -> None:
        self._forget_reservation(slot)
        if slot.exposed:
            self._late[slot.generation] = slot
        self._retire(slot)

    def _forget_reservation(self, slot: _Slot) -> None:
        del self._reserved[slot.generation], self._pending[slot.key]
        self._reserved_bytes -= slot.place.slot_bytes

    def _retire(self, slot: _Slot) -> None:
        slot.state = "retired"
        self._slot_memory.mark(slot.offset, 0)
        self._retired.append(slot)

    def _collect(self, now: float) -> None:
        """Free the retired slots that nobody can be looking at any more."""
        if not self._retired:
            return
        self._barrier()
        pinned = self._hazards.pinned()
        kept = []
        for slot in self._retired:
            if slot.rests_until is None:
                slot.rests_until = now + self._grace_s
            if slot.leases or slot.exposed or now < slot.rests_until or slot.offset in pinned:
                kept.append(slot)
                continue
            del self._slots[slot.offset]
            self._allocator.free(slot.place)
        self._retired = kept

    # -- room ------------------------------------------------------------------------------------------------

    def _make_room(self, slot_bytes: int, now: float) -> Place | None:
        self._collect(now)
        place = self._allocator.allocate(slot_bytes)
        while place is None and self._grow_more():
            place = self._allocator.allocate(slot_bytes)
        if place is None and self._evict(slot_bytes, self._batch(slot_bytes)):
            self._collect(now)
            place = self._allocator.allocate(slot_bytes)
        if place is None and self._take_slab(slot_bytes):
            self._collect(now)
            place = self._allocator.allocate(slot_bytes)
        return place

    def _has_spare(self, slot_bytes: int) -> bool:
        """Whether a slot can be had without eviction, now or by the next :meth:`_top_up`."""
        reserve = self._slot_count(slot_bytes) // RESERVE_SHARE
        while self._allocator.free_slots(slot_bytes) <= reserve:
            if not self._grow_more():
                return False
        return True

    def _grow_more(self) -> bool:
        backed_bytes = self._more()
        if backed_bytes is not None:
            self.grow(backed_bytes)
        return backed_bytes is not None

    def _batch(self, slot_bytes: int) -> int:
        return min(EVICT_BATCH, max(1, self._slot_count(slot_bytes) // RESERVE_SHARE))

    def _slot_count(self, slot_bytes: int) -> int:
        return len(self._allocator.slabs(slot_bytes)) * (self._allocator.slab_bytes // slot_bytes)

    def _evict(self, slot_bytes: int, count: int) -> int:
        """Retire up to ``count`` blocks of one class; how many there were."""
        pinned = self._hazards.pinned()
        evicted = 0
        while evicted < count and (victim := self._victim(slot_bytes, pinned)) is not None:
            self._retire_published(victim)
            evicted += 1
        self._evicted_count += evicted
        self._class_evictions[slot_bytes] = self._class_evictions.get(slot_bytes, 0) + evicted
        return evicted

    def _victim(self, slot_bytes: int, pinned: frozenset[int]) -> _Slot | None:
        def evictable(slot: _Slot) -> bool:
            return not slot.leases and slot.offset not in pinned

        queue = self._queues.get(slot_bytes)
        victim = queue.victim(self._take_mark, evictable) if queue is not None else None
        if victim is not None:
            return victim
        # Every leaf is in use (or headers claim a circle of parents): a parent must go.
        for slab in self._allocator.slabs(slot_bytes):
            for offset in self._allocator.live(slab):
                slot = self._slots[offset]
                if slot.state == "published" and evictable(slot):
                    return slot
        return None

    def _take_mark(self, slot: _Slot) -> bool:
        read = slot.entry is not None and self._index.take_referenced(slot.entry)
        marked, slot.marked = slot.marked or read, False
        return marked

    def _marked(self, slot: _Slot) -> bool:
        return slot.marked or (slot.entry is not None and self._index.referenced(slot.entry))

    def _take_slab(
        self, slot_bytes: int, donors: Sequence[int] | None = None, marks_max: float = 1.0
    ) -> bool:
        """Empty the slab of another class that costs the least; False if each has something in use."""
        pinned = self._hazards.pinned()
        choices = [
            choice
            for donor in (self._allocator.classes() if donors is None else donors)
            if donor != slot_bytes
            for choice in self._slab_choices(donor, marks_max, pinned)
        ]
        self._slabs_compared += SLABS_COMPARED
        if not choices:
            return False
        for slot in min(choices, key=lambda choice: choice[:3])[3]:
            if slot.state == "published":
                self._retire_published(slot)
                self._evicted_count += 1
        return True

    def _slab_choices(
        self, donor: int, marks_max: float, pinned: frozenset[int]
    ) -> Iterator[tuple[int, int, int, list[_Slot]]]:
        """(cost, slot count, slab, slots) of some slabs of one class that can be emptied; others each time,
        as comparing all of a large region takes 0.15 s."""
        slabs = self._allocator.slabs(donor)
        begin = self._slabs_compared % len(slabs)
        compared = 0
        for slab in slabs[begin:] + slabs[:begin]:
            slots = [self._slots[offset] for offset in self._allocator.live(slab)]
            if any(
                slot.state == "reserved" or slot.exposed or slot.leases or slot.offset in pinned
                for slot in slots
            ):
                continue
            marks = sum(self._marked(slot) for slot in slots if slot.state == "published")
            if marks <= marks_max * len(slots):
                yield marks * donor, len(slots), slab, slots
            compared += 1
            if compared == SLABS_COMPARED:
                return

    def _top_up(self) -> None:
        for slot_bytes in self._allocator.classes():
            target = self._slot_count(slot_bytes) // RESERVE_SHARE
            missing = target - self._allocator.free_slots(slot_bytes)
            if missing > 0 and not self._grow_more():  # else it is looked at again in the next tick
                self._evict(slot_bytes, min(missing, 4 * EVICT_BATCH))

    def _rebalance(self, now: float) -> None:
        """Once in a while, one slab from a class that evicted nothing and is hardly read to the class that
        evicts most."""
        if self._rebalanced_at is not None and now < self._rebalanced_at + REBALANCE_INTERVAL_S:
            return
        self._rebalanced_at = now
        evictions, self._class_evictions = self._class_evictions, {}
        hungry = max(sorted(evictions), key=lambda size: evictions[size] * size, default=None)
        if (
            hungry is None
            or evictions[hungry] * hungry < self._allocator.slab_bytes
            or self._allocator.stock_count
        ):
            return
        idle = [size for size in self._allocator.classes() if not evictions.get(size)]
        self._take_slab(hungry, idle, marks_max=0.5)

    # -- pins ------------------------------------------------------------------------------------------------

    @property
    def _pin_share(self) -> int:
        return self._pin_budget_bytes // max(1, self._hazards.client_count)

    def _share_pins(self) -> None:
        self._words[PIN_SHARE_WORD] = self._pin_share


def _generation_word(slot: _Slot) -> int:
    return (slot.place.offset + GENERATION_OFFSET) // WORD_BYTES
