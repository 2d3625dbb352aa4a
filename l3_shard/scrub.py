"""``Scrub``: reads every stored record now and then: what rots on a disk is found before it is needed.

Comparing replicas cannot find it: a tree summarises the index, which says what a record *was* when it was
written, and stays right when the record's own bytes decay.  Reads find it, but a record that nobody reads may
decay on one replica after the other, until there is none left to mend the others from.

Theory of operation.  One *pass* goes over the whole database in small steps::

    rest ──► Audit (some records) ──► damaged, lost?  in memory intact ──► write it anew
      ▲                          │                    else ask the other replicas, as for a reader
      │                          └──► misfiled?       write it anew, and its entry in the index with it
      └── this step's share of a pass ◄──┘

The rest after a step is the step's share of ``interval_s``, and never so short that more than ``bytes_s`` are
read: a pass takes ``interval_s``, or longer where the database is too large for that.  Where a pass stands is
noted, so that a shard that is restarted every day does not look at the same first half for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcomm.machine import Ticket
from l3_shard.desk import Desk
from l3_shard.storage import Audit, Audited, Database
from l3_shard.timers import Timers

STEP_RECORDS, STEP_BYTES = 128, 512 << 10
"""A step holds up the shard's loop for a millisecond or two."""
FIRST_S = 60.0
"""A shard that has just started has other things to do."""
RETRY_S = 60.0
"""After a step that the disk refused."""
NOTE_S = 60.0
"""Between two notes of where the pass stands."""


@dataclass(frozen=True, slots=True)
class ScrubOptions:
    """How fast.  Raises ``ValueError`` for what is not positive."""

    interval_s: float = 24 * 3_600.0
    """What a pass takes."""
    bytes_s: int = 8 << 20
    """Read a second, at most."""

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.bytes_s <= 0:
            raise ValueError(f"a scrub needs time and a rate, got {self.interval_s} s, {self.bytes_s} B/s")


@dataclass(slots=True)
class ScrubCounts:
    """Since start."""

    looked: int = 0
    """Records, and where there is an index its entries."""
    looked_bytes: int = 0
    damaged: int = 0
    """Records whose bytes failed verification."""
    lost: int = 0
    """Records that were gone, though the index has them."""
    misfiled: int = 0
    """Sound records about which the index was wrong."""
    passes: int = 0
    failed: int = 0
    """Steps that the disk refused."""


class Scrub:
    """Goes over one database of a shard.

    Args:
        damaged: hears of records whose stored bytes are not what was written.
        lost: hears of records that are gone and were not removed.
        misfiled: hears of sound records whose entry in the index is wrong.
        save: notes where the pass stands.
        stored: notes of an earlier life.
    """

    def __init__(
        self,
        options: ScrubOptions,
        desk: Desk,
        timers: Timers,
        *,
        database: Database = "records",
        damaged: Callable[[Sequence[bytes]], None],
        lost: Callable[[Sequence[bytes]], None],
        misfiled: Callable[[Sequence[bytes]], None],
        save: Callable[[bytes, bytes | None], None],
        stored: Mapping[bytes, bytes],
    ) -> None:
        self.counts = ScrubCounts()
        self._options, self._desk, self._timers, self._database = options, desk, timers, database
        self._damaged, self._lost, self._misfiled, self._save = damaged, lost, misfiled, save
        self._note = b"scrub/" + database.encode()
        self._at = stored.get(self._note, b"")
        self._noted_at = 0.0
        self._audit: Ticket | None = None

    def start(self) -> None:
        """Call once; goes on for ever."""
        self._timers.at(self._desk.now + min(FIRST_S, self._options.interval_s), self._step)

    def audited(self, event: Audited) -> bool:
        """Take the answer to a step; False = it is not ours."""
        if event.ticket != self._audit:
            return False
        self._audit = None
        if event.failure:
            self.counts.failed += 1
            self._rest(min(RETRY_S, self._options.interval_s))
            return True
        self._count(event)
        self._at = event.resume or b""
        self._note_where()
        for keys, tell in (
            (event.damaged, self._damaged), (event.lost, self._lost), (event.misfiled, self._misfiled)
        ):  # fmt: skip
            if keys:
                tell(keys)
        share = event.looked_count / event.total_count if event.total_count else 1.0
        self._rest(
            max(min(1.0, share) * self._options.interval_s, event.looked_bytes / self._options.bytes_s)
        )
        return True

    def _step(self) -> None:
        self._audit = self._desk.ticket()
        self._desk.order(Audit(self._audit, self._at, STEP_RECORDS, STEP_BYTES, self._database))

    def _rest(self, rest_s: float) -> None:
        self._timers.at(self._desk.now + rest_s, self._step)

    def _count(self, event: Audited) -> None:
        counts = self.counts
        counts.looked += event.looked_count
        counts.looked_bytes += event.looked_bytes
        counts.damaged += len(event.damaged)
        counts.lost += len(event.lost)
        counts.misfiled += len(event.misfiled)
        counts.passes += event.resume is None

    def _note_where(self) -> None:
        """Not at every step: it is a write, and a pass that looks at a few records twice costs less."""
        if self._desk.now - self._noted_at >= NOTE_S:
            self._noted_at = self._desk.now
            self._save(self._note, self._at or None)
