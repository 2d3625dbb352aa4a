"""``BlockStore``: the port between a process that serves blocks over a wire and the region that holds them.

``l2_rdma.owner`` implements it.  The pool process and the shard process both serve from one, put in by the
composition root, so that the tiers do not import each other.  ``Depot`` is the port of a larger and slower
store beneath it (``l3_shard.disk``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvcomm.block import BlockKey
from kvcomm.wire.messages import BlockItem, Grant, Want


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What the region holds now."""

    capacity_bytes: int
    used_bytes: int
    """Published and reserved slots, slack of the size class included."""
    reserved_bytes: int
    pinned_bytes: int
    block_count: int
    evicted_count: int
    """Since start."""
    quarantined_count: int
    """Slots taken out because their bytes failed verification, since start."""


DepotState = Literal["opening", "on", "full", "stalled", "off"]
"""``opening``: finding out what it holds.  ``full``: the disk has no room, nothing is taken until it has.
``stalled``: the disk does not answer in time.  ``off``: too many errors, for the rest of this process's
life."""


@dataclass(frozen=True, slots=True)
class DepotUsage:
    """What a depot holds now, and what happened since start."""

    state: DepotState
    capacity_bytes: int
    used_bytes: int
    """As the disk counts them: whole file-system blocks."""
    block_count: int
    waiting_count: int
    """Blocks that are still to be written."""
    written_count: int
    read_count: int
    promoted_count: int
    evicted_count: int
    dropped_count: int
    """Blocks that were not written: evicted above before their turn came, or the depot took nothing."""
    damaged_count: int
    """Files that failed verification; each was a miss and is gone."""
    error_count: int
    """Failed calls to the disk, for want of room included."""
    busy_count: int
    """Reads that were misses because the disk had too much to do or was too slow."""


ANY_TENANT = b""
"""As the ``tenant`` argument: a caller that answers for tenants itself (replication between a cluster's own
nodes)."""


class Lease(Protocol):
    """A copy that cannot be evicted until it is released."""

    @property
    def copy_bytes(self) -> int: ...

    @property
    def copy(self) -> memoryview:
        """``header | payload``, exactly; asked for before it is released.  It may have to be fetched from
        other memory, into some of this process: whoever leases many looks at their bytes first."""
        ...

    def release(self) -> None:
        """Idempotent."""
        ...


class BlockStore(Protocol):
    """The single allocator and index writer of one region.  Not thread-safe: one event loop owns it."""

    def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]: ...

    def reserve(
        self, wants: Sequence[Want], holder: int, tenant: bytes, now: float, *, evict: bool = True
    ) -> list[Grant]:
        """Hand out extents to write to.  A reservation expires ``reservation_ttl_s`` after ``now``.

        Without ``evict`` only room that nobody uses is handed out, and the reserve of free room stays.
        """
        ...

    def extent(self, token: int) -> memoryview:
        """The reserved copy's bytes, writable, for a server that receives them from a socket.

        Who takes it says later that it writes no more: by publish, abort or release_holder.  Until then the
        memory goes to nobody else, even if the reservation expires (a socket may still be filling it).

        Raises ``KeyError`` for a token that is not reserved (any more).
        """
        ...

    def expose(self, holder: int) -> None:
        """From now on this holder writes through one-sided channels, which nobody here sees: what it has
        reserved and will reserve is like an :meth:`extent`, until it is :meth:`fenced`.  A reservation that
        ran out before is nothing to be written to: clients reserve when they have their channel."""
        ...

    def late_writers(self) -> list[int]:
        """Holders whose exposed reservations have run out, and who may still be writing."""
        ...

    def fenced(self, holder: int) -> None:
        """This holder's channels are closed: what it left exposed is written to no more."""
        ...

    def publish(self, tokens: Sequence[int], holder: int, now: float, *, verify: bool) -> list[str]:
        """Make the copies visible; ``published``, ``expired`` or ``corrupt`` each.

        The header must be intact and name the reserved key, tenant and size; ``verify`` also checks the
        payload (bytes that came over a network).
        """
        ...

    def abort(self, tokens: Sequence[int], holder: int) -> None: ...

    def lease(self, key: BlockKey, tenant: bytes, *, use: bool = True) -> Lease | None:
        """A published copy, or ``None``; a ``use`` counts for eviction (the cluster's own copying is
        none)."""
        ...

    def used(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of these were read lately, as far as eviction knows."""
        ...

    def quarantine(self, keys: Sequence[BlockKey], tenant: bytes) -> None:
        """Somebody got damaged copies of these: verify the tenant's copies here, as many as a bounded time
        allows, and hide those that are damaged.  Their slots are not handed out while anyone may look at
        them."""
        ...

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """These do not belong here any more: hide them, whoever's they are.  Slots that somebody looks at are
        handed out when nobody does."""
        ...

    def open_pins(self, holder: int, slots: int) -> tuple[int, int, int]:
        """(first hazard slot, count, budget in bytes) for one client; count 0 when none are left."""
        ...

    def release_holder(self, holder: int) -> None:
        """A connection ended: its reservations and hazard slots are free again."""
        ...

    def tick(self, now: float) -> None:
        """Expire reservations, reuse what is no longer pinned, keep a reserve of free slots."""
        ...

    def deadline(self) -> float | None: ...

    def listing(self, after: bytes, limit: int, tenant: bytes) -> list[BlockItem]: ...

    def usage(self) -> StoreUsage: ...

    def check(self) -> None: ...


class Depot(Protocol):
    """A larger and slower store beneath a :class:`BlockStore`.  One event loop owns both."""

    def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]: ...

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """These were published above: take copies, when there is time."""
        ...

    def keep(self, key: BlockKey, copy: memoryview, done: Callable[[bool], None]) -> None:
        """Take this verified copy of a block that is not above, if nothing has to go for it.

        ``done`` hears whether it is kept, once; until then the copy must not change.
        """
        ...

    def drop(self, keys: Sequence[BlockKey], done: Callable[[], None]) -> None:
        """These do not belong here any more: they are hidden at once, and ``done`` hears when they are gone,
        as far as the disk lets them."""
        ...

    def recall(
        self,
        keys: Sequence[BlockKey],
        tenant: bytes,
        done: Callable[[Mapping[BlockKey, memoryview]], None],
        *,
        use: bool = True,
    ) -> None:
        """Read copies, each ``header | payload`` and verified; what cannot be had in time is left out.

        ``done`` is called once, later or at once.  Whether a copy also goes into the store above is the
        depot's affair; one that is read for no ``use`` does not, and counts for no eviction.
        """
        ...

    def quarantine(self, keys: Sequence[BlockKey], tenant: bytes) -> None:
        """Somebody got damaged copies of these: verify ours, drop those that are damaged."""
        ...

    def listing(self, after: bytes, limit: int) -> list[BlockItem]:
        """Of every tenant, sorted by key."""
        ...

    def usage(self) -> DepotUsage: ...
