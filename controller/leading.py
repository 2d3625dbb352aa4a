"""``Lead``: what the leader of the controllers does, from the lease's grant to its end.

::

    recalling ──► the map that was noted ──────────────────► at work: addresses, moves, orders
        │                                                       ▲
        ├──► there is none, and nobody has one ──► epoch 1 ─────┤
        │                                                       │
        └──► there is none, or an older one than somebody works by: the records were lost
                 ──► the newest map of the shards, + 1000 ──────┘

Every map is noted under the lease's fence before anybody hears of it, and the first thing that is noted is
what was recalled: from then on no leader before can note anything.

**After a loss of the records** somebody may work by an epoch that nobody alive has told of.  The newest map
of those that are heard is gone on with when more than half of its shards are heard and those that are not
could not have carried a transition through without them, at a number that no unseen epoch can reach.

**The first map is for all.**  A shard whose first map is a later one takes itself for one that has lost its
disk, and asks the others what it had (``l3_shard.entering``): two of three that do so wait for each other for
ever.  So no other map is issued, not even for new addresses, before every shard that lives has taken the
first, and of those that do not so many that they can tell the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from controller import placement
from controller.conductor import Conductor, Order
from controller.journal import Journal, decode_journal, encode_journal, first_journal, journal_of
from controller.notebook import Note, Notebook, Noted
from controller.placement import RingRules
from controller.roster import Roster
from kvcomm.errors import Corrupt, KVCommError, OutcomeUnknown, Unavailable
from kvcomm.machine import AskPeer, Effect, Event, Origin, Reply, Ticket
from kvcomm.wire.messages import (
    CancelOrder,
    Failure,
    Heartbeat,
    Message,
    NodePlan,
    OperationView,
    OrderAnswer,
    RingMap,
    RingNode,
    RingOffer,
    RingTaken,
)
from l3_shard.quorum import majority
from l3_shard.ring import Ring, decode_map, encode_map

FIRST_EPOCH = 1
EPOCH_GAP = 1000
"""No leader issues so many maps that nobody alive has heard of."""
RECALL_S = 5.0
SETTLE_S = 0.3
"""Nodes that come back together get one epoch for their new addresses."""
OFFER_S = 2.0
OFFER_AGAIN_S = 0.5
POOLS_S = 20.0
"""The first map waits so long for pools."""


@dataclass(frozen=True, slots=True)
class Recalled(Event):
    """The metadata records, as they are noted; ``None`` = there certainly is none."""

    ticket: Ticket
    ring: RingMap | None
    plan: bytes | None


@dataclass(frozen=True, slots=True)
class Recall(Effect):
    """Read both metadata records; answered by :class:`Recalled`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Publish(Effect):
    """This map has been noted: tell it to those who start on this host."""

    ring: RingMap


@dataclass(slots=True)
class _Offer:
    ticket: Ticket
    node: str
    incarnation: int
    until: float


class Lead:
    """For one term of the lease.

    Args:
        initial: what a cluster is to run that never had a map.
        tickets: numbers that are used once.
    """

    def __init__(
        self,
        rules: RingRules,
        initial: Sequence[NodePlan],
        roster: Roster,
        conductor: Conductor,
        tickets: Iterator[int],
        term: int,
        now: float,
    ) -> None:
        self.term = term
        self.until = now
        self.ring: RingMap | None = None
        """The newest that was noted."""
        self.journal: Journal | None = None
        """As it is to be; :attr:`noted_journal` is what may be acted on."""
        self.noted_journal: Journal | None = None
        self.over = False
        """Somebody else leads."""
        self._rules, self._initial, self._roster, self._tickets = rules, initial, roster, tickets
        self._conductor = conductor
        self._notebook = Notebook(tickets)
        self._ordered: list[tuple[Origin, OrderAnswer]] = []
        """Answers that wait for the journal to be noted."""
        self._recall: Ticket | None = None
        self._recall_at = now
        self._recalled = False
        self._offers: dict[str, _Offer] = {}
        self._offer_at: dict[str, float] = {}
        self._differs_at: float | None = None
        self._complete_at: float | None = None

    # -- events

    def recalled(self, event: Recalled, now: float) -> None:
        if self._recalled or event.ticket != self._recall:
            return
        self._recalled = True
        self._recall = None
        if event.plan is not None:
            self.journal = _readable(event.plan)
        if event.ring is None or event.ring.epoch < self._roster.heard_epoch:
            return
        self._issue(event.ring)
        if self.journal is None:
            self.journal = journal_of(event.ring, self._running())
        self._write(self.journal.with_pools(node for node in self._initial if node.role == "pool"))

    def noted(self, event: Noted, now: float) -> list[Effect]:
        if event.outcome == "fenced":
            self.over = True
            return []
        note = self._notebook.noted(event, now)
        return [] if note is None else self._made(note, now)

    def answered(self, ticket: Ticket, message: Message, now: float) -> None:
        """Of an offer."""
        offer = next((each for each in self._offers.values() if each.ticket == ticket), None)
        if offer is None:
            return
        del self._offers[offer.node]
        self._offer_at[offer.node] = now + OFFER_AGAIN_S
        if isinstance(message, RingTaken):
            self._roster.took(offer.node, offer.incarnation, message.epoch)

    def saw(self, beat: Heartbeat, now: float) -> None:
        """A heartbeat that was news."""
        self._conductor.saw(beat, now)

    def order(self, origin: Origin, message: Order, now: float) -> list[Effect]:
        """Answered when it is noted: what was answered is not forgotten with this process."""
        if self.ring is None or self.journal is None or self._lost:
            return [_failed(origin, Unavailable("the leader is not at work yet: try again"))]
        if isinstance(message, CancelOrder) and self._notebook.pending("ring"):
            # It may be the map with which the operation is done: to end it as taken back would end the
            # shards that joined by it.
            return [_failed(origin, Unavailable("the next map is being noted: try again"))]
        try:
            answer, journal = self._conductor.order(message, self.journal, self.ring, now)
        except KVCommError as error:
            return [_failed(origin, error)]
        if journal == self.journal:
            return [Reply(origin, answer)]
        self._write(journal)
        self._ordered.append((origin, answer))
        return []

    def end(self) -> list[Effect]:
        """The lease is over: nobody knows what becomes of orders that are not noted yet."""
        waiting, self._ordered = self._ordered, []
        error = OutcomeUnknown("the leader was replaced before it had noted the order: see what is under way")
        return [_failed(origin, error) for origin, _ in waiting]

    def views(self, now: float) -> list[OperationView]:
        """Of operations, newest first."""
        return [] if self.journal is None else self._conductor.views(self.journal, now)

    @property
    def plan(self) -> list[NodePlan] | None:
        """What launchers are to run; ``None``: nobody knows, and what runs is to go on."""
        return None if self.noted_journal is None or self._lost else self.noted_journal.nodes

    def work(self, now: float) -> list[Effect]:
        """All that can be done now; nothing after the lease."""
        if now >= self.until or self.over:
            return []
        if not self._recalled:
            return self._recall_due(now)
        if self.ring is None or self._lost:
            self._begin(now)
        elif not self._notebook.pending("ring"):
            self._go_on(self.ring, now)
        return [*self._notebook.due(now), *self._offers_due(now)]

    def deadline(self, now: float) -> float | None:
        """When there may be something to do again.  What is overdue waits for an event, not for time."""
        times = [self.until, self._recall_at, self._notebook.deadline(), self._differs_due]
        times += [*self._offer_times(), None if self._complete_at is None else self._complete_at + POOLS_S]
        return min((time for time in times if time is not None and time > now), default=None)

    def check(self) -> None:
        if self.ring is not None:
            Ring.from_map(self.ring)
        for node, offer in self._offers.items():
            assert node == offer.node

    # -- metadata

    def _recall_due(self, now: float) -> list[Effect]:
        if now < self._recall_at:
            return []
        self._recall = Ticket(next(self._tickets))
        self._recall_at = now + RECALL_S
        return [Recall(self._recall)]

    def _issue(self, ring: RingMap) -> None:
        self._differs_at = self._complete_at = None
        self._notebook.write("ring", encode_map(ring))

    def _write(self, journal: Journal) -> None:
        self.journal = journal
        self._notebook.write("plan", encode_journal(journal))

    def _made(self, note: Note, now: float) -> list[Effect]:
        if note.name == "plan":
            self.noted_journal = decode_journal(note.value)
            self._roster.liveness.expect((node.node for node in self.noted_journal.nodes), now)
            if self._notebook.pending("plan"):
                return []  # orders that came since are in the next one
            answers, self._ordered = self._ordered, []
            return [Reply(origin, answer) for origin, answer in answers]
        self.ring = decode_map(note.value)
        self._roster.saw(self.ring)
        self._roster.liveness.expect(placement.nodes_of(self.ring), now)
        self._offers.clear()
        self._offer_at.clear()
        return [Publish(self.ring)]

    @property
    def _lost(self) -> bool:
        """Somebody works by a newer map than was ever noted: the records are not what they were."""
        return self.ring is not None and self._roster.heard_epoch > self.ring.epoch

    # -- the first map

    def _begin(self, now: float) -> None:
        if self._notebook.pending("ring"):
            return
        if self._roster.heard_epoch:
            self._rebuild()
            return
        journal = self.journal or first_journal(self._initial)
        shards, pools = (self._heard(journal.of_role(role)) for role in ("shard", "pool"))
        if len(shards) < len(journal.of_role("shard")) or not shards:
            self._complete_at = None
            return
        if self._complete_at is None:
            self._complete_at = now
        if len(pools) == len(journal.of_role("pool")) or now >= self._complete_at + POOLS_S:
            self._write(journal)  # not before: the cluster may be another one than it was at first
            self._issue(placement.first_map(self._rules, shards, pools))

    def _rebuild(self) -> None:
        """See the module: go on from what the shards work by."""
        newest = self._roster.ring
        if newest is None or newest.epoch < self._roster.heard_epoch:
            return  # whoever has said so is asked for it
        shards = placement.shards_of(newest)
        unheard = [node for node in shards if self._roster.beat(node) is None]
        if 2 * len(unheard) >= len(shards) or Ring.from_map(newest).covers(unheard):
            return
        self._write(journal_of(newest, self._running(), self.journal))
        self._issue(self._refreshed(replace(newest, epoch=newest.epoch + EPOCH_GAP)))

    def _running(self) -> list[NodePlan]:
        """Pools and shards that are heard: none of them is forgotten with the journal."""
        beats = [self._roster.beat(node) for node in self._roster.names]
        return [
            NodePlan(beat.node, beat.role, beat.rack)
            for beat in beats
            if beat is not None and beat.role in ("pool", "shard")
        ]

    def _heard(self, plans: Sequence[NodePlan]) -> list[RingNode]:
        """Entries of those of these nodes that are heard."""
        at = self._roster.at(plan.node for plan in plans)
        there = [(plan, at[plan.node]) for plan in plans if plan.node in at]
        return [placement.placed(placement.racked(plan, where), where) for plan, where in there]

    # -- the next map

    def _go_on(self, ring: RingMap, now: float) -> None:
        """The journal is noted first, then the map that it is for."""
        if self.journal is None or self._notebook.pending("plan") or not self._begun(ring, now):
            return
        decision = self._conductor.next(self.journal, ring, now)
        if decision.journal != self.journal:
            self._write(decision.journal)
            return
        wanted = self._refreshed(decision.ring or ring)
        if decision.ring is not None:
            self._issue(replace(wanted, epoch=ring.epoch + 1))
            return
        if placement.alike(wanted, ring):
            self._differs_at = None
            return
        if self._differs_at is None:
            self._differs_at = now
        if now >= self._differs_at + SETTLE_S:
            self._issue(replace(wanted, epoch=ring.epoch + 1))

    def _begun(self, ring: RingMap, now: float) -> bool:
        """Whether the first map has reached enough shards for another one; see the module."""
        if ring.epoch != FIRST_EPOCH:
            return True
        shards = placement.shards_of(ring)
        waiting = [node for node in shards if self._roster.epoch(node) < FIRST_EPOCH]
        if not all(self._roster.liveness.gone(node, now) for node in waiting):
            return False
        groups = Ring.from_map(ring).groups() if waiting else []
        return all(len({*group} - {*waiting}) >= majority(group[1:]) for group in groups)

    @property
    def _differs_due(self) -> float | None:
        return None if self._differs_at is None else self._differs_at + SETTLE_S

    def _refreshed(self, ring: RingMap) -> RingMap:
        """With the addresses of all who are heard, and the pools that are planned."""
        pools = self.journal.pools if self.journal is not None else []
        names = [*placement.shards_of(ring), *(plan.node for plan in pools)]
        where = self._roster.at(names)
        return placement.with_pools(placement.at_addresses(ring, where), pools, where)

    # -- handing out

    def _offers_due(self, now: float) -> list[Effect]:
        ring = self.ring
        if ring is None or self._lost:
            return []
        effects: list[Effect] = []
        for node in self._behind(ring):
            offer = self._offers.get(node)
            life = self._roster.liveness.incarnation(node)
            if offer is not None and offer.until > now and offer.incarnation == life:
                continue
            if now < self._offer_at.get(node, now) and (offer is None or offer.incarnation == life):
                continue
            offer = _Offer(Ticket(next(self._tickets)), node, life, now + OFFER_S)
            self._offers[node] = offer
            effects.append(AskPeer(offer.ticket, node, RingOffer(ring), offer.until))
        return effects

    def _behind(self, ring: RingMap) -> list[str]:
        """Shards that are heard and work by an older map."""
        return [
            node
            for node in self._roster.of_role("shard")
            if self._roster.epoch(node) < ring.epoch and self._roster.liveness.state(node) != "dead"
        ]

    def _offer_times(self) -> list[float]:
        if self.ring is None or self._lost:
            return []
        return [
            self._offers[node].until if node in self._offers else self._offer_at.get(node, self.until)
            for node in self._behind(self.ring)
        ]


def _failed(origin: Origin, error: KVCommError) -> Reply:
    return Reply(origin, Failure(error.code, error.message, error.detail))


def _readable(plan: bytes) -> Journal | None:
    """A journal that cannot be read is as good as lost: the map goes on without it."""
    try:
        return decode_journal(plan)
    except Corrupt:
        return None
