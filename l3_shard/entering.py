"""``Entering``: how a shard becomes an acceptor of strong records, and becomes one again after it lost them.

An acceptor that comes back with less than it had answered for must not vote: with its empty state a majority
can forget what another majority had decided.  What a shard has is tied to the *member* id of its database,
drawn when the database is made, and to the *membership* stored in it::

    stranger ──first map is the cluster's first──► candidate ─┐
        │       (the database has been empty since)           ├──told by enough others──► voter
        └──────────(else, or the membership names another     ┘   (``quorum.informed``)
                    member: the database is new or a copy)

A stranger or candidate enters in two passes over the other shards:

1. **Which entry is mine?**  ``StrongEnter`` with entry 0 asks what is known.  One more than the highest
   number is taken.
2. **What do you have?**  ``StrongEnter`` with that number: the other shard notes the entry durably, *then*
   lists its states of the records that we own, page by page.  From then on it tells every proposer about our
   entry, and votes from before do not count any more (``l3_shard.quorum``).

States of others are merged (``acceptor.learn``), and when the passes have reached enough shards for each
group of owners that we belong to, the membership is written and we vote.  Candidates count as having told
that they have nothing; strangers do not count.  Where too many disks are gone nobody can enter, and the
records are ``Unavailable`` until an operator decides: losing them silently is the worse choice.

The *settled* map, whose owners every quorum includes, is the first map of the cluster.  It is learned from
those who vote already, and never changes yet: that takes a rescan of all records, which does not exist.

**Limit.**  A cluster that is set up anew over old directories begins at the first epoch again.  If one of the
directories is missing, its shard enters by asking the others and nothing is lost; if more are missing than a
minority, nobody remembers that there was something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from kvcomm.machine import Origin, Ticket
from kvcomm.wire.messages import (
    Message,
    RingMap,
    StrongEnter,
    StrongListed,
    StrongRegister,
    StrongState,
)
from l3_shard import acceptor
from l3_shard.ballot import NO_BALLOT
from l3_shard.desk import Desk, Request
from l3_shard.lines import Lines, Local
from l3_shard.quorum import informed
from l3_shard.ring import Ring, RingError
from l3_shard.storage import Scan, Scanned

MEMBERSHIP_KEY = b"\0membership"
"""Where the membership is stored, as the register of a record: shorter than any tenant's keys."""
FIRST_EPOCH = 1
TENANT_BYTES = 16
PAGE_KEYS = 256
PAGE_BYTES = 4 << 20
RETRY_S = 0.2


class Member(msgspec.Struct, frozen=True, array_like=True):
    """The stored membership."""

    member: str
    """Of which database the rest is true."""
    entry: int
    """0 = not a voter yet."""
    entries: dict[str, int]
    """Of others."""
    settled: RingMap | None


_member_decoder = msgspec.msgpack.Decoder(Member)


@dataclass(eq=False, slots=True)
class _Store:
    """A ``Change``: write the membership."""

    member: Callable[[], Member]
    done: Callable[[KVCommError | None], None]

    def apply(self, state: StrongState) -> StrongState:
        data = msgspec.msgpack.encode(self.member())
        return StrongState(NO_BALLOT, NO_BALLOT, StrongRegister([], data), True)

    def durable(self, state: StrongState) -> None:
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


@dataclass(eq=False, slots=True)
class _Learn:
    """A ``Change``: merge another acceptor's state."""

    other: StrongState
    done: Callable[[KVCommError | None], None]

    def apply(self, state: StrongState) -> StrongState:
        return acceptor.learn(state, self.other)

    def durable(self, state: StrongState) -> None:
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


@dataclass(eq=False, slots=True)
class _Peer:
    """Another shard, as far as it has told."""

    told: bool = False
    """In the first pass."""
    listed: bool = False
    """All it has, in the second."""
    entry: int = 0
    """Its own; 0 = it does not vote."""
    settled: RingMap | None = None
    after: bytes = b""
    busy: bool = False
    """A question is out, or what it told is being written."""
    asked_at: float = float("-inf")


@dataclass(eq=False, slots=True)
class _Listing:
    """The answer to one ``StrongEnter``."""

    request: Request
    node: str
    keys: list[bytes] = field(default_factory=list)
    states: list[StrongState | None] = field(default_factory=list)
    resume: bytes | None = None
    open_count: int = 0
    failure: str = ""


class Entering:
    """See the module; a ``voting.Membership``.

    Args:
        member: id of this shard's database.
        ring: the newest.
        refused: hears of every ``Failure`` that a peer answered.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines[StrongState],
        *,
        node: str,
        member: str,
        ring: Callable[[], Ring],
        refused: Callable[[Message], None],
    ) -> None:
        self.entry = 0
        self.entries: dict[str, int] = {}
        self.settled: Ring | None = None
        """Owners that every quorum includes; ``None`` until we know."""
        self._desk, self._lines = desk, lines
        self._node, self._member, self._ring, self._refused = node, member, ring, refused
        self._state: Literal["new", "loading", "stranger", "candidate", "voter", "failed"] = "new"
        self._known = 0
        """Our entries so far, as far as anybody has told."""
        self._number = 0
        """The entry that we are making; 0 = the first pass is not through."""
        self._copy = False
        """The database has a past under another member id."""
        self._peers: dict[str, _Peer] = {}
        self._storing = False
        self._news = True
        """Whether something was heard or stored since :meth:`_go_on`: it looks at the whole ring, which is
        too much for every request of a busy shard."""
        self._looked_epoch = -1
        self._listings: dict[Ticket, _Listing] = {}

    @property
    def votes(self) -> bool:
        return self._state == "voter"

    # -- our own way in

    def wake(self) -> None:
        """Do what is due."""
        if self._state == "new":
            self._state = "loading"
            self._lines.read(MEMBERSHIP_KEY, self._loaded)
        elif self._state in ("stranger", "candidate") and not self._storing and self._worth_a_look():
            self._go_on()

    def _worth_a_look(self) -> bool:
        due, epoch = self.deadline(), self._ring().epoch
        worth = self._news or epoch != self._looked_epoch or (due is not None and due <= self._desk.now)
        self._news, self._looked_epoch = False, epoch
        return worth

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        if self._state == "new":
            return self._desk.now
        if self._state not in ("stranger", "candidate") or self._storing:
            return None
        waits = [peer.asked_at + RETRY_S for peer in self._peers.values() if self._due(peer)]
        return max(self._desk.now, min(waits)) if waits else None

    def _loaded(self, local: Local[StrongState]) -> None:
        """A membership that cannot be read is not ours to guess: we stay out."""
        self._news = True
        if local.failure or local.damaged:
            self._state = "failed"
            return
        stored = _member(local.state)
        self._state = "stranger"
        if stored is None:
            return
        self.entries = dict(stored.entries)
        self._copy = stored.member != self._member
        if stored.member != self._member:
            return  # a copy of a database: what it knows is true, but there may have been more
        self.entry = stored.entry
        self.settled = None if stored.settled is None else Ring.from_map(stored.settled)
        if self.settled is not None:
            self._state = "voter" if self.entry else "candidate"

    def _go_on(self) -> None:
        ring = self._ring()
        if not ring.names:
            return
        if self._state == "stranger" and ring.epoch == FIRST_EPOCH and not self._copy:
            self.settled = ring
            self._store("candidate")
            return
        for node in ring.names:
            if node != self._node:
                self._peers.setdefault(node, _Peer())
        settled = self._settled_by_now()
        told = [node for node, peer in self._peers.items() if peer.told]
        listed = [node for node, peer in self._peers.items() if peer.listed]
        if settled is not None and not self._number and self._reached(settled, told):
            self._number = 1 + self._known
            for peer in self._peers.values():
                peer.asked_at = float("-inf")
        if settled is not None and self._number and self._reached(settled, listed):
            self.entry, self.settled = self._number, settled
            self._store("voter")
            return
        for node, peer in self._peers.items():
            if self._due(peer) and self._desk.now >= peer.asked_at + RETRY_S:
                self._ask(node, peer)

    def _due(self, peer: _Peer) -> bool:
        """Whether it has not been told in this pass."""
        return not peer.busy and not (peer.listed if self._number else peer.told)

    def _settled_by_now(self) -> Ring | None:
        """As those say who vote; else as we candidates saw it."""
        voters = [peer.settled for peer in self._peers.values() if peer.settled is not None and peer.entry]
        others = [peer.settled for peer in self._peers.values() if peer.settled is not None]
        if voters:
            return Ring.from_map(min(voters, key=lambda settled: settled.epoch))
        if self.settled is not None:
            return self.settled
        return Ring.from_map(others[0]) if others else None

    def _reached(self, settled: Ring, told: Sequence[str]) -> bool:
        groups = settled.groups()
        if self._state == "candidate":  # a group of one that has just begun has nothing to ask for
            groups = [group for group in groups if len(group) > 1]
        return informed(groups, self._node, told)

    def _ask(self, node: str, peer: _Peer) -> None:
        peer.busy, peer.asked_at = True, self._desk.now
        message = StrongEnter(self._ring().epoch, self._node, self._number, peer.after)
        self._desk.ask(node, message, partial(self._told, node, peer, self._number))

    def _told(self, node: str, peer: _Peer, number: int, answer: Message) -> None:
        peer.busy, self._news = False, True
        if not isinstance(answer, StrongListed):
            self._refused(answer)
            return
        if self.votes or number != self._number or answer.settled is None:
            return
        try:
            states = [acceptor.checked(state) for state in answer.states]
            if len(states) != len(answer.keys) or not all(answer.keys):
                raise Corrupt("not a list of records and their states")
            Ring.from_map(answer.settled)
        except (Corrupt, RingError):
            return
        entry = answer.entries.get(node, 0)
        if number and entry != peer.entry:  # it lost its disk meanwhile: from the beginning
            peer.entry, peer.after, peer.listed = entry, b"", False
            return
        peer.settled, peer.entry, peer.told = answer.settled, entry, True
        self._note(answer.entries)
        if number:
            self._learn(peer, answer, states)

    def _note(self, entries: dict[str, int]) -> None:
        for node, entry in entries.items():
            if node == self._node:
                self._known = max(self._known, entry)
            else:
                self.entries[node] = max(entry, self.entries.get(node, 0))

    def _learn(self, peer: _Peer, answer: StrongListed, states: Sequence[StrongState]) -> None:
        """The page counts once all of it is on our disk."""
        open_count, failed = len(states), False

        def done(error: KVCommError | None) -> None:
            nonlocal open_count, failed
            open_count -= 1
            failed |= error is not None
            if not open_count:
                page_is_over()

        def page_is_over() -> None:
            peer.busy, self._news = False, True
            if failed:
                return  # asked again, for the same page
            peer.asked_at = float("-inf")
            peer.listed, peer.after = answer.resume is None, answer.resume or b""

        if not states:
            page_is_over()
            return
        peer.busy = True
        for key, state in zip(answer.keys, states, strict=True):
            try:
                self._lines.change(key, _Learn(state, done))
            except Refused as error:
                done(error)

    def _store(
        self, then: Literal["candidate", "voter"] | None, done: Callable[[str], None] | None = None
    ) -> None:
        """Write the membership; ``then`` is what we are once it is durable."""
        self._storing = then is not None or self._storing

        def stored(error: KVCommError | None) -> None:
            self._news = True
            if then is not None:
                self._storing = False
                if error is None:
                    self._state = then
            if done is not None:
                done("" if error is None else error.message)

        def member() -> Member:
            settled = None if self.settled is None else self.settled.to_map()
            return Member(self._member, self.entry, dict(sorted(self.entries.items())), settled)

        try:
            self._lines.change(MEMBERSHIP_KEY, _Store(member, stored))
        except Refused as error:
            stored(error)

    # -- telling others

    def enter(self, origin: Origin, message: StrongEnter) -> None:
        """Answer another shard that enters.

        Raises:
            Unavailable: we do not know yet what we are.
            Refused: the entry is an old one, or the shard is busy.
        """
        if self._state in ("new", "loading", "failed"):
            raise Unavailable(f"{self._node} is reading its own membership")
        if message.entry == 0 or self.settled is None:
            self._desk.reply(origin, self._listed([], [], None))
            return
        if message.entry < self.entries.get(message.node, 0):
            raise Refused(f"{message.node} has entered again since entry {message.entry}")
        request = self._desk.open(origin, 1)
        listing = _Listing(request, message.node)
        request.expire = partial(self._desk.close, request, Unavailable("the list took too long; ask again"))
        # noted at once, before it is durable: at worst a vote is not counted that could have been
        self.entries[message.node] = message.entry
        self._store(None, partial(self._list, listing, message.after))

    def _list(self, listing: _Listing, after: bytes, failure: str) -> None:
        if failure:
            self._close(listing, failure)
            return
        ticket = self._desk.ticket()
        self._listings[ticket] = listing
        self._desk.order(Scan(ticket, b"", after, PAGE_KEYS, "strong"))

    def scanned(self, event: Scanned) -> bool:
        """Storage answered a ``Scan``; False = it is not ours."""
        listing = self._listings.pop(event.ticket, None)
        if listing is None:
            return False
        if event.failure:
            self._close(listing, event.failure)
            return True
        listing.resume = event.resume
        listing.keys = [key for key in event.keys if self._owned_by(listing.node, key)]
        listing.states = [None] * len(listing.keys)
        listing.open_count = len(listing.keys) + 1
        for index, key in enumerate(listing.keys):
            self._lines.read(key, partial(self._read, listing, index))
        self._count_down(listing)
        return True

    def _owned_by(self, node: str, key: bytes) -> bool:
        if key == MEMBERSHIP_KEY:
            return False
        rings = [self._ring()] if self.settled is None else [self._ring(), self.settled]
        return any(node in ring.replicas(key[TENANT_BYTES:]) for ring in rings)

    def _read(self, listing: _Listing, index: int, local: Local[StrongState]) -> None:
        """One state that cannot be told spoils the page: the asker would take it for told."""
        listing.states[index] = local.state
        if local.damaged or local.failure:
            listing.failure = local.failure or "a record's bytes failed verification"
        self._count_down(listing)

    def _count_down(self, listing: _Listing) -> None:
        listing.open_count -= 1
        if listing.open_count:
            return
        keys: list[bytes] = []
        states: list[StrongState] = []
        size = 0
        for key, state in zip(listing.keys, listing.states, strict=True):
            assert state is not None
            size += len(state.register.value or b"")
            if keys and size > PAGE_BYTES:
                listing.resume = keys[-1]
                break
            keys.append(key)
            states.append(state)
        self._close(listing, listing.failure, self._listed(keys, states, listing.resume))

    def _close(self, listing: _Listing, failure: str, answer: StrongListed | None = None) -> None:
        if not listing.request.open:
            return
        if failure or answer is None:
            self._desk.close(listing.request, Unavailable(f"the records cannot be listed: {failure}"))
        else:
            self._desk.close(listing.request, answer)

    def _listed(self, keys: list[bytes], states: list[StrongState], resume: bytes | None) -> StrongListed:
        entries = dict(self.entries)
        if self._state == "voter":
            entries[self._node] = self.entry
        settled = None if self.settled is None else self.settled.to_map()
        return StrongListed(entries, settled, keys, states, resume)

    # -- looking inside

    def story(self) -> str:
        """Where we stand, for a person."""
        told = sorted(node for node, peer in self._peers.items() if peer.listed)
        return f"{self._state}, entry {self.entry}" + ("" if self.votes else f", told by {told}")


def _member(state: StrongState) -> Member | None:
    return None if state.register.value is None else _member_decoder.decode(state.register.value)
