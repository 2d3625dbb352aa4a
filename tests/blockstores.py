"""``DictStore``: a ``BlockStore`` that keeps every copy in a buffer of its own; the floor's tests serve from
it.  ``DictDepot``: what may lie beneath."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcomm.block import BlockHeader, BlockKey, verify_copy
from kvcomm.blockstore import ANY_TENANT, DepotUsage, StoreUsage
from kvcomm.errors import Corrupt
from kvcomm.wire.messages import BlockItem, Grant, Want

TTL_S = 10.0


@dataclass
class Copy:
    key: BlockKey
    tenant: bytes
    buffer: bytearray
    holder: int
    expires_at: float
    leases: int = 0
    used: bool = False


@dataclass
class DictLease:
    of: Copy
    released: bool = False

    @property
    def copy_bytes(self) -> int:
        return len(self.of.buffer)

    @property
    def copy(self) -> memoryview:
        return memoryview(self.of.buffer).toreadonly()

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.of.leases -= 1


@dataclass
class DictStore:
    capacity_bytes: int = 64 << 20
    copy_bytes_max: int = 8 << 20
    copies: dict[BlockKey, Copy] = field(default_factory=dict)
    reserved: dict[int, Copy] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    next_token: int = 1
    evicting: set[bool] = field(default_factory=set)
    """Whether reservations might evict; nothing is evicted here."""
    unseen: set[int] = field(default_factory=set)
    """Holders that write through channels."""
    late: list[int] = field(default_factory=list)
    """Holders that are late with it."""

    def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]:
        return [key in self.copies and tenant in (ANY_TENANT, self.copies[key].tenant) for key in keys]

    def reserve(
        self, wants: Sequence[Want], holder: int, tenant: bytes, now: float, *, evict: bool = True
    ) -> list[Grant]:
        self.tick(now)
        self.evicting.add(evict)
        return [self._reserve(want, holder, tenant, now) for want in wants]

    def _reserve(self, want: Want, holder: int, tenant: bytes, now: float) -> Grant:
        key = BlockKey(want.key)
        if key in self.copies:
            return Grant("present")
        if any(copy.key == key for copy in self.reserved.values()):
            return Grant("pending")
        if want.copy_bytes > self.copy_bytes_max:
            return Grant("too_large")
        if self.usage().used_bytes + want.copy_bytes > self.capacity_bytes:
            return Grant("full")
        token, self.next_token = self.next_token, self.next_token + 1
        self.reserved[token] = Copy(key, tenant, bytearray(want.copy_bytes), holder, now + TTL_S)
        return Grant("granted", token, 0, token)

    def extent(self, token: int) -> memoryview:
        return memoryview(self.reserved[token].buffer)

    def expose(self, holder: int) -> None:
        self.unseen.add(holder)

    def late_writers(self) -> list[int]:
        return list(self.late)

    def fenced(self, holder: int) -> None:
        self.late.remove(holder)
        self.unseen.remove(holder)

    def publish(self, tokens: Sequence[int], holder: int, now: float, *, verify: bool) -> list[str]:
        self.tick(now)
        return [self._publish(token, holder, verify) for token in tokens]

    def _publish(self, token: int, holder: int, verify: bool) -> str:
        copy = self.reserved.get(token)
        if copy is None or copy.holder != holder:
            return "expired"
        del self.reserved[token]
        try:
            header = verify_copy(copy.buffer, copy.key) if verify else None
        except Corrupt:
            return "corrupt"
        if header is not None and copy.tenant not in (ANY_TENANT, header.tenant):
            return "corrupt"
        copy.tenant = copy.tenant or BlockHeader.unpack(copy.buffer).tenant
        self.copies[copy.key] = copy
        return "published"

    def abort(self, tokens: Sequence[int], holder: int) -> None:
        for token in tokens:
            if token in self.reserved and self.reserved[token].holder == holder:
                del self.reserved[token]

    def lease(self, key: BlockKey, tenant: bytes, *, use: bool = True) -> DictLease | None:
        copy = self.copies.get(key)
        if copy is None or tenant not in (ANY_TENANT, copy.tenant):
            return None
        copy.leases += 1
        copy.used = copy.used or use
        return DictLease(copy)

    def used(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.copies and self.copies[key].used for key in keys]

    def quarantine(self, keys: Sequence[BlockKey], tenant: bytes) -> None:
        for key, there in zip(keys, self.present(keys, tenant), strict=True):
            try:
                if there:
                    verify_copy(self.copies[key].buffer, key)
            except Corrupt:
                del self.copies[key]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self.copies.pop(key, None)

    def open_pins(self, holder: int, slots: int) -> tuple[int, int, int]:
        return (100, min(slots, 8), 1 << 20)

    def release_holder(self, holder: int) -> None:
        self.released.append(holder)
        self.reserved = {token: copy for token, copy in self.reserved.items() if copy.holder != holder}

    def tick(self, now: float) -> None:
        self.reserved = {token: copy for token, copy in self.reserved.items() if copy.expires_at > now}

    def deadline(self) -> float | None:
        return min((copy.expires_at for copy in self.reserved.values()), default=None)

    def listing(self, after: bytes, limit: int, tenant: bytes) -> list[BlockItem]:
        copies = self.copies.items()
        mine = sorted(key for key, copy in copies if key > after and tenant in (ANY_TENANT, copy.tenant))
        return [BlockItem(key, len(self.copies[BlockKey(key)].buffer)) for key in mine[:limit]]

    def usage(self) -> StoreUsage:
        everything = [*self.copies.values(), *self.reserved.values()]
        used_bytes = sum(len(copy.buffer) for copy in everything)
        reserved_bytes = sum(len(copy.buffer) for copy in self.reserved.values())
        pinned_bytes = sum(len(copy.buffer) for copy in everything if copy.leases)
        return StoreUsage(
            self.capacity_bytes, used_bytes, reserved_bytes, pinned_bytes, len(self.copies), 0, 0
        )

    def check(self) -> None:
        assert all(copy.leases >= 0 for copy in self.copies.values())


@dataclass
class DictDepot:
    """Reads at once; writes nothing."""

    tenant: bytes
    held: dict[BlockKey, bytes] = field(default_factory=dict)
    queued: list[BlockKey] = field(default_factory=list)
    suspected: list[BlockKey] = field(default_factory=list)
    lost: set[BlockKey] = field(default_factory=set)
    """Present until they are read."""
    uses: list[bool] = field(default_factory=list)
    """Whether each recall was a use."""
    capacity_bytes: int = 1 << 30

    def present(self, keys: Sequence[BlockKey], tenant: bytes) -> list[bool]:
        return [key in self.held and tenant in (ANY_TENANT, self.tenant) for key in keys]

    def stored(self, keys: Sequence[BlockKey]) -> None:
        self.queued += keys

    def keep(self, key: BlockKey, copy: memoryview, done: Callable[[bool], None]) -> None:
        room = sum(map(len, self.held.values())) + len(copy) <= self.capacity_bytes
        if room:
            self.held[key] = bytes(copy)
        done(room)

    def drop(self, keys: Sequence[BlockKey], done: Callable[[], None]) -> None:
        for key in keys:
            self.held.pop(key, None)
        done()

    def recall(
        self,
        keys: Sequence[BlockKey],
        tenant: bytes,
        done: Callable[[Mapping[BlockKey, memoryview]], None],
        *,
        use: bool = True,
    ) -> None:
        self.uses.append(use)
        done({key: memoryview(self.held[key]) for key in keys if key not in self.lost})

    def quarantine(self, keys: Sequence[BlockKey], tenant: bytes) -> None:
        self.suspected += keys

    def listing(self, after: bytes, limit: int) -> list[BlockItem]:
        keys = sorted(key for key in self.held if key > after)[:limit]
        return [BlockItem(key, len(self.held[key])) for key in keys]

    def usage(self) -> DepotUsage:
        used_bytes = sum(map(len, self.held.values()))
        return DepotUsage("on", self.capacity_bytes, used_bytes, len(self.held), 0, 0, 0, 0, 0, 0, 0, 0, 0)
