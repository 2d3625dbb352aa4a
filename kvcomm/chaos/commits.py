"""``Commits``: what ``l3_shard.commits`` does for one database, in virtual time.

Reads take a moment.  Everything that waits to be written goes into one transaction, one at a time; where the
policy is to sync, it takes a while and is durable when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic

from kvcomm.chaos.disk import Disk, Part, S
from kvcomm.chaos.draw import Draw
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.world import Host
from kvcomm.machine import Event

if TYPE_CHECKING:
    from l3_shard.storage import Audit, Load, Persist, Scan, Survey, Sweep

STALL_LOOK_S = 0.1
"""How often a stalled disk looks whether it has been healed."""


class Commits(Generic[S]):
    """One database of one life of a shard.

    Args:
        deliver: takes the events that answer what was ordered.
    """

    def __init__(
        self, disk: Disk[S], host: Host, draw: Draw, plan: Plan, deliver: Callable[[Event], None]
    ) -> None:
        self._disk: Disk[S] = disk
        self._host, self._draw, self._plan, self._deliver = host, draw, plan, deliver
        self._life = host.life
        self._waiting: list[Persist[S]] = []
        self._committing = False

    def load(self, load: Load) -> None:
        self._after_disk((0.0, self._plan.load_s), lambda: self._load(load))

    def scan(self, scan: Scan) -> None:
        self._after_disk((0.0, self._plan.load_s), lambda: self._scan(scan))

    def survey(self, survey: Survey) -> None:
        self._after_disk((0.0, 0.0), lambda: self._survey(survey))

    def sweep(self, sweep: Sweep) -> None:
        self._after_disk((0.0, 0.0), lambda: self._sweep(sweep))

    def audit(self, audit: Audit) -> None:
        self._after_disk((0.0, 0.0), lambda: self._audit(audit))

    def persist(self, persist: Persist[S]) -> None:
        self._waiting.append(persist)
        if not self._committing:
            self._committing = True
            self._host.after(self._draw.uniform(0.0, self._plan.turn_s), self._commit)

    def _after_disk(self, delay_s: tuple[float, float], action: Callable[[], None]) -> None:
        self._on_disk(self._disk.stalled_until, self._draw.uniform(*delay_s), action)

    def _on_disk(self, until: float, takes_s: float, action: Callable[[], None]) -> None:
        """What a stalled disk was asked goes on when the stall is over, also when it ends before its time."""
        stall_s = min(until, self._disk.stalled_until) - self._host.world.now
        if stall_s <= 0.0:
            self._host.after(takes_s, action)
        else:
            self._host.after(min(stall_s, STALL_LOOK_S), lambda: self._on_disk(until, takes_s, action))

    def _load(self, load: Load) -> None:
        from l3_shard.storage import Loaded

        states, damaged = self._disk.load(load.keys)
        self._deliver(Loaded(load.ticket, states, damaged))

    def _scan(self, scan: Scan) -> None:
        from l3_shard.storage import Scanned

        keys, resume = self._disk.scan(scan.prefix, scan.after, scan.limit)
        self._deliver(Scanned(scan.ticket, keys, resume))

    def _survey(self, survey: Survey) -> None:
        from kvcomm.clock import Stamp
        from l3_shard.storage import Entry, Surveyed

        leaves = [
            tuple([Entry(key, digest, Stamp(dead_since)) for key, (digest, dead_since) in leaf])
            if leaf
            else ()
            for leaf in self._disk.survey(survey.leaves)
        ]
        self._deliver(Surveyed(survey.ticket, tuple(leaves)))

    def _sweep(self, sweep: Sweep) -> None:
        from kvcomm.clock import Stamp
        from l3_shard.storage import Entry, Swept

        found, resume = self._disk.sweep(sweep.first, sweep.records)
        leaves = [
            (leaf, tuple([Entry(key, digest, Stamp(dead_since)) for key, (digest, dead_since) in entries]))
            for leaf, entries in found
        ]
        self._deliver(Swept(sweep.ticket, tuple(leaves), resume))

    def _audit(self, audit: Audit) -> None:
        from l3_shard.storage import Audited

        self._deliver(Audited(audit.ticket, *self._disk.audit(audit.resume, audit.records)))

    def _commit(self) -> None:
        batch, self._waiting = self._waiting, []
        self._disk.begin([Part(persist.writes, persist.replica, persist.notes) for persist in batch])
        if self._disk.fsync == "always":
            self._after_disk(self._plan.commit_s, lambda: self._committed(batch))
        else:
            self._committed(batch)

    def _committed(self, batch: list[Persist[S]]) -> None:
        from l3_shard.storage import Persisted

        for persist, outcome in zip(batch, self._disk.commit(), strict=True):
            if self._host.life == self._life:
                self._deliver(Persisted(persist.ticket, outcome, outcome if outcome != "durable" else ""))
        if self._host.life != self._life:
            return
        if self._waiting:
            self._host.soon(self._commit)
        else:
            self._committing = False
