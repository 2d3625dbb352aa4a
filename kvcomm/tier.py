"""``Tier``: the port through which the client walks L1, L2 and L3.

The tiers never see each other; ``kvcomm.client`` asks them in order and moves blocks between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from kvcomm.block import HEADER_BYTES, BlockHeader, BlockKey
from kvcomm.steps import Steps, Waiter
from kvcomm.wire.messages import Dots, RecordVersion, RecordWrite, StrongOrder, StrongOutcome

TierName = Literal["l1", "l2", "l3"]


@dataclass(frozen=True, slots=True)
class Block:
    """A verified block as the reader gets it.

    ``copy`` is ``header | payload``.  It may be a zero-copy view of a pool slot that is pinned for as long
    as any memoryview, tensor or array made from it lives; treat it as read-only.
    """

    header: BlockHeader
    copy: memoryview
    tier: TierName
    """Where it was found."""
    pinned: bool = False
    """Whether ``copy`` is a view of pinned pool memory (it counts against the pin budget)."""

    @property
    def key(self) -> BlockKey:
        return self.header.key

    @property
    def payload(self) -> memoryview:
        """``header.payload_bytes`` bytes; ``torch.frombuffer(block.payload, dtype=...)`` makes a tensor
        without a copy."""
        return self.copy[HEADER_BYTES : HEADER_BYTES + self.header.payload_bytes]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block on its way into a tier: header and payload need not be adjacent."""

    header: BlockHeader
    payload: memoryview

    @property
    def key(self) -> BlockKey:
        return self.header.key

    @property
    def copy_bytes(self) -> int:
        return HEADER_BYTES + self.header.payload_bytes


Presence = bool | None
"""``None``: nobody who could know answered.  Treated as a miss, never remembered as an absence."""

PutStatus = Literal[
    "stored", "present", "pending", "full", "too_large", "corrupt", "expired", "unavailable", "refused"
]
"""``stored``: readable by others now.  ``present``: somebody's first copy is there already.  The rest: not
stored, and why."""


PoolState = Literal["alive", "suspect", "away"]


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a client knows of one pool of the rack."""

    node: str
    address: str
    state: PoolState
    """``alive``: it serves, or was never tried.  ``suspect``: it has just ended, and is tried again.
    ``away``: it cannot be reached; its keys have other homes meanwhile."""
    transport: str
    """How it is read; empty when it is not."""
    refused: Mapping[str, str]
    """The other transports that are configured, and why they are not used; as of the last try."""
    problem: str
    """Why it is not read; empty when it is, or was never tried."""


class News(Protocol):
    """What became of keys that other readers of this process load."""

    @property
    def landed(self) -> Sequence[tuple[bytes, Block | None]]:
        """``None``: nobody has it."""
        ...

    @property
    def inherited(self) -> Sequence[bytes]:
        """Keys whose reader failed; ours to load now."""
        ...


class Claim(Waiter, Protocol):
    """One reader's share of loading what L1 lacks (single flight): of all who miss a key, one loads it for
    all.

    Load what is yours before you park: that order is why readers cannot wait for each other in a circle.
    """

    @property
    def blocks(self) -> Sequence[Block | None]:
        """What L1 has by now, one a key of the claim."""
        ...

    @property
    def mine(self) -> Sequence[BlockKey]: ...

    @property
    def follows(self) -> Sequence[BlockKey]:
        """Keys that others load, until :meth:`take` has told what became of them."""
        ...

    def landed(self, block: Block, now: float) -> None:
        """Put a loaded block into L1 and hand it to those who wait for it."""
        ...

    def failed(self, keys: Sequence[BlockKey], now: float) -> None:
        """These could not be loaded; a follower may try."""
        ...

    def take(self, now: float) -> News: ...

    def patience(self) -> float:
        """When to :meth:`take` even without being called back, monotonic seconds."""
        ...

    def close(self, now: float) -> None:
        """Hand over what is not loaded.  Idempotent."""
        ...


M = TypeVar("M")


class Near(Protocol[M]):
    """L1: in the agent's process, plain calls, thread-safe.  ``M`` is its notion of a moment."""

    def get(self, keys: Sequence[BlockKey]) -> list[Block | None]: ...

    def put(self, block: Block) -> PutStatus: ...

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make a run that was put block by block outlive older ones, its head longest."""
        ...

    def claim(self, keys: Sequence[BlockKey], now: float, deadline: float) -> Claim: ...

    @property
    def moment(self) -> M:
        """To be read before other tiers are asked: an absence found out since then may be outdated by a
        local put."""
        ...

    def known_absent(self, keys: Sequence[BlockKey], now: float) -> list[bool]:
        """Which keys no tier had a short while ago."""
        ...

    def mark_absent(self, keys: Sequence[BlockKey], now: float, since: M) -> None: ...

    def forget_absent(self, keys: Sequence[BlockKey]) -> None: ...


class Tier(Protocol):
    """One level of the cache, as seen from an agent's process.  Every method is an operation of
    ``kvcomm.steps``."""

    name: TierName

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        """Which keys are here, in one round trip at most; pins, renews and verifies nothing, and may be out
        of date."""
        ...

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        """Fetch; calls ``found(index, block)`` for each verified block in order of ``keys`` as it arrives,
        skips misses.

        After each call the generator yields ``Emit(index)`` so that a driver can hand the block on at once.
        """
        ...

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        """Store; one status a copy.  Never raises for a full, dead or slow tier."""
        ...


@dataclass(frozen=True, slots=True)
class RecordAnswer:
    """What the replicas said of one record; absent = no values and an empty context."""

    values: tuple[bytes, ...]
    """Siblings, in the order of their dots."""
    context: Dots
    degraded: bool
    hot: bool = False
    """So many ask for the record that the answer may be kept for a moment (``kvcomm.hotcopies``)."""


class Records(Protocol):
    """The state plane's port.  Every method is an operation of ``kvcomm.steps``; all take and give
    batches."""

    def record_get(self, keys: Sequence[bytes], least: Sequence[Dots] = ()) -> Steps[list[RecordAnswer]]:
        """``least``, one a key if there are any: an answer that has not seen so much is ``degraded``, unless
        all replicas together know no more (the record was removed).

        Raises ``Unavailable`` when no owner of some key answered."""
        ...

    def record_put(self, writes: Sequence[RecordWrite]) -> Steps[list[RecordVersion]]:
        """Raises ``PartlyDone``, ``Unavailable``, ``OutcomeUnknown``, ``Conflict`` (sibling bound),
        ``TooLarge``; the error of a batch has ``outcomes``."""
        ...

    def record_scan(self, prefix: bytes) -> Steps[list[bytes]]: ...


class Registers(Protocol):
    """The strong plane's port: linearizable, one record at a time; one outcome each, in order."""

    def strong_read(self, keys: Sequence[bytes]) -> Steps[list[StrongOutcome]]:
        """Raises ``Unavailable`` when no owner of some key answered."""
        ...

    def strong_change(self, orders: Sequence[StrongOrder]) -> Steps[list[StrongOutcome]]:
        """Raises ``Unavailable`` (nothing was changed), ``OutcomeUnknown``, ``TooLarge``."""
        ...
