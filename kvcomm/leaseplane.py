"""``LeasePlane``: acquire, renew and release leases, as sans-I/O operations over strong records.

The decisions are ``kvcomm.lease.Tenure``'s; here they are sent.  A lease's record is ``lease/<name>``, one
that no other operation of a client writes.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcomm.errors import Fenced, KVCommError, OutcomeUnknown, Unavailable
from kvcomm.lease import Claim, Grant, LeaseHeld, Tenure
from kvcomm.stateplane import record_name
from kvcomm.steps import Park, Steps
from kvcomm.strongplane import Never, StrongConflict, StrongPlane

POLL_S = 0.5
"""Who waits for a lease looks at least so often whether it was released or renewed."""
ATTEMPTS = 2
"""The first attempt of a renewal or release may find out that an earlier renewal took effect."""


class LeasePlane:
    """See the module.

    Args:
        clock: monotonic seconds, of the process that holds the leases.
        draw: random numbers from [0, 1), for the waits.
        holder: names that were never used before.
    """

    def __init__(
        self,
        strong: StrongPlane,
        clock: Callable[[], float],
        draw: Callable[[], float],
        holder: Callable[[], str],
    ) -> None:
        self._strong, self._draw, self._holder = strong, draw, holder
        self.clock = clock

    def tenure(self, ttl_s: float) -> Tenure:
        """Of a lease that is yet to be acquired."""
        return Tenure(self._holder(), ttl_s)

    def acquire(self, name: str, tenure: Tenure, until: float) -> Steps[int]:
        """Wait for the lease, at the longest until ``until``; its epoch.  Held already = that epoch.

        Raises:
            LeaseHeld: somebody else had it all the time.
            Unavailable, OutcomeUnknown: the record's majority could not be reached, last.
        """
        while not tenure.valid(self.clock()):
            failure: KVCommError | None = None
            try:
                yield from self._try(_record(name), tenure)
            except (Unavailable, OutcomeUnknown) as error:
                failure = error
            now = self.clock()
            if tenure.valid(now):
                break
            pause_s = self._pause_s(tenure, now, failed=failure is not None)
            if now + pause_s >= until:
                raise failure or LeaseHeld(f"lease {name!r} is held by {tenure.rival or 'somebody'}")
            yield Park(Never(), pause_s)
        return tenure.epoch

    def renew(self, name: str, tenure: Tenure) -> Steps[None]:
        """Hold it for its whole time again, from now.

        Raises:
            LeaseLost: it was not held any more, or is not now.
            Unavailable, OutcomeUnknown: try again; until its time has run out it is held all the same.
        """
        for _ in range(ATTEMPTS):
            claim = tenure.renewal(self.clock())
            if (yield from self._send(_record(name), tenure, claim)):
                break
        tenure.check(self.clock())

    def release(self, name: str, tenure: Tenure) -> Steps[None]:
        """Give it back: from now on it is not held here, and others need not wait.

        Raises:
            Unavailable, OutcomeUnknown: others may have to wait until its time has run out.
        """
        for _ in range(ATTEMPTS):
            claim = tenure.release(self.clock())
            if claim is None or (yield from self._send(_record(name), tenure, claim)):
                return

    def look(self, name: str) -> Steps[Grant]:
        """What the record says: who holds it or held it last."""
        (found,) = yield from self._strong.read([_record(name)])
        return Grant.of(found)

    def _try(self, record: bytes, tenure: Tenure) -> Steps[None]:
        (found,) = yield from self._strong.read([record])
        now = self.clock()
        tenure.saw(Grant.of(found), now)
        if not tenure.valid(now) and tenure.free_at() <= now:
            yield from self._send(record, tenure, tenure.claim(now))

    def _send(self, record: bytes, tenure: Tenure, claim: Claim) -> Steps[bool]:
        """Whether it is known to be done."""
        changing = self._strong.compare_and_set(record, claim.expected, claim.value, claim.fence)
        try:
            stored = yield from changing
        except OutcomeUnknown:
            tenure.unsure(claim, self.clock())
            raise
        except StrongConflict as conflict:
            tenure.refused(claim, self.clock())
            tenure.saw(Grant.of(conflict.found), self.clock())
            return False
        except Fenced:
            tenure.refused(claim, self.clock())
            (found,) = yield from self._strong.read([record])
            tenure.saw(Grant.of(found), self.clock())
            return False
        except KVCommError:
            tenure.refused(claim, self.clock())
            raise
        tenure.granted(claim, stored.version)
        return True

    def _pause_s(self, tenure: Tenure, now: float, *, failed: bool) -> float:
        """Until it may be free, but never so long that a release goes unnoticed; jittered, for those who wait
        for one lease must not all come at once."""
        poll_s = min(POLL_S, tenure.ttl_s / 4) * (0.5 + 0.5 * self._draw())
        if failed:
            return poll_s
        return min(poll_s, max(0.001, tenure.free_at() - now))


def _record(name: str) -> bytes:
    return record_name("lease", name)
