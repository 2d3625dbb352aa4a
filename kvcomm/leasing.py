"""``Lease``: the blocking face of a lease, and the thread that renews it (``kvcomm.aioleasing``: the
asyncio face).

The renewing thread looks at the clock before anything else whenever it wakes up: after a pause of the
process the loss is told before another request is sent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from kvcomm.errors import KVCommError
from kvcomm.lease import RENEWALS, LeaseLost
from kvcomm.leaseplane import LeasePlane
from kvcomm.steps import Steps
from kvcomm.wire.messages import FENCE_MAX

T = TypeVar("T")

WAIT_S = 10.0
"""Default bound of an acquisition: enough to see a lease of the default length run out."""
CALL_S = 2.0
"""Default bound of a release or of a renewal by hand."""
JOIN_S = 5.0

log = logging.getLogger(__name__)


class Fence(Protocol):
    """What a strong change may be made under."""

    def check(self) -> int:
        """The epoch.  Raises ``LeaseLost``."""
        ...


def epoch_of(fence: Fence | int | None) -> int:
    """The number that goes with the change: 0 for none.

    An ``int`` is the epoch of a lease that another process holds and told us of.

    Raises:
        LeaseLost: the lease is over; nothing is sent.
        ValueError: not an epoch.
    """
    if fence is None:
        return 0
    if isinstance(fence, int):
        if not 1 <= fence <= FENCE_MAX:
            raise ValueError(f"the epoch of a lease is 1 to {FENCE_MAX}, got {fence}")
        return fence
    return fence.check()


class LeaseFace:
    """What both faces have."""

    def __init__(self, plane: LeasePlane, name: str, ttl_s: float) -> None:
        self.name = name
        self._plane = plane
        self._tenure = plane.tenure(ttl_s)
        self._pid = os.getpid()

    @property
    def ttl_s(self) -> float:
        """How long each grant lasts."""
        return self._tenure.ttl_s

    @property
    def epoch(self) -> int:
        """Of the last grant to us, also after it is over; 0 = none yet.  Strictly larger with each grant."""
        return self._tenure.epoch

    def valid(self, now: float | None = None) -> bool:
        """Whether we hold it, and will at ``now`` (``time.monotonic()``) unless it is released.  Once it is
        not held it stays so until the lease is acquired again."""
        if self._pid != os.getpid():
            return False  # the parent holds it
        held = self._tenure.valid(self._plane.clock())
        return held and (now is None or now < self._tenure.until)

    def check(self) -> int:
        """The epoch.

        Raises:
            LeaseLost: we do not hold it (any more).
        """
        if self._pid != os.getpid():
            raise LeaseLost("the lease is the parent process's; acquire one here")
        return self._tenure.check(self._plane.clock())

    def renewal_timeout_s(self) -> float:
        """One renewal may not use up the time of the next ones, nor outlast the lease."""
        left_s = self._tenure.until - self._plane.clock()
        return max(0.0, min(self.ttl_s / RENEWALS, left_s))

    def renewal_due_s(self) -> float:
        """Seconds until something is to be done: a renewal, or to see that the time has run out."""
        due = min(self._tenure.renew_at(), self._tenure.until)
        return max(0.0, due - self._plane.clock())


class Lease(LeaseFace):
    """The right to do something alone for a while, renewed as long as needed.  Made by ``Client.lease``.

    ::

        with kv.lease("compactor").held() as lease:
            kv.strong("plan").put("next", plan, fence=lease)

    At most one process finds its lease valid at a time (see ``kvcomm.lease`` for what clocks and pauses can
    do to that).  What must never happen twice is written with ``fence=``: the record itself then refuses
    everybody whose epoch is over.

    May be used by several threads.
    """

    def __init__(
        self, plane: LeasePlane, name: str, ttl_s: float, run: Callable[[Steps[Any], float], Any]
    ) -> None:
        super().__init__(plane, name, ttl_s)
        self._run = run
        self._claiming = threading.Lock()

    def acquire(self, *, deadline_s: float = WAIT_S) -> int:
        """Wait until it is ours; its epoch.  Others' leases are waited out.

        Raises:
            LeaseHeld: somebody else had it until the deadline.
            Unavailable, OutcomeUnknown: the majority of the lease's record could not be reached.
        """
        until = time.monotonic() + deadline_s
        return self._claim(self._plane.acquire(self.name, self._tenure, until), deadline_s)

    def renew(self, *, deadline_s: float = CALL_S) -> None:
        """Have it for its whole time again, counted from now.

        Raises:
            LeaseLost: we do not hold it (any more).
            Unavailable, OutcomeUnknown: it is held until its time has run out; try again.
        """
        self._claim(self._plane.renew(self.name, self._tenure), deadline_s)

    def release(self, *, deadline_s: float = CALL_S) -> None:
        """Give it back; it is not ours from this call on, whatever comes of it.  Idempotent.

        Raises:
            Unavailable, OutcomeUnknown: others may have to wait until its time has run out.
        """
        self._claim(self._plane.release(self.name, self._tenure), deadline_s)

    @contextmanager
    def held(
        self, *, deadline_s: float = WAIT_S, lost: Callable[[LeaseLost], None] | None = None
    ) -> Iterator[Lease]:
        """Acquire, renew in a thread of its own, release at the end.

        Args:
            lost: called once, by that thread, as soon as it notices that the lease is over: at the latest
                when its time has run out, or, after a pause of the process, when the thread runs again.

        Raises:
            LeaseLost: at the end of a body that did not raise, if the lease was lost meanwhile: it may not
                have been alone.
        """
        self.acquire(deadline_s=deadline_s)
        renewer = _Renewer(self, lost)
        renewer.start()
        try:
            yield self
            self.check()
        finally:
            renewer.stop()
            with suppress(KVCommError):  # it runs out by itself
                self.release()

    def _claim(self, steps: Generator[Any, Any, T], deadline_s: float) -> T:
        with self._claiming:
            result: T = self._run(steps, deadline_s)
        return result

    def _renew_if_due(self) -> float:
        """Renew, as the renewer does; how long it may sleep now.  Raises ``LeaseLost``."""
        self.check()
        if self.renewal_due_s() <= 0:
            try:
                self.renew(deadline_s=self.renewal_timeout_s())
            except LeaseLost:
                raise
            except KVCommError as error:
                log.warning("lease %s: a renewal failed: %s", self.name, error)
            except ValueError as error:
                raise LeaseLost(f"the lease cannot be renewed: {error}") from error
        self.check()
        return self.renewal_due_s()


class _Renewer(threading.Thread):
    """Renews one lease until it is told to stop or the lease is lost."""

    def __init__(self, lease: Lease, lost: Callable[[LeaseLost], None] | None) -> None:
        super().__init__(name=f"lease {lease.name}", daemon=True)
        self._lease, self._lost = lease, lost
        self._enough = threading.Event()

    def run(self) -> None:
        try:
            while not self._enough.wait(self._lease._renew_if_due()):
                pass
        except LeaseLost as error:
            if not self._enough.is_set() and self._lost is not None:
                self._lost(error)

    def stop(self) -> None:
        self._enough.set()
        if threading.current_thread() is not self:
            self.join(JOIN_S)
