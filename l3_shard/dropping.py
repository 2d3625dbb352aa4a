"""``Dropping``: an owner of the past forgets what it knew, so that it brings nothing back when it becomes an
owner again.

A shard that is no owner of a record any more is not asked when the record's deletion is removed
(``l3_shard.removing``).  So whenever a new map has been settled (``l3_shard.settling``), each shard goes
through its records, in the background, page by page:

* It **came along** if it was at the configuration under which the map was settled, its *origin*, or beyond:
  then it drops the records that it does not own by the settled map.
* Else it has **slept through** something, and drops all that it has of any record (it is *void*), before it
  votes again.  Of what it dropped and owns still it then asks for a round (``changing.confirm``), which
  brings back what the others have.

That one of the two is due is written together with the configuration, and so is that it is done; a crash
between begins the pass anew.  Nobody votes under a configuration that is not on its disk, nor with pending
maps before the pass is through, for by those it may own a record that it has something old of.  The others
are not told what it has before then either (``l3_shard.entering``).

**Why nothing decided is lost.**  Say O = {s, .., t} was complete: majorities of all groups of owners but t's
had confirmed all that they had voted for, under exactly O.

* *Who was never there*, or beyond, has voted only under configurations that are not beyond O.  What was
  decided under those was carried to t's owners by O's confirmations, which that shard took no part in.  So
  its votes are needed no more, as those of the settled owners are not needed once they own nothing.
* *Who was there* keeps what it owns by t.  A record that it owns only by a map pending above t is protected
  by a majority of t's owners, which is in every quorum until that map is settled, and for that the record is
  confirmed once more.

**Why nothing removed comes back.**  Removals happen with nothing pending: all owners of the record were at
{r}.  Take a shard that has something older, and is none of them.  When r becomes its settled map it drops the
record.  If it goes past r, from b < r to t > r, it is told of a complete O.  Were it beyond O, O would begin
at or below b, and end in t.  But no configuration that begins below r and ends above it is ever complete:
where the ways of two complete ones part there is an acceptor in a majority of both, since both have the map
in common from which they part, and acceptors only move on.  If it was at O first, it knew t, and came by no
configuration that ends at or below r; if it was on the way to r first, O has r among its maps, or one on the
way there, and a majority of *its* owners was at O, who would have known of t before they were at {r}.  So the
shard was not beyond O, and drops everything.  And a new pending map gives it only records of which it has
nothing, or it waits until that is so.

**Limit.**  A settled map whose origin nobody knows, from before origins were noted, counts as come along; and
nothing is removed until another map has been settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvcomm.errors import KVCommError, Refused
from kvcomm.machine import Ticket
from kvcomm.wire.messages import StrongOutcome, StrongState
from l3_shard.ballot import NO_BALLOT
from l3_shard.configuration import Configuration
from l3_shard.desk import Desk
from l3_shard.entering import MEMBERSHIP_KEY, RETRY_S, TENANT_BYTES, Entering, Forget
from l3_shard.lines import Lines
from l3_shard.storage import Scan, Scanned

PAGE_KEYS = 256
ASKED_MAX = 16
"""Dropped records that are brought back at once."""
DROPPED_MAX = 65_536
"""Dropped records that are remembered for that; others come back when somebody uses them."""

Confirm = Callable[[bytes, Callable[[StrongOutcome], None]], None]


class Dropping:
    """See the module.

    Args:
        confirm: starts to confirm one record; raises ``KVCommError`` when that cannot begin.
    """

    def __init__(
        self, desk: Desk, lines: Lines[StrongState], membership: Entering, confirm: Confirm, *, node: str
    ) -> None:
        self.dropped_count = 0
        """Records, since start."""
        self._desk, self._lines, self._membership = desk, lines, membership
        self._confirm, self._node = confirm, node
        self._at = float("-inf")
        """When to do something again."""
        self._pass: tuple[Configuration, bool] | None = None
        """Under which configuration it began, and whether everything goes."""
        self._scan: Ticket | None = None
        self._open_count = 0
        self._failed = False
        self._lost: deque[bytes] = deque()
        """Dropped, and ours: to be brought back."""
        self._asked_count = 0

    def wake(self) -> None:
        """Do what is due."""
        membership = self._membership
        if not membership.votes or self._pass is not None or self._desk.now < self._at:
            return
        known = membership.configuration
        assert known is not None, "a voter has one"
        if not membership.durable:
            self._at = self._desk.now + RETRY_S  # it is being written, or that has failed
            membership.take_up(known, NO_BALLOT, lambda error: None)
        elif membership.drops:
            self._begin(known)
        elif membership.ready:
            while self._lost and self._asked_count < ASKED_MAX:
                self._bring_back(self._lost.popleft())

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        membership = self._membership
        if not membership.votes or self._pass is not None:
            return None
        lost = bool(self._lost) and self._asked_count < ASKED_MAX
        return max(self._desk.now, self._at) if lost or membership.drops or not membership.durable else None

    # -- a pass

    def _begin(self, known: Configuration) -> None:
        """What is being written was voted for before, and may come to lie behind where we look."""
        self._pass, self._failed = (known, self._membership.void), False
        self._drop(self._lines.writing(), partial(self._next, b""))

    def _next(self, after: bytes) -> None:
        self._scan = self._desk.ticket()
        self._desk.order(Scan(self._scan, b"", after, PAGE_KEYS, "strong"))

    def scanned(self, event: Scanned) -> bool:
        """Storage answered a ``Scan``; False = it is not ours."""
        if event.ticket != self._scan:
            return False
        self._scan = None
        self._failed |= bool(event.failure)
        then = self._over if event.resume is None or event.failure else partial(self._next, event.resume)
        self._drop(list(event.keys), then)
        return True

    def _drop(self, keys: list[bytes], then: Callable[[], None]) -> None:
        assert self._pass is not None
        known, void = self._pass
        keys = [key for key in keys if key != MEMBERSHIP_KEY and (void or not self._is_ours(known, key))]
        self._open_count = 1 + len(keys)
        for key in keys:
            done = partial(self._dropped, key, then)
            try:
                self._lines.change(key, Forget(done), mends=True)
            except Refused as busy:
                done(busy)
        self._count_down(then)

    def _is_ours(self, known: Configuration, key: bytes) -> bool:
        return self._node in known.settled.replicas(key[TENANT_BYTES:])

    def _dropped(self, key: bytes, then: Callable[[], None], error: KVCommError | None) -> None:
        assert self._pass is not None
        self._failed |= error is not None
        self.dropped_count += error is None
        if error is None and self._is_ours(self._pass[0], key) and len(self._lost) < DROPPED_MAX:
            self._lost.append(key)
        self._count_down(then)

    def _count_down(self, then: Callable[[], None]) -> None:
        self._open_count -= 1
        if self._open_count:
            return
        if self._is_current() and not self._failed:
            then()
        else:
            self._end(failed=True)

    def _is_current(self) -> bool:
        """Whether it is what is still to be done: another map may have been settled since it began."""
        known = self._membership.configuration
        assert known is not None and self._pass is not None
        return (known.settled.epoch, self._membership.void) == (self._pass[0].settled.epoch, self._pass[1])

    def _over(self) -> None:
        assert self._pass is not None
        epoch = self._pass[0].settled.epoch
        self._membership.have_dropped(epoch, lambda error: self._end(failed=error is not None))

    def _end(self, *, failed: bool) -> None:
        self._pass = None
        if failed:
            self._at = self._desk.now + RETRY_S

    # -- what others still have

    def _bring_back(self, key: bytes) -> None:
        self._asked_count += 1
        try:
            self._confirm(key, self._brought)
        except KVCommError:  # somebody's next change brings it
            self._asked_count -= 1

    def _brought(self, outcome: StrongOutcome) -> None:
        self._asked_count -= 1

    # -- looking inside

    def story(self) -> str:
        """What goes, for a person."""
        if not self._membership.drops:
            return f"nothing to drop, {len(self._lost)} to be brought back"
        return "dropping everything" if self._membership.void else "dropping the records of others"
