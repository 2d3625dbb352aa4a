"""A block out of the pool as a verified copy, and into the pool: both beside a memory copy of the same size.

The first copy of a block reads its bytes twice (checksum, copy); later ones of the same process need not,
for a published slot does not change.  A put reads twice as well, writes to memory that is in no cache, and
asks the pool's process twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from bench.peers.memory import MEMCPY, Buffers, memcpy
from bench.report import Report, Row
from bench.scale import Scale, size_name
from bench.service import (
    DEADLINE_S,
    Service,
    identity,
    namespace,
    pool_address,
    pool_reader,
    prompt,
    publish,
    service,
    settle,
)
from bench.timing import Call, Spread, interleave, round_robin
from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for
from kvcomm.namespace import Namespace
from kvcomm.rpc import Peers, run_blocking
from kvcomm.tier import BlockCopy

if TYPE_CHECKING:
    from l2_rdma.reader import Reader

COPY = "reader: copy of a block verified before"
FIRST, PUT = "reader: first copy, with checksum", "tier: put of a new block"
PUT_RUN = "tier: put of a run of new blocks, a block"
COPY_TIMES_MAX, PUT_TIMES_MAX = 1.6, 2.5
POOL_BYTES = 2 << 30


def run(scale: Scale) -> Report:
    report = Report("l2_copy", "A copy out of the host's pool, and a put into it")
    for size_bytes in (scale.block_bytes, scale.large_bytes):
        # A fresh pool for each size: the puts of one would evict the blocks of the other.
        with ExitStack() as stack:
            running = stack.enter_context(service(pool_bytes=POOL_BYTES))
            readers = stack.enter_context(pool_reader(running))
            writer = stack.enter_context(_Writer(running))
            settle(running)
            keys = publish(running.client, scale.working_set, size_bytes).keys(running)
            _measure_copies(scale, report, size_bytes, readers, keys)
            _measure_puts(scale, report, size_bytes, writer)  # last: they evict what the copies read
    return report


def _measure_copies(
    scale: Scale, report: Report, size_bytes: int, readers: Callable[[], Reader], keys: list[BlockKey]
) -> None:
    destination = memoryview(Buffers(1, size_bytes, seed=2).all[0])
    known, fresh = readers(), [readers()]

    def copy(reader: Reader, key: BlockKey) -> None:
        if reader.copy_into(key, destination) is None:
            raise RuntimeError("the pool lost a block that was to be copied")

    def forget() -> None:
        fresh[0] = readers()

    operations = [
        memcpy(scale.working_set, size_bytes),
        Call(COPY, round_robin(lambda key: copy(known, key), keys)),
        Call(FIRST, round_robin(lambda key: copy(fresh[0], key), keys), after=forget),
    ]
    rounds = interleave(operations, rounds=scale.rounds, turn_s=scale.turn_s, warm_calls=scale.working_set)
    size = size_name(size_bytes)
    report.add(rounds, size, {COPY: MEMCPY, FIRST: MEMCPY})
    for name, what in ((COPY, "copy"), (FIRST, "first copy, with checksum,")):
        ratio = rounds.ratio(name, MEMCPY)
        report.claim(f"{what} of {size} over memcpy", "<=", COPY_TIMES_MAX, "x", ratio)


def _measure_puts(scale: Scale, report: Report, size_bytes: int, writer: _Writer) -> None:
    put = writer.put(scale.working_set, size_bytes)
    # From here on a put has to evict, and all of the pool's memory has been written to before.
    filling = Spread.of(put.times(scale.fill_bytes // size_bytes)).scaled(1e6)
    puts = writer.put_run(scale.working_set, size_bytes)
    operations = [memcpy(scale.working_set, size_bytes), put, puts]
    rounds = interleave(operations, rounds=scale.rounds, turn_s=scale.turn_s, warm_calls=scale.working_set)
    size = size_name(size_bytes)
    report.add(rounds, size, {PUT: MEMCPY, PUT_RUN: MEMCPY}, only=[PUT, PUT_RUN])
    report.rows.append(Row("tier: put while the pool fills up", size, filling))
    for what, name in (("put", PUT), ("put in a run", PUT_RUN)):
        report.claim(f"{what} of {size} over memcpy", "<=", PUT_TIMES_MAX, "x", rounds.ratio(name, MEMCPY))


class _Writer:
    """Puts blocks nobody has seen, through the tier as the client uses it."""

    def __init__(self, running: Service) -> None:
        from l2_rdma.rack import Pool
        from l2_rdma.tier import L2Tier

        mine = identity(running)
        pools = [Pool("pool-0", pool_address(running))]
        self._running = running
        self._peers = Peers(mine)
        self._tier = L2Tier(lambda: pools, mine)
        self._fresh = count(1 << 20)

    def put(self, working_set: int, size_bytes: int) -> Call:
        """The key is made before, the header (and so the checksum) in the time."""
        ns = namespace(size_bytes).for_tenant(self._running.tenant)
        upcoming = self._keys(ns, 1)

        def next_key() -> None:
            upcoming[:] = self._keys(ns, 1)

        payloads = [memoryview(buffer) for buffer in Buffers(working_set, size_bytes, seed=6).all]
        put = round_robin(lambda payload: self._put(ns, upcoming, [payload]), payloads)
        return Call(PUT, put, after=next_key)

    def put_run(self, working_set: int, size_bytes: int) -> Call:
        """As a publish of a prefix does it: every block in one operation."""
        ns = namespace(size_bytes).for_tenant(self._running.tenant)
        upcoming = self._keys(ns, working_set)

        def next_keys() -> None:
            upcoming[:] = self._keys(ns, working_set)

        payloads = [memoryview(buffer) for buffer in Buffers(working_set, size_bytes, seed=7).all]
        put = partial(self._put, ns, upcoming, payloads)
        return Call(PUT_RUN, put, items=working_set, after=next_keys)

    def _keys(self, ns: Namespace, count_of_keys: int) -> list[BlockKey]:
        return [block_keys(ns, prompt(next(self._fresh)))[0] for _ in range(count_of_keys)]

    def _put(self, ns: Namespace, keys: list[BlockKey], payloads: list[memoryview]) -> None:
        copies = [
            BlockCopy(
                header_for(ns, key, NO_PARENT, payload, logical_start=0, producer=Incarnation(1)), payload
            )
            for key, payload in zip(keys, payloads, strict=True)
        ]
        statuses = run_blocking(self._tier.put(copies), self._peers, time.monotonic() + DEADLINE_S)
        if set(statuses) != {"stored"}:
            raise RuntimeError(f"a put was not taken: {statuses}")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.close()
        self._peers.close()
