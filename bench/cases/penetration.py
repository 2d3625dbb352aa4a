"""A flood of keys that nobody has, at ten times the rate of honest reads: what reaches the shards, and what
honest readers feel.

The flood runs in a process of its own.  Half of its prefixes come again and again, which a cache of absences
stops; the others come once, which only a filter can.  Honest reads are one block from a shard, of another
client, in the same turn; a turn without a flood is what they are held against.

Single flight is on in all arms: it shares the loading of blocks, and of an absent block nothing is loaded.
"""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rbloom import Bloom

from bench.flood import Flooded, Order
from bench.report import Report, Row, number
from bench.scale import SMOKE, Scale
from bench.service import Prefixes, Service, publish, service
from bench.timing import Spread
from l3_shard.bloom import LayeredBloom

ARMS = {
    "nothing": (0.0, 0.0),
    "absences remembered for 5 s": (5.0, 0.0),
    "filters, 2 s old": (0.0, 2.0),
    "both": (5.0, 2.0),
}
"""Seconds: of remembered absences, of filters."""
RATE, FLOOD_TIMES = 40.0, 10.0
TURN_S, SMOKE_TURN_S = 3.0, 0.5
ROUNDS, SMOKE_ROUNDS = 7, 1
BLOCKS, BLOCK_BYTES = 64, 64 << 10
LEFT_MAX = 0.05
"""Lookups an absent key that may be left with both."""
FILTER_KEYS, SMOKE_FILTER_KEYS, RATE_OF_ERRORS = 20_000, 2_000, 0.001


def run(scale: Scale) -> Report:
    report = Report("penetration", "A flood of absent keys")
    rounds, turn_s = (SMOKE_ROUNDS, SMOKE_TURN_S) if scale is SMOKE else (ROUNDS, TURN_S)
    with service(pools=0) as running, _flooder(running) as order:
        prefixes = publish(running.client, BLOCKS, BLOCK_BYTES)
        turns: dict[str, list[tuple[list[float], Flooded | None]]] = {name: [] for name in ("", *ARMS)}
        names = list(turns)
        for index in range(rounds):
            for name in names[index % len(names) :] + names[: index % len(names)]:
                turns[name].append(_turn(running, prefixes, order, name, turn_s))
    quiet = [_p99(times) for times, _ in turns[""]]
    for name in names:
        shown = f"p99 of honest reads, flood with {name}" if name else "p99 of honest reads, no flood"
        tails = [_p99(times) for times, _ in turns[name]]
        ratio = Spread.of([tail / calm for tail, calm in zip(tails, quiet, strict=True)]) if name else None
        report.rows.append(
            Row(shown, "64 KiB", Spread.of(tails).scaled(1e6), "no flood" if name else "", ratio)
        )
    report.notes += list(_notes(turns))
    left = [f.looked_up / f.absent_keys for _, f in turns["both"] if f is not None]
    report.claim("lookups an absent key, with both", "<=", LEFT_MAX, "x", Spread.of(left))
    _filters(report, SMOKE_FILTER_KEYS if scale is SMOKE else FILTER_KEYS)
    return report


def _turn(
    running: Service,
    prefixes: Prefixes,
    order: Callable[[Order], Callable[[], Flooded]],
    name: str,
    turn_s: float,
) -> tuple[list[float], Flooded | None]:
    """Honest reads at their rate, beside a flood if ``name`` names one."""
    arm = ARMS.get(name)
    finish = None if arm is None else order(Order(turn_s, RATE * FLOOD_TIMES, *arm))
    times: list[float] = []
    begin = time.monotonic()
    while (now := time.monotonic()) < begin + turn_s:
        due = begin + len(times) / RATE
        if now < due:
            time.sleep(due - now)
        start = time.perf_counter()
        got = running.client.fetch(prefixes.namespace, prefixes.tokens[len(times) % BLOCKS])
        times.append(time.perf_counter() - start)
        if not got.blocks:
            raise RuntimeError("an honest read missed")
    return times, finish() if finish is not None else None


@contextmanager
def _flooder(running: Service) -> Iterator[Callable[[Order], Callable[[], Flooded]]]:
    """Starts a flood; what that returns waits for its end."""
    address = next(node.addresses[0] for node in running.instance.nodes() if node.role == "shard")
    token = running.instance.credentials().token("default")
    command = [sys.executable, "-m", "bench.flood", address, token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def start(order: Order) -> Callable[[], Flooded]:
            stdin.write(msgspec.json.encode(order).decode() + "\n")
            stdin.flush()
            return lambda: msgspec.json.decode(stdout.readline(), type=Flooded)

        try:
            yield start
        finally:
            stdin.close()
            process.wait(timeout=30)


def _notes(turns: dict[str, list[tuple[list[float], Flooded | None]]]) -> Iterator[str]:
    lines = [
        "| flood with | prefixes a second | lookups an absent key | filters fetched a turn |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in ARMS:
        floods = [flooded for _, flooded in turns[name] if flooded is not None]
        if any(flooded.found for flooded in floods):
            raise RuntimeError("keys that nobody has were found")
        asked = sum(flooded.looked_up for flooded in floods) / sum(each.absent_keys for each in floods)
        seconds = sum(len(times) for times, _ in turns[name]) / RATE
        rate = sum(flooded.prefixes for flooded in floods) / seconds
        fetched = sum(flooded.filters for flooded in floods) / len(floods)
        lines.append(f"| {name} | {rate:.0f} | {asked:.3f} | {fetched:.1f} |")
    yield "\n".join(lines)


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)]


def _filters(report: Report, keys: int) -> None:
    """Errors of the shards' filters, and of a plain one that was made for as many keys."""
    layered, plain = LayeredBloom(keys, RATE_OF_ERRORS), Bloom(keys, RATE_OF_ERRORS)
    lines = [
        "| filter for keys | holds | absent keys called present | 95 % | bits a key |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for held in (keys, 2 * keys):
        for member in range(held - keys, held):
            layered.add(_key(member))
            plain.add(_key(member))
        absent = range(10 * keys, 20 * keys)
        for name, filter_, bits in (
            ("growing by layers, as shipped", layered, 8 * layered.size_bytes),
            ("plain", plain, plain.size_in_bits),
        ):
            wrong = sum(_key(each) in filter_ for each in absent)
            low, high = _wilson(wrong, len(absent))
            lines.append(
                f"| {name} | {held / keys:.0f} × | {100 * wrong / len(absent):.3f} % | "
                f"{100 * low:.3f} – {100 * high:.3f} % | {bits / held:.1f} |"
            )
            if name != "plain":
                share = Spread(100 * low, 100 * wrong / len(absent), 100 * high)
                what = f"absent keys called present, {held / keys:.0f} × as many keys as it was made for"
                report.claim(what, "<=", 100 * RATE_OF_ERRORS, "%", share)
    report.notes.append("\n".join(lines))
    report.notes.append(f"Filters for {number(keys)} keys and an error rate of 0.1 %.")


def _key(index: int) -> bytes:
    return hashlib.sha256(index.to_bytes(8, "little")).digest()


def _wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    share, spread = successes / trials, z * z / trials
    root = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    middle = share + spread / 2
    return max(0.0, (middle - root) / (1 + spread)), (middle + root) / (1 + spread)
