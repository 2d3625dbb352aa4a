"""``Admission``: who waits for blocks of a pool, in the order in which they came.

Only who does not run stands in line: a session that wants an archived span back, a prompt that is not begun.
Each says once how many blocks it needs in all, those for the rows that it will feed included, and gets all of
them or none, so nobody holds new blocks while waiting for more.  A running session takes its next block from
the pool directly: to stop it behind one that waits for *its* blocks would be a circle.  So who runs comes to
an end, and its blocks go to who waits.

First come, first served, without overtaking: a small wish that could be met waits behind a large one that
cannot, or the large one would never be met.  A wait ends at its deadline, with nothing held: then the caller
goes on without, by feeding a span's text again as new rows, or ends a session.

The object decides and takes; it reads no clock, and nothing happens in it but when it is called.  Call
:meth:`Admission.serve` whenever blocks were released, and at :meth:`Admission.deadline`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import NewType

from kvcomm.errors import PoolFull, Refused
from kvcomm.streams.pool import BlockId, BlockPool

Place = NewType("Place", int)
"""In line; never given out twice."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The blocks are the asker's: held once each, without content."""

    place: Place
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline came first; nothing is held."""

    place: Place


@dataclass(frozen=True, slots=True)
class _Wish:
    block_count: int
    deadline: float


class Admission:
    """The line before one pool.

    Args:
        waiting_max: most that wait at a time.
        spare_blocks: so many stay free, for sessions that run and need their next block.
    """

    def __init__(self, pool: BlockPool, *, waiting_max: int, spare_blocks: int = 0) -> None:
        if waiting_max < 1 or not 0 <= spare_blocks < pool.block_count:
            raise ValueError("at least one may wait, and the spare blocks leave some to be given out")
        self.pool, self.waiting_max, self.spare_blocks = pool, waiting_max, spare_blocks
        self._line: OrderedDict[Place, _Wish] = OrderedDict()
        self._next_place = 0

    @property
    def waiting_count(self) -> int:
        return len(self._line)

    def ask(self, block_count: int, now: float, deadline: float) -> Place:
        """Stand in line; :meth:`serve` says when it is one's turn, at once perhaps.

        Raises:
            ValueError: no blocks, or a deadline that has passed or never comes.
            PoolFull: so many can never be free at a time.
            Refused: too many wait already.
        """
        if block_count < 1 or not now < deadline < inf:
            raise ValueError(
                f"{block_count} blocks within {deadline - now} s: ask for some, and give it time"
            )
        if block_count + self.spare_blocks > self.pool.block_count:
            raise PoolFull(
                f"{block_count} blocks wanted of a pool of {self.pool.block_count} that keeps "
                f"{self.spare_blocks} spare: enlarge the pool, or restore a smaller span"
            )
        if len(self._line) >= self.waiting_max:
            raise Refused(f"{self.waiting_max} wait for blocks already: go without, or come back later")
        place = Place(self._next_place)
        self._next_place += 1
        self._line[place] = _Wish(block_count, deadline)
        return place

    def leave(self, place: Place) -> None:
        """Not needed any more; without effect when it was served or has expired."""
        self._line.pop(place, None)

    def serve(self, now: float) -> list[Granted | Expired]:
        """Whose turn it is, and who waited in vain; each place is named once."""
        outcomes: list[Granted | Expired] = []
        for place in [place for place, wish in self._line.items() if wish.deadline <= now]:
            del self._line[place]
            outcomes.append(Expired(place))
        while self._line:
            place, wish = next(iter(self._line.items()))
            if wish.block_count + self.spare_blocks > self.pool.free_count:
                break
            del self._line[place]
            outcomes.append(Granted(place, tuple(self.pool.take(wish.block_count))))
        return outcomes

    def deadline(self) -> float | None:
        """When to call :meth:`serve` at the latest; none while nobody waits."""
        return min((wish.deadline for wish in self._line.values()), default=None)

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._line) <= self.waiting_max
        assert list(self._line) == sorted(self._line), "first come, first served"
        assert all(place < self._next_place for place in self._line)
