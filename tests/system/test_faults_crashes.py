"""Faults 15 to 18: shards killed at every step, emptied, killed all at once; nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from kvcomm.instance import NodeRecord
from tests.system.conftest import eventually, metric
from tests.system.lab import SHARDS, Lab
from tests.system.traffic import Traffic

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EVENTUAL_STEPS = (
    "received RecordPut",
    "before persist records",
    "persisted records",
    "before ask RecordReplicate",
    "after ask RecordReplicate",
    "received RecordReplicate",
    "before reply RecordVersions",
    "before reply Done",
)
STRONG_STEPS = (
    "received StrongChange",
    "before persist promise",
    "persisted promise",
    "before ask StrongAccept",
    "before persist accept",
    "persisted accept",
    "before reply StrongOutcomes",
)
AFTER_ANSWERING = (
    "after reply RecordVersions",
    "after reply Done",
    "after reply StrongPromised",
    "after reply StrongAccepted",
    "after reply StrongOutcomes",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        yield lab
    finally:
        lab.close()


def kill_at(lab: Lab, traffic: Traffic, step: str, turn: int) -> NodeRecord:
    """Let one shard die at this step, after a few that it survives, and come back."""
    node = SHARDS[turn % len(SHARDS)]
    before = lab.node(node)
    lab.arm(node, step, passes=turn % 4)
    eventually(lambda: not lab.armed(node))
    after = lab.restarted(before)
    traffic.goes_on()
    return after


def kill_at_each(lab: Lab, steps: tuple[str, ...], name: str) -> None:
    traffic = Traffic(lab, name)
    with traffic.running():
        for turn, step in enumerate(steps):
            kill_at(lab, traffic, step, turn)
    traffic.judge()


@pytest.mark.parametrize("steps", [EVENTUAL_STEPS, STRONG_STEPS], ids=["eventual", "strong"])
def test_fault_15_a_shard_killed_at_every_step_before_it_answers(lab: Lab, steps: tuple[str, ...]) -> None:
    kill_at_each(lab, steps, f"fault-15-{len(steps)}")


def test_fault_17_a_shard_killed_right_after_it_answered(lab: Lab) -> None:
    kill_at_each(lab, AFTER_ANSWERING, "fault-17")


def test_fault_16_a_shard_with_an_empty_disk_under_its_old_name(lab: Lab) -> None:
    """It begins under a new replica id, votes again once it has caught up, and the counters of its former
    life are not given out twice: such writes would be lost."""
    traffic = Traffic(lab, "fault-16")
    with traffic.running():
        known = replica_ids(lab, traffic)
        before = lab.kill("shard-1", signal.SIGSTOP)
        directory = lab.storage / "shard-1"
        shutil.move(directory, directory.with_name("lost"))
        os.kill(before.pid, signal.SIGKILL)
        after = lab.restarted(before)
        eventually(lambda: metric(after, "kvcomm_caught_up") == 1)
        eventually(lambda: metric(after, "kvcomm_strong_votes") == 1)
        eventually(lambda: len(replica_ids(lab, traffic) - known) == 1)
        traffic.goes_on()
    traffic.judge()


def replica_ids(lab: Lab, traffic: Traffic) -> set[str]:
    """Of all that coordinated a write of the traffic so far."""
    keys = traffic.eventual.keys()
    states = lab.states(lab.node("shard-0"), traffic.eventual.name, keys)
    return {replica for state in states if state is not None for replica in state.context}


def test_fault_18_all_shards_killed_at_once(lab: Lab) -> None:
    traffic = Traffic(lab, "fault-18")
    with traffic.running():
        before = lab.shards()
        for node in before:
            os.kill(node.pid, signal.SIGKILL)
        for node in before:
            lab.restarted(node)
        traffic.goes_on()
    traffic.judge()
