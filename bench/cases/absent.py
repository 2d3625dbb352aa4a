"""Keys that no pool has, looked up in a rack of four: what that costs the pools.

One-sided lookups ask nobody, so it should be nothing.  Times of idling and of lookups alternate, and what
the pools' processes used of the processors in the one is taken off what they used in the other.  TCP stands
beside it: there a thread of the pool sends the bytes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from bench.pool import Pool, identity, pools
from bench.report import Report, Row, number
from bench.scale import Scale
from bench.service import DEADLINE_S, settle_processes
from bench.timing import Spread
from kvcomm.block import BlockKey
from kvcomm.rpc import Peers, run_blocking
from l2_rdma.rack import Pool as Address
from l2_rdma.tier import L2Tier
from l2_rdma.wires import Wires

RACK_POOLS, LOOKUPS = 4, 1_000
ROUNDS_MAX, TURNS = 5, 8
"""An idle time and a time of lookups last so many turns of the scale."""
TICKS_TIMES, TICK_S = 5, 1e-3
"""Longer where the kernel counts a process's time in ticks, which are this long at least."""
SHARE_MAX = 0.01
"""Of the lookups' own time, all pools together.  Nothing is asked of them; this is how much their
housekeeping differs from one time to the next."""
REGION_BYTES, INDEX_ENTRIES = 32 << 20, 1 << 16
"""A region that a guest can pin four times, with the index of one of 2 GiB: absent keys are looked for in no
more of it."""
ONE_SIDED = ("shm", "verbs")


def run(scale: Scale) -> Report:
    report = Report("absent", f"{LOOKUPS:,} absent keys looked up in a rack of {RACK_POOLS}")
    for name in (*ONE_SIDED, "tcp"):
        _measure(scale, report, name)
    return report


def _measure(scale: Scale, report: Report, name: str) -> None:
    what = f"processor time of {RACK_POOLS} pools beyond idling, per time of lookups over {name}"
    with ExitStack() as stack:
        rack = stack.enter_context(_rack(name))
        client = stack.enter_context(_client(rack, name))
        client.look_up()  # it attaches to all of them first
        reason = client.unserved(name)
        if reason is not None:
            report.skip(what, reason)
            return
        times = _Times(
            rack, client.look_up, TURNS * scale.turn_s * (TICKS_TIMES if counted_in_ticks() else 1)
        )
        settle_processes([pool.pid for pool in rack])
        shares = Spread.of([times.share() for _ in range(min(scale.rounds, ROUNDS_MAX))])
    report.rows.append(Row(f"{name}: {LOOKUPS:,} lookups", "", Spread.of(times.taken).scaled(1e6)))
    if name in ONE_SIDED:
        report.claim(what, "<=", SHARE_MAX, "x", shares)
    else:
        report.notes.append(f"The {what}: {number(shares.median)}, by the thread that sends.")


def _rack(transport: str) -> AbstractContextManager[list[Pool]]:
    return pools(RACK_POOLS, region_bytes=REGION_BYTES, index_entries=INDEX_ENTRIES, transports=[transport])


def counted_in_ticks() -> bool:
    """Whether this kernel's account of processor time goes up in steps (User-mode Linux: 10 ms)."""
    times = [time.process_time()]
    while len(times) < 3:
        now = time.process_time()
        if now != times[-1]:
            times.append(now)
    return times[2] - times[1] >= TICK_S


class _Client:
    """Looks up keys that nobody has, as an agent does."""

    def __init__(self, tier: L2Tier, peers: Peers) -> None:
        self._tier = tier
        self._peers = peers
        self._keys = [BlockKey(secrets.token_bytes(32)) for _ in range(LOOKUPS)]

    def look_up(self) -> None:
        found = run_blocking(self._tier.lookup(self._keys), self._peers, time.monotonic() + DEADLINE_S)
        if any(found):
            raise RuntimeError("keys that nobody has were found")

    def unserved(self, transport: str) -> str | None:
        """Why not all pools are read through ``transport``, if so."""
        views = self._tier.stats().pools
        return next(
            (view.problem or str(view.refused) for view in views if view.transport != transport), None
        )


@contextmanager
def _client(rack: Sequence[Pool], transport: str) -> Iterator[_Client]:
    addresses = [Address(pool.node, pool.address) for pool in rack]
    mine = identity()
    tier, peers = L2Tier(lambda: addresses, mine, wires=Wires((transport,))), Peers(mine)
    try:
        yield _Client(tier, peers)
    finally:
        tier.close()
        peers.close()


@dataclass(slots=True)
class _Times:
    """Times of idling and of lookups, both ``span_s`` long at least."""

    rack: Sequence[Pool]
    lookup: Callable[[], None]
    span_s: float
    taken: list[float] = field(default_factory=list)

    def share(self) -> float:
        """Processor seconds of the pools a second of lookups."""
        idle = self._used_while(lambda: time.sleep(self.span_s))
        return self._used_while(self._look_up) - idle

    def _look_up(self) -> None:
        until = time.perf_counter() + self.span_s
        while (begin := time.perf_counter()) < until:
            self.lookup()
            self.taken.append(time.perf_counter() - begin)

    def _used_while(self, act: Callable[[], None]) -> float:
        """A second: the last of the lookups takes them beyond the span."""
        before, begin = sum(pool.processor_seconds() for pool in self.rack), time.perf_counter()
        act()
        lasted_s = time.perf_counter() - begin
        return (sum(pool.processor_seconds() for pool in self.rack) - before) / lasted_s
