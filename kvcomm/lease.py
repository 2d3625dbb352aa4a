"""``Tenure``: one process's view of one lease, as a machine: what it holds, and what it saw others hold.

A lease is a strong record.  Its value says who holds it and for how long; its *fence* is the epoch of the
lease, so epochs grow with every grant and none is ever given twice, not after a release, an expiry, a
deletion or a restart: registers never forget their fence (``l3_shard.proposer``).

::

              saw: free, or not renewed for so long           done
      idle ─────────────────────────────────────────► claimed ─────► held ──renewal, renewal, ...──┐
        ▲                                                │            ▲ └──────────────────────────┘
        │◄──────────────── somebody was faster ──────────┘            │
        └──────────────── lost: time ran out, taken over, released ───┘

**Two clocks that nobody compares.**  The holder counts its time from when it *sent* the request that was
granted; everybody else from when it *saw* that grant, which is later.  So the holder has stopped before
anyone may follow, as long as no clock runs more than ``RATE_MARGIN`` faster than another's.  All times are of
the own monotonic clock; no wall clock takes part.

**A lease without a fence is advice.**  A holder can be stopped between looking at its lease and acting, for
any time.  What must not happen under a lease that is over is refused by the record that is changed: pass the
lease as ``fence``.

Pure: times are arguments, monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf, isfinite

import msgspec

from kvcomm.errors import Conflict, Corrupt, Refused
from kvcomm.strongplane import NO_VERSION, StrongValue
from kvcomm.wire.messages import FENCE_MAX

TTL_S = 6.0
TTL_S_MIN = 0.05
TTL_S_MAX = 86_400.0
MARGIN_S = 0.5
"""Others wait at least so much longer than the holder may act."""
RATE_MARGIN = 0.1
"""And at least this part of the lease's time: by so much one clock may run faster than another."""
RENEWALS = 3
"""A lease is renewed so many times within its time."""
CLAIMS_MAX = 16
"""Claims whose outcome is unknown that are remembered."""
HOLDER_BYTES_MAX = 256


class LeaseLost(Refused):
    """The lease is not ours (any more).  Stop what it was for; acquire it again for a new epoch."""

    code = Refused.code


class LeaseHeld(Conflict):
    """Somebody else held the lease until the deadline.  Nothing was changed."""

    code = Conflict.code


class _Term(msgspec.Struct, frozen=True, array_like=True):
    """The value of a lease's record."""

    holder: str
    serial: int
    ttl_ms: int


_decoder = msgspec.msgpack.Decoder(_Term)


@dataclass(frozen=True, slots=True)
class Grant:
    """What the record of a lease says.  Every acquisition, renewal and release is a grant of its own."""

    epoch: int
    """0 = it was never held."""
    version: bytes
    """Of the record; the name of this grant."""
    holder: str
    """Empty = nobody: released, or never held."""
    serial: int
    """The holder's number of the claim."""
    ttl_s: float

    @staticmethod
    def of(found: StrongValue) -> Grant:
        """Raises ``Corrupt``: the record is no lease."""
        if found.value is None:
            return Grant(found.fence, NO_VERSION, "", 0, 0.0)
        try:
            term = _decoder.decode(found.value)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"the record holds no lease: {error}") from error
        if not 0 <= term.ttl_ms <= TTL_S_MAX * 1_000:
            raise Corrupt(f"the record holds no lease: {term.ttl_ms} ms")
        return Grant(found.fence, found.version, term.holder, term.serial, term.ttl_ms / 1_000)


@dataclass(frozen=True, slots=True)
class Claim:
    """A change of the record that the owner of the tenure is to send: only if the record's version is
    ``expected``, under ``fence``."""

    expected: bytes
    fence: int
    value: bytes
    serial: int
    sent_at: float


class Tenure:
    """See the module.

    One thread or task at a time may claim; :meth:`valid`, :meth:`check` and the properties may be used by any
    thread meanwhile: what they rely on is written last, and a loss is final.

    Args:
        holder: a name that no other tenure has.
        ttl_s: how long each grant lasts.
        kin: what the names of our earlier lives begin with.  Whoever names it must know that they have ended:
            what they held is taken over at once.

    Raises:
        ValueError: the time or the name is out of range.
    """

    def __init__(self, holder: str, ttl_s: float = TTL_S, *, kin: str = "") -> None:
        if not (isfinite(ttl_s) and TTL_S_MIN <= ttl_s <= TTL_S_MAX):
            raise ValueError(f"a lease lasts {TTL_S_MIN} to {TTL_S_MAX:.0f} seconds, got {ttl_s}")
        if not 0 < len(holder.encode()) <= HOLDER_BYTES_MAX:
            raise ValueError(f"a holder's name has 1 to {HOLDER_BYTES_MAX} bytes")
        self.holder = holder
        self._kin = kin
        self.ttl_s = round(ttl_s, 3)
        self.epoch = 0
        """Of the last grant to us; 0 = none yet."""
        self.lost = "it was not acquired"
        """Why it is not ours; empty = it is, or its time has run out and nobody has looked yet."""
        self._until = -inf
        self._version = NO_VERSION
        self._serial = 0
        self._held_serial = 0
        self._sent: OrderedDict[int, float] = OrderedDict()
        """Claims without a known outcome: serial -> when they were sent."""
        self._seen: Grant | None = None
        self._seen_at = -inf
        self._failed_at = -inf

    # -- what we hold

    def valid(self, now: float) -> bool:
        """Whether we may act.  ``False`` is final: a renewal that comes later does not revive it."""
        if not self.lost and now >= self._until:
            self._lose(f"its {self.ttl_s} s ran out")
        return not self.lost

    def check(self, now: float) -> int:
        """The epoch.

        Raises:
            LeaseLost: :meth:`valid` is false.
        """
        if not self.valid(now):
            raise LeaseLost(f"the lease is lost: {self.lost}")
        return self.epoch

    @property
    def until(self) -> float:
        """When the last grant to us ends."""
        return self._until

    def renew_at(self) -> float:
        """When to renew next: when a third of the time is over, and soon after a renewal that failed."""
        regular = self._until - self.ttl_s + self.ttl_s / RENEWALS
        return max(regular, self._failed_at + self.ttl_s / (4 * RENEWALS))

    def renewal(self, now: float) -> Claim:
        """Raises ``LeaseLost``."""
        self.check(now)
        return self._claim(self._version, self.epoch, self.holder, now)

    def release(self, now: float) -> Claim | None:
        """Stop holding it, at once; ``None`` = there is nothing to be given back.  Others that see the claim
        done need not wait."""
        if not self.epoch or self._version == NO_VERSION:
            return None
        self._lose("it was released")
        return self._claim(self._version, self.epoch, "", now)

    # -- what others hold

    def saw(self, grant: Grant, now: float) -> None:
        """The record said so, at ``now`` or a little before."""
        if self._seen is None or grant.version != self._seen.version or grant.epoch != self._seen.epoch:
            self._seen, self._seen_at = grant, now
        if grant.holder == self.holder and grant.serial in self._sent:
            self._take(grant.epoch, grant.version, grant.serial)  # its answer was lost, it was not
        elif grant.epoch > self.epoch > 0:
            self._lose(f"{grant.holder or 'somebody'} took it over as epoch {grant.epoch}")

    def free_at(self) -> float:
        """When what was seen may be taken over; ``inf`` = nothing was seen yet.

        What stands under our own name and is not held is ours to take: we know that nobody acts on it.
        """
        if self._seen is None:
            return inf
        ours = bool(self._kin) and self._seen.holder.startswith(self._kin)
        if ours or self._seen.holder in ("", self.holder):
            return self._seen_at
        return self._seen_at + self._seen.ttl_s + margin_s(self._seen.ttl_s)

    @property
    def seen(self) -> Grant | None:
        """What the record said last."""
        return self._seen

    @property
    def rival(self) -> str:
        """Who held it when it was seen last."""
        return self._seen.holder if self._seen is not None else ""

    def claim(self, now: float) -> Claim:
        """Take over what was seen; not before :meth:`free_at`."""
        seen = self._seen
        assert seen is not None and now >= self.free_at(), "a lease is taken over when it is free"
        if seen.epoch >= FENCE_MAX:
            raise Refused("the lease has no epochs left")
        return self._claim(seen.version, seen.epoch + 1, self.holder, now)

    # -- what became of claims

    def granted(self, claim: Claim, version: bytes) -> None:
        """The change was made; the record has ``version`` now."""
        if claim.serial in self._sent and claim.fence >= self.epoch:
            self._take(claim.fence, version, claim.serial)

    def refused(self, claim: Claim, now: float) -> None:
        """The change was certainly not made."""
        self._sent.pop(claim.serial, None)
        self._failed_at = now

    def unsure(self, claim: Claim, now: float) -> None:
        """Nobody knows; what is seen of the record will tell."""
        self._failed_at = now

    def _claim(self, expected: bytes, fence: int, holder: str, now: float) -> Claim:
        self._serial += 1
        if holder:
            self._sent[self._serial] = now
            while len(self._sent) > CLAIMS_MAX:
                self._sent.popitem(last=False)
        term = _Term(holder, self._serial, round(self.ttl_s * 1_000))
        return Claim(expected, fence, msgspec.msgpack.encode(term), self._serial, now)

    def _take(self, epoch: int, version: bytes, serial: int) -> None:
        """A claim is known to have been done; it counts from when it was sent.  Claims before it are over:
        each names the version that it replaces."""
        sent_at = self._sent[serial]
        for older in [each for each in self._sent if each <= serial]:
            del self._sent[older]
        if serial <= self._held_serial:
            return
        self._held_serial, self._version = serial, version
        if epoch > self.epoch:
            self.epoch, self._until = epoch, sent_at + self.ttl_s
            self.lost = ""
        elif not self.lost:
            self._until = sent_at + self.ttl_s

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = why


def margin_s(ttl_s: float) -> float:
    """How much longer than the holder may act others wait."""
    return max(MARGIN_S, RATE_MARGIN * ttl_s)
