"""``Hub``: what all channels of one device share: a protection domain, a completion queue, registered memory,
and the loop that polls it.

Theory of operation.  One lock guards it all.  It costs little: pyverbs holds the interpreter's lock in every
call anyway.

*Sleeping.*  A waiter polls for a moment and then sleeps on the completion channel's descriptor (never in
``get_cq_event``, which blocks with the interpreter's lock held).  The queue is armed first and polled once
more, so a completion in between is not missed.  Threads that end operations without leading the loop (a post
reaps what is there, a close fails the rest) count them in ``_ended`` and wake the sleeper.

*The completion queue never overflows*: a request takes one of its places when it is posted, and gives it back
when it is known to be over.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from kvcomm.errors import KVCommError, Unavailable
from l2_rdma.transports.verbs.baton import Baton
from l2_rdma.transports.verbs.binding import event_channel, explain
from l2_rdma.transports.verbs.bounce import Arena
from l2_rdma.transports.verbs.device import Device, in_child, no_device_error
from l2_rdma.transports.verbs.registered import MemoryTable
from l2_rdma.transports.verbs.requests import WorkRequests

QUEUE_PLACES = 4096
"""Completions of all channels together."""
POLL_BATCH = 64
SPIN_S = 50e-6
"""A short READ on a real network is over before a sleeping thread would have woken."""
SLEEP_S_MAX = 1.0
_NAP_S = 200e-6
"""Between two polls, where the completion channel's descriptor is not known."""

TICKET_BITS = 40
_TICKET_MASK = (1 << TICKET_BITS) - 1


class Listener(Protocol):
    """A channel, as the hub sees it.  Everything is called with the lock held."""

    earliest_deadline: float
    """No operation's deadline is earlier."""

    def completed(self, ticket: int, status: int) -> None:
        """The request of this ticket is over, and with it all that were posted before."""
        ...

    def pump(self) -> None:
        """Post what waits, as far as there is room."""
        ...

    def expire(self, now: float) -> None:
        """End what is overdue, and say anew when the next is."""
        ...

    def break_for(self, error: KVCommError) -> None:
        """End everything."""
        ...


class Hub:
    """The shared part of one device's channels.  Thread-safe.

    Args:
        device: closed by this.

    Raises:
        Unavailable: the device has no room for it; the message says what to raise.
    """

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self.device = device
        self.clock = clock
        self.lock: Any = Baton()
        self.arena = Arena()
        self.memory = MemoryTable(self.lock)
        self.requests = WorkRequests(device.binding)
        self.places = 0
        """Of the completion queue, that are free."""
        self.closed = False
        self._listeners: dict[int, Listener] = {}
        self._number = 0
        self._backlog: list[tuple[int, int]] = []
        self._ended_count = 0
        self._seen_count = 0
        self._sleeper: int | None = None
        self._armed = False
        """Whether an event will come or waits to be taken; the kernel keeps all that nobody takes."""
        self._lost: Unavailable | None = None
        self._parts: list[Any] = []
        try:
            with no_device_error(device.binding, "the RDMA device cannot serve this process"):
                self._make()
        except BaseException:
            self.close()
            raise
        in_child(self)

    def enter(self, listener: Listener) -> int:
        """A number for the channel, never used again; its tickets begin with it."""
        self._number += 1
        self._listeners[self._number] = listener
        return self._number

    def leave(self, number: int) -> None:
        self._listeners.pop(number, None)

    def turn(self) -> bool:
        """Take what has completed, end what is overdue, post what waits; whether an operation ended.  With
        the lock held."""
        if self.closed:
            return False
        before = self._ended_count
        self.take()
        now = self.clock()
        for listener in list(self._listeners.values()):
            if now >= listener.earliest_deadline:
                listener.expire(now)
        return self._ended_count != before

    def take(self) -> None:
        """Take what has completed and post what waits; not a look at the clock, which is a system call in
        some guests.  With the lock held."""
        if self.closed:
            return
        for ticket, status in self._reap():
            listener = self._listeners.get(ticket >> TICKET_BITS)
            if listener is not None:
                listener.completed(ticket & _TICKET_MASK, status)
        for listener in list(self._listeners.values()):
            if self._lost is None:
                listener.pump()
            else:
                listener.break_for(self._lost)

    def drain(self, number: int, is_over: Callable[[], bool], limit_s: float) -> None:
        """Poll for the completions of one channel that is being stopped, until ``is_over`` or the limit; the
        others' wait for the next turn.  With the lock held."""
        listener = self._listeners[number]
        until = self.clock() + limit_s
        while not is_over() and self.clock() < until:
            kept = []
            for ticket, status in self._reap():
                if ticket >> TICKET_BITS == number:
                    listener.completed(ticket & _TICKET_MASK, status)
                else:
                    kept.append((ticket, status))
            self._backlog = kept

    def forget_completions(self, number: int) -> None:
        """Make sure that none of a channel without a queue pair is left in the queue.  With the lock held."""
        self._backlog = [each for each in self._reap() if each[0] >> TICKET_BITS != number]

    def poll(self, timeout_s: float) -> None:
        """``PollLoop``'s: by one thread at a time."""
        spin_until = self.clock() + min(SPIN_S, timeout_s)
        while not self._locked_turn():
            if self.clock() >= spin_until:
                self._sleep(timeout_s)
                return
        self._seen_count = self._ended_count

    def _locked_turn(self) -> bool:
        with self.lock:
            return self.turn()

    def ended(self) -> None:
        """An operation has ended: whoever sleeps looks again.  With the lock held."""
        self._ended_count += 1
        if self._sleeper not in (None, threading.get_ident()):
            os.eventfd_write(self._wake, 1)

    def piece_address(self, offset: int) -> int:
        return self._arena_address + offset

    def piece_view(self, offset: int, length: int) -> memoryview:
        return self._arena_view[offset : offset + length]

    def close(self) -> None:
        """Its channels must be closed before.  With the lock held; idempotent."""
        if self.closed:
            return
        self.memory.close_all()
        self.requests.close()
        self.closed = True
        for part in reversed(self._parts):
            part.close()
        self.device.close()
        if self._sleeper is not None:
            os.eventfd_write(self._wake, 1)

    def abandon(self) -> None:
        """In a forked child: the device is the parent's, and nothing may be done to it from here."""
        self.closed = True
        self.lock = Baton()  # a thread that is not here may have the parent's
        self.memory.abandon(self.lock)

    def _make(self) -> None:
        binding, context = self.device.binding, self.device.context
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self.domain = binding.PD(context)
        self._parts.append(self.domain)
        self._channel, self._descriptor = event_channel(binding, context)
        self._parts.append(self._channel)
        self.places = min(QUEUE_PLACES, context.query_device().max_cqe)
        self.queue = binding.CQ(context, self.places, None, self._channel, 0)
        self._parts.append(self.queue)
        self._events = select.poll()
        for descriptor in (self._wake, self._descriptor):
            if descriptor is not None:
                self._events.register(descriptor, select.POLLIN)
        self._arena_memory = mmap.mmap(-1, self.arena.arena_bytes)
        self._arena_view = memoryview(self._arena_memory)
        self._arena_address = ctypes.addressof(ctypes.c_char.from_buffer(self._arena_memory))
        rights = binding.constants.IBV_ACCESS_LOCAL_WRITE
        region = binding.MR(self.domain, self.arena.arena_bytes, rights, address=self._arena_address)
        self._parts.append(region)
        self.piece_key: int = region.lkey

    def _reap(self) -> list[tuple[int, int]]:
        """Every completion that there is: ticket (with its channel's number) and status."""
        taken, self._backlog = self._backlog, []
        while True:
            try:
                count, completions = self.queue.poll(POLL_BATCH)
            except self.device.binding.Error as error:
                self._lose(error)
                return taken
            taken += [(each.wr_id, each.status) for each in completions]
            if count < POLL_BATCH:
                return taken

    def _lose(self, error: Exception) -> None:
        """The device cannot be used any more (unplugged, its driver unloaded)."""
        self._lost = Unavailable(f"the RDMA device {self.device.report.device} is gone: {explain(error)}")

    def _sleep(self, timeout_s: float) -> None:
        with self.lock:
            if self.closed or self._ended_count != self._seen_count:
                self._seen_count = self._ended_count
                return
            self._sleeper = threading.get_ident()
            if self._descriptor is not None and not self._armed:
                self.queue.req_notify()
                self._armed = True
        try:
            if not self._locked_turn():
                self._await_event(timeout_s)
        finally:
            with self.lock:
                self._sleeper = None
                self._seen_count = self._ended_count

    def _await_event(self, timeout_s: float) -> None:
        with self.lock:
            earliest = min((each.earliest_deadline for each in self._listeners.values()), default=math.inf)
        limit_s = max(0.0, min(timeout_s, SLEEP_S_MAX, earliest - self.clock()))
        if self._descriptor is None:
            limit_s = min(limit_s, _NAP_S)
        ready = [descriptor for descriptor, _ in self._events.poll(math.ceil(limit_s * 1000))]
        with self.lock:
            if self._descriptor in ready and not self.closed:
                self._armed = False
                try:
                    self._channel.get_cq_event(self.queue)
                    self.queue.ack_events(1)
                except self.device.binding.Error as error:
                    self._lose(error)
        if self._wake in ready:
            os.eventfd_read(self._wake)
