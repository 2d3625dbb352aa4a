"""Faults 19, 28 to 30, 32, 33: power cuts; disks that are full, stalled, failing or damaged.

Each shard keeps its records on a file system of its own (``lab.Disk``).  The catalogue's stall of 10 s
lasts 3 s here; ``KVCOMM_LONG_FAULTS=1`` makes it 10.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcomm.errors import KVCommError, OutcomeUnknown, Unavailable
from kvcomm.wire.messages import RecordFetch, RecordStates
from tests.system.conftest import eventually, metric
from tests.system.lab import SHARDS, STALL_S, Lab, disks_missing
from tests.system.traffic import Traffic

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def disks() -> None:
    if why := disks_missing():
        pytest.skip(why)


@pytest.fixture(scope="module")
def lab(disks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"), on_disks=True)
    try:
        yield lab
    finally:
        lab.close()


def pids(lab: Lab) -> list[int]:
    return [node.pid for node in lab.shards()]


# -- full


def test_fault_28_a_full_disk_on_one_shard(lab: Lab) -> None:
    """All goes on with the other two; what the shard missed it is told once there is room, and by the same
    process."""
    before = pids(lab)
    traffic = Traffic(lab, "fault-28")
    with traffic.running():
        with lab.disks["shard-1"].full():
            traffic.goes_on(40)
            assert traffic.eventual.counts.unknown == traffic.eventual.counts.refused == 0
            assert metric(lab.node("shard-1"), "kvcomm_disk_full") == 1
        traffic.goes_on()
        eventually(lambda: metric(lab.node("shard-1"), "kvcomm_disk_full") == 0)
    traffic.judge()
    log = lab.log("shard-1")
    assert log.index("writes are refused") < log.index("there is room again for writes")
    assert pids(lab) == before


def test_fault_28_a_shard_that_is_killed_while_its_disk_is_full(lab: Lab) -> None:
    """It comes back at the latest when there is room, with what it had, and by itself."""
    traffic = Traffic(lab, "fault-28-killed")
    with traffic.running():
        with lab.disks["shard-1"].full():
            before = lab.kill("shard-1", signal.SIGKILL)
            traffic.goes_on(40)
        after = lab.restarted(before)
        eventually(lambda: metric(after, "kvcomm_caught_up") == 1)
        eventually(lambda: metric(after, "kvcomm_strong_votes") == 1)
        traffic.goes_on()
    assert not list((lab.storage / "shard-1").rglob("*.suspect")), "a full disk is no damage"
    traffic.judge()


def test_fault_29_full_disks_on_a_majority(lab: Lab) -> None:
    """Writes are refused, in time and with the reason; reads go on; all heals by itself."""
    before = pids(lab)
    with lab.client() as kv:
        kv.strong("full").put("k", b"1")
        kv.strong("full").put("read only", b"1")
        kv.state("full").put("k", b"1")
    traffic = Traffic(lab, "fault-29")
    with traffic.running():
        with lab.disks["shard-1"].full(), lab.disks["shard-2"].full(), lab.client() as kv:
            with pytest.raises(Unavailable, match=r"disk is full, nothing was written: .* free some space"):
                kv.strong("full").put("never changed before", b"2", deadline_s=4)
            with pytest.raises((Unavailable, OutcomeUnknown), match="disk is full"):
                kv.strong("full").put("k", b"2", deadline_s=4)
            with pytest.raises((Unavailable, OutcomeUnknown), match="disk is full"):
                kv.state("full").put("k", b"2", deadline_s=4)
            assert kv.strong("full").read("read only", deadline_s=4).value == b"1"
            assert b"1" in kv.state("full").get("k", deadline_s=4).values
        traffic.goes_on()
    traffic.judge()
    assert traffic.eventual.counts.unknown + traffic.eventual.counts.refused > 0
    assert pids(lab) == before


# -- stalled


@pytest.mark.parametrize("node", ["shard-0", "shard-2"])
def test_fault_30_a_stalled_disk(lab: Lab, node: str) -> None:
    """The shard counts as slow and the others go on; what it did late changes nothing twice."""
    before = pids(lab)
    traffic = Traffic(lab, f"fault-30-{node}")
    with traffic.running():
        with lab.disks[node].stalled():
            begin = time.monotonic()
            while time.monotonic() < begin + STALL_S:
                traffic.goes_on(10)
        traffic.goes_on()
    assert traffic.eventual.gap.longest_s < STALL_S and traffic.strong.gap.longest_s < STALL_S
    traffic.judge()
    assert pids(lab) == before


# -- failing


def test_fault_32_a_disk_that_fails(lab: Lab) -> None:
    """The shard stops, says why, and is started again in vain until its disk is back."""
    traffic = Traffic(lab, "fault-32")
    with traffic.running():
        before, said = lab.node("shard-1"), len(lab.said())
        lab.disks["shard-1"].cut_power()
        eventually(lambda: "shard-1 ended with code 1" in lab.said()[said:])
        assert "the disk failed, what was written is unknown" in lab.said()[said:]
        traffic.goes_on(40)
        eventually(lambda: lab.said()[said:].count("shard-1 ended with code 1") >= 2)
        assert "Input/output error" in lab.log("shard-1")
        lab.disks["shard-1"].unmount()
        lab.disks["shard-1"].mount()
        lab.restarted(before)
        traffic.goes_on()
    traffic.judge()


# -- power


def cut_all_power(lab: Lab, *, boot: str) -> None:
    """Between two moments nothing reaches any disk any more; then the machine starts anew."""
    for node in SHARDS:
        lab.disks[node].cut_power()
    lab.stop(signal.SIGKILL)
    for node in SHARDS:
        lab.disks[node].unmount()
        lab.disks[node].mount()
    lab.stage.boot.write_text(boot)
    lab.start()


def test_fault_19_a_power_cut_of_all_disks(lab: Lab) -> None:
    traffic, said = Traffic(lab, "fault-19"), {node: len(lab.log(node)) for node in SHARDS}
    with traffic.running():
        traffic.goes_on(60)
        cut_all_power(lab, boot="second boot")
        traffic.goes_on()
    traffic.judge()
    for node in SHARDS:
        assert "is kept as" not in lab.log(node)[said[node] :], "what was synced is sound"


# -- damaged


def damaged(lab: Lab, node: str, damage: Callable[[Path], None]) -> None:
    """Let the node's process wake up to another disk than it left."""
    record = lab.kill(node, signal.SIGSTOP)
    damage(lab.storage / node)
    os.kill(record.pid, signal.SIGKILL)
    lab.restarted(record)


def flip(data: Path, value: bytes) -> None:
    """A bit in every copy of the value that the file holds."""
    content = data.read_bytes()
    assert value in content
    wrong = bytes([value[0] ^ 1]) + value[1:]
    with data.open("r+b") as file:
        file.write(content.replace(value, wrong))


def test_fault_33_flipped_bits_in_an_eventual_record(lab: Lab) -> None:
    """The shard does not serve it, has it again from the others, and says that it met damage."""
    value = b"an eventual value" * 8
    items = {f"k{number}": b"%d:" % number + value for number in range(20)}
    with lab.client() as kv:
        kv.state("flipped").put_many(items)
    lab.agreed("flipped", list(items))
    damaged(lab, "shard-0", lambda directory: flip(directory / "data.mdb", value))
    with lab.client() as kv:
        for _ in range(3):
            got = kv.state("flipped").get_many(list(items), deadline_s=10)
            assert {key: found.values for key, found in got.items()} == {
                key: (value,) for key, value in items.items()
            }
    stored = [lab.stored_key("state", "flipped", key) for key in items]

    def whole_again() -> bool:
        ring = lab.instance.ring()
        assert ring is not None
        try:
            answer = lab.ask(lab.node("shard-0"), RecordFetch(ring.epoch, stored))
        except KVCommError:
            return False
        if not isinstance(answer, RecordStates):
            return False
        held = [[each.value for each in state.siblings] if state else [] for state in answer.states]
        assert all(values in ([], [right]) for values, right in zip(held, items.values(), strict=True))
        return held == [[right] for right in items.values()]

    eventually(whole_again)


@pytest.mark.parametrize("database", ["records", "strong"])
def test_fault_33_a_truncated_database(lab: Lab, database: str) -> None:
    """It is set aside, which the log says, and the shard is filled by the others."""

    def cut(directory: Path) -> None:
        data = directory / ("data.mdb" if database == "records" else "strong/data.mdb")
        os.truncate(data, data.stat().st_size // 2 // PAGE_BYTES * PAGE_BYTES)

    traffic, said = Traffic(lab, f"fault-33-{database}"), len(lab.log("shard-2"))
    with traffic.running():
        traffic.goes_on(60)
        damaged(lab, "shard-2", cut)
        eventually(lambda: metric(lab.node("shard-2"), "kvcomm_strong_votes") == 1)
        traffic.goes_on()
    assert "it is kept as data.mdb.suspect" in lab.log("shard-2")[said:]
    traffic.judge()


def test_fault_33_flipped_bits_in_a_strong_record(lab: Lab) -> None:
    """It is not served and does not vote; the other two answer for it until they have filled it again."""
    value = b"a strong value" * 8
    data = lab.storage / "shard-0" / "strong" / "data.mdb"
    with lab.client() as kv:

        def on_all_three() -> bool:
            """A majority is enough to be done, and the third may have been slow."""
            held = data.read_bytes()
            missing = [number for number in range(6) if b"%d:" % number + value not in held]
            for number in missing:
                kv.strong("flipped").put(f"k{number}", b"%d:" % number + value, deadline_s=10)
            return not missing

        eventually(on_all_three)
    damaged(lab, "shard-0", lambda directory: flip(directory / "strong" / "data.mdb", value))
    with lab.client() as kv:
        for number in range(6):
            assert kv.strong("flipped").read(f"k{number}", deadline_s=10).value == b"%d:" % number + value
            kv.strong("flipped").put(f"k{number}", b"another", deadline_s=10)
            assert kv.strong("flipped").read(f"k{number}", deadline_s=10).value == b"another"
        node = lab.node("shard-0")

        def healed() -> bool:
            """A shard notices the damage when it is asked; it may have been passed over so far."""
            for number in range(6):
                kv.strong("flipped").read(f"k{number}", deadline_s=10)
            return metric(node, "kvcomm_strong_healed_records_total") >= 6

        eventually(healed)


@pytest.fixture(scope="module")
def relaxed_lab(disks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Eventual records are synced so seldom that no test sees it happen."""
    lab = Lab(tmp_path_factory.mktemp("relaxed"), on_disks=True, fsync="interval", fsync_interval="10m")
    try:
        yield lab
    finally:
        lab.close()


def test_fault_19_a_power_cut_under_fsync_interval(relaxed_lab: Lab) -> None:
    """As the policy says: strong records are back, the eventual ones of all hosts that lost power are set
    aside, which each shard's log says, and nothing made up is in their place."""
    lab = relaxed_lab
    traffic = Traffic(lab, "interval")
    with traffic.running():
        traffic.goes_on(60)
        cut_all_power(lab, boot="second boot")
    for node in SHARDS:
        assert "the machine ended under fsync: interval" in lab.log(node)
    traffic.strong.judge(lab)
    with lab.client() as kv:
        for key, found in kv.state("interval").get_many(traffic.eventual.keys()).items():
            assert set(found.values) <= traffic.eventual.attempted(key)


def test_fault_19_a_power_cut_that_a_shard_takes_for_a_crash_is_condemned(relaxed_lab: Lab) -> None:
    """The judge's own test: what was never synced is gone, and the name of the boot, by which a shard knows,
    has not changed."""
    lab = relaxed_lab
    traffic = Traffic(lab, "unnoticed", strong=0)
    with traffic.running():
        traffic.goes_on(60)
    cut_all_power(lab, boot=lab.stage.boot.read_text())
    keys = traffic.eventual.keys()
    states = lab.states(lab.node("shard-0"), "unnoticed", keys)
    with pytest.raises(AssertionError, match="lost"):
        traffic.eventual.judge_states(keys, states)
