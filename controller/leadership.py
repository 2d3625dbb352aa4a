"""``Leadership``: one controller's share in the lease ``controller``, and the two records that its holder
keeps.

::

    waiting ──acquired──► Led(term, until) ──renewed, every third of the lease──► Led(term, until) ...
       ▲                                                                              │
       └───────────────────────────────── Deposed() ◄── lost, run out, taken over ───┘

Nothing that must not happen twice relies on the lease alone: whoever stood still may believe in it for too
long.  Every change of the records carries the lease's epoch as a fence, and a new leader reads them by a
change under its own fence, so what an earlier one still has under way is refused from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, Protocol

from kvcomm.errors import Corrupt, Fenced, KVCommError
from kvcomm.lease import RENEWALS, LeaseLost, Tenure
from kvcomm.leaseplane import LeasePlane
from kvcomm.stateplane import record_name
from kvcomm.steps import Steps
from kvcomm.strongplane import StrongPlane
from kvcomm.wire.messages import RingMap
from l3_shard.ring import decode_map

LEASE = "controller"
RING = record_name("controller", "ring")
PLAN = record_name("controller", "plan")
RETRY_S = 0.1
"""After something that was refused at once; what was not answered has taken its time."""
ACQUIRE_S = 1.0
"""One attempt; more follow."""
NOTE_S = 2.0

_log = logging.getLogger(__name__)

NoteOutcome = Literal["done", "fenced", "unknown"]


class Recollection(NamedTuple):
    """What the records say; ``None`` = nothing, or nothing that can be read."""

    ring: RingMap | None
    plan: bytes | None


class Group(Protocol):
    """The metadata group, as ``controller.metadata.Metadata``."""

    strong: StrongPlane
    leases: LeasePlane

    async def run(self, steps: Steps[Any], timeout_s: float) -> Any: ...


class Leadership:
    """See the module.

    Args:
        tenure: made for this process's life.
        led: told at each grant, with the lease's epoch and until when it may be acted on.
        deposed: told once after each time that it was led.
        follows: told which node holds the lease otherwise ("" = nobody), and its epoch, when that changes.
        sleep: as ``asyncio.sleep``; tests have another clock.
    """

    def __init__(
        self,
        group: Group,
        tenure: Tenure,
        *,
        led: Callable[[int, float], None],
        deposed: Callable[[], None],
        follows: Callable[[str, int], None] = lambda leader, term: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._group, self._tenure, self._led, self._deposed = group, tenure, led, deposed
        self._follows, self._sleep = follows, sleep
        self._followed = ("", 0)

    async def run(self) -> None:
        """Acquire the lease, hold it as long as possible, and again; until cancelled."""
        while True:
            if await self._acquired():
                await self._hold()

    async def recall(self) -> Recollection | None:
        """Read both records and close them to earlier terms; ``None`` = we do not lead (any more)."""
        found: list[bytes | None] = []
        for name in (RING, PLAN):
            while len(found) < (name == PLAN) + 1:
                try:
                    fence = self._tenure.check(self._now())
                    change = self._group.strong.change(name, lambda value: value, fence)
                    found.append((await self._group.run(change, self._patience_s())).value)
                except (LeaseLost, Fenced):
                    return None
                except KVCommError as error:
                    _log.warning("the controllers' records cannot be read: %s", error)
                    await self._sleep(RETRY_S)
        return Recollection(_ring_of(found[0]), found[1])

    async def note(self, name: Literal["ring", "plan"], value: bytes) -> NoteOutcome:
        """Write one of the records, under the fence.  ``unknown`` is also said, a little later, of what was
        certainly not done: it may be tried again."""
        try:
            fence = self._tenure.check(self._now())
            put = self._group.strong.put({"ring": RING, "plan": PLAN}[name], value, fence)
            await self._group.run(put, self._patience_s())
        except (LeaseLost, Fenced):
            return "fenced"
        except KVCommError as error:
            _log.warning("the controllers' %s cannot be written: %s", name, error)
            await self._sleep(RETRY_S)
            return "unknown"
        return "done"

    async def release(self, timeout_s: float) -> None:
        """Stop leading; if the others hear of it they need not wait."""
        try:
            await self._group.run(self._group.leases.release(LEASE, self._tenure), timeout_s)
        except KVCommError as error:
            _log.info("the lease runs out by itself: %s", error)

    async def _acquired(self) -> bool:
        until = self._now() + ACQUIRE_S
        try:
            await self._group.run(self._group.leases.acquire(LEASE, self._tenure, until), ACQUIRE_S)
        except KVCommError:  # held by another, or no majority: that is how most controllers live
            self._tell_whom_we_follow()
            await self._sleep(RETRY_S)
        return self._tenure.valid(self._now())

    def _tell_whom_we_follow(self) -> None:
        """One whose time is over without a sign of it leads no more, even if nobody else can yet."""
        seen, now = self._tenure.seen, self._now()
        if seen is None or self._tenure.valid(now):
            return
        followed = (node_of(seen.holder) if now < self._tenure.free_at() else "", seen.epoch)
        if followed != self._followed:
            self._followed = followed
            self._follows(*followed)

    async def _hold(self) -> None:
        tenure = self._tenure
        self._led(tenure.epoch, tenure.until)
        while tenure.valid(self._now()):
            await self._sleep(max(0.0, min(tenure.renew_at(), tenure.until) - self._now()))
            if tenure.valid(self._now()) and self._now() >= tenure.renew_at() and await self._renewed():
                self._led(tenure.epoch, tenure.until)
        _log.warning("this controller leads no more: %s", tenure.lost)
        self._deposed()

    async def _renewed(self) -> bool:
        """One renewal may not use up the time of the next ones, nor outlast the lease."""
        tenure = self._tenure
        timeout_s = min(tenure.ttl_s / RENEWALS, tenure.until - self._now())
        try:
            await self._group.run(self._group.leases.renew(LEASE, tenure), timeout_s)
        except LeaseLost:
            return False
        except KVCommError as error:
            _log.warning("a renewal failed: %s", error)
            return False
        return True

    def _patience_s(self) -> float:
        return min(NOTE_S, self._tenure.until - self._now())

    def _now(self) -> float:
        return self._group.leases.clock()


def tenure_of(node: str, incarnation: int, ttl_s: float) -> Tenure:
    """Of a controller's life.  An earlier life of it has ended: it would still own the member's directory."""
    return Tenure(f"{node}/{incarnation:016x}", ttl_s, kin=f"{node}/")


def node_of(holder: str) -> str:
    """Which controller a lease's holder is."""
    return holder.partition("/")[0]


def _ring_of(value: bytes | None) -> RingMap | None:
    if value is None:
        return None
    try:
        return decode_map(value)
    except Corrupt as error:
        _log.error("the controllers' ring is ignored: %s", error)
        return None
