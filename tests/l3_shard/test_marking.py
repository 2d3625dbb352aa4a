"""What a shard makes of its clients' reports and the controllers' list."""

from __future__ import annotations

from math import inf, nan

import pytest

from kvcomm.errors import Refused, TooLarge
from kvcomm.machine import ConnectionId, Origin
from kvcomm.wire.frames import encode_frame
from kvcomm.wire.messages import (
    HOT_KEYS_MAX,
    TRAFFIC_AGENTS_MAX,
    AgentTraffic,
    Done,
    Failure,
    Fetched,
    HotRecords,
    HotReport,
    KeyHeat,
    RecordStates,
)
from l3_shard.marking import COUNT_MAX, TRAFFIC_MAX, TTL_MAX_S, Marking

NODES, TENANT = b"N" * 16, b"T" * 16
AGENT = Origin(ConnectionId(1), 1, TENANT, 7)
LEADER = Origin(ConnectionId(2), 1, NODES, 8)
BLOCK = b"b" * 32


def client_report(count: float = 3.0, *, error: float = 0.0, fetched: int = 1) -> HotReport:
    traffic = AgentTraffic(99, "rack-a", [Fetched(5, fetched, 100, 10)])
    return HotReport(
        2.0, [KeyHeat(BLOCK, count, error)], [KeyHeat(b"state/n/k", count, error)], traffic=[traffic]
    )


def test_reports_are_added_up_under_their_tenant_and_their_sender():
    marking = Marking(NODES)
    assert marking.take(AGENT, client_report(), 1.0) == Done()
    marking.take(AGENT, client_report(4.0), 1.5)
    marking.asked(TENANT, [b"state/n/k", b"state/n/k"])
    report = marking.report(2.0)
    assert report == HotReport(
        0.0,
        [KeyHeat(BLOCK, 7.0)],
        [KeyHeat(TENANT + b"state/n/k", 7.0)],
        [KeyHeat(TENANT + b"state/n/k", 2.0)],
        [AgentTraffic(7, "rack-a", [Fetched(5, 2, 200, 20)])],
    )
    assert marking.report(4.0) is None, "nothing has come since"
    marking.asked(TENANT, [b"state/n/k"])
    later = marking.report(6.0)
    assert later is not None and later.lasted_s == 2.0


@pytest.mark.parametrize(
    ("count", "error", "kept"),
    [(inf, 0.0, KeyHeat(BLOCK, COUNT_MAX)), (nan, nan, KeyHeat(BLOCK, 0.0)), (-5.0, 1.0, KeyHeat(BLOCK, 0.0)),
     (2.0, inf, KeyHeat(BLOCK, 2.0, 2.0)), (2.0, -1.0, KeyHeat(BLOCK, 2.0))],
)  # fmt: skip
def test_numbers_of_a_client_are_bounded(count, error, kept):
    marking = Marking(NODES)
    marking.take(AGENT, client_report(1.0), 0.0)
    marking.report(0.0)
    marking.take(AGENT, client_report(count, error=error), 1.0)
    report = marking.report(2.0)
    assert report is not None and report.blocks == [kept]


def test_what_is_no_key_and_negative_traffic_is_left_out():
    marking = Marking(NODES)
    marking.take(
        AGENT,
        HotReport(
            2.0,
            [KeyHeat(b"short", 1.0)],
            [KeyHeat(b"", 1.0), KeyHeat(b"n" * 481, 1.0)],
            traffic=[AgentTraffic(1, "r" * 999, [Fetched(5, -1, 100, 10)])],
        ),
        0.0,
    )
    report = marking.report(1.0)
    assert report is not None and not (report.blocks or report.records)
    assert report.traffic == [AgentTraffic(7, "r" * 200, [])]


def test_whatever_clients_say_can_be_told_on():
    marking, most = Marking(NODES), (1 << 64) - 1
    report = HotReport(2.0, [], [], traffic=[AgentTraffic(9, "r", [Fetched(most, most, most, most)])])
    for _ in range(3):
        marking.take(AGENT, report, 1.0)
    told = marking.report(2.0)
    assert told is not None and encode_frame(1, told)
    assert told.traffic[0].fetched == [Fetched(most, TRAFFIC_MAX, TRAFFIC_MAX, TRAFFIC_MAX)]


def test_too_many_keys_are_refused_and_agents_forgotten():
    marking = Marking(NODES)
    with pytest.raises(TooLarge):
        marking.take(AGENT, HotReport(2.0, [KeyHeat(BLOCK, 1.0)] * (HOT_KEYS_MAX + 1), []), 0.0)
    with pytest.raises(TooLarge):
        marking.take(LEADER, HotRecords([b"k"] * (HOT_KEYS_MAX + 1), 6.0), 0.0)
    for caller in range(TRAFFIC_AGENTS_MAX + 5):
        marking.take(Origin(ConnectionId(1), 1, TENANT, caller), client_report(), 0.0)
    report = marking.report(1.0)
    assert report is not None and len(report.traffic) == TRAFFIC_AGENTS_MAX


def test_answers_about_hot_records_are_marked_until_the_list_is_void():
    marking = Marking(NODES)
    names = [b"cold", b"hot"]
    assert marking.among(TENANT, names, 0.0) == []
    marking.take(LEADER, HotRecords([TENANT + b"hot"], 6.0), 10.0)
    assert marking.hot_count(12.0) == 1
    assert marking.among(TENANT, names, 15.9) == [1]
    assert marking.among(b"O" * 16, names, 15.9) == [], "another tenant's"
    assert marking.among(TENANT, names, 16.0) == [] and marking.hot_count(16.0) == 0
    marking.take(LEADER, HotRecords([TENANT + b"hot"], inf), 20.0)
    assert marking.among(TENANT, names, 20.0 + TTL_MAX_S) == []
    marking.take(LEADER, HotRecords([], 6.0), 21.0)
    assert marking.among(TENANT, names, 21.0) == []


def test_only_whole_answers_are_marked():
    marking = Marking(NODES)
    assert marking.marked(RecordStates([None, None]), [1]) == RecordStates([None, None], False, [1])
    degraded, failure = RecordStates([None], True), Failure("unavailable", "")
    assert marking.marked(degraded, [0]) is degraded and marking.marked(failure, [0]) is failure
    assert marking.marked_count == 1


def test_only_nodes_say_what_is_hot():
    with pytest.raises(Refused):
        Marking(NODES).take(AGENT, HotRecords([b"k"], 6.0), 0.0)
