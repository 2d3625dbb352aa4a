"""``Tally``: what a client counts of its own operations, cells looked up once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcomm.blockplane import Prefix, Stored
from kvcomm.errors import KVCommError
from kvcomm.metrics import Histogram, Metrics
from kvcomm.steps import Steps
from kvcomm.tier import RecordAnswer, TierName

T = TypeVar("T")

TIERS: tuple[TierName, ...] = ("l1", "l2", "l3")


class Tally:
    """Counts into ``metrics`` (scope ``client``); ``clock`` gives monotonic seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.metrics = metrics
        self._clock = clock
        self._tokens = {tier: metrics.counter("kvcomm_fetch_tokens_total", tier=tier) for tier in TIERS}
        self._blocks = {tier: metrics.counter("kvcomm_fetch_blocks_total", tier=tier) for tier in TIERS}
        self._bytes = {tier: metrics.counter("kvcomm_fetch_bytes_total", tier=tier) for tier in TIERS}
        self._missed = metrics.counter("kvcomm_fetch_missed_blocks_total")
        self._foreign = metrics.counter("kvcomm_fetch_foreign_blocks_total")
        self._siblings = metrics.counter("kvcomm_record_siblings_total")
        self._read = metrics.counter("kvcomm_record_operations_total", operation="get", outcome="ok")
        self._read_degraded = metrics.counter(
            "kvcomm_record_operations_total", operation="get", outcome="degraded"
        )
        self._wrote = metrics.counter("kvcomm_record_operations_total", operation="put", outcome="ok")
        self._seconds: dict[str, Histogram] = {}

    def fetched(self, prefix: Prefix, block_tokens: int) -> None:
        for block in prefix.blocks:
            self._tokens[block.tier].add(block_tokens)
            self._blocks[block.tier].add()
            self._bytes[block.tier].add(block.header.payload_bytes)
        self._missed.add(prefix.asked_count - len(prefix.blocks))
        self._foreign.add(prefix.foreign_count)

    def published(self, stored: Sequence[Stored], block_bytes: int) -> None:
        for each in stored:
            for tier, status in (("l2", each.l2), ("l3", each.l3)):
                if status is not None:
                    self.metrics.counter("kvcomm_publish_blocks_total", tier=tier, status=status).add()
                if status == "stored":
                    self.metrics.counter("kvcomm_publish_bytes_total", tier=tier).add(block_bytes)

    def read(self, answer: RecordAnswer) -> None:
        (self._read_degraded if answer.degraded else self._read).add()
        if len(answer.values) > 1:
            self._siblings.add(len(answer.values) - 1)

    def wrote(self, count: int) -> None:
        self._wrote.add(count)

    def scanned(self, count: int) -> None:
        self.metrics.counter("kvcomm_record_operations_total", operation="scan", outcome="ok").add(count)

    def timed(self, operation: str, steps: Steps[T], record_count: int = 1) -> Steps[T]:
        """Run ``steps`` and note how long it took the caller; where it fails, so do those of its
        ``record_count`` records that were not done."""
        begin = self._clock()
        try:
            return (yield from steps)
        except KVCommError as error:
            if operation.startswith("record_"):
                kind = operation.removeprefix("record_")
                failed = self.metrics.counter(
                    "kvcomm_record_operations_total", operation=kind, outcome="failed"
                )
                failed.add(record_count - sum(each.status == "done" for each in error.outcomes))
            raise
        finally:
            self._histogram(operation).observe(self._clock() - begin)

    def _histogram(self, operation: str) -> Histogram:
        cell = self._seconds.get(operation)
        if cell is None:
            cell = self.metrics.histogram("kvcomm_operation_seconds", operation=operation)
            self._seconds[operation] = cell
        return cell
