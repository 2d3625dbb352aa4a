"""``BlockService``: answers the wire's block messages from a :class:`BlockStore`.

The pool serves it alone; the shard hands its block messages on to it.  Copies go from the region to the
socket and from the socket into the region without a stop: a get sends leased views and releases them when
their bytes have left, a put reserves extents when its message arrives, receives into them, verifies and
publishes.

Where there is a :class:`Depot` beneath the store, what only that has counts as present, and a get of it is
answered when it has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvcomm.block import HEADER_BYTES, BlockKey
from kvcomm.blockstore import ANY_TENANT, BlockStore, Depot, Lease
from kvcomm.channels import Channels
from kvcomm.errors import KVCommError, Refused, TooLarge
from kvcomm.machine import ConnectionId, Origin
from kvcomm.serve import ReplyFunction
from kvcomm.wire.frames import discard
from kvcomm.wire.messages import (
    KEYS_MAX,
    SUSPECTS_MAX,
    BlockAbort,
    BlockCopies,
    BlockGet,
    BlockList,
    BlockListed,
    BlockLookup,
    BlockPresence,
    BlockPublish,
    BlockPublished,
    BlockPut,
    BlockReserve,
    BlockReserved,
    BlockStored,
    BlockSuspect,
    ChannelAsk,
    ChannelOffers,
    ChannelOpen,
    ChannelOpened,
    Done,
    Failure,
    Grant,
    Message,
    PinOpen,
    PinRange,
    Want,
)

T = TypeVar("T")

BATCH_BYTES_MAX = 1 << 30
"""Copies that one get returns or one put brings."""
KEY_BYTES = 32
LIST_MAX = 4096
"""Items of one listing; asking for more returns so many."""


def no_region(_tenant: bytes) -> str:
    """A server whose blocks are read over the wire only."""
    return ""


class BlockService:
    """A ``kvcomm.serve.Service``.  Reservations and pins belong to the connection that asked for them and end
    with it."""

    def __init__(
        self,
        store: BlockStore,
        clock: Callable[[], float],
        *,
        region: Callable[[bytes], str] = no_region,
        epoch: Callable[[], int] = lambda: 0,
        depot: Depot | None = None,
        cluster: bytes | None = None,
        channels: Channels | None = None,
    ) -> None:
        """
        Args:
            clock: monotonic seconds, the one that ``store.tick`` is driven by.
            region: path of the shared-memory region for a tenant's digest, or "".
            epoch: the ring epoch that a welcome names.
            depot: beneath the store.
            cluster: tenant digest of the cluster's own nodes, who copy the blocks of every tenant; what they
                read is no use of a block.
            channels: one-sided ways into the region, beside the file that ``region`` names.
        """
        self._store = store
        self._clock = clock
        self._region = region
        self._epoch = epoch
        self._depot = depot
        self._cluster = cluster
        self._channels = channels
        self.grant_counts: dict[str, int] = {}
        """Reservations asked for since start, by the answer."""
        self.asked_count = self.found_count = 0
        """Blocks that clients asked for since start, and those of them that were there."""
        # Puts whose payload is being received.
        self._arriving: dict[tuple[ConnectionId, int], list[Grant]] = {}
        self._handlers: dict[type[Message], Callable[[Origin, Message], Message]] = {
            BlockReserve: self._reserve,
            BlockPublish: self._publish,
            BlockAbort: self._abort,
            BlockLookup: self._lookup,
            BlockList: self._list,
            BlockPut: self._put,
            BlockSuspect: self._suspect,
            PinOpen: self._open_pins,
            ChannelAsk: self._offer_channels,
            ChannelOpen: self._open_channel,
        }

    def answers(self, message: Message) -> bool:
        """Whether this is one of our messages (for a service that hands them on)."""
        return isinstance(message, BlockGet) or type(message) in self._handlers

    def welcome(self, origin: Origin) -> tuple[str, int]:
        return self._region(origin.tenant), self._epoch()

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        """Extents for what is wanted here, the bin for the rest."""
        if not isinstance(message, BlockPut):
            raise Refused(f"{type(message).__name__} takes no payload")
        wants = _checked_wants(message.wants)
        if sum(want.copy_bytes for want in wants) != payload_bytes:
            raise Refused("the payload is not as long as the copies that the put names")
        grants = self._grant(origin, wants)
        self._arriving[origin.connection, origin.request] = grants
        pieces: list[memoryview] = []
        for want, grant in zip(wants, grants, strict=True):
            if grant.status == "granted":
                pieces.append(self._store.extent(grant.token))
            else:
                pieces += discard(want.copy_bytes)
        return pieces

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        if isinstance(message, BlockGet):
            self._get(origin, message, reply)
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            raise Refused(f"this server does not answer {type(message).__name__}")
        reply(handler(origin, message))

    def closed(self, connection: ConnectionId) -> None:
        for arriving in [key for key in self._arriving if key[0] == connection]:
            del self._arriving[arriving]
        if self._channels is not None:
            self._channels.close(connection)  # first: what it reserved must not be written to any more
        self._store.release_holder(connection)

    def _get(self, origin: Origin, message: BlockGet, reply: ReplyFunction) -> None:
        """What the store has is leased before the depot is asked: reading from that may evict it."""
        keys, tenant = _checked_keys(message.keys), self._tenant(origin)
        use = origin.tenant != self._cluster
        leases = [self._store.lease(key, tenant, use=use) for key in keys]
        below: list[BlockKey] = []
        if self._depot is not None:
            missing = [key for key, lease in zip(keys, leases, strict=True) if lease is None]
            present = self._depot.present(missing, tenant)
            below = [key for key, there in zip(missing, present, strict=True) if there]
        if use:
            self.asked_count += len(keys)
            self.found_count += len(leases) - leases.count(None) + len(below)
        if self._depot is None or not below:
            _send(keys, leases, {}, reply)
        else:
            self._depot.recall(below, tenant, lambda recalled: _send(keys, leases, recalled, reply), use=use)

    def _tenant(self, origin: Origin) -> bytes:
        """Whose blocks the caller may see."""
        return ANY_TENANT if origin.tenant == self._cluster else origin.tenant

    def _only_below(self, keys: Sequence[BlockKey], tenant: bytes) -> list[BlockKey]:
        """What the depot has and the store has not."""
        if self._depot is None:
            return []
        above = self._store.present(keys, tenant)
        missing = [key for key, present in zip(keys, above, strict=True) if not present]
        below = self._depot.present(missing, tenant)
        return [key for key, present in zip(missing, below, strict=True) if present]

    def _put(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, BlockPut)
        grants = self._arriving.pop((origin.connection, origin.request), None)
        if grants is None:
            raise Refused("a put without copies")
        tokens = [grant.token for grant in grants if grant.status == "granted"]
        outcomes = iter(self._store.publish(tokens, origin.connection, self._clock(), verify=True))
        statuses = [next(outcomes) if grant.status == "granted" else grant.status for grant in grants]
        if self._depot is not None:
            wants = zip(message.wants, statuses, strict=True)
            self._depot.stored([BlockKey(want.key) for want, status in wants if status == "published"])
        return BlockStored(["stored" if status == "published" else status for status in statuses])

    def _reserve(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, BlockReserve)
        self._require_region(origin)
        wants = _checked_wants(message.wants)
        return BlockReserved(self._grant(origin, wants))

    def _grant(self, origin: Origin, wants: list[Want]) -> list[Grant]:
        """First copy wins, also where only the depot has it."""
        below = frozenset(self._only_below([BlockKey(want.key) for want in wants], origin.tenant))
        lacking = [want for want in wants if want.key not in below]
        granted = iter(self._store.reserve(lacking, origin.connection, origin.tenant, self._clock()))
        grants = [Grant("present") if want.key in below else next(granted) for want in wants]
        for grant in grants:
            self.grant_counts[grant.status] = self.grant_counts.get(grant.status, 0) + 1
        return grants

    def _publish(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, BlockPublish)
        tokens = _checked_count(message.tokens)
        return BlockPublished(self._store.publish(tokens, origin.connection, self._clock(), verify=False))

    def _abort(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, BlockAbort)
        self._store.abort(_checked_count(message.tokens), origin.connection)
        return Done()

    def _lookup(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, BlockLookup)
        keys, tenant = _checked_keys(message.keys), self._tenant(origin)
        present = self._store.present(keys, tenant)
        if self._depot is not None:
            below = self._depot.present(keys, tenant)
            present = [here or there for here, there in zip(present, below, strict=True)]
        return BlockPresence(bytes(present))

    def _suspect(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, BlockSuspect)
        keys = _checked_keys(message.keys, SUSPECTS_MAX)
        self._store.quarantine(keys, self._tenant(origin))
        if self._depot is not None:
            self._depot.quarantine(keys, self._tenant(origin))
        return Done()

    def _list(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, BlockList)
        limit = max(0, min(message.limit, LIST_MAX))
        return BlockListed(self._store.listing(message.after, limit, origin.tenant))

    def _open_pins(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, PinOpen)
        self._require_region(origin)
        return PinRange(*self._store.open_pins(origin.connection, max(0, message.slots)))

    def _offer_channels(self, origin: Origin, message: Message) -> Message:
        return self._channels.offers(origin.tenant) if self._channels else ChannelOffers(b"", [], [])

    def _open_channel(self, origin: Origin, message: Message) -> Message:
        assert isinstance(message, ChannelOpen)
        if self._channels is None:
            raise Refused("this server has no memory that can be read one-sided")
        holder = origin.connection
        answer = self._channels.open(holder, origin.tenant, message.transport, message.proposal)
        if self._channels.writes_unseen(holder):
            self._store.expose(holder)
        return ChannelOpened(answer)

    def fence_late_writers(self) -> None:
        """Close the channels of those whose reservations ran out while they could still be writing through
        them; then what they held goes to others."""
        for holder in self._store.late_writers():
            assert self._channels is not None, "only a holder of channels writes unseen"
            self._channels.close(holder)
            self._store.fenced(holder)

    def _require_region(self, origin: Origin) -> None:
        """One-sided work is for those who have the region: others would empty it with a few words, and
        could write nothing into what they got."""
        if not self._region(origin.tenant):
            raise Refused("this server's memory is not shared with this tenant; put blocks with BlockPut")


def _send(
    keys: Sequence[BlockKey],
    leases: Sequence[Lease | None],
    recalled: Mapping[BlockKey, memoryview],
    reply: ReplyFunction,
) -> None:
    """Answer a get: leased copies, and for the rest recalled ones, which have memory of their own."""

    def release() -> None:
        for lease in leases:
            if lease is not None:
                lease.release()

    found = [recalled.get(key) if lease is None else lease for key, lease in zip(keys, leases, strict=True)]
    sizes = [_copy_bytes(each) for each in found]
    try:
        if sum(sizes) > BATCH_BYTES_MAX:
            raise TooLarge(f"these copies are over {BATCH_BYTES_MAX} bytes together; ask for fewer at a time")
        copies = [each if isinstance(each, memoryview) else each.copy for each in found if each is not None]
    except KVCommError as error:
        release()
        reply(Failure(error.code, error.message))
        return
    reply(BlockCopies(sizes), copies, release)


def _copy_bytes(found: Lease | memoryview | None) -> int:
    if found is None:
        return 0
    return found.nbytes if isinstance(found, memoryview) else found.copy_bytes


def _checked_count(items: list[T], count_max: int = KEYS_MAX) -> list[T]:
    if len(items) > count_max:
        raise TooLarge(f"{len(items)} items in one request, over {count_max}; split the batch")
    return items


def _checked_keys(keys: list[bytes], count_max: int = KEYS_MAX) -> list[BlockKey]:
    if any(len(key) != KEY_BYTES for key in _checked_count(keys, count_max)):
        raise Refused(f"a block key has {KEY_BYTES} bytes")
    return [BlockKey(key) for key in keys]


def _checked_wants(wants: list[Want]) -> list[Want]:
    _checked_keys([want.key for want in wants])
    if any(want.copy_bytes < HEADER_BYTES for want in wants):
        raise Refused(f"a copy is at least its header, {HEADER_BYTES} bytes")
    return wants
