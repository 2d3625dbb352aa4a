"""Calls that come when they come: clients that do not wait for answers before they ask again.

A closed loop slows down with the service that it asks, and never asks too much of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from kvcomm.errors import KVCommError

TICK_S = 0.005
"""What is due is begun so often."""

Act = Callable[[int], Awaitable[object]]
"""One call, by its number.  Raises ``KVCommError``."""


@dataclass(slots=True)
class Calls:
    """What came of them; times are monotonic seconds."""

    begin: float
    end: float
    """No call was begun after it."""
    done_at: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    """By code of the error."""
    begun: int = 0
    late_s: float = 0.0
    """The longest that these clients were late by themselves."""

    def rate(self, first_s: float = 0.0) -> float:
        """Calls done a second, from ``first_s`` after the begin to the end."""
        begin = self.begin + first_s
        return sum(begin <= at < self.end for at in self.done_at) / (self.end - begin)

    def steady_after_s(self, rate: float, share: float, over: int) -> float:
        """The second from which on ``share`` of ``rate`` was done over any ``over`` seconds; all of them =
        never."""
        seconds = int(self.end - self.begin)
        done = [0] * seconds
        for at in self.done_at:
            if 0 <= int(at - self.begin) < seconds:
                done[int(at - self.begin)] += 1
        for first in range(max(0, seconds - over), -1, -1):
            if sum(done[first : first + over]) < share * rate * min(over, seconds):
                return float(seconds if first == max(0, seconds - over) else first + 1)
        return 0.0


async def closed_loop(act: Act, callers: int, seconds: float) -> Calls:
    """``callers`` that each begin a call when the one before is over."""
    begin = time.monotonic()
    calls = Calls(begin, begin + seconds)

    async def caller() -> None:
        while time.monotonic() < calls.end:
            await _one(act, calls)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return calls


async def open_loop(act: Act, rate: float, seconds: float) -> Calls:
    """``rate`` calls a second, whatever becomes of them.  Returns at the end of that time; what is still
    under way then goes on, as it would in the service's clients."""
    begin = time.monotonic()
    calls, under_way = Calls(begin, begin + seconds), set[asyncio.Task[None]]()
    while (now := time.monotonic()) < calls.end:
        while calls.begun < (now - begin) * rate:
            task = asyncio.create_task(_one(act, calls))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.sleep(TICK_S)
        calls.late_s = max(calls.late_s, time.monotonic() - now - TICK_S)
    return calls


def _one(act: Act, calls: Calls) -> Coroutine[None, None, None]:
    calls.begun += 1
    return _noted(act(calls.begun), calls)


async def _noted(call: Awaitable[object], calls: Calls) -> None:
    try:
        await call
    except KVCommError as error:
        calls.failed[error.code] += 1
    else:
        calls.done_at.append(time.monotonic())


def failures_text(all_calls: Sequence[Calls]) -> str:
    """``3 unavailable, 1 refused`` of all of them."""
    total = sum((calls.failed for calls in all_calls), Counter[str]())
    return ", ".join(f"{number:,} {code}" for code, number in sorted(total.items())) or "none"
