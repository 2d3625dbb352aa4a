"""``PollLoop``: the loop that all channels of a transport share, driven by whoever waits.

Leader and followers (Schmidt, O'Ryan, Kircher, Pyarali, Buschmann, "Leader/Followers", 2000): of all
threads that wait, one polls the wire for everybody; the others sleep until something was done or the lead is
free.  So a single caller gets its completion without a switch of threads, and nothing runs while nobody
waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from l2_rdma.transports.port import Operation

_OVERDUE_S = 0.001
"""How long a follower whose time is over leaves it to the leader to say so."""
_NOBODY = 0  # is no thread's number


class PollLoop:
    """Waits for operations.

    Args:
        poll: ends operations that are done, and those whose deadline has passed; waits for something to
            happen for at most so many seconds, less if it likes.  Called by one thread at a time.
        clock: monotonic seconds, the clock of the deadlines.
    """

    def __init__(self, poll: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._poll = poll
        self._clock = clock
        # Entered by itself: a signal that comes while a condition enters it would keep it for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._leader = _NOBODY  # a thread's number
        self._follower_count = 0

    def wait(self, operations: Sequence[Operation]) -> None:
        """Until all are done."""
        me = threading.get_ident()
        try:
            for operation in operations:
                while not operation.done:
                    if self._lead(me):
                        self._poll_for(operation)
                    else:
                        self._follow(operation)
        finally:
            if self._leader == me:  # interrupted between taking the lead and polling
                self._give_up()

    def _poll_for(self, operation: Operation) -> None:
        try:
            while not operation.done:
                self._poll(max(0.0, operation.deadline - self._clock()))
                if self._follower_count:
                    with self._lock:
                        self._changed.notify_all()
        finally:
            self._give_up()

    def _lead(self, me: int) -> bool:
        with self._lock:
            if self._leader != _NOBODY:
                return False
            self._leader = me
            return True

    def _give_up(self) -> None:
        with self._lock:
            self._leader = _NOBODY
            self._changed.notify_all()

    def _follow(self, operation: Operation) -> None:
        """Sleep until the leader has polled, or has given up the lead.  It ends what is overdue, ours too."""
        with self._lock:
            self._follower_count += 1  # before we look: a leader that sees nobody follow tells nobody
            try:
                if self._leader != _NOBODY and not operation.done:
                    left_s = max(operation.deadline - self._clock(), _OVERDUE_S)
                    self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            finally:
                self._follower_count -= 1
