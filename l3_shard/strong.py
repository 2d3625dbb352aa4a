"""``Strong``: the strong records of one shard: CASPaxos, one register a record (Rystsov 2018, arXiv
1802.07000).

Any owner of a record may coordinate a read or change of it (``changing``, ``proposer``); every owner is an
acceptor (``voting``, ``acceptor``), once it has entered the group (``entering``)::

    caller ── StrongChange ──► coordinator ── StrongPrepare ──► owners      skipped when they promised this
                                   │ ◄──────── promised, what they have     ballot with the last accept
                                   │ ── StrongAccept(changed) ──► owners    on their disk before they answer
    caller ◄── StrongOutcomes ─────┘ ◄──────── accepted, by a majority

Strong records share nothing with the eventual ones but the wire and the ring: they have a database of their
own in which every write is synced, whatever ``storage.fsync`` says, and the same name may be used in both.
They are never evicted.

In the background: new owners take over when the ring changes (``settling``) and old ones forget
(``dropping``), damaged records are filled again
(``healing``), and what deletions leave behind goes (``removing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvcomm.errors import Unavailable
from kvcomm.machine import Effect, Origin
from kvcomm.wire.messages import (
    Failure,
    Message,
    RingNode,
    StrongAccept,
    StrongEnter,
    StrongOrder,
    StrongPrepare,
    StrongRemove,
    StrongSettle,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.ballot import Ballots
from l3_shard.changing import Changing
from l3_shard.desk import Desk, Request
from l3_shard.dropping import Dropping
from l3_shard.entering import TENANT_BYTES, Entering
from l3_shard.healing import Healing
from l3_shard.keptmap import kept_map
from l3_shard.lines import Lines
from l3_shard.notes import Notes
from l3_shard.proposer import Jitter
from l3_shard.quorum import Quorum
from l3_shard.removing import AGE_S, Removing
from l3_shard.ring import Ring
from l3_shard.settling import Settling
from l3_shard.storage import Loaded, Persisted, Scanned
from l3_shard.voting import Voting, check

RECENT_BYTES_MAX = 16 << 20
"""States kept in memory beside those in use."""


@dataclass(frozen=True, slots=True)
class StrongIdentity:
    """Who a shard is among acceptors and proposers."""

    member: str
    """Id of the database with the strong records: drawn when it is made, and when it is found to be a
    copy."""
    incarnation: int
    """Of the process; never used before, not even by an earlier life on the same disk."""
    draw: Jitter
    """Random numbers from [0, 1)."""
    tombstone_age_s: float = AGE_S
    """What a deletion leaves behind is left alone for so long, then removed."""
    notes: Mapping[bytes, bytes] = field(default_factory=dict)
    """What the database kept beside the records."""


@dataclass(frozen=True, slots=True)
class StrongCounts:
    """What happened since start."""

    contended_count: int
    """Rounds that met another proposer's ballot."""
    unknown_count: int
    unavailable_count: int
    votes: bool
    pending_count: int = 0
    """Ring maps whose owners are taking over."""
    confirmed_count: int = 0
    """Records that were confirmed for new owners."""
    damaged_count: int = 0
    """Records whose stored bytes failed verification."""
    healed_count: int = 0
    """Of those, filled again by the others."""
    removed_count: int = 0
    """Tombstones that were taken away here."""


class Strong:
    """See the module; the parts of a shard machine that are about strong records.

    Args:
        ring: the newest.
        refused: hears of every ``Failure`` that a peer answered.
    """

    def __init__(
        self,
        node: str,
        identity: StrongIdentity,
        desk: Desk,
        tickets: Iterator[int],
        *,
        ring: Callable[[], Ring],
        refused: Callable[[Message], None],
    ) -> None:
        self._node, self._member, self._desk, self._ring = node, identity.member, desk, ring
        self._lines: Lines[StrongState] = Lines(
            desk.limits.changes_max,
            tickets,
            RECENT_BYTES_MAX,
            empty=acceptor.EMPTY,
            value_bytes=_value_bytes,
            database="strong",
            mends=False,
        )
        self.notes = Notes(desk, "strong")
        """Beside the strong records: durable whatever the fsync policy is."""
        self._refused = refused
        self._entering = Entering(
            desk,
            self._lines,
            node=node,
            member=identity.member,
            kept=Ring.from_map(kept_map(identity.notes)).serving,
            ring=ring,
            refused=refused,
            moved=self._moved,
        )
        self._voting = Voting(self._lines, self._entering, self._deleted)
        self._changing = Changing(
            desk,
            self._voting,
            tickets,
            node=node,
            ballots=Ballots(node, identity.incarnation),
            draw=identity.draw,
            quorum=self._quorum,
            epoch=lambda: ring().epoch,
            refused=self._heard_no,
        )
        self._settling = Settling(
            desk, self._entering, self._changing.confirm, node=node, ring=ring, refused=refused
        )
        self._dropping = Dropping(desk, self._lines, self._entering, self._changing.confirm, node=node)
        self._healing = Healing(
            desk, self._lines, self._entering, node=node, epoch=lambda: ring().epoch, refused=refused
        )
        self._removing = Removing(
            desk,
            self._lines,
            self._entering,
            self._voting,
            self._changing.confirm,
            node=node,
            quorum=self._quorum,
            epoch=lambda: ring().epoch,
            refused=self._heard_no,
            age_s=identity.tombstone_age_s,
        )

    # -- requests, checked and with stored keys

    def run(self, origin: Origin, orders: Sequence[StrongOrder]) -> None:
        """Reads and changes of a caller.

        Raises:
            Unavailable: this shard cannot coordinate now.
            Refused: it is busy.
        """
        self._changing.run(origin, orders)

    def vote(self, origin: Origin, message: StrongPrepare | StrongAccept) -> None:
        """Another shard's round.

        Raises:
            Refused: the shard is busy.
            Corrupt: it is not something that a proposer asks.
        """
        check(message)
        value = message.register.value if isinstance(message, StrongAccept) else None
        request = self._desk.open(origin, 1, len(value or b""))
        request.expire = partial(self._desk.close, request, Unavailable("the acceptor was too slow"))
        self._voting.vote(message, partial(self._voted, request))

    def _voted(self, request: Request, answer: Message) -> None:
        if request.open:
            self._desk.close(request, answer)

    def enter(self, origin: Origin, message: StrongEnter) -> None:
        """Another shard that enters.  Raises as ``Entering.enter``."""
        self._entering.enter(origin, message)

    def settle(self, origin: Origin, message: StrongSettle) -> None:
        """Another voter's configuration.  Raises as ``Settling.settle``."""
        self._settling.settle(origin, message)

    def remove(self, origin: Origin, message: StrongRemove) -> None:
        """Tombstones to drop.  Raises as ``Removing.remove``."""
        self._removing.remove(origin, message)

    def owned(self, key: bytes) -> bool:
        """Whether this shard is an acceptor of the stored key, by the newest map or the configuration."""
        name, known = key[TENANT_BYTES:], self._entering.configuration
        owner = self._node in self._ring().replicas(name)
        return owner or (known is not None and known.owned_by(self._node, name))

    def shard(self, node: str) -> RingNode:
        """Where an acceptor is to be called that is in the newest map no more.  Raises ``KeyError``."""
        for known in (self._entering.configuration, self._entering.heard_of):
            for ring in reversed(() if known is None else known.rings):
                if node in ring:
                    return ring.shard(node)
        raise KeyError(node)

    def inspect(self, keys: Sequence[bytes]) -> None:
        """These records do not lie on the disk as they were written.  What is in memory is durable state and
        is written anew; what is not is read, as for a vote, and found damaged."""
        for key in keys:
            if self._lines.known(key) is not None:
                self._lines.rewrite(key)
            else:
                self._lines.read(key, lambda local: None)

    def _quorum(self, key: bytes) -> Quorum:
        known = self._entering.configuration
        if known is None or not self._entering.votes:
            raise Unavailable(f"{self._node} has no strong records (yet): it is catching up")
        return known.quorum(key[TENANT_BYTES:])

    def _moved(self) -> None:
        """Other acceptors count from now on."""
        self._changing.forget_promises()

    def _deleted(self, key: bytes) -> None:
        """Whatever promise we have was given before, and is overtaken."""
        self._changing.forget_promise(key)
        self._removing.deleted(key)

    def _heard_no(self, node: str, answer: Message) -> None:
        """A peer refused: it has another configuration, or a newer ring, or is just busy."""
        if isinstance(answer, Failure) and answer.code == Unavailable.code and answer.detail:
            self._settling.differs(node, answer)
        else:
            self._refused(answer)

    # -- the rest of the machine

    def took(self, event: Loaded[StrongState] | Persisted | Scanned) -> bool:
        """An answer of the storage; False = it was not asked by us, or it is a failed write."""
        match event:
            case Loaded() if self._lines.awaits(event.ticket):
                self._healing.found(self._lines.loaded(event))
            case Persisted() if event.outcome != "failed" and self._lines.awaits(event.ticket):
                self._lines.persisted(event)
            case Persisted() if event.outcome != "failed" and self.notes.persisted(event):
                pass
            case Scanned():
                parts = (self._entering, self._settling, self._dropping, self._removing)
                return any(part.scanned(event) for part in parts)
            case _:
                return False
        return True

    def wake(self) -> None:
        """Do what is due."""
        self._entering.wake()
        self._settling.wake()
        self._dropping.wake()
        self._healing.wake()
        self._removing.wake()
        self._changing.wake()

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        background = (self._settling, self._dropping, self._healing, self._removing)
        parts = (self._entering, *background, self._changing)
        waits = [wait for part in parts if (wait := part.deadline()) is not None]
        return min(waits, default=None)

    @property
    def pending(self) -> bool:
        """Whether ``flush`` has something to do."""
        return self._lines.pending

    def flush(self) -> list[Effect]:
        """What has come together for the storage."""
        return self._lines.flush(self._member)

    def flush_notes(self) -> None:
        """Order what is to be noted."""
        self.notes.flush(self._member)

    # -- looking inside

    def counts(self) -> StrongCounts:
        changing, known = self._changing, self._entering.configuration
        return StrongCounts(
            changing.contended_count,
            changing.unknown_count,
            changing.unavailable_count,
            self._entering.votes,
            0 if known is None else len(known.pending),
            self._settling.confirmed_count,
            self._healing.damaged_count,
            self._healing.healed_count,
            self._removing.removed_count,
        )

    @property
    def maps(self) -> tuple[int, ...]:
        """Epochs of the maps whose owners decide; empty until this shard votes."""
        return self._entering.maps if self._entering.votes else ()

    def moved(self) -> tuple[int, bool]:
        """Epoch of the map that has settled our records (the newest, if that places them alike), and whether
        we have nothing more of records that are not ours by it."""
        ring, known = self._ring(), self._entering.configuration
        if not self._entering.votes or known is None:
            return 0, False
        if known.pending or known.settled.placement != ring.placement:
            return known.settled.epoch, False
        return ring.epoch, not self._entering.drops

    def check(self) -> None:
        """Assert every invariant."""
        self._lines.check()
        self._changing.check()

    def story(self, key: bytes) -> str:
        """What is known of the stored ``key``, for a person."""
        parts = (self._entering, self._settling, self._dropping, self._healing, self._removing)
        background = "; ".join(part.story() for part in parts)
        return f"{background}; {self._changing.story(key)}; {self._lines.story(key)}"


def _value_bytes(state: StrongState) -> int:
    return len(state.register.value or b"")
