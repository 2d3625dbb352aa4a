"""Fault 37: one record gets 90 % of reads, while it is written: how many of them its shard sees, and how old
what readers are shown is.

The baseline are the same clients with ``cache.hot_record_age: 0s``, which ask each time.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.hotload import HotLoad, Running, Seen, hot_load
from bench.report import Report
from bench.scale import Scale
from bench.timing import Spread
from kvcomm.client import Client
from kvcomm.instance import Instance

READERS, READS_S, WRITES_S = 8, 50.0, 44.0
"""At most what two cores do beside a cluster when every read asks."""
HOT_S = 60.0
"""In which the record must have become hot."""
WATCHED_S, ROUNDS = 4.0, 5
STALE_MAX_MS = 1_000.0
_CONFIG = """
cache: {{l2_size: 16MiB, l3_size: 32MiB, hot_record_age: {age}}}
cluster: {{shards: 3, pools: 1, heartbeat: {heartbeat}}}
storage: {{fsync: interval}}
"""


def run(scale: Scale) -> Report:
    report = Report(
        "hot_record", f"One record, {READERS} clients that read it {READS_S:.0f} times a second each"
    )
    small = scale.rounds < 3
    rounds, watched_s = (1, 0.5) if small else (ROUNDS, WATCHED_S)
    with _cluster("250ms" if small else "2s") as (instance, connect):
        asking = _watched(instance, connect("0s"), rounds, watched_s, lambda running: None)
        copying = _watched(instance, connect("1s"), rounds, watched_s, _until_hot)
    _tell(report, "every read asks", asking)
    _tell(report, "copies", copying)
    asked = [before.asked / max(1, after.asked) for before, after in zip(asking, copying, strict=True)]
    report.claim("reads that the shards see, asking over with copies", ">=", 10.0, "x", Spread.of(asked))
    stale = Spread.of([1e3 * seen.stale_max_s for seen in copying])
    report.claim("oldest answer from a copy", "<=", STALE_MAX_MS, "ms", stale)
    strong = Spread.of([1e3 * seen.strong_stale_max_s for seen in [*asking, *copying]])
    report.claim("oldest strong answer", "<=", 0.0, "ms", strong)
    return report


def _watched(
    instance: Instance,
    connect: Callable[[], Client],
    rounds: int,
    watched_s: float,
    settle: Callable[[Running], None],
) -> list[Seen]:
    with hot_load(instance, connect, HotLoad(READERS, READS_S, WRITES_S)) as running:
        settle(running)
        return [running.watch(watched_s) for _ in range(rounds)]


def _until_hot(running: Running) -> None:
    deadline = time.monotonic() + HOT_S
    while not running.watch(0.5).from_copies:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the record was not found to be hot within {HOT_S:.0f} s")


def _tell(report: Report, name: str, seen: list[Seen]) -> None:
    reads = sum(each.reads for each in seen)
    seconds = sum(each.seconds for each in seen)
    report.notes.append(
        f"{name}: {reads / seconds:,.0f} reads a second ({100 * seen[0].read_share:.0f} % of all), "
        f"{sum(each.asked for each in seen) / seconds:,.1f} of them reach a shard, "
        f"{100 * sum(each.from_copies for each in seen) / max(1, reads):.0f} % come from copies, the oldest "
        f"{1e3 * max(each.stale_max_s for each in seen):.0f} ms old."
    )


@contextmanager
def _cluster(heartbeat: str) -> Iterator[tuple[Instance, Callable[[str], Callable[[], Client]]]]:
    """A cluster, and what makes its clients by the age of their copies."""
    from kvcomm.connect import connect
    from kvcomm.embedded import Embedded

    with tempfile.TemporaryDirectory(prefix="kvb-") as directory:

        def config(age: str) -> Path:
            path = Path(directory) / f"{age}.yaml"
            path.write_text(_CONFIG.format(age=age, heartbeat=heartbeat))
            return path

        name = f"bench-{secrets.token_hex(4)}"
        embedded = Embedded.start(name, config("1s"), time.monotonic() + 60.0)
        try:
            yield Instance.open(name), lambda age: lambda: connect(config(age), instance=name)
        finally:
            embedded.stop()
