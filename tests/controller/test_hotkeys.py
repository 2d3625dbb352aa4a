"""Which keys are hot, for how long, and who is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.hotkeys import REPEAT_WINDOWS, TTL_WINDOWS, HotKeys, HotOptions, HotSet
from kvcomm.wire.messages import (
    HOT_KEYS_MAX,
    HotRecords,
    HotReport,
    KeyHeat,
    RingMap,
    RingNode,
    RingTransition,
    WarmOrder,
)
from l2_rdma.rack import Rack

OPTIONS = HotOptions(sketch_bytes=16 << 10, names_max=64)
WINDOW_S = OPTIONS.window_s
REPEAT_S = REPEAT_WINDOWS * WINDOW_S


def node(name: str, rack: str = "rack-a") -> RingNode:
    return RingNode(name, f"tcp://{name}", "", "", rack, 1)


def ring(*pools: RingNode, transition: RingTransition | None = None) -> RingMap:
    return RingMap(3, 3, 2, 1, 1, [node("shard-0"), node("shard-1")], list(pools), [], transition)


def block(number: int) -> bytes:
    return bytes([number]) * 32


def report(
    blocks: dict[bytes, float] | None = None,
    records: dict[bytes, float] | None = None,
    served: dict[bytes, float] | None = None,
) -> HotReport:
    told_blocks, told_records, told_served = [
        [KeyHeat(key, count) for key, count in (told or {}).items()] for told in (blocks, records, served)
    ]
    return HotReport(WINDOW_S, told_blocks, told_records, told_served)


def windows(hot: HotKeys, begin: float, seconds: float, said: HotReport, of: RingMap) -> Iterator[tuple]:
    now = begin
    while now < begin + seconds:
        hot.heard(said, now)
        for order in hot.orders(of, now):
            yield now, order.node, order.message
        now += WINDOW_S


# -- the set -------------------------------------------------------------------------------------------------


def test_in_above_one_rate_out_below_another_and_not_before_its_time():
    hot = HotSet(10.0, 5.0, 30.0, 4)
    for now, rate, inside in (
        (0.0, 9.9, False), (1.0, 10.0, True), (2.0, 6.0, True), (3.0, 1.0, True), (30.9, 1.0, True),
        (31.0, 5.0, True), (32.0, 4.9, False), (33.0, 6.0, False),
    ):  # fmt: skip
        hot.update([(b"k", rate)], {b"k": rate}.__getitem__, now)
        assert (b"k" in hot) == inside, now
        assert hot.keys == ((b"k",) if inside else ())
    assert hot.entered_count == 1


def test_a_full_set_gives_way_to_what_is_twice_as_hot():
    hot = HotSet(10.0, 5.0, 3.0, 2)
    rates = {b"a": 20.0, b"b": 30.0}
    hot.update(rates.items(), rates.__getitem__, 0.0)
    rates[b"c"] = 100.0
    hottest = sorted(rates.items(), key=lambda item: -item[1])
    hot.update(hottest, rates.__getitem__, 1.0)
    assert hot.keys == (b"b", b"a"), "they stay for their time"
    hot.update(hottest, rates.__getitem__, 3.0)
    assert hot.keys == (b"c", b"b")
    rates[b"d"] = 59.0
    hot.update([(b"c", 100.0), (b"d", 59.0)], rates.__getitem__, 9.0)
    assert hot.keys == (b"c", b"b"), "not twice as hot as the coldest"


def test_nothing_enters_that_may_be_noise():
    hot = HotSet(10.0, 5.0, 3.0, 2)
    hot.update([(b"k", 50.0)], lambda key: 50.0, 0.0, noise_s=51.0)
    assert hot.keys == ()


@given(st.lists(st.lists(st.floats(0, 100), min_size=6, max_size=6), max_size=40))
def test_the_set_is_bounded_and_never_holds_what_was_cold_for_long(history):
    hot = HotSet(20.0, 10.0, 3.0, 3)
    entered: dict[bytes, float] = {}
    for now, drawn in enumerate(history):
        rates = {b"%d" % number: rate for number, rate in enumerate(drawn)}
        hottest = sorted(rates.items(), key=lambda item: -item[1])
        hot.update(hottest, rates.__getitem__, float(now))
        assert len(hot.keys) <= 3
        assert [rates[key] for key in hot.keys] == sorted((rates[key] for key in hot.keys), reverse=True)
        for key in hot.keys:
            begun = entered.setdefault(key, float(now))
            assert rates[key] >= 10.0 or now - begun < 3.0
            assert rates[key] >= 20.0 or begun < now
        entered = {key: begun for key, begun in entered.items() if key in hot}


# -- the cluster ---------------------------------------------------------------------------------------------


def test_every_shard_is_told_of_hot_records_again_and_again_and_that_there_are_none_once():
    hot = HotKeys(OPTIONS)
    told = list(windows(hot, 0.0, 20.0, report(records={b"k": 400.0, b"cold": 10.0}), ring()))
    lists = [(name, message) for _, name, message in told if isinstance(message, HotRecords)]
    assert lists[-2:] == [
        (name, HotRecords([b"k"], TTL_WINDOWS * WINDOW_S)) for name in ("shard-0", "shard-1")
    ]
    after = list(windows(hot, 20.0, 200.0, report(), ring()))
    empty = [(name, message.keys) for _, name, message in after if not message.keys]
    assert empty == [("shard-0", []), ("shard-1", [])], "once"
    assert after[-1][2].keys == [], "and nothing more"


def test_a_record_that_copies_answer_stays_hot_and_one_that_nobody_reports_becomes_so():
    hot = HotKeys(OPTIONS)
    list(windows(hot, 0.0, 20.0, report(records={b"k": 400.0}, served={b"k": 400.0, b"s": 300.0}), ring()))
    assert set(hot.records.keys) == {b"k", b"s"}
    list(windows(hot, 20.0, 60.0, report(records={b"k": 400.0}, served={b"k": 2.0}), ring()))
    assert hot.records.keys == (b"k",)


def test_what_is_an_error_of_a_summary_counts_for_nothing():
    hot = HotKeys(OPTIONS)
    said = HotReport(WINDOW_S, [], [KeyHeat(b"k", 1_000.0, 999.0)])
    list(windows(hot, 0.0, 20.0, said, ring()))
    assert hot.records.keys == ()


def test_the_home_of_each_rack_is_asked_for_a_hot_block_and_again_while_it_is_hot():
    hot = HotKeys(OPTIONS)
    pools = [node("pool-0", "rack-a"), node("pool-1", "rack-a"), node("pool-2", "rack-b")]
    said = report(blocks={block(number): 40.0 for number in range(6)})
    told = list(windows(hot, 0.0, REPEAT_S + 6.0, said, ring(*pools)))
    asked = [(now, name, key) for now, name, message in told for key in message.keys]
    assert {type(message) for _, _, message in told} == {WarmOrder}
    for number in range(6):
        homes = {Rack([("pool-0", 1), ("pool-1", 1)]).home(block(number)), "pool-2"}
        assert {name for _, name, key in asked if key == block(number)} == homes
        times = [now for now, name, key in asked if key == block(number) and name == "pool-2"]
        assert len(times) == 2 and times[1] - times[0] == REPEAT_S
    assert told[0][2].rate_bytes == OPTIONS.warm_rate_bytes


def test_without_a_rate_no_pool_is_asked_for_anything():
    hot = HotKeys(HotOptions(sketch_bytes=16 << 10, names_max=64, warm_rate_bytes=0))
    assert not list(windows(hot, 0.0, 20.0, report(blocks={block(1): 40.0}), ring(node("pool-0"))))
    assert hot.blocks.keys == (block(1),)


def test_shards_that_are_joining_are_told_too():
    joining = RingTransition("copy", [node("shard-1"), node("shard-2")], [])
    hot = HotKeys(OPTIONS)
    told = list(windows(hot, 0.0, 20.0, report(records={b"k": 400.0}), ring(transition=joining)))
    assert {name for _, name, _ in told} == {"shard-0", "shard-1", "shard-2"}


def test_nothing_is_ordered_between_two_windows():
    hot = HotKeys(OPTIONS)
    hot.heard(report(records={b"k": 4_000.0}), 0.0)
    assert hot.deadline() is None
    assert hot.orders(ring(), 0.0)
    assert hot.deadline() == WINDOW_S and not hot.orders(ring(), WINDOW_S - 0.1)
    assert hot.orders(ring(), WINDOW_S)


@pytest.mark.parametrize(
    "wrong", [{"leave_share": 0.0}, {"leave_share": 2.0}, {"blocks_max": HOT_KEYS_MAX + 1}]
)
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"leaves below|named at once"):
        HotOptions(**wrong)
