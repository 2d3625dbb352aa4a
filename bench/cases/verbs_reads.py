"""One-sided reads over RDMA, beside the barest loop of READs that pyverbs can do."""

from __future__ import annotations

from contextlib import ExitStack

from bench.channels import channel, mapped
from bench.peers.bare_verbs import BARE_READ, BARE_READ_MADE, bare_verbs
from bench.pool import pools
from bench.report import Report
from bench.scale import Scale, size_name
from bench.timing import interleave, repeated

IN_FLIGHT = 16
VERBS, VERBS_RUN = "verbs: read", f"verbs: {IN_FLIGHT} reads at once, a read"
SHARE_MIN, TIMES_MAX = 0.8, 1.5
LARGE_BYTES, SMALL_BYTES = 1 << 20, 4 << 10
IN_A_ROW = 8
"""READs timed as one: in a guest reading the clock costs a good part of a READ."""


def run(scale: Scale) -> Report:
    report = Report("verbs_reads", "One-sided reads over RDMA")
    with ExitStack() as stack:
        [pool] = stack.enter_context(pools(1, transports=["verbs"]))
        region = stack.enter_context(mapped(pool))
        reads = stack.enter_context(channel(pool, "verbs"))
        bare = stack.enter_context(bare_verbs(scale.working_set, LARGE_BYTES))
        if isinstance(reads, str) or isinstance(bare, str):
            report.skip("reads over verbs, beside bare READs", reads if isinstance(reads, str) else str(bare))
            return report
        extents = region.payloads(pool.fill(scale.working_set, LARGE_BYTES))
        bare_run = bare.run(LARGE_BYTES, IN_FLIGHT)
        large = interleave(
            [bare_run, reads.of(VERBS_RUN, extents, IN_FLIGHT)], rounds=scale.rounds, turn_s=scale.turn_s
        )
        extents = region.payloads(pool.fill(scale.working_set, SMALL_BYTES))
        small = interleave(
            [
                repeated(bare.one(SMALL_BYTES), IN_A_ROW),
                repeated(bare.making(SMALL_BYTES), IN_A_ROW),
                repeated(reads.of(VERBS, extents), IN_A_ROW),
            ],
            rounds=scale.rounds,
            turn_s=scale.turn_s,
        )
    report.add(large, size_name(LARGE_BYTES), {VERBS_RUN: bare_run.name})
    report.add(small, size_name(SMALL_BYTES), {VERBS: BARE_READ, BARE_READ_MADE: BARE_READ})
    share, over = large.ratio(bare_run.name, VERBS_RUN), small.ratio(VERBS, BARE_READ)
    what = f"{IN_FLIGHT} reads of {size_name(LARGE_BYTES)} at once over verbs, share of bare READs' bandwidth"
    report.claim(what, ">=", SHARE_MIN, "x", share)
    what = f"read of {size_name(SMALL_BYTES)} over verbs, over a bare READ"
    report.claim(what, "<=", TIMES_MAX, "x", over)
    report.claim(f"{what} and its request", "<=", TIMES_MAX, "x", small.ratio(VERBS, BARE_READ_MADE))
    return report
