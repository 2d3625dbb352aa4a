"""``Member``: one pool as a client sees it: attached, being attached, or away.

Theory of operation.  A member holds one attachment (``l2_rdma.attachment``).  When its connection or its
channel ends the pool is gone, or gone for us: the attachment is dropped (views already handed out keep their
memory mapped; an attendant thread sees to it that an idle agent does not keep a dead pool's memory), and
attaching is tried again, in a thread of its own, when the member's ``Health`` allows.  A pool that comes back
is another incarnation with another region: nothing of the old one is carried over.

A pool that is paused does not stop views of its memory, so only its *puts* are left out for a while
(:meth:`may_put`); one that is read through a channel and does not answer is given up.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping

from kvcomm.errors import KVCommError
from kvcomm.rpc import Identity
from kvcomm.tier import PoolView
from l2_rdma.attachment import Attachment, AttachOptions, Mapped, Unusable, attach
from l2_rdma.ledger import Ledger
from l2_rdma.rack import Health, Pool
from l2_rdma.region import Region
from l2_rdma.wires import Wires

_PREFAULT_SLICE_BYTES = 2 << 20
_PREFAULT_REST = 9
"""Prefaulting rests so many times as long as it works: 0.1 to 0.4 s of CPU a GiB, at most a tenth of a core
at a time, and never long in the way of somebody else who changes this process's mappings."""
_PREFAULT_REST_MIN_S = 0.002
_ATTEND_INTERVAL_S = 0.5


class Member:
    """Thread-safe; a forked child attaches anew.

    Args:
        ledger: is told what happens here.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: Pool,
        identity: Identity,
        wires: Wires,
        options: AttachOptions,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self._identity = identity
        self._wires = wires
        self._options = options
        self._ledger = ledger
        self._clock = clock
        self._closed = False
        self._refused: dict[str, str] = {}
        self._problem = ""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._attempt: Attempt | None = None
        self._health = Health()
        self._puts = Health()

    @property
    def is_home(self) -> bool:
        """Whether keys may have their home here."""
        return self._health.is_home

    def current(self, *, start: bool = True) -> tuple[Attachment | None, Attempt | None]:
        """The attachment, if the pool lives, or an attempt under way; ``start`` one if it is time."""
        self._reset_after_fork()
        with self._lock:
            now = self._clock()
            attachment = self._attachment
            if attachment is not None and not attachment.alive(now):
                self._drop(now, lost=True)
            if self._attachment is None and self._attempt is None and start:
                self._start_attempt(now)
            return self._attachment, self._attempt

    def judge(self, attachment: Attachment) -> None:
        """Give the attachment up if reading or writing through it has failed."""
        if attachment.failure is not None:
            with self._lock:
                if self._attachment is attachment:
                    self._drop(self._clock(), lost=True)

    def may_put(self) -> bool:
        """Whether the pool has answered the last put, or that is long enough ago."""
        return self._puts.may_try(self._clock())

    def put_answered(self, answered: bool) -> None:
        self._puts = self._puts.attached() if answered else self._puts.failed(self._clock())

    def holds(self, attachment: Attachment) -> bool:
        """Whether it is ours and its pool lives; drops it if not."""
        return self.current(start=False)[0] is attachment

    def view(self) -> PoolView:
        self._reset_after_fork()
        with self._lock:
            used = self._attachment.transport if self._attachment is not None else ""
            pool, state = self.pool, self._health.state
            return PoolView(pool.node, pool.address, state, used, dict(self._refused), self._problem)

    def close(self) -> None:
        """Leave the pool.  Views stay valid, and pinned, for as long as they live.  Idempotent."""
        self._reset_after_fork()
        with self._lock:
            self._closed = True
            self._drop(self._clock(), lost=False)

    # -- attaching -------------------------------------------------------------------------------------------

    def _start_attempt(self, now: float) -> None:
        if self._closed or not self._health.may_try(now):
            return
        attempt = Attempt(awaited=self._health.is_home)
        threading.Thread(target=self._attach, args=(attempt,), name="kvcomm-l2-attach", daemon=True).start()
        self._attempt = attempt  # its end is noted under our lock, so later

    def _attach(self, attempt: Attempt) -> None:
        """Runs in a thread of its own."""
        attachment: Attachment | None = None
        unusable: Mapping[str, str] = {}
        problem = "the attempt failed"
        try:
            with self._wires.using():
                attachment = attach(
                    self.pool.address, self._identity, self._wires, self._options, self._clock
                )
                unusable, problem = attachment.refused.unusable, ""
        except Unusable as error:
            problem, unusable = error.message, error.refused
            if unusable != self._refused:  # the next attempts will say the same
                self._ledger.unusable(self._preferred(unusable))
        except KVCommError as error:
            problem = error.message  # not there (yet), or not for us: a miss until the back-off is over
        finally:
            with self._lock:
                self._attempt = None
                self._refused = dict(unusable)
                if attachment is not None:
                    self._refused |= attachment.refused.unused
                self._problem = problem
                if attachment is None:
                    self._health = self._health.failed(self._clock())
                elif self._closed:
                    attachment.close()
                else:
                    self._attachment, self._health = attachment, self._health.attached()
                    passed_over = self._preferred(unusable, attachment.transport)
                    self._ledger.attached(attachment.transport, attachment.counters, passed_over)
                    self._attend(attachment)
            attempt.finish()

    def _preferred(self, unusable: Mapping[str, str], used: str = "") -> list[str]:
        """The transports that are configured before the one in use, and could not be used."""
        names = list(self._wires.names)
        before = names[: names.index(used)] if used in names else names
        return [name for name in before if name in unusable]

    def _attend(self, attachment: Attachment) -> None:
        rests: Iterator[float] = itertools.repeat(_ATTEND_INTERVAL_S)
        if isinstance(attachment, Mapped) and self._options.prefault:
            rests = _prefault(attachment.region)
        threading.Thread(
            target=_attend,
            args=(weakref.ref(self), attachment, rests),
            name="kvcomm-l2-attendant",
            daemon=True,
        ).start()

    def _drop(self, now: float, *, lost: bool) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        self._ledger.detached(attachment.counters, lost=lost)
        if lost:
            failure = attachment.failure
            self._problem = failure.message if failure is not None else "the pool has ended the connection"
            self._health = self._health.failed(now) if attachment.silent else self._health.ended()
        attachment.close()

    def _reset_after_fork(self) -> None:
        """The connection, the pins and the threads are the parent's."""
        if self._process == os.getpid():
            return
        self._lock = threading.Lock()
        self._attachment = self._attempt = None
        self._health = self._puts = Health()
        self._process = os.getpid()  # last: from now on other threads take the lock, which must be ours


class Attempt:
    """A ``Waiter`` for one try at attaching."""

    def __init__(self, *, awaited: bool) -> None:
        self.awaited = awaited
        """Whether operations wait for it: the one before has not failed."""
        self._lock = threading.Lock()
        self._done = False
        self._callbacks: list[Callable[[], None]] = []

    def add_callback(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(call)
                return
        call()

    def finish(self) -> None:
        with self._lock:
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call()


def _attend(member: weakref.ref[Member], attachment: Attachment, rests: Iterator[float]) -> None:
    """Until the attachment is closed, its pool is gone, or nobody has the member any more."""
    for rest_s in rests:
        if attachment.closed.wait(rest_s):
            return
        still = member()
        if still is None:
            attachment.close()
        elif still.holds(attachment):
            del still
            continue
        return


def _prefault(region: Region, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """Enter all of the region into this process's page tables, a slice each time after the rest (s) that is
    yielded; the owner may still be adding memory to it.  Never ends."""
    at, end = 0, region.header.layout.slots_end
    while True:
        step = min(at + _PREFAULT_SLICE_BYTES, region.backed_bytes, end)
        rest_s = _ATTEND_INTERVAL_S
        if step > at:
            begun = clock()
            at = step if region.populate(at, step) else end
            rest_s = max(_PREFAULT_REST * (clock() - begun), _PREFAULT_REST_MIN_S)
        yield rest_s
