"""Fault 26: one shard's wall clock is wrong, jumps, and runs to and fro.

Nothing that must be right goes by wall clocks: they only order concurrent values for a person, and tell how
old a tombstone is.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from kvcomm.clock import DRIFT_MS_MAX, Stamp, unpack
from tests.system.conftest import eventually, metric
from tests.system.lab import Lab, WallClock, faketime_library
from tests.system.traffic import Traffic

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(faketime_library() is None, reason="libfaketime is not installed"),
]

SKEWED = "shard-1"
SKEW_S = 300
STROBES = 20
HASTE_MS = 5_000
"""What the stamps of a correct clock may be ahead while a test reads them."""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WallClock]:
    clock = WallClock(tmp_path_factory.mktemp("clock") / "clock")
    yield clock
    clock.close()


@pytest.fixture(scope="module")
def lab(clock: WallClock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Tombstones age fast, so that a clock that is 300 s ahead finds all of them old."""
    lab = Lab(
        tmp_path_factory.mktemp("lab"),
        hint_age="20s",
        tombstone_age="60s",
        variables={SKEWED: clock.variables()},
    )
    try:
        yield lab
    finally:
        lab.close()


def far_ahead(lab: Lab, traffic: Traffic) -> set[str]:
    """Replicas that gave a living value a stamp further ahead of us than any shard may follow."""
    name, keys = traffic.eventual.name, traffic.eventual.keys()
    now_ms = time.time() * 1_000
    return {
        sibling.replica
        for state in lab.agreed(name, keys)
        for sibling in (state.siblings if state is not None else ())
        if unpack(Stamp(sibling.hlc))[0] > now_ms + DRIFT_MS_MAX + HASTE_MS
    }


def delete_some(lab: Lab, name: str) -> list[str]:
    """Records that all shards have had, and whose tombstones all shards have."""
    keys = [f"deleted-{number}" for number in range(12)]
    with lab.client() as kv:
        kv.state(name).put_many(dict.fromkeys(keys, b"gone"))
        lab.agreed(name, keys)
        for key in keys:
            kv.state(name).delete(key)
    return keys


def none_returned(lab: Lab, name: str, keys: list[str]) -> None:
    for state in lab.agreed(name, keys):
        assert state is None or all(sibling.value is None for sibling in state.siblings)
    with lab.client() as kv:
        assert all(not found.values for found in kv.state(name).get_many(keys).values())


@pytest.mark.parametrize("skew_s", [-SKEW_S, SKEW_S])
def test_fault_26_a_wall_clock_jumps(lab: Lab, clock: WallClock, skew_s: int) -> None:
    """No write is lost, none that was deleted returns, though the wrong clock holds all tombstones for old;
    strong records stay linearizable; far stamps are that shard's alone.  (The jump ahead comes last: stamps
    never go back, so the shard's run ahead until its clock has caught up.)"""
    traffic = Traffic(lab, f"fault-26-{skew_s}")
    deleted = delete_some(lab, f"fault-26-{skew_s}")
    with traffic.running():
        clock.set(skew_s)
        traffic.goes_on(150)
    traffic.judge()
    assert len(far_ahead(lab, traffic)) == (1 if skew_s > 0 else 0), "nobody saw the jump, or others followed"
    if skew_s > 0:
        eventually(lambda: metric(lab.node(SKEWED), "kvcomm_tombstones_removed_total") > 0)
    none_returned(lab, traffic.eventual.name, deleted)
    clock.set(0)


def test_fault_26_a_wall_clock_runs_to_and_fro(lab: Lab, clock: WallClock) -> None:
    traffic = Traffic(lab, "fault-26-strobe")
    deleted = delete_some(lab, "fault-26-strobe")
    with traffic.running():
        for turn in range(STROBES):
            clock.set(SKEW_S if turn % 2 else -SKEW_S)
            traffic.goes_on(8)
        clock.set(0)
        traffic.goes_on()
    assert len(far_ahead(lab, traffic)) <= 1
    traffic.judge()
    none_returned(lab, traffic.eventual.name, deleted)


def test_fault_26_a_shard_starts_under_a_wrong_clock(lab: Lab, clock: WallClock) -> None:
    traffic = Traffic(lab, "fault-26-start")
    clock.set(SKEW_S)
    with traffic.running():
        lab.restarted(lab.kill(SKEWED, signal.SIGKILL))
        traffic.goes_on(30)
        clock.set(0)
        traffic.goes_on()
    assert len(far_ahead(lab, traffic)) <= 1
    traffic.judge()
