"""Hot keys: are they found in little memory, and what does counting cost?

* **Found**: the 200 heaviest of 200,000 keys whose hot set changes half way, and of the traces' blocks, by a
  sketch with names of 8 to 128 KiB (cells and 40 bytes a name), against exact decayed counts.  The same
  through everything that is between: clients name what they read most, every two seconds, a shard adds up.
* **Cost**: counting a key, beside one update of a dictionary and beside a hit in L1.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import cycle
from math import inf

from bench.popularity import Drawn, Exact, Reference, Trace
from bench.report import Report
from bench.scale import KIB, Scale
from bench.timing import Call, Spread, interleave
from controller.hotkeys import HotKeys
from kvcomm.block import ROOT_LINEAGE, BlockKey, Incarnation, header_for
from kvcomm.heat import BLOCKS_MAX, INTERVAL_S, Heat, Window, heats
from kvcomm.namespace import Namespace
from kvcomm.sketch import CountMin, HeavyHitters, Hotness
from kvcomm.tier import Block
from kvcomm.wire.messages import HOT_KEYS_MAX, HotReport
from l1.tier import L1Tier

TOP = 200
KEYS, EVENTS, SECONDS = 200_000, 400_000, 60.0
"""10 half lives of 6 s: the hot set before the change has decayed to a 30th."""
HALF_LIFE_S = 6.0
EXPONENTS = (0.8, 1.0, 1.2)
SIZES = (8 * KIB, 16 * KIB, 64 * KIB, 128 * KIB)
"""The last is what controllers have."""
CLAIMED = "64 KiB"
NAME_BYTES = 40
SEEDS = (11, 12, 13)
CLIENTS = 32
TRACES = (
    "mooncake/conversation_trace.jsonl", "mooncake/synthetic_trace.jsonl",
    "claude_code/all_traces_rle.jsonl.gz",
)  # fmt: skip
TRACE_REFERENCES = 300_000
"""Of each, counted without decay: at the pace of one trace few blocks come more than once in a minute."""
BATCH = 64
DICTIONARY = "dict update"
L1_HIT = "L1 hit"
COUNTED = "a client counts an L1 hit"


def run(scale: Scale) -> Report:
    report = Report("hotkeys", f"The {TOP} hottest keys: found in little memory, counted in little time")
    small = scale.rounds < 3
    seeds = SEEDS[:1] if small else SEEDS
    for exponent in EXPONENTS:
        drawn = Drawn(exponent, KEYS // 100 if small else KEYS, EVENTS // 100 if small else EVENTS, SECONDS)
        _find_drawn(report, drawn, seeds)
    for name in TRACES:
        _find_in_trace(report, Trace(name, TRACE_REFERENCES // 100 if small else TRACE_REFERENCES))
    _cost(report, scale)
    return report


# -- found ---------------------------------------------------------------------------------------------------


def _find_drawn(report: Report, drawn: Drawn, seeds: Iterable[int]) -> None:
    scores: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        events = list(drawn.references(seed))
        for name, score in _scores(events, HALF_LIFE_S).items():
            scores.setdefault(name, []).append(score)
    _tell(report, f"Zipf {drawn.exponent}, {drawn.key_count:,} keys, shifted", scores)
    if drawn.exponent >= 1.0:
        for name in (CLAIMED, THROUGH):
            recall = Spread.of([score[0] for score in scores[name]])
            report.claim(f"recall of the top {TOP}, Zipf {drawn.exponent}, {name}", ">=", 90.0, "%", recall)


def _find_in_trace(report: Report, trace: Trace) -> None:
    try:
        events = list(trace.references())
    except FileNotFoundError as error:
        report.skip(f"hot blocks of {trace.name}", str(error))
        return
    found = {name: [score] for name, score in _scores(events, inf).items()}
    last = Counter(key for _, key, _ in events).most_common(TOP)[-1][1]
    what = f"{trace.name}, {len(events):,} references, number {TOP} came {last} times"
    _tell(report, what, found)


THROUGH = f"through {CLIENTS} clients and a shard"


def _scores(events: list[Reference], half_life_s: float) -> dict[str, tuple[float, float]]:
    """(recall, precision) of each way to find them."""
    exact = Exact(half_life_s)
    for now, key, _ in events:
        exact.add(key, now)
    end = events[-1][0]
    scores: dict[str, tuple[float, float]] = {}
    for size_bytes in SIZES:
        names_max = min(2 * TOP, size_bytes // 2 // NAME_BYTES)
        sketch = Hotness.of_size(size_bytes, names_max, half_life_s, name_bytes=NAME_BYTES)
        for now, key, _ in events:
            sketch.add(key, now)
        found = [each.key for each in sketch.top(TOP, end)]
        scores[f"{size_bytes // KIB} KiB"] = exact.score(found, TOP)
    scores[THROUGH] = _through(events, half_life_s)
    return scores


def _through(events: list[Reference], half_life_s: float) -> tuple[float, float]:
    """As the service does it, a report of each client every ``INTERVAL_S``."""
    exact = Exact(half_life_s)
    clients, shard = [Window() for _ in range(CLIENTS)], Window()
    hot = _hot_keys(half_life_s)
    due = events[0][0] + INTERVAL_S
    for now, key, reader in events:
        if now >= due:
            _report(clients, shard, hot, due)
            due += INTERVAL_S * ((now - due) // INTERVAL_S + 1)
        clients[reader % CLIENTS].add([key])
        exact.add(key, due)
    _report(clients, shard, hot, due)
    return exact.score(hot.hottest_blocks(TOP, due), TOP)


def _hot_keys(half_life_s: float) -> HotKeys:
    from controller.hotkeys import HotOptions

    return HotKeys(HotOptions(half_life_s=half_life_s))


def _report(clients: Iterable[Window], shard: Window, hot: HotKeys, now: float) -> None:
    for client in clients:
        shard.take(client.drain(BLOCKS_MAX))
    hot.heard(HotReport(INTERVAL_S, heats(shard.drain(HOT_KEYS_MAX)), []), now)


def _tell(report: Report, what: str, scores: dict[str, list[tuple[float, float]]]) -> None:
    told = [
        f"{name}: recall {_median(each, 0):.0f} %, precision {_median(each, 1):.0f} %"
        for name, each in scores.items()
    ]
    report.notes.append(f"{what}. {'; '.join(told)}.")


def _median(scores: list[tuple[float, float]], which: int) -> float:
    return Spread.of([score[which] for score in scores]).median


# -- cost ----------------------------------------------------------------------------------------------------


def _cost(report: Report, scale: Scale) -> None:
    keys = [secrets.token_bytes(32) for _ in range(16 * BATCH)]
    batches = cycle([keys[begin : begin + BATCH] for begin in range(0, len(keys), BATCH)])
    counts: dict[bytes, float] = {}

    def dictionary(batch: list[bytes]) -> None:
        for key in batch:
            counts[key] = counts.get(key, 0.0) + 1.0

    window, sketch, named, summary = (
        Window(), CountMin(4_096, 4, 10.0), Hotness.of_size(64 * KIB, 400, 10.0), HeavyHitters(400, 10.0)
    )  # fmt: skip
    near, held = _near()
    heat = Heat(Incarnation(2), "", _NoShards(), time.monotonic)
    hits = [block for block in near.get(held) if block is not None]
    others = [replace(block, tier="l2") for block in hits]

    def each(add: Callable[[bytes, float], object]) -> Callable[[], None]:
        def of_all() -> None:
            for key in next(batches):
                add(key, 1.0)

        return of_all

    rounds = interleave(
        [
            Call(DICTIONARY, lambda: dictionary(next(batches)), BATCH),
            Call(L1_HIT, lambda: near.get(held), BATCH),
            Call(COUNTED, lambda: heat.fetched(hits), BATCH),
            Call("a client counts a block of the pool", lambda: heat.fetched(others), BATCH),
            Call("a client counts a record", lambda: window.add(next(batches)), BATCH),
            Call("count-min, conservative, depth 4", each(sketch.add), BATCH),
            Call("count-min and names, 64 KiB", each(named.add), BATCH),
            Call("SpaceSaving, 400 of 1,024 keys", each(summary.add), BATCH),
        ],
        rounds=scale.rounds,
        turn_s=scale.turn_s,
    )
    baselines = {name: DICTIONARY for name in rounds.seconds if name not in (DICTIONARY, L1_HIT, COUNTED)}
    report.add(rounds, "one key", baselines | {COUNTED: L1_HIT})
    report.claim(f"{COUNTED}, over finding it", "<=", 1.0, "x", rounds.ratio(COUNTED, L1_HIT))
    report.claim(f"{COUNTED}, over a dict update", "<=", 2.0, "x", rounds.ratio(COUNTED, DICTIONARY))


class _NoShards:
    """Nobody to report to."""

    def shard_address(self, address: str) -> bool:
        return False

    def any_shard(self) -> str | None:
        return None


def _near() -> tuple[L1Tier, list[BlockKey]]:
    """An L1 with a batch of blocks in it."""
    namespace = Namespace(
        model="bench", revision="1", tokenizer="t", vocab_size=1_000, dtype="float16", layout="LKHTD",
        layers=2, kv_heads=2, head_dim=32, block_tokens=16, rope="none", rope_parameters={},
    )  # fmt: skip
    near = L1Tier(64 << 20)
    held = [BlockKey(secrets.token_bytes(32)) for _ in range(BATCH)]
    payload = memoryview(bytes(namespace.block_bytes))
    for key in held:
        header = header_for(
            namespace, key, key, payload, logical_start=0, producer=Incarnation(1), lineage=ROOT_LINEAGE
        )
        copy = memoryview(header.pack() + bytes(payload))
        near.put(Block(header, copy, "l2", pinned=False))
    return near, held
