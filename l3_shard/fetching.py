"""``Fetching``: one get of many blocks from many shards, handed on in order of the keys.

Each shard has a lane: indices that wait, and windows under way. The operation always waits for the lane that
holds the first block not handed on yet, and tops up every lane before it waits::

    keys      0 1 2 3 4 5 6 7 ...            lane of shard A   [0 2 3 5] [8 9 ..]  | 12 14 ...
    handed on ^^^                            lane of shard B   [1 4 6 7] [10 11 ..]| 13 ...

A shard whose copies were damaged is told at once, so that it can hide what is damaged there: else it would
call the block present for ever, and nobody could publish it again.  No block waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvcomm.block import BlockKey, verify_copy
from kvcomm.errors import Corrupt
from kvcomm.steps import Answer, Call, Emit, Steps, Submit, Wait
from kvcomm.tier import Block
from kvcomm.wire.messages import SUSPECTS_MAX, BlockCopies, BlockGet, BlockSuspect, Message
from l3_shard.routes import WINDOW_BYTES, WINDOW_KEYS, WINDOWS_IN_FLIGHT, Routes

TELL_TIMEOUT_S = 0.1
"""How long the end of a get waits, at most, for a shard that was told of damage."""

assert WINDOW_KEYS <= SUSPECTS_MAX, "one report a window"


@dataclass(eq=False, slots=True)
class _Window:
    indices: list[int]
    call: Call | None = None


@dataclass(eq=False, slots=True)
class _Lane:
    waiting: deque[int] = field(default_factory=deque)
    under_way: deque[_Window] = field(default_factory=deque)


class Fetching:
    """One operation; run :meth:`steps` once."""

    def __init__(self, routes: Routes, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> None:
        self._routes, self._keys, self._found = routes, keys, found
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[int, str] = {}  # indices that are not decided
        self._tried: dict[int, set[str]] = {}
        self._stale: set[int] = set()
        self._blocks: dict[int, Block] = {}  # verified, not handed on
        self._damaged: dict[str, list[BlockKey]] = {}  # by the shard that sent them, not yet told
        self._told: list[Call] = []

    def steps(self) -> Steps[None]:
        for index in range(len(self._keys)):
            self._route(index)
        for index in range(len(self._keys)):
            while index in self._lane_of:
                yield from self._top_up()
                if index in self._lane_of:
                    yield from self._wait(self._lane_of[index])
                    yield from self._tell()
            block = self._blocks.pop(index, None)
            if block is not None:
                self._found(index, block)
                yield Emit(index)
        for call in self._told:
            yield Wait(call)  # mostly long there; and a connection without open requests can be kept

    def _route(self, index: int, *, first: bool = False) -> None:
        """Queue it at the next owner; with none left it is a miss.  ``first``: others wait for it already."""
        self._lane_of.pop(index, None)
        tried = self._tried.setdefault(index, set())
        node = next(
            (owner for owner in self._routes.block_owners(self._keys[index]) if owner not in tried), None
        )
        if node is None:
            return
        tried.add(node)
        self._lane_of[index] = node
        waiting = self._lanes.setdefault(node, _Lane()).waiting
        if first:
            waiting.appendleft(index)
        else:
            waiting.append(index)

    def _route_again(self) -> None:
        """What waits was placed by the old map."""
        waiting = sorted(index for lane in self._lanes.values() for index in lane.waiting)
        for lane in self._lanes.values():
            lane.waiting.clear()
        for index in waiting:
            self._tried[index].clear()
            self._route(index)

    def _top_up(self) -> Steps[None]:
        windows: list[_Window] = []
        asks = []
        for node in list(self._lanes):
            lane = self._lanes[node]
            if lane.waiting and not self._routes.healthy(node):
                indices, lane.waiting = lane.waiting, deque()
                for index in indices:
                    self._route(index)
            while lane.waiting and len(lane.under_way) < WINDOWS_IN_FLIGHT:
                window = _Window(
                    [lane.waiting.popleft() for _ in range(min(self._window_keys(), len(lane.waiting)))]
                )
                lane.under_way.append(window)
                windows.append(window)
                message = BlockGet(self._routes.ring.epoch, [self._keys[index] for index in window.indices])
                asks.append(self._routes.ask(node, message, sink=self._sink))
        if asks:
            calls: list[Call] = yield Submit(asks)
            for window, call in zip(windows, calls, strict=True):
                window.call = call

    def _window_keys(self) -> int:
        return max(1, min(WINDOW_KEYS, WINDOW_BYTES // max(1, self._routes.copy_bytes)))

    def _wait(self, node: str) -> Steps[None]:
        """For the oldest window of a lane: a shard answers one caller's requests about in order."""
        window = self._lanes[node].under_way.popleft()
        assert window.call is not None
        answer: Answer = yield Wait(window.call)
        copies = _copies(answer, len(window.indices))
        if copies is not None:
            for index, copy in zip(window.indices, copies, strict=True):
                self._take(index, copy, node)
            return
        renewed = self._routes.failed(node, answer)
        if renewed:
            self._route_again()
        for index in reversed(window.indices):
            if renewed and index not in self._stale:
                self._stale.add(index)
                self._tried[index].clear()
            self._route(index, first=True)

    def _sink(self, _request: int, message: Message, payload_bytes: int) -> list[memoryview] | None:
        """A buffer a copy, so that each block can be kept and let go by itself."""
        if (
            not isinstance(message, BlockCopies)
            or sum(message.copy_bytes) != payload_bytes
            or min(message.copy_bytes) < 0
        ):
            return None
        return [self._routes.allocate(size) for size in message.copy_bytes if size]

    def _take(self, index: int, copy: memoryview | None, node: str) -> None:
        key = self._keys[index]
        if copy is not None:
            try:
                self._blocks[index] = Block(verify_copy(copy, key), copy, "l3")
            except Corrupt:
                self._routes.counts.damaged_count += 1
                self._damaged.setdefault(node, []).append(key)
            else:
                self._routes.copy_bytes = len(copy)
                del self._lane_of[index]
                return
        self._route(index, first=True)

    def _tell(self) -> Steps[None]:
        """Report what was damaged, without waiting for the answer."""
        if not self._damaged:
            return
        damaged, self._damaged = self._damaged, {}
        asks = [
            replace(self._routes.ask(node, BlockSuspect([*keys])), timeout_s=TELL_TIMEOUT_S)
            for node, keys in damaged.items()
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
