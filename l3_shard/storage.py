"""What a shard machine orders from its storage, and what it hears back.

The shell performs them against ``l3_shard.store``; a simulator delays, loses and tears them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvcomm.machine import Effect, Event, Ticket
from kvcomm.wire.messages import RecordState


@dataclass(frozen=True, slots=True)
class Load(Effect):
    """Read records; answered by :class:`Loaded`."""

    ticket: Ticket
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    ticket: Ticket
    states: tuple[RecordState | None, ...]
    """In the order of the keys; ``None`` = no such record, or a damaged one."""
    damaged: tuple[bytes, ...] = ()
    """Keys whose bytes failed verification."""
    failure: str = ""
    """Not empty: nothing could be read, and why; ``states`` is empty."""


@dataclass(frozen=True, slots=True)
class Persist(Effect):
    """Write records, all or nothing, and the replica id with them; answered by :class:`Persisted`.

    A machine never has two of them in flight for one key, so their order among each other is free.
    """

    ticket: Ticket
    writes: tuple[tuple[bytes, RecordState], ...]
    replica: str


@dataclass(frozen=True, slots=True)
class Persisted(Event):
    ticket: Ticket
    outcome: Literal["durable", "full", "failed"] = "durable"
    """``durable`` as the fsync policy means it.  ``full``: no room; nothing was written.  ``failed``: an I/O
    error or failed fsync; what is on the disk is unknown, and the shard must end."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Scan(Effect):
    """List living records in key order; answered by :class:`Scanned`."""

    ticket: Ticket
    prefix: bytes
    after: bytes
    """Only keys above this one."""
    limit: int


@dataclass(frozen=True, slots=True)
class Scanned(Event):
    ticket: Ticket
    keys: tuple[bytes, ...]
    resume: bytes | None
    """Where to go on (``after``); ``None`` = there are no more.  A scan looks at a bounded number of records
    and may stop before it has found ``limit``."""
    failure: str = ""
