"""``Tier``: the port through which the client walks L1, L2 and L3.

The tiers never see each other; ``kvcomm.client`` asks them in order and moves blocks between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvcomm.block import HEADER_BYTES, BlockHeader, BlockKey
from kvcomm.steps import Steps

TierName = Literal["l1", "l2", "l3"]


@dataclass(frozen=True, slots=True)
class Block:
    """A verified block as the reader gets it.

    ``copy`` is ``header | payload``.  It may be a zero-copy view of a pool slot that is pinned for as long as any
    memoryview, tensor or array made from it lives; treat it as read-only.
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
        """``header.payload_bytes`` bytes; ``torch.frombuffer(block.payload, dtype=...)`` makes a tensor without a copy."""
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


PutStatus = Literal["stored", "present", "pending", "full", "too_large", "corrupt", "expired", "unavailable", "refused"]
"""``stored``: readable by others now.  ``present``: somebody's first copy is there already.  The rest: not stored, and why."""


class Tier(Protocol):
    """One level of the cache, as seen from an agent's process.  Every method is an operation of ``kvcomm.steps``."""

    name: TierName

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[bool]]:
        """Which keys are here, in one round trip at most; pins, renews and verifies nothing, and may be out of date."""
        ...

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        """Fetch; calls ``found(index, block)`` for each verified block in order of ``keys`` as it arrives, skips misses.

        After each call the generator yields ``Emit(index)`` so that a driver can hand the block on at once.
        """
        ...

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        """Store; one status a copy.  Never raises for a full, dead or slow tier."""
        ...
