"""``DiskHealth``: whether a disk tier may be written to and read from, by what its disk did so far.

::

    opening --(files are known)--> on --(no room: ENOSPC, EDQUOT)--> full --(a write succeeds)--> on
                                    '---(an answer is overdue)-----> stalled --(it came)--------> on
                                    '---(ERRORS_MAX errors within ERRORS_WITHIN_S)--------------> off

While the disk is full one write every ``RETRY_S`` finds out whether there is room again; reads go on.  While
it is stalled nothing is asked of it at all: what it has is a miss, so that nobody waits for it again.

Damaged and missing files are no errors: a power cut leaves some on a sound disk.
"""

from __future__ import annotations

import errno
from collections import deque

from kvcomm.blockstore import DepotState

RETRY_S = 2.0
ERRORS_MAX = 16
ERRORS_WITHIN_S = 60.0

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskHealth:
    """``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.error_count = 0
        self._opened = self._off = False
        self._full_until: float | None = None
        self._overdue_count = 0
        self._errors: deque[float] = deque(maxlen=ERRORS_MAX)

    @property
    def state(self) -> DepotState:
        if self._off:
            return "off"
        if not self._opened:
            return "opening"
        if self._overdue_count:
            return "stalled"
        return "on" if self._full_until is None else "full"

    @property
    def reads(self) -> bool:
        return self.state in ("on", "full")

    def writes(self, now: float) -> bool:
        """Whether a block may be written now."""
        return self.reads and (self._full_until is None or now >= self._full_until)

    def retry_at(self) -> float | None:
        """When to look again, if the disk is full."""
        return self._full_until if self.state == "full" else None

    def opened(self) -> None:
        self._opened = True

    def give_up(self) -> None:
        """It cannot be used at all."""
        self._off = True

    def wrote(self) -> None:
        self._full_until = None

    def overdue(self) -> None:
        """An answer should have come by now; :meth:`came` once it has."""
        self._overdue_count += 1

    def came(self) -> None:
        assert self._overdue_count, "nothing was overdue"
        self._overdue_count -= 1

    def failed(self, number: int | None, now: float) -> bool:
        """A call to the disk failed with this ``errno``; True = that was one too many, the tier is off."""
        self.error_count += 1
        if number in NO_ROOM:
            self._full_until = now + RETRY_S
            return False
        self._errors.append(now)
        many = len(self._errors) == ERRORS_MAX and now - self._errors[0] <= ERRORS_WITHIN_S
        turned = many and not self._off
        self._off = self._off or many
        return turned
