"""A cluster in dictionaries: what several clients of it share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcomm.block import BlockKey, Incarnation, verify_copy
from kvcomm.blockplane import BlockPlane
from kvcomm.metrics import Metrics
from kvcomm.namespace import TenantDigest
from kvcomm.operations import Operations
from kvcomm.stateplane import StatePlane
from kvcomm.steps import Emit, Steps
from kvcomm.streams.sharing import Sharing
from kvcomm.tally import Tally
from kvcomm.tier import Block, BlockCopy, Presence, PutStatus, RecordAnswer, TierName
from kvcomm.wire.messages import RecordVersion
from l1.tier import L1Tier
from tests.kvcomm.test_stateplane import FakeRecords

TENANT = TenantDigest(b"t" * 16)


@dataclass
class Tier:
    """Takes everything while there is room; copies are bytes and verified."""

    name: TierName = "l3"
    held: dict[BlockKey, bytes] = field(default_factory=dict)
    blocks_max: int = 1_000_000
    fetched: int = 0
    silent: bool = False
    """It answers nobody."""

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        yield from ()
        return [None if self.silent else key in self.held for key in keys]

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        for index, key in enumerate(keys):
            if key in self.held and not self.silent:
                copy = memoryview(self.held[key])
                self.fetched += 1
                found(index, Block(verify_copy(copy, key), copy, self.name))
                yield Emit(index)

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        yield from ()
        statuses: list[PutStatus] = []
        for copy in copies:
            room = len(self.held) < self.blocks_max
            statuses.append("stored" if room else "full")
            if room:
                self.held.setdefault(copy.key, copy.header.pack() + bytes(copy.payload))
        return statuses


class Records(FakeRecords):
    """Keeps the last value; ``concurrent``: every put makes a sibling."""

    concurrent = False

    def record_put(self, writes: Any) -> Steps[list[RecordVersion]]:
        versions = yield from super().record_put(writes)
        for write, version in zip(writes, versions, strict=True):
            before = self.answers.get(write.key, RecordAnswer((), {}, False)).values
            values = (*before, write.value) if self.concurrent else (write.value,)
            self.answers[write.key] = RecordAnswer(values, version.context, False)
        return versions


@dataclass
class Cluster:
    tier: Tier = field(default_factory=Tier)
    records: Records = field(default_factory=Records)

    def operations(self, tenant: TenantDigest = TENANT) -> Operations:
        """Of another process: with an L1 of its own."""
        tally = Tally(Metrics("client"), clock=lambda: 0.0)
        blocks: BlockPlane[Any] = BlockPlane(L1Tier(1 << 20, 0.0), None, self.tier, clock=lambda: 0.0)
        return Operations(blocks, StatePlane(self.records, tally), tally, tenant, Incarnation(7))

    def sharing(self, tenant: TenantDigest = TENANT) -> Sharing:
        return Sharing(self.operations(tenant))
