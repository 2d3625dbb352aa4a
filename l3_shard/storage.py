"""What a shard machine orders from its storage, and what it hears back.

The shell performs them against ``l3_shard.store``; a simulator delays, loses and tears them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from kvcomm.clock import Stamp
from kvcomm.machine import Effect, Event, Ticket
from kvcomm.wire.messages import RecordState, StrongState

Database = Literal["records", "strong"]
"""``records`` is as durable as the fsync policy says; every write to ``strong`` is synced."""
State = RecordState | StrongState
"""What they hold, in this order."""
S = TypeVar("S", bound=State)


@dataclass(frozen=True, slots=True)
class Load(Effect):
    """Read records; answered by :class:`Loaded`."""

    ticket: Ticket
    keys: tuple[bytes, ...]
    database: Database = "records"


@dataclass(frozen=True, slots=True)
class Loaded(Event, Generic[S]):
    ticket: Ticket
    states: tuple[S | None, ...]
    """In the order of the keys; ``None`` = no such record, or a damaged one."""
    damaged: tuple[bytes, ...] = ()
    """Keys whose bytes failed verification."""
    failure: str = ""
    """Not empty: nothing could be read, and why; ``states`` is empty."""


@dataclass(frozen=True, slots=True)
class Persist(Effect, Generic[S]):
    """Write records, all or nothing, and the replica id with them; answered by :class:`Persisted`.

    A machine never has two of them in flight for one key, so their order among each other is free.
    """

    ticket: Ticket
    writes: tuple[tuple[bytes, S], ...]
    """An empty state (no context; ``acceptor.EMPTY``) removes the record."""
    replica: str
    """Of the strong database: its member id."""
    database: Database = "records"
    notes: tuple[tuple[bytes, bytes | None], ...] = ()
    """Small facts beside the records, see ``l3_shard.notes``; ``None`` removes one."""


@dataclass(frozen=True, slots=True)
class Persisted(Event):
    ticket: Ticket
    outcome: Literal["durable", "full", "failed"] = "durable"
    """``durable`` as the fsync policy means it.  ``full``: no room; nothing was written.  ``failed``: an I/O
    error or failed fsync; what is on the disk is unknown, and the shard must end."""
    text: str = ""


class Entry(NamedTuple):
    """A record as the store's index knows it, without reading the record."""

    key: bytes
    digest: int
    """``merkle.state_digest`` of its durable state."""
    dead_since: Stamp
    """The latest tombstone's stamp where nothing but tombstones is left; 0 = it has a value."""


@dataclass(frozen=True, slots=True)
class Survey(Effect):
    """List all records of some leaves of the Merkle tree; answered by :class:`Surveyed`, and not before other
    events had their turn: surveys come in long rows."""

    ticket: Ticket
    leaves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Surveyed(Event):
    ticket: Ticket
    leaves: tuple[tuple[Entry, ...], ...]
    """In the order of the question; the entries of a leaf in order of their keys."""
    failure: str = ""
    """Not empty: nothing could be read, and why; ``leaves`` is empty."""


@dataclass(frozen=True, slots=True)
class Sweep(Effect):
    """List the records of all leaves from one on, whole leaves only, until there are so many; answered by
    :class:`Swept`, and not before other events had their turn.  Costs what is there, not what could be."""

    ticket: Ticket
    first: int
    """Leaf."""
    records: int


@dataclass(frozen=True, slots=True)
class Swept(Event):
    ticket: Ticket
    leaves: tuple[tuple[int, tuple[Entry, ...]], ...]
    """Those with records, in order."""
    resume: int | None
    """The leaf to go on with; ``None`` = there are no more."""
    failure: str = ""
    """Not empty: nothing could be read, and why; ``leaves`` is empty."""


@dataclass(frozen=True, slots=True)
class Audit(Effect):
    """Read stored records as they lie on the disk and verify them; answered by :class:`Audited`, and not
    before other events had their turn.  See ``l3_shard.scrub``."""

    ticket: Ticket
    resume: bytes
    """Where to begin: empty, or what the answer before said."""
    records: int
    """Look at so many at most."""
    size_bytes: int
    """Stop after the record that reaches this size of all together."""
    database: Database = "records"


@dataclass(frozen=True, slots=True)
class Audited(Event):
    ticket: Ticket
    looked_count: int
    looked_bytes: int
    total_count: int
    """What a whole pass looks at, about."""
    damaged: tuple[bytes, ...]
    """Keys whose bytes failed verification."""
    lost: tuple[bytes, ...]
    """Keys that the index has and the records have not."""
    misfiled: tuple[bytes, ...]
    """Keys of sound records about which the index says something else, or nothing."""
    resume: bytes | None
    """Where to go on; ``None`` = the pass is over.  Means something to the store only."""
    failure: str = ""
    """Not empty: nothing could be read, and why."""


@dataclass(frozen=True, slots=True)
class Scan(Effect):
    """List living records in key order; answered by :class:`Scanned`."""

    ticket: Ticket
    prefix: bytes
    after: bytes
    """Only keys above this one."""
    limit: int
    database: Database = "records"
    """Of the strong one all records are listed, deleted ones too."""


@dataclass(frozen=True, slots=True)
class Scanned(Event):
    ticket: Ticket
    keys: tuple[bytes, ...]
    resume: bytes | None
    """Where to go on (``after``); ``None`` = there are no more.  A scan looks at a bounded number of records
    and may stop before it has found ``limit``."""
    failure: str = ""
