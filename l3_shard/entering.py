"""``Entering``: how a shard becomes an acceptor of strong records, and becomes one again after it lost them.

An acceptor that comes back with less than it had answered for must not vote: with its empty state a majority
can forget what another majority had decided.  What a shard has is tied to the *member* id of its database,
drawn when the database is made, and to the *membership* stored in it::

    stranger ──first map is the cluster's first──► candidate ─┐
        │       (the database has been empty since)           ├──told by enough others──► voter
        └──────────(else, or the membership names another     ┘   (``quorum.informed``)
                    member: the database is new or a copy)

A first map that was kept (``l3_shard.keptmap``) in a database without a membership counts as the first: its
shard ended before the membership was written.

A membership whose own bytes are damaged is no membership, and its shard a stranger.

A stranger or candidate enters in two passes over the other shards:

1. **Which entry is mine?**  ``StrongEnter`` with entry 0 asks what is known.  A number above the highest is
   taken, and above all that our lost disk can have taken besides.
2. **What do you have?**  ``StrongEnter`` with that number: the other shard notes the entry durably, *then*
   lists its states of the records that we own, page by page.  From then on it tells every proposer about our
   entry, and votes from before do not count any more (``l3_shard.quorum``).

States of others are merged (``acceptor.learn``), their configurations and floors too, and when the passes
have reached enough shards the membership is written and we vote.  Candidates count as having told that they
have nothing, strangers do not.  A candidate *that somebody knows an entry of* counts only if it says that it
is *fresh*, on its way in for the first time: else it has voted, and its nothing is what a lost disk left.
Where too many disks are gone nobody can enter, and the records are ``Unavailable`` until an operator decides:
losing them silently is the worse choice.

A database that has a past as somebody else's, or as ours before its membership was damaged, may be older than
what the others know.  Its states are merged with theirs, and are nobody's votes; what none of them lists was
never decided, or was deleted and removed since, and is forgotten before we vote.

**Enough** is, by the settled map, a majority of the *others* in every group that we belong to
(``quorum.informed``), and a majority of every other group: so that whoever loses its disk later hears that it
was there before.  By a pending map it is a majority of the others too, but only for one that was there
before: what a pending map's owners have is a settled map's majority's as well, as long as nobody counts on
them alone, and of several that are new at once somebody has to be the first.

The configuration begins as the first map of the cluster, and is moved on by ``l3_shard.settling``; this
module keeps it, in the membership.

**Limit.**  A cluster that is set up anew over old directories begins at the first epoch again.  If one of the
directories is missing, its shard enters by asking the others and nothing is lost; if more are missing than a
minority, nobody remembers that there was something.  And that a candidate has voted is known to a majority of
the others: with six owners or more, while two of them have lost their disks, it can be another majority than
the one that is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
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
from l3_shard.ballot import NO_BALLOT, counter_of
from l3_shard.configuration import Configuration, encode, from_maps
from l3_shard.desk import Desk, Request
from l3_shard.lines import Lines, Local
from l3_shard.patience import Patience
from l3_shard.quorum import informed, majority
from l3_shard.ring import Ring
from l3_shard.storage import Scan, Scanned

MEMBERSHIP_KEY = b"\0membership"
"""Where the membership is stored, as the register of a record: shorter than any tenant's keys."""
FIRST_EPOCH = 1
TENANT_BYTES = 16
PAGE_KEYS = 256
PAGE_BYTES = 4 << 20
RETRY_S = 0.2
LIFE_ENTRIES = 1 << 20
"""Entry numbers of one disk: it may have taken some that it could tell nobody (``l3_shard.healing``), and its
successor takes none of those."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """The stored membership."""

    member: str
    """Of which database the rest is true."""
    entry: int
    """0 = not a voter yet."""
    entries: dict[str, int]
    """Of others."""
    settled: RingMap | None
    pending: list[RingMap] = []
    floor: bytes = NO_BALLOT
    """See ``l3_shard.removing``."""
    confirmed: list[int] = []
    """Epochs of the configuration under which our records are being confirmed, see ``l3_shard.settling``."""
    cursor: bytes | None = b""
    """They are, up to here; ``None`` = all."""
    fresh: bool = False
    """It has never voted, nor has anybody before it under its name."""
    origin: list[int] = []
    """Of the configuration."""
    dropped: int = 0
    """Epoch of the last settled map for which ``l3_shard.dropping`` is through; 0 = it was not noted yet."""
    void: bool = False
    """All that it has of records is to be dropped."""


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
    copied: bool
    """What is here may be somebody else's votes."""
    done: Callable[[KVCommError | None], None]

    def apply(self, state: StrongState) -> StrongState:
        if self.copied and state.accepted != NO_BALLOT:
            state = StrongState(state.promised, state.accepted, state.register, False)
        return acceptor.learn(state, self.other)

    def durable(self, state: StrongState) -> None:
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


@dataclass(eq=False, slots=True)
class Forget:
    """A ``Change``: there is no such record."""

    done: Callable[[KVCommError | None], None]

    def apply(self, state: StrongState) -> StrongState:
        return acceptor.EMPTY

    def durable(self, state: StrongState) -> None:
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


@dataclass(eq=False, slots=True)
class _Peer:
    """Another shard, as far as it has told."""

    patience: Patience
    told: bool = False
    """In the first pass."""
    listed: bool = False
    """All it has, in the second."""
    entry: int = 0
    """Its own; 0 = it does not vote."""
    fresh: bool = False
    """Nor has it ever."""
    configuration: Configuration | None = None
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
        kept: the newest ring that was kept in it.
        ring: the newest.
        refused: hears of every ``Failure`` that a peer answered.
        moved: called when the configuration has become another one.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines[StrongState],
        *,
        node: str,
        member: str,
        kept: Ring,
        ring: Callable[[], Ring],
        refused: Callable[[Message], None],
        moved: Callable[[], None],
    ) -> None:
        self._entry = 0
        self.entries: dict[str, int] = {}
        self.configuration: Configuration | None = None
        """``None`` until we know."""
        self.heard_of: Configuration | None = None
        """What a voter told us that is none of our own yet: whom to ask."""
        self._floor = NO_BALLOT
        self.confirmed: tuple[int, ...] = ()
        self.cursor: bytes | None = b""
        self.void = False
        """All that we have of records is to be dropped before we vote again, see ``l3_shard.dropping``."""
        self._dropped = FIRST_EPOCH
        self._wipes = False
        """An earlier life has begun to enter; what it was told may be out of date."""
        self._moved = moved
        self._durable: tuple[tuple[int, ...], bytes, int, int, bool] = ((), NO_BALLOT, 0, FIRST_EPOCH, False)
        """What of these is on the disk: maps, floor, entry, dropped, void."""
        self._desk, self._lines = desk, lines
        self._node, self._member, self._ring, self._refused = node, member, ring, refused
        self._first = kept if kept.epoch == FIRST_EPOCH else None
        self._state: Literal["new", "loading", "stranger", "candidate", "voter", "failed"] = "new"
        self._known = 0
        """Our entries so far, as far as anybody has told."""
        self._number = 0
        """The entry that we are making; 0 = the first pass is not through."""
        self._fresh = False
        """Nobody has ever voted under our name."""
        self._copy = False
        self._listed_keys: set[bytes] = set()
        """By the others, where we have a past."""
        self._forgetting: Ticket | None = None
        self._forgotten = False
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

    @property
    def entry(self) -> int:
        """Ours, as it is on the disk: one that a crash takes back must not be heard of, for it is taken once
        more after it."""
        return self._durable[2]

    @property
    def floor(self) -> bytes:
        """As it is on the disk: what goes because of a floor must not go before it."""
        return self._durable[1]

    @property
    def maps(self) -> tuple[int, ...]:
        """Epochs of the configuration."""
        return () if self.configuration is None else self.configuration.maps

    @property
    def durable(self) -> bool:
        """Whether the configuration is on the disk, with what is to be dropped for it."""
        maps, _, _, dropped, void = self._durable
        return (maps, dropped, void) == (self.maps, self._dropped, self.void)

    @property
    def drops(self) -> bool:
        """Whether we may still have something from an earlier ownership: see ``l3_shard.dropping``."""
        known = self.configuration
        return known is not None and (self.void or self._dropped != known.settled.epoch)

    @property
    def ready(self) -> bool:
        known = self.configuration
        return self.durable and not self.void and not (self.drops and known is not None and known.pending)

    @property
    def told(self) -> bytes:
        """The configuration as it travels in the detail of a failure."""
        assert self.configuration is not None, "a voter has one"
        return encode(self.configuration.to_message(self._ring().epoch, self._floor))

    def hear_of(self, configuration: Configuration) -> None:
        """A voter's, while we are none: its shards are worth asking."""
        self.heard_of, self._news = configuration, True

    # -- what else the membership keeps

    def take_up(
        self, configuration: Configuration, floor: bytes, done: Callable[[KVCommError | None], None]
    ) -> None:
        """Move on to what this and ours are together; ``done`` once all of it is on the disk."""
        before = self.maps
        ours = self.configuration
        self.configuration = configuration if ours is None else self._followed(ours.merged(configuration))
        self._floor = max(self._floor, floor)
        if self.maps != before:
            self._moved()
        if self._durable[:2] == (self.maps, self._floor):
            done(None)
        else:
            self._store(None, done)

    def settle(self, maps: tuple[int, ...]) -> None:
        """The owners by the last of these maps, our configuration, have everything now."""
        assert self.configuration is not None and maps == self.maps
        self.configuration = self._followed(self.configuration.reached())
        self._moved()
        self._store(None)

    def _followed(self, after: Configuration) -> Configuration:
        """Where another map has been settled, what we have counts only if we came the way of the others."""
        before = self.configuration
        assert before is not None
        if after.settled.epoch != before.settled.epoch:
            came_along = not after.origin or before.is_beyond(after.origin)
            self.void = self.drops or not came_along
        return after

    def have_dropped(self, epoch: int, done: Callable[[KVCommError | None], None]) -> None:
        """All that had to go under this settled map is off the disk."""
        before = self._dropped, self.void
        self._dropped, self.void = epoch, False

        def stored(error: KVCommError | None) -> None:
            if error is not None:
                self._dropped, self.void = before
            done(error)

        self._store(None, stored)

    def progress(
        self, maps: tuple[int, ...], cursor: bytes | None, done: Callable[[KVCommError | None], None]
    ) -> None:
        """How far our records are confirmed under the configuration of these maps."""
        self.confirmed, self.cursor = maps, cursor
        self._store(None, done)

    def enter_anew(self, done: Callable[[KVCommError | None], None]) -> int:
        """Take the next entry, for which nothing has been voted yet: see ``l3_shard.healing``."""
        self._entry += 1
        self._store(None, done)
        return self._entry

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
        waits = [peer.asked_at + RETRY_S for node, peer in self._peers.items() if self._due(node, peer)]
        return max(self._desk.now, min(waits)) if waits else None

    def _loaded(self, local: Local[StrongState]) -> None:
        """A membership that cannot be read now is not ours to guess: we stay out.  One whose bytes are
        damaged is lost, like the rest of a lost database."""
        self._news = True
        if local.failure:
            self._state = "failed"
            return
        stored = _member(local.state)
        self._state, self._copy = "stranger", local.damaged
        if stored is None or local.damaged:
            return
        self._first = None
        self.entries, self._floor = dict(stored.entries), stored.floor
        self._copy = stored.member != self._member
        self._wipes = not self._copy and not stored.entry
        self._fresh = stored.fresh and not self._copy
        if self._copy:
            return  # a copy of a database: what it knows is true, but there may have been more
        self._entry = stored.entry
        if stored.settled is not None:
            self.configuration = from_maps(stored.settled, stored.pending, stored.origin)
            # unnoted, with pending maps: we may have voted by them, and nothing has been removed by this one
            unnoted = stored.settled.epoch if stored.pending else FIRST_EPOCH
            self._dropped, self.void = stored.dropped or unnoted, stored.void
            self.confirmed, self.cursor = tuple(stored.confirmed), stored.cursor
            self._durable = (self.maps, self._floor, self._entry, self._dropped, self.void)
            self._state = "voter" if self._entry else "candidate"

    def _go_on(self) -> None:
        ring = self._ring()
        if not ring.names:
            return
        first = ring if ring.epoch == FIRST_EPOCH else self._first
        if self._state == "stranger" and first is not None and not self._copy:
            self.configuration = Configuration(first)
            self._store("candidate")
            return
        if self._wipes:
            self._forget_after(b"")
            return
        settled = self._told_by_now()
        others = [known.names for known in (settled, self.heard_of) if known is not None]
        for node in (*ring.names, *chain.from_iterable(others)):
            if node != self._node:
                self._peers.setdefault(node, _Peer(Patience(self._desk.limits.request_timeout_s)))
        told = [node for node, peer in self._peers.items() if peer.told and self._counts(node, peer)]
        listed = [node for node, peer in self._peers.items() if peer.listed and self._counts(node, peer)]
        if settled is not None and not self._number and self._reached(settled, told):
            self._number = self._known + (LIFE_ENTRIES if self._known else 1)
            self._fresh = self._fresh or not (self._known or self._copy)
            if not self._copy:  # noted before we learn and others note our entry: a crash must not forget it
                self._store("stranger" if self._state == "stranger" else "candidate")
            for peer in self._peers.values():
                peer.asked_at = float("-inf")
            if self._storing:
                return
        if settled is not None and self._number and self._reached(settled, listed):
            if self._copy and not self._forgotten:
                self._forget_after(b"")
                return
            self._entry, self.configuration = self._number, settled
            self.confirmed, self.cursor, self._fresh = (), b"", False
            self._dropped, self.void = settled.settled.epoch, False
            self._store("voter")
            return
        for node, peer in self._peers.items():
            if self._due(node, peer) and self._desk.now >= peer.asked_at + RETRY_S:
                self._ask(node, peer)

    def _forget_after(self, after: bytes) -> None:
        if self._forgetting is None and not self._storing:
            self._storing = True
            self._forgetting = self._desk.ticket()
            self._desk.order(Scan(self._forgetting, b"", after, PAGE_KEYS, "strong"))

    def _forget(self, event: Scanned) -> None:
        """Drop what of this page none of the others has; from the beginning if that fails."""
        self._forgetting = None
        keys = [key for key in event.keys if key != MEMBERSHIP_KEY and key not in self._listed_keys]
        open_count, failed = 1 + len(keys), bool(event.failure)

        def done(error: KVCommError | None) -> None:
            nonlocal open_count, failed
            open_count, failed = open_count - 1, failed or error is not None
            if open_count:
                return
            self._storing, self._news = False, True
            if not failed and event.resume is not None:
                self._forget_after(event.resume)
            elif not failed:
                self._forgotten, self._wipes = not self._wipes, False

        for key in keys:
            try:
                self._lines.change(key, Forget(done), mends=True)
            except Refused as error:
                done(error)
        done(None)

    def _due(self, node: str, peer: _Peer) -> bool:
        """Whether it has not told in this pass what counts."""
        told = peer.listed if self._number else peer.told
        return not peer.busy and not (told and self._counts(node, peer))

    def _counts(self, node: str, peer: _Peer) -> bool:
        return self.has_its_state(node, peer.entry, fresh=peer.fresh)

    def has_its_state(self, node: str, entry: int, *, fresh: bool) -> bool:
        """Whether ``node``, which says this of itself, has all that it ever voted.  One that has lost it must
        be asked again: it may vote by then."""
        return bool(entry) or fresh or not self.entries.get(node, 0)

    def _told_by_now(self) -> Configuration | None:
        """All that those know who vote; else what we candidates began with."""
        told = [peer for peer in self._peers.values() if peer.configuration is not None]
        known = self.configuration
        for peer in [peer for peer in told if peer.entry] or told:
            assert peer.configuration is not None
            known = peer.configuration if known is None else known.merged(peer.configuration)
        return known

    def _reached(self, configuration: Configuration, told: Sequence[str]) -> bool:
        """Whether these are enough; see the module."""
        groups = configuration.settled.groups()
        if self._state == "candidate":  # a group of one that has just begun has nothing to ask for
            groups = [group for group in groups if len(group) > 1]
        for group in groups:
            if self._node not in group and sum(node in told for node in group) < majority(group):
                return False
        if not self._fresh and (self._known or self._copy):
            groups += [group for ring in configuration.pending for group in ring.groups()]
        return informed(groups, self._node, told)

    def _ask(self, node: str, peer: _Peer) -> None:
        peer.busy, peer.asked_at = True, self._desk.now
        message = StrongEnter(self._ring().epoch, self._node, self._number, peer.after)
        timeout_s = peer.patience.asked(self._desk.now)
        self._desk.ask(node, message, partial(self._told, node, peer, self._number), timeout_s=timeout_s)

    def _told(self, node: str, peer: _Peer, number: int, answer: Message) -> None:
        peer.busy, self._news = False, True
        peer.patience.heard(self._desk.now, answered=isinstance(answer, StrongListed))
        if not isinstance(answer, StrongListed):
            self._refused(answer)
            return
        if self.votes or number != self._number or answer.settled is None:
            return
        try:
            states = checked(answer)
            configuration = self._same_or(answer.settled, answer.pending, answer.origin)
        except Corrupt:
            return
        entry = answer.entries.get(node, 0)
        if peer.after and entry != peer.entry:  # it entered again between two pages: from the beginning
            peer.entry, peer.after, peer.listed = entry, b"", False
            return
        before, peer.configuration = self._told_by_now(), configuration
        peer.entry, peer.told, peer.fresh = entry, True, answer.fresh
        self._floor = max(self._floor, answer.floor)
        self._note(answer.entries)
        known = self._told_by_now()
        assert known is not None
        if number and before is not None and before.settled.epoch != known.settled.epoch:
            self._learn_anew()
        elif number and configuration.settled.epoch == known.settled.epoch:
            self._learn(peer, answer, states)

    def _learn_anew(self) -> None:
        """The others have other owners since: what they told before may have been removed."""
        for peer in self._peers.values():
            peer.listed, peer.after, peer.asked_at = False, b"", float("-inf")
        self._listed_keys.clear()
        self._wipes, self._forgotten = not self._copy, False

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
            peer.listed, peer.after = answer.resume is None, answer.resume or b""
            if not peer.listed:
                peer.asked_at = float("-inf")

        if not states:
            page_is_over()
            return
        peer.busy = True
        if self._copy:
            self._listed_keys.update(answer.keys)
        for key, state in zip(answer.keys, states, strict=True):
            try:
                self._lines.change(key, _Learn(state, self._copy, done), mends=True)
            except Refused as error:
                done(error)

    def _store(
        self,
        then: Literal["stranger", "candidate", "voter"] | None,
        done: Callable[[KVCommError | None], None] | None = None,
    ) -> None:
        """Write the membership; ``then`` is what we are once it is durable."""
        self._storing = then is not None or self._storing
        written = self._durable

        def stored(error: KVCommError | None) -> None:
            self._news = True
            if error is None:
                self._durable = written
            if then is not None:
                self._storing = False
                if error is None:
                    self._state = then
                    self._moved()
            if done is not None:
                done(error)

        def member() -> Member:
            nonlocal written
            written = (self.maps, self._floor, self._entry, self._dropped, self.void)
            settled, pending = None, list[RingMap]()
            if self.configuration is not None:
                settled = self.configuration.settled.to_map()
                pending = [ring.to_map() for ring in self.configuration.pending]
            entries = dict(sorted(self.entries.items()))
            confirmed = list(self.confirmed)
            return Member(
                self._member,
                self._entry,
                entries,
                settled,
                pending,
                self._floor,
                confirmed,
                self.cursor,
                self._fresh,
                [] if self.configuration is None else list(self.configuration.origin),
                self._dropped,
                self.void,
            )

        try:
            self._lines.change(MEMBERSHIP_KEY, _Store(member, stored), mends=True)
        except Refused as error:
            stored(error)

    def _same_or(self, settled: RingMap, pending: Sequence[RingMap], origin: Sequence[int]) -> Configuration:
        """What another node told; ours if it is the same, for a ring is not made in no time."""
        ours = self.configuration
        maps = (settled.epoch, *(ring.epoch for ring in pending))
        if ours is not None and ours.maps == maps and (ours.origin or not origin):
            return ours
        told = (peer.configuration for peer in self._peers.values())
        known = [known for known in (ours, self.heard_of, *told) if known is not None]
        rings = [self._ring(), *(ring for each in known for ring in each.rings)]
        return from_maps(settled, pending, origin, rings)

    def configuration_of(
        self, settled: RingMap, pending: Sequence[RingMap], origin: Sequence[int]
    ) -> Configuration:
        """Raises ``Corrupt``: it is none."""
        return self._same_or(settled, pending, origin)

    # -- telling others

    def enter(self, origin: Origin, message: StrongEnter) -> None:
        """Answer another shard that enters.

        Raises:
            Unavailable: we do not know yet what we are.
            Refused: the entry is an old one, or the shard is busy.
        """
        if self._state in ("new", "loading", "failed"):
            raise Unavailable(f"{self._node} is reading its own membership")
        if message.entry and self.votes and (self.drops or not self.durable):
            raise Unavailable(f"{self._node} is dropping what it knew as an owner of the past; ask again")
        if message.entry == 0 or self.configuration is None:
            self._desk.reply(origin, self._listed([], [], None))
            return
        if message.entry < self.entries.get(message.node, 0):
            raise Refused(f"{message.node} has entered again since entry {message.entry}")
        request = self._desk.open(origin, 1)
        listing = _Listing(request, message.node)
        request.expire = partial(self._desk.close, request, Unavailable("the list took too long; ask again"))
        # noted at once, before it is durable: at worst a vote is not counted that could have been
        self.entries[message.node] = message.entry
        self._store(None, partial(self._list, listing, message))

    def _list(self, listing: _Listing, message: StrongEnter, error: KVCommError | None) -> None:
        if error is not None:
            self._close(listing, error.message)
            return
        if message.keys is not None:
            self._read_all(listing, list(message.keys))
            return
        ticket = self._desk.ticket()
        self._listings[ticket] = listing
        self._desk.order(Scan(ticket, b"", message.after, PAGE_KEYS, "strong"))

    def scanned(self, event: Scanned) -> bool:
        """Storage answered a ``Scan``; False = it is not ours."""
        if event.ticket == self._forgetting:
            self._forget(event)
            return True
        listing = self._listings.pop(event.ticket, None)
        if listing is None:
            return False
        if event.failure:
            self._close(listing, event.failure)
            return True
        listing.resume = event.resume
        self._read_all(listing, [key for key in event.keys if self._owned_by(listing.node, key)])
        return True

    def _read_all(self, listing: _Listing, keys: list[bytes]) -> None:
        listing.keys = keys
        listing.states = [None] * len(listing.keys)
        listing.open_count = len(listing.keys) + 1
        for index, key in enumerate(listing.keys):
            self._lines.read(key, partial(self._read, listing, index))
        self._count_down(listing)

    def _owned_by(self, node: str, key: bytes) -> bool:
        if key == MEMBERSHIP_KEY:
            return False
        name, known = key[TENANT_BYTES:], self.configuration
        return known is not None and known.owned_by(node, name)

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
        if self.configuration is None:
            return StrongListed(entries, None, keys, states, resume)
        known = self.configuration.to_message(0, self._floor)
        told = (known.pending, known.floor, known.origin, self._fresh)
        return StrongListed(entries, known.settled, keys, states, resume, *told)

    # -- looking inside

    def story(self) -> str:
        """Where we stand, for a person."""
        told = sorted(node for node, peer in self._peers.items() if peer.listed)
        return f"{self._state}, entry {self.entry}, maps {list(self.maps)}" + (
            "" if self.votes else f", told by {told}"
        )


def checked(answer: StrongListed) -> list[StrongState]:
    """The states of a list from another shard.

    Raises:
        Corrupt: it is no such list.
    """
    states = [acceptor.checked(state) for state in answer.states]
    if len(states) != len(answer.keys) or not all(answer.keys):
        raise Corrupt("not a list of records and their states")
    if answer.floor != NO_BALLOT:
        counter_of(answer.floor)
    return states


def _member(state: StrongState) -> Member | None:
    return None if state.register.value is None else _member_decoder.decode(state.register.value)
