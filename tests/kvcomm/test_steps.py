"""The steps that need no peer, on both drivers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcomm.rpc import AsyncPeers, Peers, run_async, run_blocking
from kvcomm.steps import Park, Steps
from tests.peers import IDENTITY, soon


class Flight:
    """A waiter as ``kvcomm.steps`` describes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._calls: list[Callable[[], None]] = []
        self.parked = threading.Event()

    def add_callback(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._done:
                self._calls.append(call)
                self.parked.set()
                return
        call()

    def land(self) -> None:
        with self._lock:
            self._done = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()


def blocking(steps: Steps[Any], deadline: float) -> Any:
    return run_blocking(steps, Peers(IDENTITY), deadline)


def asynchronous(steps: Steps[Any], deadline: float) -> Any:
    async def main() -> Any:
        return await run_async(steps, AsyncPeers(IDENTITY), deadline)

    return asyncio.run(main())


drivers = pytest.mark.parametrize("driver", [blocking, asynchronous])


def park(flight: Flight, timeout_s: float | None = None) -> Steps[bool]:
    landed: bool = yield Park(flight, timeout_s)
    return landed


@drivers
def test_park_ends_when_another_thread_lands(driver: Any) -> None:
    flight = Flight()

    def land() -> None:
        assert flight.parked.wait(10.0)
        flight.land()

    pilot = threading.Thread(target=land)
    pilot.start()
    assert driver(park(flight), soon()) is True
    pilot.join()


@drivers
def test_park_behind_what_has_landed_does_not_wait(driver: Any) -> None:
    flight = Flight()
    flight.land()
    assert driver(park(flight), soon()) is True


@drivers
@pytest.mark.parametrize(("timeout_s", "deadline_s"), [(0.03, 9.0), (None, 0.03), (9.0, 0.03), (None, -1.0)])
def test_park_ends_in_time(driver: Any, timeout_s: float | None, deadline_s: float) -> None:
    begin = time.monotonic()
    flight = Flight()
    assert driver(park(flight, timeout_s), begin + deadline_s) is False
    assert time.monotonic() >= begin + min(0.03, deadline_s)
    flight.land()  # later than the parked operation, whose loop is closed by now


@drivers
def test_many_park_behind_one(driver: Any) -> None:
    flight = Flight()
    landed: list[bool] = []
    followers = [
        threading.Thread(target=lambda: landed.append(driver(park(flight), soon()))) for _ in range(10)
    ]
    for follower in followers:
        follower.start()
    assert flight.parked.wait(10.0)
    flight.land()
    for follower in followers:
        follower.join()
    assert landed == [True] * 10
