"""``Settling``: moves the configuration of strong records on when the ring gives them other owners.

The owners of the settled map decide alone until the owners of the next one have everything that was decided.
Every voter walks through this by itself, from whatever its membership says when it starts::

    settled ──a newer map puts records elsewhere──► fencing ──majorities have the same──► scanning
       ▲                                                                                      │
       └──────── majorities of all old groups have confirmed theirs too ◄── confirmed ◄───────┘

* **Fencing.**  The map is added to the pending ones, durably, and told to all others (``StrongSettle``), who
  take it up, durably, before they answer.  An acceptor votes only for proposers with the very same
  configuration, and proposers need majorities by all of its maps.
* **Scanning.**  Every record that this shard has as an owner by any map but the last is confirmed
  (``changing.confirm``): what it holds, and the highest ballot promised for it, become known to a quorum of
  the whole configuration.  How far this went is durable page by page.  It begins when this shard's own fence
  is durable too: the votes that it gave before are on its disk then, where the scan finds them.
  One round is enough for a record, whichever owner does it.  So that owners do not all do the same ones at
  the same time, and duel, each begins with those that it is the first owner of, tells their other owners,
  and then does what nobody has told it of.
* **Confirmed.**  When a majority of every group of owners, by every map but the last, has confirmed its
  records under this configuration, the last map is the settled one.  Whoever finds that out tells all others.

**Why nothing decided is lost.**  Say the configuration is G before and G + t with the map t.  A proposer that
does not know of t has a quorum in one of the groups of G that a record has; it shares an acceptor x with the
majority that was fenced there.  x voted for it before it was fenced, for afterwards it refuses.  Confirming
begins after the fence, and all that was voted for before the fence by those who confirm is in their scan;
what was decided was voted for by a majority of the group, and those who confirmed are one too, so one of them
scans the record.  Its round asks a majority of that group: either that has the vote, or its promise forbids
it, as always between two ballots (Rystsov 2018, section 2.3); a ballot promised under G is below one that a
majority of t's owners promises in that round, so a vote from G that turns up later is too old.  All of this
is true of the round whoever ran it, if it was under this configuration: an acceptor answers only rounds of
the configuration that is on its disk, so all its votes from before are there too, and it tells of them.
Proposers that know of t have majorities of t's owners in their quorums from the start.

**Why no two settle differently.**  Two nodes that add two maps fence majorities of the same groups, so one of
them learns of the other's map at the shared acceptor, and from then on has both in its configuration; the
greater one is settled, with the other's owners fenced too.  Confirmations count only among equal
configurations.  A node that slept through all of it has a configuration that a majority refuses, and learns
the newer one from the refusal.

The price: for the moments in which two nodes have different configurations, rounds between them are refused
and repeated.

**Limit.**  A pending map stays in every quorum until it or a newer one is settled, and a newer one is settled
by majorities of its owners too: while a record's majority by a pending map is away the record is
``Unavailable``, and if it never returns nothing is settled any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf

from msgspec.structs import replace

from kvcomm.errors import Corrupt, KVCommError, Unavailable
from kvcomm.machine import Origin, Ticket
from kvcomm.wire.messages import Failure, Message, StrongOutcome, StrongSettle, StrongSettling
from l3_shard.ballot import NO_BALLOT, counter_of
from l3_shard.configuration import Configuration, decode
from l3_shard.desk import Desk
from l3_shard.entering import MEMBERSHIP_KEY, TENANT_BYTES, Entering
from l3_shard.patience import Patience
from l3_shard.quorum import majority
from l3_shard.ring import Ring
from l3_shard.storage import Scan, Scanned

PAGE_KEYS = 64
"""Records that are confirmed before the progress is written."""
WINDOW_KEYS = 2
"""Of them at once: each is a round with all its owners, and all shards have theirs to do."""
REST = 2.0
"""Times what a window took, until the next: callers' requests go in between."""
TURN_S = 0.1
"""Before records that others are to confirm first, for what they have to tell."""
BEGIN_S = 0.2
"""Under a new configuration before the first: callers' rounds that it was in the way of come first."""
TOLD_MAX = 65_536
"""Records that others have told of and that our own scan has not come to; what is told beyond is confirmed
once more."""
RETRY_S = 0.2
POLL_S = 1.0
"""Between two questions to who has the same configuration: it tells when it has confirmed its records, and
asks then what we have, so this is for what got lost."""

Confirm = Callable[[bytes, Callable[[StrongOutcome], None]], None]


@dataclass(eq=False, slots=True)
class _Peer:
    """What another voter said last."""

    patience: Patience
    maps: tuple[int, ...] = ()
    confirmed: tuple[int, ...] = ()
    busy: bool = False
    again: bool = False
    """There is more to tell, as soon as it has answered."""
    asked_at: float = -inf
    keys: list[bytes] = field(default_factory=list)
    """Of ours that have been confirmed and that it is still to hear of."""


class Settling:
    """See the module.

    Args:
        confirm: starts to confirm one record; raises ``KVCommError`` when that cannot begin.
        ring: the newest.
        refused: hears of every ``Failure`` that a peer answered.
    """

    def __init__(
        self,
        desk: Desk,
        membership: Entering,
        confirm: Confirm,
        *,
        node: str,
        ring: Callable[[], Ring],
        refused: Callable[[Message], None],
    ) -> None:
        self.confirmed_count = 0
        """Records, since start."""
        self._desk, self._membership, self._confirm = desk, membership, confirm
        self._node, self._ring, self._refused = node, ring, refused
        self._peers: dict[str, _Peer] = {}
        self._scan: Ticket | None = None
        self._scan_maps: tuple[int, ...] = ()
        """Of the configuration that the page was begun under."""
        self._open_count = 0
        """Records of the page that are being confirmed, and the page itself."""
        self._failed = False
        self._page_at = -inf
        self._keys: deque[tuple[int, bytes]] = deque()
        """Of the page, that are still to be confirmed, each with our place among its owners."""
        self._done: list[bytes] = []
        """Of the page, that have been, and that nobody has been told of."""
        self._turn = 0
        """Our place among the owners of those that are being confirmed."""
        self._told_of: dict[bytes, None] = {}
        """Records that others have confirmed under the configuration of ``_told_maps``."""
        self._told_maps: tuple[int, ...] = ()
        self._resume: bytes | None = None
        """Where the next page begins; ``None`` = this is the last."""
        self._window_at = 0.0
        self._go_on_at = inf
        """When the next window is begun."""
        self._quiet: tuple[Configuration, Ring] | None = None
        self._news = True
        """Whether something was heard or done since :meth:`wake` went through everything: that is too much
        for every event of a busy shard."""
        self._looked: tuple[object, ...] = ()
        """At this, then."""
        self._due_at = 0.0
        """When it is to look again, whatever happens."""
        self._fence: tuple[tuple[int, ...], bool] = ((), False)
        """For which configuration our own fence is ordered, and whether it is durable."""

    # -- our own way

    def wake(self) -> None:
        """Do what is due."""
        if self._is_quiet() or not self._membership.votes or self._is_idle():
            return
        self._news = False
        known = self._membership.configuration
        assert known is not None, "a voter has one"
        reaching = known.reaching(self._ring())
        if reaching is not known:
            self._take_up(reaching)
            known = reaching
        if not known.pending:
            self._quiet = (known, self._ring())
            return
        self._fence_ourselves(known)
        for node in known.names:
            peer = self._peer(node)
            if node != self._node and not peer.busy and self._desk.now >= self._asks_at(peer, known):
                self._tell(node, peer)
        if self._has_part(known) and self._enough(known, known.rings[:-1], self._has_confirmed):
            self._membership.settle(known.maps)
            self._tell_all()
        elif self._may_scan(known) and self._desk.now >= self._page_at + RETRY_S:
            self._begin_page(known)
        elif self._desk.now >= self._go_on_at:
            self._next_window()
        self._looked, self._due_at = self._looks_at(), self._when(known)

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        if self._is_quiet() or self._membership.configuration is None or not self._membership.votes:
            return None
        return max(self._desk.now, self._due_at) if self._is_idle() else self._desk.now

    def _is_idle(self) -> bool:
        """Whether there is nothing to do before ``_due_at``."""
        return not self._news and self._desk.now < self._due_at and self._looked == self._looks_at()

    def _looks_at(self) -> tuple[object, ...]:
        """What others change."""
        membership = self._membership
        return membership.configuration, self._ring(), membership.confirmed, membership.cursor

    def _when(self, known: Configuration) -> float:
        waits = [
            self._asks_at(peer, known)
            for node in known.names
            if node != self._node and not (peer := self._peer(node)).busy
        ]
        if self._may_scan(known):
            waits.append(self._page_at + RETRY_S)
        waits.append(min(self._go_on_at, self._desk.now + POLL_S))
        return min(waits)

    def _asks_at(self, peer: _Peer, known: Configuration) -> float:
        return peer.asked_at + (POLL_S if peer.maps == known.maps else RETRY_S)

    def _is_quiet(self) -> bool:
        """Whether nothing has changed since there was nothing to do: this is asked at every event."""
        if self._quiet is None:
            return False
        known, ring = self._quiet
        return known is self._membership.configuration and ring is self._ring()

    def _fence_ourselves(self, known: Configuration) -> None:
        """Our own answer to what we ask the others."""
        if self._fence[0] != known.maps:
            self._fence = (known.maps, False)
            self._membership.take_up(known, NO_BALLOT, partial(self._fenced, known.maps))

    def _fenced(self, maps: tuple[int, ...], error: KVCommError | None) -> None:
        self._news = True
        if self._fence[0] == maps:
            self._fence = (maps, True) if error is None else ((), False)

    def _take_up(self, configuration: Configuration) -> None:
        self._membership.take_up(configuration, NO_BALLOT, lambda error: None)

    def _peer(self, node: str) -> _Peer:
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = _Peer(Patience(self._desk.limits.request_timeout_s))
        return peer

    def _tell(self, node: str, peer: _Peer) -> None:
        known = self._membership.configuration
        assert known is not None
        peer.busy, peer.again, peer.asked_at = True, False, self._desk.now
        message = known.to_message(self._ring().epoch, self._membership.floor)
        if peer.keys:
            message = replace(message, confirmed=peer.keys if self._scan_maps == known.maps else [])
            peer.keys = []
        timeout_s = peer.patience.asked(self._desk.now)
        self._desk.ask(node, message, partial(self._told, node, peer), timeout_s=timeout_s)

    def _tell_all(self, nodes: Iterable[str] | None = None) -> None:
        for node in list(self._peers) if nodes is None else nodes:
            peer = self._peers[node]
            if peer.busy:
                peer.again = True
            elif node != self._node:
                self._tell(node, peer)

    def _told(self, node: str, peer: _Peer, answer: Message) -> None:
        peer.busy, self._news = False, True
        if peer.again:
            self._tell(node, peer)
        peer.patience.heard(self._desk.now, answered=isinstance(answer, StrongSettling))
        if not isinstance(answer, StrongSettling):
            self._refused(answer)
            return
        try:
            self._learn(answer)
        except Corrupt:
            return
        peer.maps = (answer.settled.epoch, *(ring.epoch for ring in answer.pending))
        peer.confirmed = tuple(answer.confirmed)

    def _learn(self, told: StrongSettle | StrongSettling) -> None:
        if told.floor != NO_BALLOT:
            counter_of(told.floor)
        configuration = self._membership.configuration_of(told.settled, told.pending, told.origin)
        if self._membership.votes:
            self._membership.take_up(configuration, told.floor, lambda error: None)

    def _enough(
        self, known: Configuration, rings: Iterable[Ring], has: Callable[[str, Configuration], bool]
    ) -> bool:
        """A majority of every group of owners by these maps; to settle, by every map but the last."""
        return all(
            sum(has(node, known) for node in group) >= majority(group)
            for ring in rings
            for group in ring.groups()
        )

    def _has_fence(self, node: str, known: Configuration) -> bool:
        if node == self._node:
            return self._fence == (known.maps, True)
        return node in self._peers and self._peers[node].maps == known.maps

    def _has_confirmed(self, node: str, known: Configuration) -> bool:
        if node == self._node:
            return self._has_all(known)
        return node in self._peers and self._peers[node].confirmed == known.maps

    # -- our records

    def _has_all(self, known: Configuration) -> bool:
        return self._membership.confirmed == known.maps and self._membership.cursor is None

    def _has_part(self, known: Configuration) -> bool:
        """Whether nothing is left that we are to confirm."""
        return self._has_all(known) or not any(self._node in ring for ring in known.rings[:-1])

    def _may_scan(self, known: Configuration) -> bool:
        idle = self._open_count == 0 and not self._has_part(known)
        fenced = idle and self._has_fence(self._node, known)
        return fenced and self._enough(known, known.rings, self._has_fence)  # else no round can end

    def _place(self, known: Configuration, key: bytes) -> int | None:
        """Ours among the owners of a record by all maps but the last; ``None`` = we are none by those."""
        owners = [ring.replicas(key[TENANT_BYTES:]) for ring in known.rings[:-1]]
        return min((each.index(self._node) for each in owners if self._node in each), default=None)

    def _begin_page(self, known: Configuration) -> None:
        goes_on = self._membership.confirmed == known.maps
        after = (self._membership.cursor or b"") if goes_on else b""
        self._open_count, self._failed, self._page_at = 1, False, self._desk.now
        if self._scan_maps != known.maps:
            self._scan_maps = known.maps
            for peer in self._peers.values():
                peer.keys = []
        self._done, self._turn = [], 0
        self._scan = self._desk.ticket()
        self._desk.order(Scan(self._scan, b"", after, PAGE_KEYS, "strong"))

    def scanned(self, event: Scanned) -> bool:
        """Storage answered a ``Scan``; False = it is not ours."""
        if event.ticket != self._scan:
            return False
        self._scan, known, self._news = None, self._membership.configuration, True
        assert known is not None
        self._failed = bool(event.failure)
        places = [(self._place(known, key), key) for key in event.keys if key != MEMBERSHIP_KEY]
        self._keys = deque(sorted((place, key) for place, key in places if place is not None))
        self._resume = event.resume
        self._go_on(0.0 if self._membership.confirmed == self._scan_maps else BEGIN_S)
        return True

    def _go_on(self, rest_s: float) -> None:
        """With the next window of the page, or the next page."""
        self._failed |= self._scan_maps != self._membership.maps
        self._skip_told()
        if self._failed or not self._keys:
            self._pass_on()
            self._page_over()
            return
        self._open_count = 1
        self._go_on_at = self._desk.now + rest_s
        if self._keys[0][0] != self._turn:
            self._turn = self._keys[0][0]
            self._go_on_at += TURN_S
            self._pass_on()

    def _skip_told(self) -> None:
        while self._keys and self._told_maps == self._scan_maps and self._keys[0][1] in self._told_of:
            del self._told_of[self._keys.popleft()[1]]

    def _next_window(self) -> None:
        """Of a page under a configuration that is not ours any more nothing counts."""
        self._go_on_at, self._window_at = inf, self._desk.now
        self._failed |= self._scan_maps != self._membership.maps
        window: list[bytes] = []
        self._skip_told()
        while self._keys and len(window) < WINDOW_KEYS and self._keys[0][0] == self._turn:
            window.append(self._keys.popleft()[1])
            self._skip_told()
        if self._failed:
            window = []
        self._open_count = 1 + len(window)
        for key in window:
            try:
                self._confirm(key, partial(self._was_confirmed, key))
            except KVCommError:
                self._was_confirmed(key, StrongOutcome(Unavailable.code, b"", None))
        self._count_down()

    def _was_confirmed(self, key: bytes, outcome: StrongOutcome) -> None:
        self._failed |= bool(outcome.code)
        if not outcome.code:
            self.confirmed_count += 1
            self._done.append(key)
        self._count_down()

    def _count_down(self) -> None:
        self._open_count -= 1
        if not self._open_count:
            self._news = True
            self._go_on(REST * (self._desk.now - self._window_at))

    def _pass_on(self) -> None:
        """Tell other owners what they need not confirm."""
        known = self._membership.configuration
        if known is None or known.maps != self._scan_maps:
            return
        for key in self._done:
            owners = {node for ring in known.rings[:-1] for node in ring.replicas(key[TENANT_BYTES:])}
            for node in sorted(owners - {self._node}):
                self._peer(node).keys.append(key)
        self._done = []
        self._tell_all([node for node, peer in self._peers.items() if peer.keys])

    def _page_over(self) -> None:
        """A page counts when all of it was confirmed under one configuration, the one that we still have."""
        self._keys.clear()
        if self._failed or self._scan_maps != self._membership.maps:
            return
        self._open_count = 1
        self._membership.progress(self._scan_maps, self._resume, self._noted)

    def _noted(self, error: KVCommError | None) -> None:
        self._open_count, self._news = 0, True
        self._page_at = -inf if error is None else self._desk.now
        self._tell_all()

    # -- others

    def settle(self, origin: Origin, message: StrongSettle) -> None:
        """Another voter told its configuration.

        Raises:
            Unavailable: we are no voter.
            Corrupt: it is no configuration.
        """
        if not self._membership.votes:
            told = self._membership.configuration_of(message.settled, message.pending, message.origin)
            self._membership.hear_of(told)
            raise Unavailable(f"{self._node} does not vote on strong records (yet)")
        if message.floor != NO_BALLOT:
            counter_of(message.floor)
        configuration = self._membership.configuration_of(message.settled, message.pending, message.origin)
        request = self._desk.open(origin, 1)
        request.expire = partial(self._desk.close, request, Unavailable("the disk was too slow; ask again"))

        def taken(error: KVCommError | None) -> None:
            if request.open:
                self._desk.close(request, error or self._settling())

        self._membership.take_up(configuration, message.floor, taken)
        if configuration.maps == self._membership.maps:
            self._hear_of(message.confirmed, configuration.maps)

    def _hear_of(self, keys: Iterable[bytes], maps: tuple[int, ...]) -> None:
        """They have been confirmed, under these maps and no others."""
        if self._told_maps != maps:
            self._told_of, self._told_maps = {}, maps
        self._told_of |= dict.fromkeys(islice(keys, max(0, TOLD_MAX - len(self._told_of))))

    def _settling(self) -> StrongSettling:
        known, membership = self._membership.configuration, self._membership
        assert known is not None
        told = known.to_message(0, membership.floor)
        confirmed = list(known.maps) if known.pending and self._has_all(known) else []
        entries = dict(membership.entries)
        return StrongSettling(told.settled, told.pending, told.floor, confirmed, entries, told.origin)

    def differs(self, node: str, answer: Failure) -> None:
        """``node`` refused a vote, for it has another configuration, which its answer tells."""
        try:
            told = decode(answer.detail)
            self._learn(told)
        except Corrupt:
            return
        if (told.settled.epoch, *(ring.epoch for ring in told.pending)) == self._membership.maps:
            return
        peer = self._peer(node)
        if self._membership.votes and not peer.busy and self._desk.now >= peer.asked_at + RETRY_S / 10:
            self._tell(node, peer)

    # -- looking inside

    def story(self) -> str:
        """How far it is, for a person."""
        known = self._membership.configuration
        if known is None or not known.pending:
            return "settled"
        fenced = sorted(node for node in known.names if node in self._peers and self._has_fence(node, known))
        done = sorted(
            node for node in known.names if node in self._peers and self._has_confirmed(node, known)
        )
        at = self._membership.cursor if self._membership.confirmed == known.maps else b""
        return f"settling {list(known.maps)}: fenced by {fenced}, confirmed by {done}, ours up to {at!r}"
