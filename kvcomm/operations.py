"""``Operations``: everything a client can do, as sans-I/O steps over the two planes.

The blocking face (``kvcomm.client``) and the asyncio face (``kvcomm.aio``) run the same generators.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcomm.block import (
    NO_PARENT,
    ROOT_LINEAGE,
    BlockKey,
    Buffer,
    Incarnation,
    block_keys,
    header_for,
)
from kvcomm.blockplane import BlockPlane, Prefix, Stored
from kvcomm.errors import (
    KVCommError,
    NamespaceError,
    PayloadError,
    Refused,
    Unavailable,
    name_outcomes,
)
from kvcomm.heat import Heat
from kvcomm.leaseplane import LeasePlane
from kvcomm.manifest import Manifest
from kvcomm.mergeplane import MergePlane
from kvcomm.metrics import Metrics
from kvcomm.namespace import Namespace, NamespaceId, TenantDigest
from kvcomm.stateplane import StatePlane, StateValue, record_name, record_path
from kvcomm.steps import Steps
from kvcomm.strongplane import StrongPlane, StrongValue
from kvcomm.tally import Tally
from kvcomm.tier import Block, BlockCopy, Presence, TierName
from kvcomm.wire.messages import Dots

NAMESPACES_MAX = 1024
"""Bound namespaces remembered; one that was forgotten is bound again, which costs a hash."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known prefix, every copy verified.  A miss is a hit of no tokens."""

    keys: tuple[BlockKey, ...]
    """Keys of all full blocks that were asked for."""
    blocks: tuple[Block, ...]
    """The leading ones that somebody had, in order."""
    block_tokens: int

    @property
    def token_count(self) -> int:
        """Tokens whose KV is in ``blocks``."""
        return len(self.blocks) * self.block_tokens

    @property
    def tiers(self) -> dict[TierName, int]:
        """Tokens by the tier that served them."""
        counts: dict[TierName, int] = {"l1": 0, "l2": 0, "l3": 0}
        for block in self.blocks:
            counts[block.tier] += self.block_tokens
        return counts


@dataclass(frozen=True, slots=True)
class Published:
    """What became of each published block.  A block that nobody could take is not an error: it is computed
    again later."""

    statuses: tuple[Stored, ...]

    @property
    def stored(self) -> int:
        """Blocks written to some tier by this call."""
        return sum(status.wrote for status in self.statuses)

    @property
    def present(self) -> int:
        """Blocks that others had published already everywhere."""
        return sum(status.readable and not status.wrote for status in self.statuses)

    @property
    def failed(self) -> int:
        """Blocks that nobody can read: see ``statuses`` for why."""
        return sum(not status.readable for status in self.statuses)


class Operations:
    """The client's operations.  ``tenant`` is what the cluster derived from our credential; ``producer``
    marks our blocks."""

    def __init__(
        self,
        blocks: BlockPlane[Any],
        state: StatePlane | None,
        tally: Tally,
        tenant: TenantDigest,
        producer: Incarnation,
        strong: StrongPlane | None = None,
        leases: LeasePlane | None = None,
        heat: Heat | None = None,
    ) -> None:
        self._blocks = blocks
        self._tally = tally
        self._state = state
        self._strong = strong
        self._leases = leases
        self._heat = heat
        self._tenant = tenant
        self.producer = producer
        self._bound: OrderedDict[NamespaceId, Namespace] = OrderedDict()
        """Namespaces bound lately, by the id the caller's object has: binding hashes the whole identity."""

    @property
    def metrics(self) -> Metrics:
        """Of this client."""
        return self._tally.metrics

    def fetch(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        *,
        lineage: bytes = ROOT_LINEAGE,
        extra: bytes = b"",
    ) -> Steps[Hit]:
        """Fetch the longest known prefix of ``tokens``; emits each block as it is verified.

        Raises ``TokenError`` for ids out of range and ``Refused`` for a namespace of another tenant.
        """
        keys = block_keys(self.bind(namespace), tokens, lineage=lineage, extra=extra)
        return (yield from self._fetch(keys, [lineage] * len(keys), namespace.block_tokens))

    def follow(self, manifest: Manifest) -> Steps[Hit]:
        """Fetch the blocks that a manifest names."""
        lineages = [manifest.lineage] * len(manifest.keys)
        return (yield from self._fetch(manifest.keys, lineages, manifest.block_tokens))

    def fetch_named(
        self, namespace: Namespace, keys: Sequence[BlockKey], lineages: Sequence[bytes]
    ) -> Steps[Hit]:
        """Fetch blocks by their keys, one lineage a key; the leading ones that could be had."""
        return (yield from self._fetch(keys, lineages, self.bind(namespace).block_tokens))

    def present(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        """Which of ``keys`` somebody seems to have; ``None`` where nobody can say."""
        return (yield from self._blocks.present(keys))

    def publish(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        blocks: Sequence[Buffer],
        *,
        first_block: int = 0,
        lineage: bytes = ROOT_LINEAGE,
        extra: bytes = b"",
    ) -> Steps[Published]:
        """Publish the KV of blocks ``first_block, first_block + 1, ...`` of ``tokens``.

        Args:
            tokens: the whole prefix from its first token: a block's key depends on everything before it.
            blocks: one contiguous buffer of ``namespace.block_bytes`` bytes a block, shape
            ``namespace.block_shape``.

        Raises ``PayloadError`` if the buffers do not fit the namespace or the tokens; nothing is written
        then.
        """
        namespace = self.bind(namespace)
        keys = block_keys(namespace, tokens, lineage=lineage, extra=extra)
        if first_block < 0 or first_block + len(blocks) > len(keys):
            raise PayloadError(
                f"{len(blocks)} blocks from block {first_block} on, but {len(tokens)} tokens are "
                f"{len(keys)} full blocks"
            )
        starts = [index * namespace.block_tokens for index in range(len(keys))]
        return (yield from self._publish(namespace, keys, blocks, first_block, starts, lineage))

    def publish_copies(
        self, namespace: Namespace, keys: Sequence[BlockKey], build: Callable[[int], BlockCopy]
    ) -> Steps[Published]:
        """Publish copies that ``build(index)`` makes where nobody has ``keys[index]`` yet."""
        publishing = self._blocks.publish(keys, build)
        stored = yield from self._tally.timed("publish", publishing)
        self._tally.published(stored, namespace.block_bytes)
        return Published(tuple(stored))

    def append(
        self,
        agent: str,
        session: str,
        namespace: Namespace | None,
        tokens: Sequence[int],
        blocks: Sequence[Buffer],
    ) -> Steps[Manifest]:
        """Extend an agent's context and move its head: blocks first, so that whoever sees the head finds
        them.

        Args:
            namespace: of the context; ``None`` = the one this context (or, for a new one, this client)
            already uses.
            blocks: the KV of the full blocks that these tokens complete, or empty to move the head only.

        Raises what :meth:`publish` and ``StatePlane.put`` raise, and ``NamespaceError`` if the namespace is
        not known or not the context's.
        """
        state, name = self.state(), record_name("context", agent, session)
        head = yield from state.manifest(name, fresh=True)
        namespace = self._namespace_of(head, namespace)
        before = head or Manifest.empty(namespace)
        after = before.append(tokens, namespace)
        first = len(before.keys)
        if blocks and len(blocks) != len(after.keys) - first:
            raise PayloadError(
                f"these tokens complete {len(after.keys) - first} blocks (blocks {first} to "
                f"{len(after.keys) - 1} of the context); got {len(blocks)} buffers"
            )
        if blocks:
            starts = [after.position(index * namespace.block_tokens) for index in range(len(after.keys))]
            yield from self._publish(namespace, after.keys, blocks, first, starts, after.lineage)
        yield from state.put([(name, after.encode(), None)])
        return after

    def head(self, agent: str, session: str) -> Steps[Manifest]:
        """The head of an agent's context.  Raises ``Unavailable`` if there is none (yet), ``Conflict`` if it
        forked."""
        manifest = yield from self.state().manifest(record_name("context", agent, session))
        if manifest is None:
            raise Unavailable(f"agent {agent!r} has no context {session!r} (yet)")
        return manifest

    def follow_head(self, agent: str, session: str) -> Steps[Hit]:
        """Fetch the blocks that the head of an agent's context names."""
        manifest = yield from self.head(agent, session)
        return (yield from self.follow(manifest))

    def state_get(self, name: str, keys: Sequence[str], fresh: bool = False) -> Steps[list[StateValue]]:
        return (yield from self.state().get([record_name("state", name, key) for key in keys], fresh=fresh))

    def state_put(
        self, name: str, items: Sequence[tuple[str, bytes | None]], context: Dots | None
    ) -> Steps[list[Dots]]:
        writes = [(record_name("state", name, key), value, context) for key, value in items]
        try:
            contexts = yield from self.state().put(writes)
        except KVCommError as error:
            name_outcomes(error, [key for key, _ in items])
            raise
        return list(contexts)

    def state_keys(self, name: str) -> Steps[list[str]]:
        found = yield from self.state().names(record_name("state", name) + b"/")
        return [record_path(record)[-1] for record in found]

    def strong_read(self, name: str, key: str) -> Steps[StrongValue]:
        (found,) = yield from self.strong().read([record_name("strong", name, key)])
        return found

    def strong_put(self, name: str, key: str, value: bytes, fence: int = 0) -> Steps[StrongValue]:
        return (yield from self.strong().put(record_name("strong", name, key), value, fence))

    def strong_compare_and_set(
        self, name: str, key: str, expected: bytes, value: bytes | None, fence: int = 0
    ) -> Steps[StrongValue]:
        record = record_name("strong", name, key)
        return (yield from self.strong().compare_and_set(record, expected, value, fence))

    def strong_change(
        self, name: str, key: str, function: Callable[[bytes | None], bytes | None], fence: int = 0
    ) -> Steps[StrongValue]:
        return (yield from self.strong().change(record_name("strong", name, key), function, fence))

    def strong_delete(self, name: str, key: str, fence: int = 0) -> Steps[StrongValue]:
        return (yield from self.strong().delete(record_name("strong", name, key), fence))

    def names(self, prefix: bytes) -> Steps[list[bytes]]:
        return (yield from self.state().names(prefix))

    def bind(self, namespace: Namespace) -> Namespace:
        """``namespace`` under our tenant.  Raises ``Refused`` if it already names another."""
        bound = self._bound.get(namespace.id)
        if bound is None:
            if namespace.tenant not in (b"", self._tenant):
                raise Refused(
                    "the namespace belongs to another tenant; leave .tenant empty, the cluster derives it"
                )
            bound = self._bound[namespace.id] = namespace.for_tenant(self._tenant)
            while len(self._bound) > NAMESPACES_MAX:
                self._bound.popitem(last=False)
        return bound

    def state(self) -> StatePlane:
        if self._state is None:
            raise Unavailable("this cluster has no shards, so it keeps no state")
        return self._state

    def merging(self) -> MergePlane:
        return MergePlane(self.state())

    def strong(self) -> StrongPlane:
        if self._strong is None:
            raise Unavailable("this cluster has no shards, so it keeps no state")
        return self._strong

    def leases(self) -> LeasePlane:
        if self._leases is None:
            raise Unavailable("this cluster has no shards, so it keeps no state")
        return self._leases

    def _namespace_of(self, head: Manifest | None, namespace: Namespace | None) -> Namespace:
        # list() first: it copies at once, while other threads may bind namespaces of their own.
        used = {bound.id: bound for bound in list(self._bound.values())}
        if namespace is not None:
            namespace = self.bind(namespace)
        elif head is not None:
            namespace = used.get(head.namespace)
        elif len(used) == 1:
            (namespace,) = used.values()
        if namespace is None:
            raise NamespaceError("which namespace is this context in? pass namespace=...")
        if head is not None and head.namespace != namespace.id:
            raise NamespaceError(
                "this context was written in another namespace; use another session for another model"
            )
        return namespace

    def _fetch(self, keys: Sequence[BlockKey], lineages: Sequence[bytes], block_tokens: int) -> Steps[Hit]:
        heat, fetching = self._heat, self._blocks.fetch(keys, lineages)
        prefix: Prefix = yield from self._tally.timed("fetch", heat.riding(fetching) if heat else fetching)
        self._tally.fetched(prefix, block_tokens)
        if heat is not None:
            heat.fetched(prefix.blocks)
        return Hit(tuple(keys), prefix.blocks, block_tokens)

    def _publish(
        self,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        blocks: Sequence[Buffer],
        first: int,
        starts: Sequence[int],
        lineage: bytes,
    ) -> Steps[Published]:
        payloads = [_payload(namespace, block) for block in blocks]

        def build(index: int) -> BlockCopy:
            at = first + index
            parent = keys[at - 1] if at else NO_PARENT
            payload = payloads[index]
            header = header_for(
                namespace,
                keys[at],
                parent,
                payload,
                logical_start=starts[at],
                producer=self.producer,
                lineage=lineage,
            )
            return BlockCopy(header, payload)

        return (yield from self.publish_copies(namespace, keys[first : first + len(blocks)], build))


def _payload(namespace: Namespace, block: Buffer) -> memoryview:
    """The block's bytes as a flat view: of bytes, arrays, ctypes, memoryviews of any shape and format.

    Raises ``PayloadError`` for a wrong size, a view with gaps, or numbers in foreign byte order.
    """
    try:
        view = memoryview(block)
    except (TypeError, ValueError) as error:  # ValueError: an array whose dtype no buffer can describe
        raise PayloadError(
            "a block is a bytes-like buffer (tensors: view(torch.uint8).numpy(); arrays of a foreign dtype: "
            f'view("u1")); {error}'
        ) from error
    if view.format[:1] in (">", "!") and view.itemsize > 1:
        raise PayloadError(f"a block's numbers are little-endian, got format {view.format!r}; convert them")
    if not view.c_contiguous or view.nbytes != namespace.block_bytes:
        raise PayloadError(
            f"a block of this namespace is {namespace.block_bytes} contiguous bytes, shape "
            f"{namespace.block_shape} of {namespace.dtype}; got {view.nbytes} bytes, "
            f"{'contiguous' if view.c_contiguous else 'with gaps'}"
        )
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view
