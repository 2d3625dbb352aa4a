"""Fault 45: twice as many calls as the cluster can do, for half a minute, and half as many after that.

The shards get a few percent of a core each, so that two cores are enough to ask too much of them.  The peak,
which the rest is held against, is what as many callers as help get done when each waits for its answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bench.openloop import Act, Calls, closed_loop, failures_text, open_loop
from bench.report import Report
from bench.scale import SMOKE, Scale
from bench.service import service
from bench.timing import Spread
from kvcomm.chaos.live import quotas
from kvcomm.instance import Instance

SHARD_PERCENT = 4.0
"""Of a core.  A client process does several thousand calls a second at best; what is to be too much for the
shards must be no trouble to it."""
CALLERS = 128
PEAK_S, OVER_S, AFTER_S = 8.0, 30.0, 20.0
ROUNDS = 3
SETTLED_S = 5.0
"""Goodput under overload is that of the time after this: until then the sockets' buffers take what is too
much."""
TIMES_OVER, TIMES_AFTER = 2.0, 0.5
STEADY_SHARE, STEADY_S = 0.8, 5
"""A shard with so little of a core needs seconds for what it does in the background as well."""
KEYS, VALUE = 500, b"v" * 128
PUT_EACH = 5
"""Every so many calls one writes."""
DEADLINE_S = 2.0
LATE_MAX_S = 1.0
"""Clients that were later than this by themselves had too much to do, and measured that."""
SHARD_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """A peak, what came of twice as much, and what came of half as much after it."""

    peak: Calls
    over: Calls
    after: Calls


def run(scale: Scale) -> Report:
    report = Report("overload", "Twice as many calls of records as the cluster can do")
    if why := quotas.missing():
        report.skip("twice as many calls as three shards can do", why)
        return report
    rounds, shorter = (1, 0.05) if scale is SMOKE else (ROUNDS, 1.0)
    with service(pools=0, shard_bytes=SHARD_BYTES, fsync="interval") as running:
        turns = asyncio.run(_turns(running.instance, rounds, shorter))
    settled_s = SETTLED_S * shorter
    goodput = [turn.over.rate(settled_s) / turn.peak.rate() for turn in turns]
    report.claim("calls done in time at twice the peak, over the peak", ">=", 0.8, "x", Spread.of(goodput))
    steady = [
        1e3 * turn.after.steady_after_s(TIMES_AFTER * turn.peak.rate(), STEADY_SHARE, STEADY_S)
        for turn in turns
    ]
    what = f"after it, until {STEADY_SHARE:.0%} of half the peak are done over any {STEADY_S} s"
    report.claim(what, "<=", 10_000.0, "ms", Spread.of(steady))
    for name, each in (
        (f"peak, {CALLERS} callers that wait", [turn.peak for turn in turns]),
        ("twice the peak", [turn.over for turn in turns]),
        ("half the peak after it", [turn.after for turn in turns]),
    ):
        begun = sum(calls.begun for calls in each)
        done = sum(len(calls.done_at) for calls in each)
        report.notes.append(
            f"{name}: {begun:,} calls, {done:,} done in time, failed: {failures_text(each)}; clients late by "
            f"themselves by {1e3 * max(calls.late_s for calls in each):.0f} ms at most."
        )
    if max(turn.over.late_s for turn in turns) > LATE_MAX_S:
        report.notes.append("The clients had too much to do themselves: this is no measure of the service.")
    return report


async def _turns(instance: Instance, rounds: int, shorter: float) -> list[Turn]:
    from kvcomm.connect import connect_async

    client, limits = await connect_async(instance=instance.name), quotas.Quotas()
    state = client.state("overload")

    async def act(number: int) -> object:
        key = f"k{number % KEYS}"
        if number % PUT_EACH:
            return await state.get(key, deadline_s=DEADLINE_S)
        return await state.put(key, VALUE, deadline_s=DEADLINE_S)

    try:
        for number in range(KEYS):
            await state.put(f"k{number}", VALUE)
        for node in instance.nodes():
            if node.role == "shard":
                limits.limit(node.node, [node.pid], SHARD_PERCENT)
        return [await _turn(act, shorter) for _ in range(rounds)]
    finally:
        limits.close()
        await client.close()


async def _turn(act: Act, shorter: float) -> Turn:
    peak = await closed_loop(act, CALLERS, PEAK_S * shorter)
    over = await open_loop(act, TIMES_OVER * peak.rate(), OVER_S * shorter)
    after = await open_loop(act, TIMES_AFTER * peak.rate(), AFTER_S * shorter)
    await asyncio.sleep(DEADLINE_S)  # what was begun at last comes to its end
    return Turn(peak, over, after)
