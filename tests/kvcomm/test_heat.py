"""What a client counts, and how its reports travel: in front of requests, or alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcomm import heat
from kvcomm.block import BlockKey, Incarnation, header_for
from kvcomm.heat import ALONE_WAIT_S, INTERVAL_S, Heat, Window
from kvcomm.sketch import Counted
from kvcomm.steps import Ask, Call, Emit, Steps, Submit, Wait, WaitAny
from kvcomm.tier import Block, TierName
from kvcomm.wire.messages import AgentTraffic, Fetched, HotReport, KeyHeat, Ping
from tests.kvcomm.test_blockplane import NAMESPACE

ME = Incarnation(7)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Shards:
    addresses: Sequence[str] = ("unix:///shard-0", "unix:///shard-1")
    well: list[str] = field(default_factory=lambda: ["unix:///shard-1"])

    def shard_address(self, address: str) -> bool:
        return address in self.addresses

    def any_shard(self) -> str | None:
        return self.well[0] if self.well else None


@dataclass
class Driver:
    """Runs steps; answers each call with its own address."""

    submitted: list[Ask] = field(default_factory=list)
    waited: list[float | None] = field(default_factory=list)

    def run(self, steps: Steps[Any]) -> Any:
        answer: Any = None
        try:
            while True:
                step = steps.send(answer)
                answer = self._answer(step)
        except StopIteration as stop:
            return stop.value

    def _answer(self, step: Any) -> Any:
        match step:
            case Submit():
                self.submitted += step.asks
                return [Call(ask) for ask in step.asks]
            case Wait():
                return step.call.ask.address
            case WaitAny():
                self.waited.append(step.timeout_s)
                return None
        return None

    @property
    def reports(self) -> list[HotReport]:
        return [ask.message for ask in self.submitted if isinstance(ask.message, HotReport)]


def asking(*addresses: str) -> Steps[list[str]]:
    calls = yield Submit([Ask(address, Ping()) for address in addresses])
    yield Emit("something")
    answers = []
    for call in calls:
        answers.append((yield Wait(call)))
    return answers


def block(number: int, tier: TierName, producer: Incarnation) -> Block:
    key = BlockKey(bytes([number]) * 32)
    payload = memoryview(bytes(NAMESPACE.block_bytes))
    header = header_for(NAMESPACE, key, key, payload, logical_start=0, producer=producer)
    return Block(header, payload, tier, pinned=False)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted(clock: Clock) -> Heat:
    made = Heat(ME, "rack-a", Shards(), clock)
    made.read_records([b"state/n/a", b"state/n/a", b"state/n/b"])
    return made


def test_nothing_is_said_before_it_is_due(counted, clock):
    driver = Driver()
    clock.now += INTERVAL_S - 0.01
    assert driver.run(counted.riding(asking("unix:///shard-0"))) == ["unix:///shard-0"]
    assert driver.reports == [] and counted.reports_count == 0


def test_a_report_rides_in_front_of_the_first_request_to_a_shard(counted, clock):
    driver = Driver()
    clock.now += INTERVAL_S
    answers = driver.run(counted.riding(asking("unix:///pool", "unix:///shard-1", "unix:///shard-0")))
    assert answers == ["unix:///pool", "unix:///shard-1", "unix:///shard-0"]
    assert [ask.address for ask in driver.submitted] == [
        "unix:///shard-1", "unix:///pool", "unix:///shard-1", "unix:///shard-0",
    ]  # fmt: skip
    assert driver.reports == [
        HotReport(INTERVAL_S, [], [KeyHeat(b"state/n/a", 2.0), KeyHeat(b"state/n/b", 1.0)])
    ]
    driver.run(counted.riding(asking("unix:///shard-0")))
    assert len(driver.reports) == 1, "the next one has time again"


def test_one_that_cannot_ride_goes_alone_half_as_often_and_is_hardly_waited_for(counted, clock):
    driver = Driver()
    clock.now += INTERVAL_S
    driver.run(counted.riding(asking("unix:///pool")))
    assert driver.reports == []
    clock.now += INTERVAL_S
    driver.run(counted.riding(asking("unix:///pool")))
    [_, _, alone] = driver.submitted
    assert isinstance(alone.message, HotReport) and alone.address == "unix:///shard-1"
    assert driver.waited == [ALONE_WAIT_S] and alone.timeout_s == ALONE_WAIT_S


def test_without_a_shard_that_is_well_it_stays(clock):
    lonely = Heat(ME, "", Shards(well=[]), clock)
    lonely.read_records([b"state/n/a"])
    driver = Driver()
    clock.now += 3 * INTERVAL_S
    driver.run(lonely.riding(asking("unix:///pool")))
    assert driver.reports == []


def test_who_reads_nothing_says_nothing(clock):
    idle = Heat(ME, "", Shards(), clock)
    driver = Driver()
    clock.now += 60.0
    driver.run(idle.riding(asking("unix:///shard-0")))
    assert driver.reports == []


def test_an_operation_that_fails_fails_as_it_would(counted, clock):
    def failing() -> Steps[None]:
        yield Submit([Ask("unix:///shard-0", Ping())])
        raise KeyError("its own")

    clock.now += INTERVAL_S
    with pytest.raises(KeyError, match="its own"):
        Driver().run(counted.riding(failing()))


def test_blocks_of_others_are_traffic(clock):
    mine = Heat(ME, "rack-a", Shards(), clock)
    other = Incarnation(9)
    mine.fetched([block(1, "l1", other), block(2, "l2", other), block(3, "l3", other), block(4, "l2", ME)])
    driver = Driver()
    clock.now += INTERVAL_S
    driver.run(mine.riding(asking("unix:///shard-0")))
    [report] = driver.reports
    assert {each.key[0]: each.count for each in report.blocks} == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}
    assert report.traffic == [
        AgentTraffic(7, "rack-a", [Fetched(9, 2, NAMESPACE.block_bytes, NAMESPACE.block_bytes)])
    ]


def test_long_names_do_not_make_a_report_long(clock, monkeypatch):
    monkeypatch.setattr(heat, "NAMES_BYTES_MAX", 25)
    busy = Heat(ME, "", Shards(), clock)
    busy.read_records([b"a" * 10, b"b" * 10, b"c" * 10])
    driver = Driver()
    clock.now += INTERVAL_S
    driver.run(busy.riding(asking("unix:///shard-0")))
    assert [each.key for each in driver.reports[0].records] == [b"a" * 10, b"b" * 10]


def test_a_window_is_exact_and_prefers_heads_among_equals():
    window = Window()
    window.add([b"head", b"middle", b"tail"])
    window.add([b"tail"])
    assert window.total == 4
    assert window.drain(2) == [Counted(b"tail", 2.0), Counted(b"head", 1.0)]
    assert window.drain(2) == [] and window.total == 0


def test_beyond_its_room_a_window_keeps_the_heaviest(monkeypatch):
    monkeypatch.setattr(heat, "EXACT_KEYS", 50)
    monkeypatch.setattr(heat, "SUMMARY_KEYS", 20)
    window = Window()
    for number in range(1_000):
        window.add([b"hot", b"cold-%d" % number])
    [hottest] = window.drain(1)
    assert hottest.key == b"hot" and hottest.count - hottest.error <= 1_000 <= hottest.count


def test_a_window_adds_up_what_others_counted():
    window = Window()
    window.add([b"a"])
    window.take([Counted(b"a", 2.0, 0.5), Counted(b"b", 4.0)])
    assert window.drain(5) == [Counted(b"b", 4.0), Counted(b"a", 3.0, 0.5)]


def test_threads_may_count_while_another_reports(clock):
    """Nothing raises, and no key is counted more often than it was read."""
    busy, stop = Heat(ME, "", Shards(), clock), threading.Event()
    reads = [0] * 3

    def read(number: int) -> None:
        while not stop.is_set():
            busy.read_records([b"%d" % (reads[number] % 500) for _ in range(20)])
            reads[number] += 20

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    driver = Driver()
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            clock.now += INTERVAL_S
            driver.run(busy.riding(asking("unix:///shard-0")))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    told = sum(each.count for report in driver.reports for each in report.records)
    assert 0 < told <= sum(reads)
