"""``campaign``: many seeds, on all cores, told in the order of the seeds.

Each seed is a world of its own, so they share nothing; what a process hands back is a :class:`Verdict`, small
and plain.  The order of what is told does not depend on which process was quicker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Literal

from kvcomm.chaos.merging import MergingWorkload, merging_plan
from kvcomm.chaos.plan import Mode, Plan
from kvcomm.chaos.registers import KINDS, MixedWorkload
from kvcomm.chaos.simulation import simulate
from kvcomm.chaos.splits import Heal, Splits, distribution, splits_plan
from kvcomm.chaos.swarm import draw_plan
from kvcomm.chaos.watch import Violation
from kvcomm.chaos.workload import Workload

WorkloadName = Literal["mixed", "merging", "splits"]
SHOWN_MAX = 5
"""Violations of one seed that are told."""
BATCH_SEEDS = 4
"""That one process is handed at a time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one seed."""

    seed: int
    mode: Mode
    violations: Sequence[Violation]
    undecided_count: int
    """Registers whose history was too hard to judge."""
    operation_count: int
    done_count: int
    """Of the operations: those that were done."""
    strong_count: int
    """Of those that were done: on strong records."""
    simulated_s: float
    cpu_s: float
    world: str
    """As JSON; empty where nothing was broken."""
    workload: WorkloadName = "mixed"
    move_count: int = 0
    """Times that controllers moved records."""
    heals: Sequence[Heal] = ()
    """What each split and its end came to; of the workload ``splits``."""

    def report(self) -> str:
        """For a person: what was broken, and how to see it again."""
        lines = [f"seed {self.seed}: {len(self.violations)} violations"]
        lines += [f"  {violation.promise}: {violation.text}" for violation in self.violations[:SHOWN_MAX]]
        how = f"--mode {self.mode} --workload {self.workload} --seed {self.seed}"
        lines += [f"  world: {self.world}", f"  again: kvcomm chaos sim {how} --trace"]
        return "".join(f"{line}\n" for line in lines)


@dataclass(slots=True)
class Summary:
    """What came of all of them."""

    seed_count: int = 0
    operation_count: int = 0
    done_count: int = 0
    strong_count: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    undecided_count: int = 0
    move_count: int = 0
    moved_count: int = 0
    """Of the worlds: those in which records were moved."""
    failed: list[int] = field(default_factory=list)
    heals: list[Heal] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.seed_count += 1
        self.operation_count += verdict.operation_count
        self.done_count += verdict.done_count
        self.strong_count += verdict.strong_count
        self.simulated_s += verdict.simulated_s
        self.cpu_s += verdict.cpu_s
        self.undecided_count += verdict.undecided_count
        self.move_count += verdict.move_count
        self.moved_count += verdict.move_count > 0
        self.heals += verdict.heals
        if verdict.violations:
            self.failed.append(verdict.seed)

    def text(self) -> str:
        """One line, and a table if there were splits.  ``n`` clean seeds bound the rate of failures a seed by
        3/n with 95 % confidence."""
        moves = f", {self.move_count} moves in {self.moved_count} worlds" if self.move_count else ""
        undecided = f", {self.undecided_count} registers undecided" if self.undecided_count else ""
        return (
            f"{self.seed_count} seeds, {self.operation_count} operations "
            f"({self.done_count} done, {self.strong_count} of them strong), "
            f"{self.simulated_s / 3600:.2f} simulated hours in {self.cpu_s / 3600:.3f} CPU hours "
            f"({self.simulated_s / max(self.cpu_s, 1e-9):.0f} to 1){moves}{undecided}: "
            f"{len(self.failed)} broke a promise {self.failed or ''}".rstrip()
            + f"\n{distribution(self.heals)}".rstrip()
        )


def run_campaign(
    seeds: Sequence[int],
    mode: Mode,
    jobs: int,
    heard: Callable[[Verdict], None] = lambda verdict: None,
    workload: WorkloadName = "mixed",
) -> Summary:
    """Try all of ``seeds``; ``heard`` is told of each, in their order."""
    summary = Summary()
    for verdict in verdicts(seeds, mode, jobs, workload):
        summary.add(verdict)
        heard(verdict)
    return summary


def verdicts(
    seeds: Sequence[int], mode: Mode, jobs: int, workload: WorkloadName = "mixed"
) -> Iterator[Verdict]:
    """In the order of ``seeds``, by ``jobs`` processes."""
    judge = partial(try_seed, mode, workload=workload)
    if jobs == 1 or len(seeds) == 1:
        yield from map(judge, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(judge, seeds, chunksize=BATCH_SEEDS)


def world_of(seed: int, mode: Mode, workload: WorkloadName) -> tuple[Plan, Callable[[Plan], Workload]]:
    """The world, and what its clients do: eventual and strong records, or counters and sets."""
    if workload == "splits":
        return splits_plan(seed), MixedWorkload
    plan = draw_plan(seed, mode)
    return (plan, MixedWorkload) if workload == "mixed" else (merging_plan(plan), MergingWorkload)


def try_seed(mode: Mode, seed: int, workload: WorkloadName = "mixed") -> Verdict:
    """The verdict on one seed."""
    begin = time.process_time()
    plan, clients = world_of(seed, mode, workload)
    splits = Splits() if workload == "splits" else None
    result = simulate(plan, workload=clients, splits=splits)
    operations = result.history.operations()
    done = [operation for operation in operations if operation.outcome == "ok"]
    return Verdict(
        seed,
        mode,
        result.violations[: SHOWN_MAX + 1],
        len(result.undecided),
        len(operations),
        len(done),
        sum(operation.invoked.kind in KINDS for operation in done),
        result.simulated_s,
        time.process_time() - begin,
        json.dumps(result.plan.describe(), sort_keys=True) if result.violations else "",
        workload,
        result.move_count,
        () if splits is None else splits.heals,
    )
