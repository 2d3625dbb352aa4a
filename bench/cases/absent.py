"""Keys that no pool has, looked up in a rack of four: what that costs the pools.

One-sided lookups ask nobody, so it should be nothing.  Times of idling and of lookups alternate, and what
the pools' processes used of the processors in the one is taken off what they used in the other.  TCP stands
beside it: there a thread of the pool sends the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from bench.channels import Reads, absent_lookups, channel
from bench.pool import Pool, pools
from bench.report import Report, Row, number
from bench.scale import Scale
from bench.service import settle_processes
from bench.timing import Spread

RACK_POOLS, LOOKUPS = 4, 1_000
ROUNDS_MAX, TURNS = 9, 8
"""An idle time and a time of lookups last so many turns of the scale, long beside the kernel's accounting."""
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
        members: dict[str, Reads] = {}
        for pool in rack:
            reads = stack.enter_context(channel(pool, name))
            if isinstance(reads, str):
                report.skip(what, reads)
                return
            members[pool.node] = reads
        lookup = absent_lookups(members, LOOKUPS)
        times = _Times(rack, lookup, TURNS * scale.turn_s)
        lookup()
        settle_processes([pool.pid for pool in rack])
        shares = Spread.of([times.share() for _ in range(min(scale.rounds, ROUNDS_MAX))])
    report.rows.append(Row(f"{name}: {LOOKUPS:,} lookups", "", Spread.of(times.taken).scaled(1e6)))
    if name in ONE_SIDED:
        report.claim(what, "<=", SHARE_MAX, "x", shares)
    else:
        report.notes.append(f"The {what}: {number(shares.median)}, by the thread that sends.")


def _rack(transport: str) -> AbstractContextManager[list[Pool]]:
    return pools(RACK_POOLS, region_bytes=REGION_BYTES, index_entries=INDEX_ENTRIES, transports=[transport])


@dataclass(slots=True)
class _Times:
    """Times of idling and of lookups, both ``span_s`` long."""

    rack: Sequence[Pool]
    lookup: Callable[[], None]
    span_s: float
    taken: list[float] = field(default_factory=list)

    def share(self) -> float:
        """Processor seconds of the pools a second of lookups."""
        idle_s = self._used_while(lambda: time.sleep(self.span_s))
        busy_s = self._used_while(self._look_up)
        return (busy_s - idle_s) / self.span_s

    def _look_up(self) -> None:
        until = time.perf_counter() + self.span_s
        while (begin := time.perf_counter()) < until:
            self.lookup()
            self.taken.append(time.perf_counter() - begin)

    def _used_while(self, act: Callable[[], None]) -> float:
        before = sum(pool.processor_seconds() for pool in self.rack)
        act()
        return sum(pool.processor_seconds() for pool in self.rack) - before
