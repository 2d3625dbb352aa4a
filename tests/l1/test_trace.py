"""Replay of public request traces through ``Lru``, one unit of weight a block.

Two things are held against it.  The hit rates are those that came with the traces.  The counters are those of
an oracle that
knows nothing of caches: under LRU a reference hits exactly if fewer than ``capacity`` other blocks were
referenced since the last reference to the same block (stack distances: Mattson, Gecsei, Slutz, Traiger 1970),
so one pass over the trace gives the counters of every capacity.
"""

from __future__ import annotations

from collections import Counter
from decimal import ROUND_HALF_UP, Decimal
from functools import cache

import pytest

from l1.lru import Lru
from tests.traces import block_references, trace_path

pytestmark = pytest.mark.slow

TABLES = {
    "mooncake/conversation_trace.jsonl": {
        1_000: "4.5",
        3_000: "6.5",
        10_000: "21.1",
        30_000: "32.6",
        50_000: "35.5",
        100_000: "36.4",
        10**9: "36.6",
    },
    "mooncake/synthetic_trace.jsonl": {
        1_000: "8.3",
        3_000: "18.8",
        10_000: "42.4",
        30_000: "62.4",
        50_000: "64.0",
        10**9: "64.0",
    },
}
"""Hit rate in percent by capacity in blocks, as printed in the traces' README; the last is the ideal."""

ROWS = [(name, capacity) for name, table in TABLES.items() for capacity in table]


@cache
def requests(name: str) -> list[list[bytes]]:
    return [[block.to_bytes(8, "little") for block in ids] for ids in block_references(trace_path(name))]


@cache
def distances(name: str) -> Counter[int | None]:
    """How many references have which stack distance; ``None`` = first reference to the block.

    A Fenwick tree over the references counts those that are the last one to their block.
    """
    references = [block for request in requests(name) for block in request]
    tree = [0] * (len(references) + 1)

    def add(position: int, amount: int) -> None:
        while position < len(tree):
            tree[position] += amount
            position += position & -position

    def count_up_to(position: int) -> int:
        total = 0
        while position:
            total += tree[position]
            position &= position - 1
        return total

    last: dict[bytes, int] = {}
    found: Counter[int | None] = Counter()
    for position, block in enumerate(references, start=1):
        before = last.get(block)
        if before is None:
            found[None] += 1
        else:
            found[len(last) - count_up_to(before)] += 1
            add(before, -1)
        last[block] = position
        add(position, 1)
    return found


def in_order(lru: Lru[bool], request: list[bytes]) -> None:
    """The textbook: each block is looked up, and stored on a miss, one after the other."""
    for block in request:
        if lru.get(block) is None:
            lru.put(block, True, 1)


def as_a_run(lru: Lru[bool], request: list[bytes]) -> None:
    """What the client does: look for the run, store what was missing as it arrives, touch the run."""
    for block, found in zip(request, lru.get_run(request), strict=True):
        if found is None:
            lru.put(block, True, 1)
    lru.touch_run(request)


def replay(name: str, capacity: int, visit) -> Lru[bool]:
    lru: Lru[bool] = Lru(capacity)
    for request in requests(name):
        visit(lru, request)
    return lru


def as_printed(hits: int, references: int) -> str:
    """Percent as the table has them: to hundredths and from there to tenths (4.447 became 4.45 and then
    4.5)."""
    percent = Decimal(100 * hits) / references
    hundredths = percent.quantize(Decimal("0.01"), ROUND_HALF_UP)
    return str(hundredths.quantize(Decimal("0.1"), ROUND_HALF_UP))


@pytest.mark.parametrize(("name", "capacity"), ROWS)
def test_in_order_it_hits_as_often_as_the_table_says_and_counts_every_event(name, capacity):
    lru = replay(name, capacity, in_order)
    truth = distances(name)
    references = sum(truth.values())
    hits = sum(count for distance, count in truth.items() if distance is not None and distance < capacity)
    distinct = truth[None]
    assert (lru.hits, lru.misses) == (hits, references - hits)
    assert lru.evicted == lru.misses - min(distinct, capacity), "every miss stored a block"
    assert (len(lru), lru.used_bytes, lru.refused) == (min(distinct, capacity),) * 2 + (0,)
    assert as_printed(lru.hits, references) == TABLES[name][capacity]


@pytest.mark.parametrize(("name", "capacity"), ROWS)
def test_as_runs_it_hits_at_least_as_often(name, capacity, record_property):
    plain, runs = replay(name, capacity, in_order), replay(name, capacity, as_a_run)
    record_property("plain_percent", 100 * plain.hits / (plain.hits + plain.misses))
    record_property("run_percent", 100 * runs.hits / (runs.hits + runs.misses))
    assert runs.hits + runs.misses == plain.hits + plain.misses
    assert runs.hits >= plain.hits
    runs.check()
