"""Waiting for a quiet machine ends when it is quiet, and when patience does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from bench import host
from bench.host import Host, wait_for_quiet
from bench.scale import SMOKE


class FakeTime:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(host, "time", fake)
    return fake


def ticks(busy_first: int) -> Iterator[tuple[int, int]]:
    """100 ticks a poll; all busy for the first polls, then all idle."""
    idle = 0
    for poll in count():
        idle += 0 if poll <= busy_first else 100
        yield 100 * poll, idle


@pytest.mark.parametrize(("busy_polls", "waited_s"), [(0, 3.0), (10, 8.0)])
def test_it_waits_until_the_machine_has_been_quiet_for_a_while(
    monkeypatch: pytest.MonkeyPatch, clock: FakeTime, busy_polls: int, waited_s: float
):
    numbers = ticks(busy_polls)
    monkeypatch.setattr(host, "_processor_ticks", lambda: next(numbers))
    assert wait_for_quiet(60.0)
    assert clock.now - 100.0 == waited_s


def test_patience_ends(monkeypatch: pytest.MonkeyPatch, clock: FakeTime):
    numbers = ticks(10_000)
    monkeypatch.setattr(host, "_processor_ticks", lambda: next(numbers))
    assert not wait_for_quiet(20.0)
    assert clock.now - 100.0 == 20.0
    assert not wait_for_quiet(0.0)


def test_the_processors_ticks_add_up():
    whole, idle = host._processor_ticks()
    assert 0 < idle <= whole


def test_a_host_describes_itself():
    text = Host.measured(SMOKE).described()
    assert "cores of" in text and "CPython" in text and "64 KiB: median" in text
