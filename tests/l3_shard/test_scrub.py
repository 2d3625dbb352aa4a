"""A pass over everything: how fast, where it goes on, what becomes of what it finds."""

from __future__ import annotations

from itertools import count

import pytest

from kvcomm.machine import Ticket
from l3_shard.desk import Desk, ShardLimits
from l3_shard.repair import RepairOptions
from l3_shard.scrub import FIRST_S, NOTE_S, STEP_BYTES, STEP_RECORDS, Scrub, ScrubOptions
from l3_shard.storage import Audit, Audited
from l3_shard.timers import Timers
from tests.l3_shard.cluster import TENANT, Cluster
from tests.l3_shard.test_repair import put

K = TENANT + b"k"


class Bench:
    """A scrub, and the time."""

    def __init__(self, options: ScrubOptions, stored: dict[bytes, bytes] | None = None) -> None:
        numbers = count(1)
        self.desk, self.timers = Desk(ShardLimits(), numbers), Timers(numbers)
        self.found: list[tuple[str, bytes]] = []
        self.notes: dict[bytes, bytes | None] = dict(stored or {})
        self.scrub = Scrub(
            options,
            self.desk,
            self.timers,
            damaged=lambda keys: self.found.extend(("damaged", key) for key in keys),
            lost=lambda keys: self.found.extend(("lost", key) for key in keys),
            misfiled=lambda keys: self.found.extend(("misfiled", key) for key in keys),
            save=self.notes.__setitem__,
            stored=stored or {},
        )
        self.scrub.start()

    def step(self) -> Audit:
        """Let the next step come due."""
        due = self.timers.deadline()
        assert due is not None
        self.desk.now = due
        self.timers.run(due)
        (effect,) = self.desk.take()
        assert isinstance(effect, Audit)
        return effect

    def answer(self, audit: Audit, count: int, of: int, resume: bytes | None, **found: object) -> float:
        """Seconds until the next step."""
        parts = {"damaged": (), "lost": (), "misfiled": (), "looked_bytes": count, "failure": ""} | found
        event = Audited(audit.ticket, looked_count=count, total_count=of, resume=resume, **parts)  # type: ignore[arg-type]
        assert self.scrub.audited(event)
        due = self.timers.deadline()
        assert due is not None
        return due - self.desk.now


def test_a_pass_takes_its_time_whatever_there_is():
    bench = Bench(ScrubOptions(interval_s=1_000.0))
    audit = bench.step()
    assert bench.desk.now == FIRST_S
    assert audit == Audit(audit.ticket, b"", STEP_RECORDS, STEP_BYTES, "records")
    assert bench.answer(audit, 128, 512, b"a") == pytest.approx(250.0)
    audit = bench.step()
    assert audit.resume == b"a"
    assert bench.answer(audit, 384, 512, None) == pytest.approx(750.0)
    assert bench.scrub.counts.passes == 1
    assert bench.step().resume == b"", "and again"


def test_a_database_of_nothing_is_looked_at_once_an_interval():
    bench = Bench(ScrubOptions(interval_s=1_000.0))
    assert bench.answer(bench.step(), 0, 0, None) == 1_000.0


def test_no_more_is_read_a_second_than_allowed_though_a_pass_takes_longer():
    bench = Bench(ScrubOptions(interval_s=1.0, bytes_s=1_000))
    assert bench.answer(bench.step(), 100, 1_000, b"a", looked_bytes=50_000) == pytest.approx(50.0)


def test_a_step_that_the_disk_refuses_is_done_again_later():
    bench = Bench(ScrubOptions(interval_s=1_000.0))
    audit = bench.step()
    bench.answer(audit, 10, 20, b"a")
    audit = bench.step()
    assert 0.0 < bench.answer(audit, 0, 0, None, failure="EIO") <= 100.0
    assert bench.step().resume == b"a"
    assert bench.scrub.counts.failed == 1 and bench.scrub.counts.passes == 0


def test_where_a_pass_stands_outlives_the_process_and_is_not_written_at_every_step():
    bench = Bench(ScrubOptions(interval_s=10 * NOTE_S))
    bench.answer(bench.step(), 10, 1_000, b"a")
    assert bench.notes == {b"scrub/records": b"a"}
    bench.answer(bench.step(), 10, 1_000, b"b")
    assert bench.notes == {b"scrub/records": b"a"}, "six seconds later"
    stored = {note: value for note, value in bench.notes.items() if value}
    assert Bench(ScrubOptions(), stored).step().resume == b"a"


def test_the_answer_to_something_else_is_not_taken():
    bench = Bench(ScrubOptions())
    assert not bench.scrub.audited(Audited(Ticket(99), 0, 0, 0, (), (), (), None))


def test_whoever_mends_hears_of_what_is_found():
    bench = Bench(ScrubOptions())
    bench.answer(bench.step(), 3, 3, None, damaged=(b"d",), lost=(b"l",), misfiled=(b"m",))
    assert bench.found == [("damaged", b"d"), ("lost", b"l"), ("misfiled", b"m")]
    counts = bench.scrub.counts
    assert (counts.damaged, counts.lost, counts.misfiled, counts.looked) == (1, 1, 1, 3)


@pytest.mark.parametrize("bad", [{"interval_s": 0.0}, {"bytes_s": 0}])
def test_impossible_rates_are_refused(bad):
    with pytest.raises(ValueError, match="scrub"):
        ScrubOptions(**bad)


# -- in a cluster

OPTIONS = RepairOptions(interval_s=1_000.0, scrub=ScrubOptions(interval_s=10.0))


def cluster_with(records: int) -> Cluster:
    cluster = Cluster(1, repair=OPTIONS)
    cluster.run(until=2.0)
    for number in range(records):
        put(cluster, "abc"[number % 3], b"k%d" % number, b"v%d" % number, {})
    cluster.run(until=cluster.now + 1.0)
    return cluster


def test_what_is_damaged_and_forgotten_is_fetched_from_the_others_and_costs_the_id():
    cluster = cluster_with(5)
    disk = cluster.disks["b"]
    before = dict(disk.records)
    disk.damaged.update(before)
    cluster.crash("b")  # it knows nothing from memory
    replica = cluster.shards["b"].replica
    cluster.run(until=cluster.now + 60.0)
    assert not disk.damaged and disk.records == before
    assert cluster.shards["b"].replica != replica, "counters may have been lost with them"
    assert cluster.shards["b"].damaged_now() == 0
    assert cluster.shards["b"].scrub_counts()["records"].damaged == 5


def test_what_is_damaged_and_still_in_memory_is_written_anew_and_costs_nothing():
    cluster = cluster_with(5)
    disk = cluster.disks["b"]
    before, replica = dict(disk.records), cluster.shards["b"].replica
    disk.damaged.update(before)
    cluster.away.add("b")  # nobody needs to be asked
    cluster.run(until=cluster.now + 60.0)
    assert not disk.damaged and disk.records == before and cluster.shards["b"].replica == replica


def test_a_record_that_nobody_else_can_give_back_now_is_asked_for_again():
    cluster = Cluster(1, repair=RepairOptions(interval_s=8.0, scrub=ScrubOptions(interval_s=10.0)))
    cluster.run(until=2.0)
    put(cluster, "a", b"k", b"v", {})
    cluster.run(until=cluster.now + 1.0)
    disk = cluster.disks["b"]
    disk.damaged.add(K)
    cluster.crash("b")
    cluster.away.add("b")
    cluster.run(until=cluster.now + 60.0)
    assert disk.damaged and cluster.shards["b"].damaged_now() == 1
    cluster.away.clear()
    cluster.run(until=cluster.now + 30.0)
    assert not disk.damaged and cluster.shards["b"].damaged_now() == 0


def test_a_record_that_is_gone_is_got_back_and_not_taken_for_one_that_never_was():
    cluster = cluster_with(3)
    disk = cluster.disks["b"]
    disk.lost.update(disk.records)
    cluster.crash("b")
    replica = cluster.shards["b"].replica
    cluster.run(until=cluster.now + 60.0)
    shard = cluster.shards["b"]
    assert not disk.lost and shard.damaged_now() == 0 and shard.replica != replica
    assert shard.scrub_counts()["records"].lost == 3
    assert disk.records == cluster.disks["a"].records


def test_a_record_that_is_gone_but_in_memory_is_written_anew():
    cluster = cluster_with(3)
    disk, replica = cluster.disks["b"], cluster.shards["b"].replica
    disk.lost.update(disk.records)
    cluster.away.add("b")
    cluster.run(until=cluster.now + 60.0)
    assert not disk.lost and cluster.shards["b"].replica == replica
