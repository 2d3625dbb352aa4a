"""``BlockStore``: the port between a process that serves blocks over a wire and the region that holds them.

``l2_rdma.owner`` implements it.  The pool process and the shard process both serve from one, put in by the
composition root, so that the tiers do not import each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Lease(Protocol):
    """A copy that cannot be evicted until it is released."""

    @property
    def copy(self) -> memoryview:
        """``header | payload``, exactly."""
        ...

    def release(self) -> None:
        """Idempotent."""
        ...


class BlockStore(Protocol):
    """The single allocator and index writer of one region.  Not thread-safe: one event loop owns it."""

    def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]: ...

    def reserve(self, wants: Sequence[Want], holder: int, tenant: bytes, now: float) -> list[Grant]:
        """Hand out extents to write to.  A reservation expires ``reservation_ttl_s`` after ``now``."""
        ...

    def extent(self, token: int) -> memoryview:
        """The reserved copy's bytes, writable, for a server that receives them from a socket.

        Who takes it says later that it writes no more: by publish, abort or release_holder.  Until then the
        memory goes to nobody else, even if the reservation expires (a socket may still be filling it).

        Raises ``KeyError`` for a token that is not reserved (any more).
        """
        ...

    def publish(self, tokens: Sequence[int], holder: int, now: float, *, verify: bool) -> list[str]:
        """Make the copies visible; ``published``, ``expired`` or ``corrupt`` each.

        The header must be intact and name the reserved key, tenant and size; ``verify`` also checks the
        payload (bytes that came over a network).
        """
        ...

    def abort(self, tokens: Sequence[int], holder: int) -> None: ...

    def lease(self, key: BlockKey, tenant: bytes) -> Lease | None:
        """A published copy, or ``None``; counts as a use for eviction."""
        ...

    def quarantine(self, keys: Sequence[BlockKey], tenant: bytes) -> None:
        """Somebody got damaged copies of these: verify the tenant's copies here, as many as a bounded time
        allows, and hide those that are damaged.  Their slots are not handed out while anyone may look at
        them."""
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
