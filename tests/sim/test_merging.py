"""Counters and sets under drawn faults; every promise of their judge broken once, by hand and by a planted
bug."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvcomm.chaos.campaign import WorkloadName, try_seed
from kvcomm.chaos.cluster import Parts, shipped_shard
from kvcomm.chaos.eventual import Ending, Replica
from kvcomm.chaos.history import History, Invoked, Outcome, Returned, Seen, Write
from kvcomm.chaos.merging import MergingWorkload, check_merging, merging_plan
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.simulation import Result, simulate
from kvcomm.chaos.swarm import draw_plan
from kvcomm.chaos.watch import Violation
from kvcomm.clock import Stamp
from kvcomm.resolvers import Moment
from kvcomm.resolvers.fields import FieldsDelta
from kvcomm.resolvers.table import COUNTER, SET
from kvcomm.version import Dot, VersionVector
from kvcomm.wire.messages import RecordState
from l3_shard import dvv
from l3_shard.shard import Shard
from l3_shard.writing import Draft
from tests.sim.planted import _again_after_unknown
from tests.sim.test_swarm import explain


def lived(seed: int, parts: Parts | None = None) -> Result:
    return simulate(merging_plan(draw_plan(seed, controlled=False)), parts, workload=MergingWorkload)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_nothing_acknowledged_is_lost_and_nothing_counts_twice(first: int) -> None:
    done = 0
    for seed in range(first, first + 10):
        result = lived(seed)
        assert not result.violations, explain(result)
        done += sum(operation.outcome == "ok" for operation in result.history.operations())
    assert done > 300, "a cluster that refuses everything keeps every promise"


class _JoinsOneSibling(Shard):
    """Applies a delta to the first sibling and covers them all."""

    def _accept(self, state: RecordState, draft: Draft) -> dvv.Written:
        return super()._accept(RecordState(state.context, state.siblings[:1]), draft)


@pytest.mark.slow
def test_a_coordinator_that_does_not_join_is_caught() -> None:
    assert {"sum", "lost"} <= broken_promises(Parts(shard=partial(shipped_shard, shard=_JoinsOneSibling)))


@pytest.mark.slow
def test_a_client_that_repeats_unknown_adds_is_caught() -> None:
    assert "sum" in broken_promises(Parts(run=_again_after_unknown))


def broken_promises(parts: Parts) -> set[str]:
    return {violation.promise for seed in range(10) for violation in lived(seed, parts).violations}


@pytest.mark.slow
def test_a_campaign_tries_the_workload_that_it_is_told_and_says_so() -> None:
    mixed, merging = (try_seed("safety", 3, name) for name in WORKLOADS)
    assert mixed.operation_count and merging.operation_count
    broken = replace(merging, violations=[Violation("sum", "is off")])
    assert "--workload merging --seed 3" in broken.report()
    assert "--workload mixed --seed 3" in replace(mixed, violations=broken.violations).report()


WORKLOADS: tuple[WorkloadName, ...] = ("mixed", "merging")


# -- the judge by hand

PLAN = Plan(seed=0, read_quorum=2, write_quorum=2)


class Story:
    """Operations one after the other on key ``k``, a second each."""

    def __init__(self) -> None:
        self.history, self._number = History(), 0

    def write(self, kind: str, value: str, outcome: Outcome = "ok") -> Story:
        return self._add(kind, [Write("k", value)], Returned(0, "c", 0, outcome))

    def read(self, kind: str, *values: str, degraded: bool = False) -> Story:
        return self._add(kind, [], Returned(0, "c", 0, "ok", seen=[Seen(list(values), {}, degraded)]))

    def never_returns(self) -> Story:
        return self._add("sum", [], None)

    def _add(self, kind: str, writes: list[Write], returned: Returned | None) -> Story:
        at, number = 2.0 * self._number, self._number
        self.history.add(Invoked(at, "c", number, kind, ["k"], writes))
        if returned is not None:
            seen, outcome = returned.seen, returned.outcome
            self.history.add(Returned(at + 1, "c", number, outcome, seen=seen))
        self._number += 1
        return self

    def broken(self, total: int, *elements: str, intact: bool = True) -> list[str]:
        """Promises, if the disks end with this."""
        records = {
            f"counter/sim/{'k'}": {"n": _replica(COUNTER, total)},
            f"set/sim/{'k'}": {"n": _replica(SET, FieldsDelta({each.encode(): b"" for each in elements}))},
        }
        return [each.promise for each in check_merging(PLAN, self.history, Ending(records, intact))]


def _replica(resolver: Any, delta: Any) -> Replica:
    moment = Moment(Dot("r", 1), Stamp(1), VersionVector(), VersionVector())
    value = resolver.apply([], resolver.encode_delta(delta), moment)
    return Replica({"r": 1}, {("r", 1): value.decode("latin-1")})


def test_a_sum_is_what_was_acknowledged_and_some_of_the_unknown() -> None:
    story = Story().write("add", "5").write("add", "-2").write("add", "10", "refused")
    assert story.broken(3) == []
    assert story.broken(13) == story.broken(5) == ["sum"]
    story.write("add", "7", "unknown").write("add", "-1", "unknown")
    assert [total for total in range(-9, 30) if not story.broken(total)] == [2, 3, 9, 10]


def test_elements_are_those_added_and_not_removed() -> None:
    story = Story().write("collect", "e1").write("collect", "e2", "unknown").write("collect", "e3", "refused")
    assert story.broken(0, "e1") == story.broken(0, "e1", "e2") == []
    assert story.broken(0) == ["lost"]
    assert story.broken(0, "e1", "e3") == ["made up"]
    assert story.broken(0, "e1", "e4") == ["made up"]
    story.write("drop", "e1")
    assert story.broken(0) == []
    assert story.broken(0, "e1") == ["came back"]


def test_a_remove_of_which_nobody_knows_may_have_been_made() -> None:
    story = Story().write("collect", "e1").write("drop", "e1", "unknown")
    assert story.broken(0) == story.broken(0, "e1") == []


def test_last_reads_are_held_to_the_same_where_quorums_meet() -> None:
    story = Story().write("add", "5").read("sum", "4").read("sum", "3", degraded=True)
    assert story.broken(5) == ["sum"]
    assert story.broken(5, intact=False) == []
    early = Story().read("sum", "0").write("add", "5")
    assert early.broken(5) == []


def test_every_operation_ends_in_time() -> None:
    assert Story().never_returns().broken(0) == ["deadlines"]
