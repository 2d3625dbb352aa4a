"""``Fetching``: one get of many blocks from many shards, handed on in order of the keys.

Each shard has a lane: indices that wait, and windows under way. The operation always waits for the lane that
holds the first block not handed on yet, and tops up every lane before it waits::

    keys      0 1 2 3 4 5 6 7 ...            lane of shard A   [0 2 3 5] [8 9 ..]  | 12 14 ...
    handed on ^^^                            lane of shard B   [1 4 6 7] [10 11 ..]| 13 ...

Where there are several copies the fastest owner is asked, and when it takes longer than usual another owner
is asked too: the first answer counts.  A window that was outpaced stays under way until the operation ends;
each window is received into memory of its own, so a late copy touches nothing that was handed on.

While keys are being moved from one placement to another, what the owners have not is asked for where it may
be still, or already.

A shard whose copies were damaged is told at once, so that it can hide what is damaged there: else it would
call the block present for ever, and nobody could publish it again.  No block waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvcomm.block import BlockKey, verify_copy
from kvcomm.errors import Corrupt
from kvcomm.steps import Answer, Call, Emit, Steps, Submit, Wait, WaitAny
from kvcomm.tier import Block
from kvcomm.wire.messages import SUSPECTS_MAX, BlockCopies, BlockGet, BlockSuspect, Message
from l3_shard.routes import WINDOW_BYTES, WINDOW_KEYS, WINDOWS_IN_FLIGHT, Routes

TELL_TIMEOUT_S = 0.1
"""How long the end of a get waits, at most, for a shard that was told of damage."""

AWAY_MAX_S = 0.001
"""A window during which the consumer took longer says nothing about its shard: it may have been answered
long before anybody looked, or just then."""

assert WINDOW_KEYS <= SUSPECTS_MAX, "one report a window"


@dataclass(eq=False, slots=True)
class _Window:
    node: str
    indices: list[int]
    size_bytes: int
    """About."""
    began: float
    away_s: float
    """What others had spent by then."""
    call: Call | None = None
    outlasted: bool = False
    """Whoever could be asked instead has been."""


@dataclass(eq=False, slots=True)
class _Lane:
    waiting: deque[int] = field(default_factory=deque)
    under_way: deque[_Window] = field(default_factory=deque)


class Fetching:
    """One operation; run :meth:`steps` once."""

    def __init__(self, routes: Routes, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> None:
        self._routes, self._keys, self._found = routes, keys, found
        self._lanes: dict[str, _Lane] = {}
        self._places: dict[int, list[str]] = {}  # of undecided indices: the lanes that hold them
        self._tried: dict[int, set[str]] = {}
        self._stale: set[int] = set()
        self._blocks: dict[int, Block] = {}  # verified, not handed on
        self._damaged: dict[str, list[BlockKey]] = {}  # by the shard that sent them, not yet told
        self._told: list[Call] = []
        self._away_s = 0.0  # spent by whoever takes the blocks: no fault of any shard

    def steps(self) -> Steps[None]:
        for index in range(len(self._keys)):
            self._route(index)
        for index in range(len(self._keys)):
            while index in self._places:
                yield from self._top_up()
                if index in self._places:
                    yield from self._wait(index)
                    yield from self._tell()
            block = self._blocks.pop(index, None)
            if block is not None:
                self._found(index, block)
                left = self._routes.now()
                yield Emit(index)
                self._away_s += self._routes.now() - left
        for call in self._told:
            yield Wait(call)  # mostly long there; and a connection without open requests can be kept

    def _now(self) -> float:
        """Seconds that this operation was at work."""
        return self._routes.now() - self._away_s

    # -- who is asked for what

    def _route(self, index: int, *, first: bool = False) -> None:
        """Queue it at one more owner; with none left, and nobody asked, it is a miss.  ``first``: others wait
        for it already."""
        node = self._next_owner(index)
        if node is None:
            if not self._places.get(index):
                self._places.pop(index, None)
            return
        self._tried.setdefault(index, set()).add(node)
        self._places.setdefault(index, []).append(node)
        waiting = self._lanes.setdefault(node, _Lane()).waiting
        if first:
            waiting.appendleft(index)
        else:
            waiting.append(index)

    def _next_owner(self, index: int) -> str | None:
        tried = self._tried.get(index, ())
        return next(
            (each for each in self._routes.block_owners(self._keys[index]) if each not in tried), None
        )

    def _failed_at(self, index: int, node: str) -> None:
        """``node`` will not bring it.  Who else was asked may; else somebody else is."""
        places = self._places.get(index)
        if places is None:
            return  # decided
        places.remove(node)
        if not places:
            self._route(index, first=True)

    def _unqueue(self, node: str, *, again: bool) -> None:
        """What waits in this lane goes to other owners; ``again``: this one may be asked later all the
        same."""
        lane = self._lanes[node]
        indices, lane.waiting = lane.waiting, deque()
        for index in indices:
            if index not in self._places:
                continue  # decided
            if again:
                self._tried[index].discard(node)
            self._places[index].remove(node)
            if not self._places[index]:
                self._route(index)

    def _route_again(self) -> None:
        """What waits was placed by the old map."""
        waiting = sorted(
            {index for lane in self._lanes.values() for index in lane.waiting} & set(self._places)
        )
        for node, lane in self._lanes.items():
            for index in lane.waiting:
                if index in self._places:
                    self._places[index].remove(node)
            lane.waiting.clear()
        for index in waiting:
            if not self._places[index]:
                self._tried[index].clear()
                self._route(index)

    def _top_up(self) -> Steps[None]:
        windows: list[_Window] = []
        asks = []
        for node in [node for node in self._lanes if not self._routes.healthy(node)]:
            self._unqueue(node, again=False)
        for node, lane in self._lanes.items():
            while len(lane.under_way) < WINDOWS_IN_FLIGHT and (indices := self._next_indices(lane)):
                size_bytes = len(indices) * self._routes.copy_bytes
                window = _Window(node, indices, size_bytes, self._now(), self._away_s)
                lane.under_way.append(window)
                windows.append(window)
                message = BlockGet(self._routes.ring.epoch, [self._keys[index] for index in window.indices])
                asks.append(self._routes.ask(node, message, sink=self._sink))
        if asks:
            calls: list[Call] = yield Submit(asks)
            for window, call in zip(windows, calls, strict=True):
                window.call = call

    def _next_indices(self, lane: _Lane) -> list[int]:
        count_max = max(1, min(WINDOW_KEYS, WINDOW_BYTES // max(1, self._routes.copy_bytes)))
        indices: list[int] = []
        while lane.waiting and len(indices) < count_max:
            index = lane.waiting.popleft()
            if index in self._places:  # else another copy was faster
                indices.append(index)
        return indices

    # -- answers

    def _wait(self, index: int) -> Steps[None]:
        """For the oldest windows of the lanes that hold ``index``: a shard answers one caller's requests
        about in order."""
        windows = [self._oldest(node) for node in self._places[index]]
        impatient = [window for window in windows if self._could_ask_others(window)]
        if len(windows) == 1 and not impatient:
            yield from self._take(windows[0])
            return
        overdue = min((self._overdue_at(window) for window in impatient), default=None)
        timeout_s = None if overdue is None else max(0.0, overdue - self._now())
        done: Call | None = yield WaitAny([window.call for window in windows if window.call], timeout_s)
        if done is not None:
            yield from self._take(next(window for window in windows if window.call is done))
            return
        for window in impatient:
            if self._overdue_at(window) <= self._now():
                self._ask_others(window)

    def _oldest(self, node: str) -> _Window:
        """Of those that nobody else was asked for, if there is one."""
        under_way = self._lanes[node].under_way
        return next((window for window in under_way if not window.outlasted), under_way[0])

    def _could_ask_others(self, window: _Window) -> bool:
        return not window.outlasted and any(
            index in self._places and self._next_owner(index) is not None for index in window.indices
        )

    def _overdue_at(self, window: _Window) -> float:
        return window.began + self._routes.speeds.patience_s(window.size_bytes)

    def _ask_others(self, window: _Window) -> None:
        """Hedge what is in the window, and send what waits behind it elsewhere."""
        window.outlasted = True
        speeds = self._routes.speeds
        if not speeds.may_hedge():
            return
        self._routes.counts.hedged_count += 1
        elapsed_s = self._now() - window.began
        speeds.outlasted(window.node, elapsed_s, window.size_bytes, self._routes.now())
        for index in reversed(window.indices):
            if index in self._places:
                self._route(index, first=True)
        self._unqueue(window.node, again=True)

    def _take(self, window: _Window) -> Steps[None]:
        assert window.call is not None
        node = window.node
        answer: Answer = yield Wait(window.call)
        self._lanes[node].under_way.remove(window)
        copies = _copies(answer, len(window.indices))
        if copies is not None:
            away_s = self._away_s - window.away_s
            if away_s <= AWAY_MAX_S:
                size_bytes = sum(len(copy) for copy in copies if copy is not None)
                elapsed_s = answer.now - window.away_s - window.began
                self._routes.speeds.took(node, elapsed_s, size_bytes, answer.now)
            for index, copy in zip(window.indices, copies, strict=True):
                self._take_copy(index, copy, node)
            return
        renewed = self._routes.failed(node, answer)
        if renewed:
            self._route_again()
        for index in reversed(window.indices):
            if index not in self._places:
                continue
            if renewed and index not in self._stale:
                self._stale.add(index)
                self._tried[index].clear()
            self._failed_at(index, node)

    def _sink(self, _request: int, message: Message, payload_bytes: int) -> list[memoryview] | None:
        """A buffer a copy, so that each block can be kept and let go by itself."""
        if (
            not isinstance(message, BlockCopies)
            or sum(message.copy_bytes) != payload_bytes
            or min(message.copy_bytes) < 0
        ):
            return None
        return [self._routes.allocate(size) for size in message.copy_bytes if size]

    def _take_copy(self, index: int, copy: memoryview | None, node: str) -> None:
        if index not in self._places:
            return  # another copy was faster
        key = self._keys[index]
        if copy is not None:
            try:
                self._blocks[index] = Block(verify_copy(copy, key), copy, "l3")
            except Corrupt:
                self._routes.counts.damaged_count += 1
                self._damaged.setdefault(node, []).append(key)
            else:
                self._routes.copy_bytes = len(copy)
                del self._places[index]
                return
        self._failed_at(index, node)

    def _tell(self) -> Steps[None]:
        """Report what was damaged, without waiting for the answer."""
        if not self._damaged:
            return
        damaged, self._damaged = self._damaged, {}
        asks = [
            replace(self._routes.ask(node, BlockSuspect([*keys])), timeout_s=TELL_TIMEOUT_S)
            for node, keys in damaged.items()
            if node in self._routes.ring
        ]
        self._told += yield Submit(asks)


def _copies(answer: Answer, count: int) -> list[memoryview | None] | None:
    """The copies of an answer, ``None`` for each that is missing; ``None`` when it is no answer to ``count``
    keys."""
    message = answer.message
    if not isinstance(message, BlockCopies) or len(message.copy_bytes) != count:
        return None
    pieces = iter(answer.payload)
    copies = [next(pieces, None) if size else None for size in message.copy_bytes]
    sizes = [0 if copy is None else len(copy) for copy in copies]
    return copies if sizes == message.copy_bytes else None
