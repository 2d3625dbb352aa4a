"""``Presence``: which blocks a shard may have, as Bloom filters that clients fetch.

One filter a tenant, made when somebody first asks.  It must never lack a block that is here, so

* a block that is published is entered *before* it can be read (:meth:`Presence.heard`, which the block store
  calls), also into a filter that is still being made;
* the making goes through all keys in memory and then through those on the disk, a page a tick.  A block that
  changes its place meanwhile is met: what leaves memory is on the disk, which comes later, and what comes
  into memory is published.  A disk that cannot be read at the moment is waited for: what it has comes back;
* nothing is ever taken out.  When a filter holds twice as many keys as there are blocks it is made anew, and
  the old one is handed out beside the new one for :data:`KEPT_S` more: a client that combines filters of
  several owners must not meet a block's old owner after it let go and its new one before it had it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcomm.block import BlockKey
from kvcomm.blockstore import BlockStore, Depot
from l3_shard.bloom import LayeredBloom

RATE = 0.001
FIRST_KEYS = 4_096
KEYS_MAX = 1 << 21
"""Of one filter: 5 MiB.  A shard with more says nothing."""
PAGE_KEYS = 2_048
"""Entered in one tick: a few milliseconds."""
TENANTS_MAX = 64
KEPT_S = 10.0
"""The oldest filter that a client may use (``cache.l3_filter_age``)."""
OVERGROWN = 2
_END = object()


@dataclass(eq=False, slots=True)
class _Tenant:
    making: LayeredBloom = field(default_factory=lambda: LayeredBloom(FIRST_KEYS, RATE, keys_max=KEYS_MAX))
    """The newest; the one that is served when it is done."""
    pages: Iterator[None] | None = None
    """What is left to do for it; ``None`` = done."""
    served: LayeredBloom | None = None
    before: LayeredBloom | None = None
    before_until: float = 0.0


class Presence:
    """Filters over one shard's blocks.  Owned by the event loop that owns the store.

    Args:
        disk: beneath ``blocks``, if there is one.
    """

    def __init__(self, blocks: BlockStore, disk: Depot | None) -> None:
        self._blocks, self._disk = blocks, disk
        self._tenants: dict[bytes, _Tenant] = {}

    @property
    def busy(self) -> bool:
        """Whether a filter is being made: :meth:`tick` soon."""
        return any(each.pages is not None for each in self._tenants.values())

    def heard(self, key: BlockKey, tenant: bytes) -> None:
        """This block will be visible in a moment."""
        each = self._tenants.get(tenant)
        if each is None:
            return
        for bloom in (each.making, each.served):
            if bloom is not None:
                bloom.add(key)

    def layers(self, tenant: bytes, now: float) -> list[bytes]:
        """The filter as ``l3_shard.bloom`` writes it: a block in none of its layers is not here.  Empty =
        nothing can be said (yet)."""
        each = self._tenants.get(tenant)
        if each is None:
            if len(self._tenants) < TENANTS_MAX:
                self._tenants[tenant] = self._begun(tenant, _Tenant())
            return []
        if each.before is not None and now >= each.before_until:
            each.before = None
        blooms = [bloom for bloom in (each.served, each.before) if bloom is not None]
        if each.served is None or any(bloom.saturated for bloom in blooms):
            return []
        return [layer for bloom in blooms for layer in bloom.to_layers()]

    def tick(self, now: float) -> None:
        """A page of each filter that is being made; a new one instead of an overgrown one."""
        for tenant, each in list(self._tenants.items()):
            if each.pages is None:
                if self._overgrown(each):
                    self._begun(tenant, each)
                continue
            if next(each.pages, _END) is _END:
                each.pages = None
                each.before, each.before_until = each.served, now + KEPT_S
                each.served = each.making

    def _overgrown(self, each: _Tenant) -> bool:
        assert each.served is not None
        blocks = self._blocks.usage().block_count + (self._disk.usage().block_count if self._disk else 0)
        return each.served.key_count > OVERGROWN * max(FIRST_KEYS, blocks)

    def _begun(self, tenant: bytes, each: _Tenant) -> _Tenant:
        each.making = LayeredBloom(FIRST_KEYS, RATE, keys_max=KEYS_MAX)
        each.pages = self._pages(tenant, each.making)
        return each

    def _pages(self, tenant: bytes, bloom: LayeredBloom) -> Iterator[None]:
        after = b""
        while items := self._blocks.listing(after, PAGE_KEYS, tenant):
            for item in items:
                bloom.add(item.key)
            after = items[-1].key
            yield
        after = b""
        while self._disk is not None:
            while self._disk.usage().state in ("opening", "stalled"):
                yield
            if not (items := self._disk.listing(after, PAGE_KEYS)):
                break
            keys = [BlockKey(item.key) for item in items]
            for key, mine in zip(keys, self._disk.present(keys, tenant), strict=True):
                if mine:
                    bloom.add(key)
            after = keys[-1]
            yield
