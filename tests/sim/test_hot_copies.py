"""Fault 37 in simulated worlds: every record is hot, so clients answer reads from copies where they may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest

from kvcomm.chaos.cluster import Parts
from kvcomm.chaos.history import History
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.simulation import Result, simulate
from kvcomm.chaos.workload import EventualWorkload
from kvcomm.hotcopies import HotCopies
from kvcomm.steps import Steps
from kvcomm.tier import RecordAnswer
from kvcomm.wire.messages import Dots, RingMap, RingNode
from l3_shard.tier import L3Tier

AGE_S = 1.0
BUSY: tuple[tuple[str, int], ...] = (("get", 18), ("put", 1), ("batch", 1))
"""Nine reads of ten."""


class _AllHot(L3Tier):
    """Shards that call every record hot."""

    def record_get(self, keys: Sequence[bytes], least: Sequence[Dots] = ()) -> Steps[list[RecordAnswer]]:
        answers = yield from super().record_get(keys, least)
        return [replace(answer, hot=True) for answer in answers]


def _all_hot(
    ring_map: RingMap, timeout_s: float, clock: Callable[[], float], dial: Callable[[RingNode], str]
) -> L3Tier:
    return _AllHot(ring_map, timeout_s=timeout_s, clock=clock, dial=dial)


HOT = Parts(tier=_all_hot)


@dataclass
class Counting:
    """Reads that were answered from copies, in all worlds of a test."""

    answered: int = 0

    def watch(self) -> None:
        get = HotCopies.get

        def counted(copies: HotCopies, name: bytes, least: Dots, now: float) -> RecordAnswer | None:
            answer = get(copies, name, least, now)
            self.answered += answer is not None
            return answer

        self.patch = patch.object(HotCopies, "get", counted)


def _world(seed: int, **changes: object) -> Plan:
    plan = Plan(
        seed, active_s=8.0, keys=2, clients=4, pace_s=0.15, read_quorum=1, mix=BUSY, fault_every_s=1.5
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def _run(plan: Plan) -> tuple[Result, int]:
    """And how many reads copies answered."""
    counting = Counting()
    counting.watch()
    with counting.patch:
        result = simulate(plan, HOT, workload=EventualWorkload)
    return result, counting.answered


def _stale_max_s(history: History) -> float:
    """By how much a read began after the acknowledgement of a write that it does not know."""
    stored: dict[str, list[tuple[float, str, int]]] = {}
    stale_s = 0.0
    ended = [(each.invoked, each.returned) for each in history.operations() if each.returned is not None]
    for invoked, returned in ended:
        for write, dot in zip(invoked.writes, returned.stored, strict=False):
            if dot is not None:
                stored.setdefault(write.key, []).append((returned.at, dot.replica, dot.counter))
    for invoked, returned in ended:
        for key, seen in zip(invoked.keys, returned.seen, strict=False):
            for at, replica, counter in stored.get(key, ()):
                if at < invoked.at and seen.context.get(replica, 0) < counter:
                    stale_s = max(stale_s, invoked.at - at)
    return stale_s


@pytest.mark.slow
def test_fault_37_copies_in_a_calm_world_are_a_second_old_at_most() -> None:
    stale_s = []
    for seed in range(3):
        result, answered = _run(_world(seed))
        assert not result.violations
        assert answered > 50
        stale_s.append(_stale_max_s(result.history))
    assert max(stale_s) <= AGE_S + 1e-6
    assert max(stale_s) > 0.3, "no copy was ever old, so nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_fault_37_no_promise_is_broken_by_copies_whatever_happens(seed: int) -> None:
    faults = (
        "halves",
        "isolate",
        "one_way",
        "flapping",
        "kill",
        "pause",
        "client_cut",
        "reset",
        "slow",
        "epoch",
    )
    result, answered = _run(_world(seed, faults=faults, repair_interval_s=1.0))
    assert [f"{violation.promise}: {violation.text}" for violation in result.violations] == []
    assert answered > 5


def _blind(copies: HotCopies, name: bytes, least: Dots, now: float) -> RecordAnswer | None:
    """A bug: whatever the session has seen."""
    copy = copies._copies.get(name)
    return None if copy is None or now - copy.sent_at > AGE_S else copy.answer


def _eternal(copies: HotCopies, name: bytes, least: Dots, now: float) -> RecordAnswer | None:
    """A bug: whatever its age."""
    copy = copies._copies.get(name)
    return None if copy is None or now - copy.sent_at > 5 * AGE_S else copy.answer


@pytest.mark.slow
def test_copies_that_forget_the_session_are_noticed() -> None:
    with patch.object(HotCopies, "get", _blind), patch.object(HotCopies, "wrote", lambda *_: None):
        found = {violation.promise for violation in _calm(0).violations}
    assert "sessions" in found


@pytest.mark.slow
def test_copies_that_live_too_long_are_noticed() -> None:
    with patch.object(HotCopies, "get", _eternal):
        assert _stale_max_s(_calm(0).history) > AGE_S


def _calm(seed: int) -> Result:
    return simulate(_world(seed), HOT, workload=EventualWorkload)
