"""``Storing``: one put of many blocks, each to every one of its owners, pipelined by shard.

While keys are being moved from one placement to another, the shards of both are owners here.

One copy that others can read is what the caller wants, so a put is done when every block has one, and its
other owners have had as long again as that took (``LAG_MIN_S`` at least).  An owner that is slower is left to
get its copies from the others (``l3_shard.refilling``), and is given none for a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from kvcomm.block import Buffer
from kvcomm.steps import Answer, Ask, Call, Steps, Submit, Wait, WaitAny
from kvcomm.tier import BlockCopy, PutStatus
from kvcomm.wire.messages import BlockPut, BlockStored, Failure, Want
from l3_shard.routes import WINDOW_BYTES, WINDOW_KEYS, WINDOWS_IN_FLIGHT, Routes

LAG_MIN_S = 0.05

_STATUSES: tuple[PutStatus, ...] = get_args(PutStatus)
_BEST_FIRST: tuple[PutStatus, ...] = (
    "stored", "present", "pending", "full", "too_large", "corrupt", "expired", "refused", "unavailable",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class _Window:
    node: str
    indices: list[int]
    call: Call | None = None


@dataclass(eq=False, slots=True)
class _Lane:
    waiting: deque[int] = field(default_factory=deque)
    under_way: int = 0


class Storing:
    """One operation; run :meth:`steps` once."""

    def __init__(self, routes: Routes, copies: Sequence[BlockCopy]) -> None:
        self._routes, self._copies = routes, copies
        self._lanes: dict[str, _Lane] = {}
        self._under_way: deque[_Window] = deque()
        self._stale: set[int] = set()
        self._statuses: list[PutStatus] = ["unavailable"] * len(copies)
        self._copies_max = 1

    def steps(self) -> Steps[list[PutStatus]]:
        began = self._routes.now()
        for index in range(len(self._copies)):
            self._route(index)
        until: float | None = None
        while True:
            yield from self._top_up()
            if not self._under_way:
                return self._statuses
            if until is None and self._all_readable():
                now = self._routes.now()
                until = now + max(LAG_MIN_S, now - began)
            window = yield from self._next(until)
            if window is None:
                self._leave_behind()
                return self._statuses
            answer: Answer = yield Wait(_call_of(window))
            self._lanes[window.node].under_way -= 1
            self._take(window, answer)

    def _all_readable(self) -> bool:
        return all(status in ("stored", "present") for status in self._statuses)

    def _next(self, until: float | None) -> Steps[_Window | None]:
        """A window that is answered; ``None`` = none was in time.  Without a time limit the oldest."""
        if until is None and self._copies_max == 1:
            return self._under_way.popleft()
        timeout_s = None if until is None else max(0.0, until - self._routes.now())
        done: Call | None = yield WaitAny([_call_of(window) for window in self._under_way], timeout_s)
        window = next((window for window in self._under_way if window.call is done), None)
        if window is not None:
            self._under_way.remove(window)
        return window

    def _leave_behind(self) -> None:
        """Every block has a copy; who has not taken its own by now does so without us."""
        for window in self._under_way:
            self._routes.counts.lagging_count += len(window.indices)
            self._routes.lagged(window.node)
        self._routes.counts.lagging_count += sum(len(lane.waiting) for lane in self._lanes.values())

    def _route(self, index: int) -> None:
        takers = self._routes.takers(self._copies[index].key)
        self._copies_max = max(self._copies_max, len(takers))
        for node in takers:
            self._lanes.setdefault(node, _Lane()).waiting.append(index)

    def _route_again(self) -> None:
        """What waits was placed by the old map."""
        waiting = sorted({index for lane in self._lanes.values() for index in lane.waiting})
        for lane in self._lanes.values():
            lane.waiting.clear()
        for index in waiting:
            self._route(index)

    def _top_up(self) -> Steps[None]:
        windows: list[_Window] = []
        asks: list[Ask] = []
        for node, lane in self._lanes.items():
            if not self._routes.healthy(node):
                lane.waiting.clear()
            while lane.waiting and lane.under_way < WINDOWS_IN_FLIGHT:
                window = _Window(node, self._next_indices(lane))
                lane.under_way += 1
                windows.append(window)
                asks.append(self._ask(window))
        if asks:
            calls: list[Call] = yield Submit(asks)
            for window, call in zip(windows, calls, strict=True):
                window.call = call
            self._under_way += windows

    def _next_indices(self, lane: _Lane) -> list[int]:
        indices = [lane.waiting.popleft()]
        size = self._copies[indices[0]].copy_bytes
        while lane.waiting and len(indices) < WINDOW_KEYS:
            size += self._copies[lane.waiting[0]].copy_bytes
            if size > WINDOW_BYTES:
                break
            indices.append(lane.waiting.popleft())
        return indices

    def _ask(self, window: _Window) -> Ask:
        copies = [self._copies[index] for index in window.indices]
        payload: list[Buffer] = []
        for copy in copies:
            payload += (copy.header.pack(), copy.payload)
        wants = [Want(copy.key, copy.copy_bytes) for copy in copies]
        return self._routes.ask(window.node, BlockPut(self._routes.ring.epoch, wants), payload)

    def _take(self, window: _Window, answer: Answer) -> None:
        message = answer.message
        if isinstance(message, BlockStored) and len(message.statuses) == len(window.indices):
            for index, status in zip(window.indices, message.statuses, strict=True):
                self._note(index, status if status in _STATUSES else "refused")
            return
        renewed = self._routes.failed(window.node, answer)
        if renewed:
            self._route_again()
        for index in window.indices:
            if renewed and index not in self._stale:
                self._stale.add(index)
                self._route(index)
            elif isinstance(message, Failure) and message.code in ("refused", "too_large"):
                self._note(index, cast("PutStatus", message.code))

    def _note(self, index: int, status: PutStatus) -> None:
        """The best that an owner said counts: one copy that others can read is what the caller wants."""
        self._statuses[index] = min(status, self._statuses[index], key=_BEST_FIRST.index)


def _call_of(window: _Window) -> Call:
    assert window.call is not None, "it was submitted"
    return window.call
