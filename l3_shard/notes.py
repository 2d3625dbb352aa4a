"""``Notes``: the few facts beside its records that a shard must still know after a restart: hints, the
counter floor, whether it has caught up.

They lie in the record store's own database, or in that of the strong records, and are written like records,
as one :class:`~l3_shard.storage.Persist` at a time, so that a later note never loses against an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcomm.machine import Ticket
from l3_shard.desk import Desk
from l3_shard.storage import Database, Persist, Persisted

Told = Callable[[bool], None]
"""Hears whether the note is durable; if not (no room on the disk), nothing was noted."""

NOTES_A_WRITE = 1_024


class Notes:
    """What waits to be written.  Reading is done once, at start."""

    def __init__(self, desk: Desk, database: Database = "records") -> None:
        self._desk: Desk = desk
        self._database: Database = database
        self._waiting: dict[bytes, bytes | None] = {}
        self._told: list[Told] = []
        self._telling: list[Told] = []
        self._ticket: Ticket | None = None

    def save(self, note: bytes, value: bytes | None, told: Told | None = None) -> None:
        """Write, or remove (``None``), at the next flush that finds no other under way."""
        self._waiting[note] = value
        if told is not None:
            self._told.append(told)

    def flush(self, replica: str) -> None:
        """Order the write of what waits.  A note that somebody waits for is in the first."""
        if self._ticket is not None or not self._waiting:
            return
        self._ticket = self._desk.ticket()
        if self._told:
            going, self._waiting = self._waiting, {}
        else:
            going = {note: self._waiting.pop(note) for note in list(self._waiting)[:NOTES_A_WRITE]}
        self._telling, self._told = self._told, []
        self._desk.order(Persist(self._ticket, (), replica, self._database, tuple(going.items())))

    def persisted(self, event: Persisted) -> bool:
        """Take the answer; False = the write was not ours."""
        if event.ticket != self._ticket:
            return False
        self._ticket = None
        telling, self._telling = self._telling, []
        for told in telling:
            told(event.outcome == "durable")
        return True
