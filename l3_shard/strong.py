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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvcomm.errors import Unavailable
from kvcomm.machine import Effect, Origin
from kvcomm.wire.messages import (
    Message,
    StrongAccept,
    StrongEnter,
    StrongOrder,
    StrongPrepare,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.ballot import Ballots
from l3_shard.changing import Changing
from l3_shard.desk import Desk, Request
from l3_shard.entering import TENANT_BYTES, Entering
from l3_shard.lines import Lines
from l3_shard.proposer import Jitter
from l3_shard.quorum import Quorum, joint
from l3_shard.ring import Ring
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


@dataclass(frozen=True, slots=True)
class StrongCounts:
    """What happened since start."""

    contended_count: int
    """Rounds that met another proposer's ballot."""
    unknown_count: int
    unavailable_count: int
    votes: bool


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
        self._entering = Entering(
            desk, self._lines, node=node, member=identity.member, ring=ring, refused=refused
        )
        self._voting = Voting(self._lines, self._entering)
        self._changing = Changing(
            desk,
            self._voting,
            tickets,
            node=node,
            ballots=Ballots(node, identity.incarnation),
            draw=identity.draw,
            quorum=self._quorum,
            epoch=lambda: ring().epoch,
            refused=lambda node, answer: refused(answer),
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

    def owned(self, key: bytes) -> bool:
        """Whether this shard is an acceptor of the stored key, by the newest map or the settled one."""
        settled = self._entering.settled
        rings = [self._ring()] if settled is None else [self._ring(), settled]
        return any(self._node in ring.replicas(key[TENANT_BYTES:]) for ring in rings)

    def _quorum(self, key: bytes) -> Quorum:
        settled = self._entering.settled
        if settled is None or not self._entering.votes:
            raise Unavailable(f"{self._node} has no strong records (yet): it is catching up")
        name = key[TENANT_BYTES:]
        return joint(settled.replicas(name), self._ring().replicas(name))

    # -- the rest of the machine

    def ring_changed(self) -> None:
        self._changing.forget_promises()

    def took(self, event: Loaded[StrongState] | Persisted | Scanned) -> bool:
        """An answer of the storage; False = it was not asked by us, or it is a failed write."""
        match event:
            case Loaded() if self._lines.awaits(event.ticket):
                self._lines.loaded(event)
            case Persisted() if event.outcome != "failed" and self._lines.awaits(event.ticket):
                self._lines.persisted(event)
            case Scanned():
                return self._entering.scanned(event)
            case _:
                return False
        return True

    def wake(self) -> None:
        """Do what is due."""
        self._entering.wake()
        self._changing.wake()

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        waits = (self._entering.deadline(), self._changing.deadline())
        return min((wait for wait in waits if wait is not None), default=None)

    @property
    def pending(self) -> bool:
        """Whether ``flush`` has something to do."""
        return self._lines.pending

    def flush(self) -> list[Effect]:
        """What has come together for the storage."""
        return self._lines.flush(self._member)

    # -- looking inside

    def counts(self) -> StrongCounts:
        changing = self._changing
        return StrongCounts(
            changing.contended_count,
            changing.unknown_count,
            changing.unavailable_count,
            self._entering.votes,
        )

    def check(self) -> None:
        """Assert every invariant."""
        self._lines.check()
        self._changing.check()

    def story(self, key: bytes) -> str:
        """What is known of the stored ``key``, for a person."""
        return f"{self._entering.story()}; {self._changing.story(key)}; {self._lines.story(key)}"


def _value_bytes(state: StrongState) -> int:
    return len(state.register.value or b"")
