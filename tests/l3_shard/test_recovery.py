"""What is told of a split that is over: first the counting, then whole shards that were split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvcomm.clock import pack
from kvcomm.wire.messages import (
    Failure,
    Message,
    Ping,
    Pong,
    RecordPut,
    RecordState,
    RecordVersions,
    RecordWrite,
    Sibling,
    SplitReport,
)
from l3_shard.peers import WatchOptions
from l3_shard.recovery import Recovery
from l3_shard.repair import RepairOptions
from l3_shard.shard import Shard
from tests.l3_shard.cluster import TENANT, Cluster, Faults

NOW_MS = 1_000_000


def state(*values: tuple[str, int, bytes | None, int]) -> RecordState:
    """(replica, counter, value, its age in ms) of each sibling."""
    siblings = [
        Sibling(replica, counter, pack(NOW_MS - age_ms), value) for replica, counter, value, age_ms in values
    ]
    return RecordState({replica: counter for replica, counter, _, _ in values}, siblings)


EMPTY = RecordState({}, [])
ONE, OTHER = ("a1", 1, b"1", 5000), ("b1", 1, b"2", 4000)


class Told(Recovery):
    """At a time that stands still until it is set."""

    def __init__(self) -> None:
        self.at = 100.0
        super().__init__(lambda key: key, lambda: self.at, lambda: NOW_MS)


def recovery() -> Told:
    made = Told()
    made.silenced("b")
    made.returned("b", 12.5)
    return made


def test_nothing_is_told_before_anything_was_split() -> None:
    assert Told().report() is None


def test_a_split_is_over_when_everybody_who_returned_has_been_found_equal() -> None:
    made = recovery()
    made.at = 100.5
    made.returned("c", 20.0)
    assert made.report() == SplitReport(20.0, 0, 0, 0, 0, -1.0)
    made.handed("b", 7)
    made.handed("x", 3)
    assert made.compared("b", 5), "they differed: once more"
    assert not made.compared("b", 2), "twice is enough where there is traffic"
    assert made.report() == SplitReport(20.0, 7, 7, 0, 0, -1.0)
    made.at = 103.0
    assert not made.compared("c", 0)
    assert made.report() == SplitReport(20.0, 7, 7, 0, 0, 3.0)
    made.at = 163.0
    assert not made.compared("c", 9), "that is no part of it"
    assert made.report() == SplitReport(20.0, 7, 7, 0, 0, 3.0)


@pytest.mark.parametrize("goes", [Recovery.silenced, Recovery.gone])
def test_who_is_gone_again_is_not_waited_for_and_nothing_is_called_equal_for_it(goes) -> None:
    made = recovery()
    goes(made, "b")
    assert made.report() == SplitReport(12.5, 0, 0, 0, 0, -1.0)
    assert not made.compared("b", 0)
    made.at = 200.0
    made.returned("b", 3.0)
    made.at = 201.5
    made.compared("b", 0)
    assert made.report() == SplitReport(3.0, 0, 0, 0, 0, 1.5)


def test_records_are_counted_once_and_by_what_is_shown_in_the_end() -> None:
    made = recovery()
    made.merged(b"new", EMPTY, state(OTHER))
    made.merged(b"both", state(ONE), state(ONE, OTHER))
    made.merged(b"deleted", state(ONE), state(("b1", 1, None, 3000)))
    made.merged(b"edited", state(ONE), state(ONE, ("b1", 1, None, 3000)))
    made.merged(b"sum/x", state(ONE), state(ONE, OTHER))
    made.merged(b"settled", state(ONE), state(ONE, OTHER))
    made.merged(b"settled", state(ONE, OTHER), state(("b1", 2, b"3", 2000)))
    made.compared("b", 0)
    report = made.report()
    assert report is not None and (report.merged, report.siblings_kept) == (6, 2)


def test_what_came_in_time_is_no_merge_of_a_split() -> None:
    made = recovery()
    made.merged(b"k", state(ONE), state(ONE, ("b1", 1, b"2", 30)))
    made.merged(b"same", state(ONE), state(ONE))
    made.compared("b", 0)
    made.merged(b"late", state(ONE), state(ONE, OTHER))
    report = made.report()
    assert report is not None and report.merged == 0, "nobody is away, and nobody has just come back"


def test_what_was_handed_on_by_one_that_noticed_first_counts() -> None:
    made = Told()
    made.merged(b"before", EMPTY, state(OTHER))
    made.silenced("b")
    made.merged(b"long before", EMPTY, state(OTHER))
    made.at = 110.0
    made.merged(b"just now", EMPTY, state(OTHER))
    made.at = 110.3
    made.returned("b", 10.0)
    made.merged(b"then", EMPTY, state(OTHER))
    made.compared("b", 0)
    report = made.report()
    assert report is not None and report.merged == 2


# -- whole shards


class Split(Cluster):
    """Shards that watch each other; ``sides`` do not hear each other."""

    sides: tuple[str, ...] = ()

    def __init__(self, names: str = "abc", **quorums: int) -> None:
        super().__init__(
            7,
            names,
            Faults(delay_s=0.002, disk_s=0.002),
            None,
            partial(Shard, watch=WatchOptions()),
            RepairOptions(interval_s=3600.0),
            None,
            **quorums,
        )

    def _request(
        self,
        node: str,
        message: Message,
        tenant: bytes,
        then: Callable[[Message], None],
        timeout_s: float,
        reliable: bool,
        asker: str = "",
    ) -> None:
        """Pings are answered by the server, not by the machine."""
        if not isinstance(message, Ping):
            super()._request(node, message, tenant, then, timeout_s, reliable, asker)
        elif self._passes(False, node, asker):
            self.after(0.004, lambda: then(Pong()))
        else:
            self.after(timeout_s, lambda: then(Failure("unavailable", "no reply in time")))

    def _passes(self, reliable: bool, *ends: str) -> bool:
        apart = any(ends[0] in side and ends[-1] not in side for side in self.sides)
        return super()._passes(reliable, *ends) and not (apart and all(ends))

    def put(self, node: str, key: bytes, value: bytes) -> Message:
        answers: list[Message] = []
        self.call(node, RecordPut(self.map.epoch, [RecordWrite(key, value, {})]), answers.append)
        self.run(self.now + 3.0)
        return answers[0]

    def reports(self) -> dict[str, SplitReport]:
        return {name: report for name, shard in self.shards.items() if (report := shard.split())}

    def equal(self) -> bool:
        records = [disk.records for disk in self.disks.values()]
        return all(each == records[0] for each in records)


def counters(cluster: Split, sides: tuple[str, ...], seconds: float) -> None:
    """Writes on each side of a split, then its end."""
    cluster.run(cluster.now + 5.0)
    cluster.sides = sides
    cluster.run(cluster.now + 5.0)
    for side in sides:
        for number in range(6):
            cluster.put(side[0], b"both%d" % number, side.encode())
            cluster.put(side[0], b"%s%d" % (side.encode(), number), b"1")
    cluster.run(cluster.now + seconds)
    cluster.sides = ()


def test_a_split_of_three_is_told_by_all_of_them_and_soon_over() -> None:
    cluster = Split()
    counters(cluster, ("ab", "c"), 30.0)
    healed_at = cluster.now
    while not cluster.equal():
        cluster.run(cluster.now + 0.05)
    assert cluster.now - healed_at < 3.0
    cluster.run(cluster.now + 3.0)
    reports = cluster.reports()
    assert set(reports) == {"a", "b", "c"}
    assert all(report.lasted_s > 30.0 and 0.0 <= report.equal_after_s < 3.0 for report in reports.values())
    assert reports["a"].hints_drained >= 12, "what a and b agreed on"
    assert reports["c"].merged >= 12 and reports["c"].siblings_kept == 6
    assert all(shard.watch_view().mode == "whole" for shard in cluster.shards.values())


def test_without_hints_comparing_finds_it_at_once() -> None:
    """The interval is an hour."""
    cluster = Split()
    cluster.repair = RepairOptions(interval_s=3600.0, hint_bytes_max=0)
    for name in "abc":
        cluster.crash(name)
    counters(cluster, ("ab", "c"), 10.0)
    healed_at = cluster.now
    while not cluster.equal():
        cluster.run(cluster.now + 0.05)
    assert cluster.now - healed_at < 3.0
    cluster.run(cluster.now + 3.0)
    reports = cluster.reports()
    assert reports["c"].hints_drained == 0 and reports["c"].records_compared >= 12
    assert reports["a"].siblings_kept + reports["b"].siblings_kept + reports["c"].siblings_kept >= 6


def test_the_minority_says_so_and_what_it_wrote_is_kept() -> None:
    cluster = Split("abcde", replicas=5, write=3)
    cluster.run(5.0)
    cluster.sides = ("abc", "de")
    cluster.run(10.0)
    modes = {name: shard.watch_view().mode for name, shard in cluster.shards.items()}
    assert modes == dict.fromkeys("abc", "majority") | dict.fromkeys("de", "minority")
    assert isinstance(cluster.put("a", b"k", b"1"), RecordVersions)
    assert not isinstance(cluster.put("d", b"k", b"2"), RecordVersions)
    cluster.sides = ()
    cluster.run(cluster.now + 5.0)
    assert {len(disk.records[TENANT + b"k"].siblings) for disk in cluster.disks.values()} == {2}
    assert all(0.0 <= report.equal_after_s < 3.0 for report in cluster.reports().values())


@pytest.mark.parametrize("seconds", [2.0, 20.0, 200.0])
def test_a_heal_is_noticed_as_soon_whatever_the_split_lasted(seconds: float) -> None:
    cluster = Split()
    cluster.run(5.0)
    cluster.sides = ("a", "bc")
    cluster.run(cluster.now + 4.0 + seconds)
    assert cluster.shards["a"].watch_view().silent == ("b", "c")
    cluster.sides = ()
    cluster.run(cluster.now + 0.5)
    assert cluster.shards["a"].watch_view().silent == ()
