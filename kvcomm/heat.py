"""``Heat``: what a client reads, counted by key, and how the shards hear of it.

Hot keys are found where they are read: what L1 and the pools answer is seen by no server.  So each client
counts, and says at the pace of the nodes' heartbeats what it read most, as long as it reads anything::

    client ── HotReport ──► a shard adds up its clients' ── HotReport ──► controllers: the leader decides

* **Cheap**: counting a key is one dictionary update; :class:`Window` falls back to a summary of bounded size
  (``kvcomm.sketch.HeavyHitters``) when many different keys come between two reports.
* **No thread, no extra wait**: a report that is due goes in front of the first request that the next
  operation sends to a shard anyway, on the same connection, and is answered before it.  A client that asks
  the shards nothing, because nearer tiers have all, sends one by itself, half as often, and gives it
  :data:`ALONE_WAIT_S`.  One that is lost is lost: the next tells what is hot then.
* **Names and counts travel, no sketch**: a client that reads few different keys (they all do, within
  seconds) names them exactly, and 8 KiB of a sketch would blur what it adds up (``bench/cases/hotkeys``).

The same report carries whose blocks this client fetched, for the placement of agents.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from kvcomm.block import Incarnation
from kvcomm.sketch import Counted, HeavyHitters
from kvcomm.steps import Ask, Call, Steps, Submit, WaitAny
from kvcomm.tier import Block
from kvcomm.wire.messages import TRAFFIC_PUBLISHERS_MAX, AgentTraffic, Fetched, HotReport, KeyHeat, Message

T = TypeVar("T")

INTERVAL_S = 2.0
"""Between two reports of one client, unless ``cluster.heartbeat`` says otherwise."""
ALONE_WAIT_S = 0.05
"""A shard that does not answer a report on its own so soon is not waited for."""
RIDE_WAIT_S = 0.02
"""The same for one that went in front of a request, so that its answer is there already."""
BLOCKS_MAX, RECORDS_MAX = 160, 64
"""Keys of one report: about 8 KiB with names of usual length."""
NAMES_BYTES_MAX = 4_096
"""All record names of one report together."""
EXACT_KEYS = 4_096
SUMMARY_KEYS = 2_048
PUBLISHERS_MAX = 1_024


class Shards(Protocol):
    """What is to be known of the shards to report to one."""

    def shard_address(self, address: str) -> bool:
        """Whether a shard of the ring is called there."""
        ...

    def any_shard(self) -> str | None:
        """Where to call one that is well, in turn; ``None`` = there is none."""
        ...


class Window:
    """Keys counted since the last report: exact up to :data:`EXACT_KEYS` of them, then the heaviest.

    Threads: an update that is lost between two of them is one count too few.
    """

    __slots__ = ("_counts", "_errors", "_summary", "total")

    def __init__(self) -> None:
        self._counts: dict[bytes, float] = {}
        self._errors: dict[bytes, float] = {}
        self._summary: HeavyHitters | None = None
        self.total = 0.0

    def add(self, keys: Sequence[bytes]) -> None:
        """One more of each."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.get(key, 0.0) + 1.0
        self.total += len(keys)
        if len(counts) > EXACT_KEYS:
            self._fold()

    def take(self, counted: Iterable[Counted]) -> None:
        """Add what somebody else has counted."""
        counts, errors = self._counts, self._errors
        for each in counted:
            counts[each.key] = counts.get(each.key, 0.0) + each.count
            if each.error:
                errors[each.key] = errors.get(each.key, 0.0) + each.error
            self.total += each.count
        if len(counts) > EXACT_KEYS:
            self._fold()

    def drain(self, count: int) -> list[Counted]:
        """The heaviest, and begin anew.  Of equal ones that which came first: heads of prefixes do."""
        if self._summary is None:
            counts, errors = self._begin()
            heaviest = heapq.nlargest(count, counts.items(), key=lambda item: item[1])
            found = [Counted(key, times, errors.get(key, 0.0)) for key, times in heaviest]
        else:
            self._fold()
            found, self._summary = self._summary.top(count, 0.0), None
        self.total = 0.0
        return found

    def _begin(self) -> tuple[dict[bytes, float], dict[bytes, float]]:
        """What has been counted exactly, which is forgotten here.

        As copies: another thread may still be counting into what was there.
        """
        counts, errors = self._counts, self._errors
        self._counts, self._errors = {}, {}
        return counts.copy(), errors.copy()

    def _fold(self) -> None:
        counts, errors = self._begin()
        if self._summary is None:
            self._summary = HeavyHitters(SUMMARY_KEYS)
        self._summary.take([Counted(key, times, errors.get(key, 0.0)) for key, times in counts.items()], 0.0)


class Heat:
    """One client's counts and their way to the shards; one object serves many threads.

    Args:
        agent: this process; what it published itself is no traffic.
        rack: where it runs; "" = it does not say.
        clock: monotonic seconds.
        interval_s: between two reports.
    """

    def __init__(
        self,
        agent: Incarnation,
        rack: str,
        shards: Shards,
        clock: Callable[[], float],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.reports_count = 0
        """Sent since start."""
        self._agent, self._rack, self._shards, self._clock = agent, rack, shards, clock
        self._blocks, self._records = Window(), Window()
        self._fetched: dict[int, list[int]] = {}
        """By publisher: blocks, bytes from the pools, bytes from the shards."""
        self._reported_at = clock()
        self._interval_s = interval_s
        self._due_at = self._reported_at + interval_s

    def read_records(self, names: Sequence[bytes]) -> None:
        self._records.add(names)

    def fetched(self, blocks: Sequence[Block]) -> None:
        """Blocks that were handed to the caller."""
        self._blocks.add([block.header.key for block in blocks])
        for block in blocks:
            if block.tier != "l1":
                self._came(block)

    def _came(self, block: Block) -> None:
        header = block.header
        if header.producer == self._agent:
            return
        sums = self._fetched.get(header.producer)
        if sums is None:
            if len(self._fetched) >= PUBLISHERS_MAX:
                return
            sums = self._fetched[header.producer] = [0, 0, 0]
        sums[0] += 1
        sums[1 if block.tier == "l2" else 2] += header.payload_bytes

    def riding(self, steps: Steps[T]) -> Steps[T]:
        """Run ``steps``; a report that is due goes along."""
        if self._clock() < self._due_at or not (self._blocks.total or self._records.total):
            return (yield from steps)
        return (yield from self._reporting(steps))

    def _reporting(self, steps: Steps[T]) -> Steps[T]:
        sent: Call | None = None
        try:
            step = next(steps)
            while True:
                if sent is None and isinstance(step, Submit) and (address := self._address_in(step)):
                    calls = yield Submit([Ask(address, self._report()), *step.asks])
                    sent, answer = calls[0], calls[1:]
                else:
                    answer = yield step
                step = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            yield from self._finish(sent)
            return result
        finally:
            steps.close()

    def _finish(self, sent: Call | None) -> Steps[None]:
        if sent is not None:
            yield WaitAny([sent], RIDE_WAIT_S)
        elif self._clock() >= self._due_at + self._interval_s:
            address = self._shards.any_shard()
            if address is not None:
                [alone] = yield Submit([Ask(address, self._report(), timeout_s=ALONE_WAIT_S)])
                yield WaitAny([alone], ALONE_WAIT_S)

    def _address_in(self, step: Submit) -> str | None:
        """Of the first shard that is asked something."""
        return next((ask.address for ask in step.asks if self._shards.shard_address(ask.address)), None)

    def _report(self) -> Message:
        now = self._clock()
        lasted_s, self._reported_at, self._due_at = now - self._reported_at, now, now + self._interval_s
        fetched, self._fetched = self._fetched, {}
        self.reports_count += 1
        return HotReport(
            lasted_s,
            heats(self._blocks.drain(BLOCKS_MAX)),
            _within(heats(self._records.drain(RECORDS_MAX)), NAMES_BYTES_MAX),
            traffic=self._traffic(fetched.copy()),
        )

    def _traffic(self, fetched: Mapping[int, list[int]]) -> list[AgentTraffic]:
        if not fetched:
            return []
        told = heaviest(Fetched(publisher, *sums) for publisher, sums in fetched.items())
        return [AgentTraffic(self._agent, self._rack, told)]


def heats(counted: Iterable[Counted]) -> list[KeyHeat]:
    """As they travel."""
    return [KeyHeat(each.key, each.count, each.error) for each in counted]


def _within(records: list[KeyHeat], size_bytes: int) -> list[KeyHeat]:
    """As many of the first as fit."""
    fitting: list[KeyHeat] = []
    for each in records:
        size_bytes -= len(each.key)
        if size_bytes < 0:
            break
        fitting.append(each)
    return fitting


def summed(one: Fetched, other: Fetched) -> Fetched:
    """Of the same publisher."""
    return Fetched(
        one.publisher,
        one.blocks + other.blocks,
        one.near_bytes + other.near_bytes,
        one.far_bytes + other.far_bytes,
    )


def heaviest(fetched: Iterable[Fetched]) -> list[Fetched]:
    """As many as travel."""
    return heapq.nlargest(
        TRAFFIC_PUBLISHERS_MAX, fetched, key=lambda each: (each.near_bytes + each.far_bytes, each.blocks)
    )
