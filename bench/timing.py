"""Timing in interleaved rounds.

One number on a shared machine says little: a neighbour's burst can double it.  So every operation is timed in
turns with its baseline (``A B C, B C A, C A B, ...``), each turn short against the bursts, and ratios are
taken *within* a round, where both met the same machine.  Reported are medians with the 10th and 90th
percentile, and the load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from statistics import median
from typing import Protocol, TypeVar

T = TypeVar("T")

CALLS_MAX = 2_000
"""Most calls in one turn: more would only average away what the percentiles should show."""


_CLOCK_READS = 1_000


class Operation(Protocol):
    """Something to time.  It times itself, so that a peer in a process of its own needs no extra hop."""

    @property
    def name(self) -> str: ...

    def times(self, count: int) -> list[float]:
        """Seconds of each of ``count`` calls, one after the other."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of this process.  With ``items`` above 1 a call does that many, and its time is for
    one."""

    name: str
    function: Callable[[], object]
    items: int = 1
    after: Callable[[], object] | None = None
    """Done after each call, outside the time: put back what the call changed."""

    def times(self, count: int) -> list[float]:
        clock, function, after, taken = time.perf_counter, self.function, self.after, []
        for _ in range(count):
            begin = clock()
            function()
            taken.append((clock() - begin) / self.items)
            if after is not None:
                after()
        return taken


def repeated(call: Call, number: int) -> Call:
    """The same, ``number`` of them one after the other in each call, where reading the clock costs as much as
    what is timed; it has no ``after``."""
    assert call.after is None

    def repeat() -> None:
        for _ in range(number):
            call.function()

    return Call(call.name, repeat, items=call.items * number)


def clock_cost_s() -> float:
    """Seconds that reading the clock takes: tens of nanoseconds, or microseconds in a guest that traps it."""
    begin = time.perf_counter()
    for _ in range(_CLOCK_READS):
        time.perf_counter()
    return (time.perf_counter() - begin) / _CLOCK_READS


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and where four fifths of the values lie."""

    p10: float
    median: float
    p90: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Raises ``ValueError`` for no values."""
        if not values:
            raise ValueError("nothing was measured")
        ordered = sorted(values)
        last = len(ordered) - 1
        return Spread(ordered[round(0.1 * last)], median(ordered), ordered[round(0.9 * last)])

    def scaled(self, factor: float) -> Spread:
        return Spread(self.p10 * factor, self.median * factor, self.p90 * factor)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Every time taken, by operation and round."""

    seconds: dict[str, list[list[float]]]
    load: tuple[float, float]
    """One-minute load average before and after."""

    def spread(self, name: str) -> Spread:
        """Of all calls, in seconds."""
        return Spread.of(list(chain.from_iterable(self.seconds[name])))

    def ratio(self, name: str, baseline: str, *, less_s: float = 0.0) -> Spread:
        """Of the rounds' medians, each divided by the baseline's of the same round.

        ``less_s`` is taken off first: a fixed part of the cost that is allowed beside the proportional one.
        """
        mine, theirs = self.seconds[name], self.seconds[baseline]
        return Spread.of(
            [(median(one) - less_s) / median(other) for one, other in zip(mine, theirs, strict=True)]
        )

    def fastest(self, names: Sequence[str]) -> str:
        """The one with the smallest median."""
        return min(names, key=lambda name: self.spread(name).median)


def round_robin(function: Callable[[T], object], items: Sequence[T]) -> Callable[[], object]:
    """``function`` of each item in turn, for ever."""
    turn = cycle(items)
    return lambda: function(next(turn))


def interleave(operations: Sequence[Operation], *, rounds: int, turn_s: float, warm_calls: int = 3) -> Rounds:
    """Time ``operations`` in ``rounds`` turns each of about ``turn_s`` seconds, rotating who goes first.

    Each operation is first called twice ``warm_calls`` times, to warm up and to see how often it fits into a
    turn.
    """
    if len({operation.name for operation in operations}) != len(operations):
        raise ValueError("two operations have one name")
    load_before = os.getloadavg()[0]
    counts = [_calls_in(operation, turn_s, warm_calls) for operation in operations]
    turns = list(zip(operations, counts, strict=True))
    seconds: dict[str, list[list[float]]] = {operation.name: [] for operation in operations}
    for index in range(rounds):
        first = index % len(turns)
        for operation, count in turns[first:] + turns[:first]:
            seconds[operation.name].append(operation.times(count))
    return Rounds(seconds, (load_before, os.getloadavg()[0]))


def _calls_in(operation: Operation, turn_s: float, warm_calls: int) -> int:
    """The first calls pay for what is paid once (pages, connections); the next tell how long one takes."""
    operation.times(warm_calls)
    begin = time.perf_counter()
    taken = operation.times(warm_calls)
    wall_s = (time.perf_counter() - begin) / warm_calls  # a call of many items takes longer than one's time
    return max(1, min(CALLS_MAX, int(turn_s / max(wall_s, median(taken), 1e-7))))
