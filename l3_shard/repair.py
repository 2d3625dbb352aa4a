"""``Repair``: brings this shard and each of its neighbours to the same records, without anybody asking.

A *neighbour* is another shard that keeps some record with us.  Each has a turn whenever it is due, one thing
at a time::

                      ┌────────── handed on, rest as long as it took ─────────┐
    due ──► hints for it? ── yes ──► Handoff: one batch ──────────────────────┤
              │ no                                                            │ no answer: back off, retry;
              ▼                                                               │ once it answers, compare too
            comparison due? ── yes ──► Comparing ── equal ──► due again after ``interval``

It is due at start and after each new placement, soon after it did not acknowledge a write, and every
``interval``. So a shard that comes back is told what it missed by those who noticed, and finds out the rest
itself.

**While records move** (``l3_shard.ring``) a shard that gains some fetches them itself: it compares itself
with one neighbour at a time, so that nothing is fetched twice, until it is ready (``l3_shard.readiness``).
The others leave that to it and compare themselves with it at the usual interval only.

Everything is bounded: one exchange with a neighbour at a time, so many records each; a rest after each that
is as long as it took; at least ``retry_min_s`` and at most ``retry_max_s`` between attempts to reach a silent
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from xxhash import xxh3_64_intdigest

from kvcomm.clock import pack
from kvcomm.errors import Refused, Unavailable
from kvcomm.machine import Origin
from kvcomm.wire.messages import (
    KEYS_MAX,
    LeafGet,
    LeafRecords,
    Message,
    RecordState,
    TreeDigests,
    TreeGet,
)
from l3_shard.comparing import LEAVES_MAX, NODES_MAX, CompareCounts, Comparing, Hurry
from l3_shard.desk import Desk, Request
from l3_shard.forest import Forest
from l3_shard.handoff import Handoff
from l3_shard.hints import Hints
from l3_shard.lines import Lines
from l3_shard.merkle import DEPTH, FAN_OUT, LEAVES
from l3_shard.notes import Notes
from l3_shard.purge import Purge
from l3_shard.readiness import Readiness
from l3_shard.recovery import Recovery
from l3_shard.ring import CHANGE_REST_S, NO_RING, Ring
from l3_shard.scrub import ScrubOptions
from l3_shard.storage import Entry
from l3_shard.timers import Timers
from l3_shard.tombstones import Burial, Forget

CAUGHT_UP = b"caught_up"
FLOOR = b"floor"


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """How a shard repairs.  Raises ``ValueError`` when hints would outlive tombstones."""

    interval_s: float = 60.0
    """Between two comparisons with a neighbour, give or take a quarter."""
    hint_bytes_max: int = 64 << 20
    hint_age_s: float = 3 * 3_600.0
    tombstone_age_s: float = 24 * 3_600.0
    batch_keys: int = 64
    """Records handed on or exchanged at once: a few milliseconds for whoever merges them."""
    gain_keys: int = 128
    """The same while records are fetched that a move gives this shard."""
    move_rate_bytes: int = 0
    """A second, of those; 0 = as fast as it can."""
    retry_min_s: float = 0.2
    retry_max_s: float = 2.0
    scrub: ScrubOptions = field(default_factory=ScrubOptions)

    def __post_init__(self) -> None:
        if not self.hint_age_s < self.tombstone_age_s:
            raise ValueError(
                "hints must be given up before tombstones go, "
                f"got {self.hint_age_s} and {self.tombstone_age_s} s"
            )


@dataclass(frozen=True, slots=True)
class RepairCounts:
    """Since start, but for what says "now"."""

    hint_count: int
    """Now."""
    hint_bytes: int
    """Now."""
    hints: Mapping[str, int]
    """Kept, refused, delivered, expired, void; see ``HintCounts``."""
    comparisons: Mapping[str, int]
    """Equal, repaired, failed; see ``CompareCounts``."""
    records: Mapping[str, int]
    """Records in which a neighbour knew more (pulled) or less (pushed), hints not counted."""
    contradictions: int
    tombstones_removed: int
    purged: int
    """Records dropped that this shard does not keep any more."""
    caught_up: int
    """Now: 1 = this shard's own word counts (see :attr:`Repair.caught_up`)."""


@dataclass(eq=False, slots=True)
class _Neighbour:
    node: str
    compare_at: float = 0.0
    turn: int = 0
    """Number of the wake-up or piece of work that is valid; what carries another comes too late."""
    wake_at: float = math.inf
    """When its next turn is."""
    working: bool = False
    waiting: bool = False
    """For another one's comparison to end."""
    failure_count: int = 0
    round_count: int = 0
    comparing: Comparing | None = None


class Repair:
    """See the module.

    Args:
        ring: the one in force.
        keepers: of a stored key, in order of preference; empty if we are none of them.
        wall_ms: what the wall clock shows.
        refused: hears every answer that was none.
        last_counter: the largest counter of our own replica id in some states.
        caught_up: hears that :attr:`caught_up` or :attr:`ready` has become true.
        recover: asks the other replicas again for what is damaged here.
        taken: calls back once the newest ring is one that we cannot fall back behind any more: only then is
            it true that we acknowledge nothing under an older one, which whoever compares counts on.
        recovery: hears what neighbours that were silent and we have told each other.
        stored: notes of an earlier life.  Without :data:`CAUGHT_UP` among them the store is a new one.
    """

    def __init__(
        self,
        node: str,
        options: RepairOptions,
        desk: Desk,
        lines: Lines[RecordState],
        notes: Notes,
        timers: Timers,
        *,
        ring: Callable[[], Ring],
        keepers: Callable[[bytes], Sequence[str]],
        wall_ms: Callable[[], int],
        refused: Callable[[Message], None],
        last_counter: Callable[[Sequence[RecordState]], int],
        caught_up: Callable[[], None],
        recover: Callable[[], None],
        taken: Callable[[Callable[[], None]], None],
        recovery: Recovery,
        stored: Mapping[bytes, bytes],
    ) -> None:
        self.caught_up = CAUGHT_UP in stored
        """False: the store is new and has not been compared with all neighbours yet, so what it lacks may
        exist."""
        self.floor = int.from_bytes(stored.get(FLOOR, b""), "big")
        """Largest counter under which a record was removed here."""
        self._node, self._options = node, options
        self._desk, self._lines, self._notes, self._timers = desk, lines, notes, timers
        self._ring, self._keepers, self._wall_ms, self._refused = ring, keepers, wall_ms, refused
        self._durable_floor = self.floor
        self._last_counter, self._tell_caught_up, self._recover = last_counter, caught_up, recover
        self._taken = taken
        self._new_cluster = ring().epoch == NO_RING.epoch
        self._compare_counts = CompareCounts()
        self._hurry = Hurry(options.move_rate_bytes)
        self._removed_count = 0
        self._placed = b""
        self._rest_s = 0.0
        self._epoch = ring().epoch
        self._readiness = Readiness(node, ring())
        self._neighbours: dict[str, _Neighbour] = {}
        self._burial: Burial | None = None
        self.forest = Forest(node, desk, keepers)
        self.purge = Purge(
            desk,
            lines,
            timers,
            ring=ring,
            keeps=lambda key: bool(keepers(key)),
            raise_floor=self._raise_floor,
            above_floor=lambda state: last_counter([state]) > self._durable_floor,
            save=notes.save,
            stored=stored,
        )
        self.hints = Hints(options.hint_bytes_max, options.hint_age_s, notes.save, stored)
        self._recovery = recovery
        self.hints.handed = recovery.handed
        timers.at(0.0, self._begin)

    def _begin(self) -> None:
        self.placed()
        self._timers.at(self._desk.now + self._jittered(self._options.interval_s, "tidy"), self._tidy)

    # -- whom we repair with

    def placed(self) -> None:
        """The ring in force is another.  What was begun under the old one is abandoned."""
        ring = self._ring()
        self._rest_s = CHANGE_REST_S if self._placed else 0.0  # by the first one nothing was under way
        for neighbour in self._neighbours.values():
            self._abandon(neighbour)
        if self._burial is not None:
            self._burial.abandon()
            self._burial = None
        if ring.placement != self._placed:
            self._placed = ring.placement
            self._readiness = Readiness(self._node, ring)
            self.forest.mark_all()
            before, self._neighbours = (
                self._neighbours,
                {
                    node: _Neighbour(node, self._first_comparison(node))
                    for node in ring.neighbours(self._node)
                },
            )
            for node in before.keys() - self._neighbours.keys():
                self._recovery.gone(node)
        elif ring.epoch > self._epoch + 1:  # by a map in between we may have been given nothing
            self._readiness = Readiness(self._node, ring)
            for neighbour in self._neighbours.values():
                if self._readiness.wants(neighbour.node):
                    neighbour.compare_at = self._after_change(neighbour.node)
        self._epoch = ring.epoch
        self.purge.placed()
        for neighbour in self._neighbours.values():
            self._wake(neighbour, self._desk.now)
        self._check_caught_up()

    def _first_comparison(self, node: str) -> float:
        """When, under a new placement: one that gains will come to us."""
        if self._leaves_it_to(node):
            return self._desk.now + self._jittered(self._options.interval_s, node)
        return self._after_change(node)

    def _after_change(self, node: str) -> float:
        """When to compare at the earliest."""
        return self._desk.now + self._jittered(self._rest_s, node)

    def _leaves_it_to(self, node: str) -> bool:
        ring = self._ring()
        return ring.moving and ring.gains(node) and self.caught_up and not self._readiness.wants(node)

    @property
    def ready(self) -> bool:
        """Whether this shard has everything that it gains by the transition under way, if there is one."""
        return self._readiness.ready

    def missed(self, node: str, keys: Sequence[bytes]) -> None:
        """``node`` did not acknowledge a write of ``keys``."""
        neighbour = self._neighbours.get(node)
        if neighbour is None:
            return  # it left the ring meanwhile
        for key in keys:
            if node in self._keepers(key):
                self.hints.add(node, key, self._wall_ms())
        if not neighbour.working:
            soon = self._desk.now + self._back_off_s(neighbour)
            if not self._leaves_it_to(node):
                neighbour.compare_at = min(neighbour.compare_at, soon)
            self._wake(neighbour, soon)

    def returned(self, node: str, silent_s: float) -> None:
        """``node`` answers again after it was silent: what it missed, and a comparison, at once.  What was
        asked of it before may wait for an answer that was lost."""
        neighbour = self._neighbours.get(node)
        if neighbour is None:
            return
        self._recovery.returned(node, silent_s)
        self._abandon(neighbour)
        neighbour.failure_count = 0
        neighbour.compare_at = self._desk.now
        self._wake(neighbour, self._desk.now)
        self._wake_waiting()

    def _wake(self, neighbour: _Neighbour, when: float) -> None:
        """A turn at ``when`` or before: a row of missed writes must not put it off again and again."""
        if when >= neighbour.wake_at:
            return
        neighbour.wake_at = when
        neighbour.turn += 1
        self._timers.at(when, partial(self._turn, neighbour, neighbour.turn))

    def _turn(self, neighbour: _Neighbour, turn: int) -> None:
        if turn != neighbour.turn or neighbour.working:
            return
        neighbour.wake_at, neighbour.waiting = math.inf, False
        now, epoch = self._desk.now, self._ring().epoch
        if self.hints.oldest(neighbour.node, 1):
            neighbour.working = True
            Handoff(
                neighbour.node,
                epoch,
                self._desk,
                self._lines,
                self.hints,
                keeps=lambda key: neighbour.node in self._keepers(key),
                done=partial(self._handed_on, neighbour, turn, now),
            ).start(self._options.batch_keys)
        elif neighbour.compare_at <= now:
            if not self.ready and any(map(_fetches, self._neighbours.values())):
                neighbour.waiting = True
                return
            hurry = self._readiness.wants(neighbour.node)
            neighbour.working = True
            neighbour.comparing = Comparing(
                neighbour.node,
                self._node,
                epoch,
                self._desk,
                self._lines,
                self.forest,
                self._timers,
                self._compare_counts,
                keys_max=self._options.gain_keys if hurry else self._options.batch_keys,
                hurry=self._hurry if hurry else None,
                keeps=lambda key: bool(self._keepers(key)),
                merged=self._recovery.merged,
                done=partial(self._compared, neighbour, turn),
            )
            neighbour.comparing.start()
        else:
            self._wake(neighbour, neighbour.compare_at)

    def _handed_on(self, neighbour: _Neighbour, turn: int, began_at: float, problem: Message | None) -> None:
        if turn != neighbour.turn:
            return
        neighbour.working = False
        if problem is not None:
            self._failed(neighbour, problem)
            return
        neighbour.failure_count = 0
        now = self._desk.now
        self._wake(neighbour, now + (now - began_at))

    def _compared(self, neighbour: _Neighbour, turn: int, problem: Message | None) -> None:
        if turn != neighbour.turn:
            return
        assert neighbour.comparing is not None
        vouched, differing_count = neighbour.comparing.vouched, neighbour.comparing.differing_count
        neighbour.working, neighbour.comparing = False, None
        if problem is not None:
            self._failed(neighbour, problem)
            self._wake_waiting()
            return
        neighbour.failure_count = 0
        neighbour.round_count += 1
        was_ready = self.ready
        self._readiness.compared(neighbour.node, vouched=vouched)
        self._check_caught_up()
        if self.ready and not was_ready:
            self._tell_caught_up()
        interval_s = self._options.interval_s
        if self._readiness.wants(neighbour.node):  # it did not vouch, but may soon
            interval_s = min(interval_s, self._options.retry_max_s)
        neighbour.compare_at = self._desk.now + self._jittered(
            interval_s, neighbour.node, neighbour.round_count
        )
        if self._recovery.compared(neighbour.node, differing_count):
            neighbour.compare_at = self._desk.now
        self._wake(
            neighbour, self._desk.now if self.hints.oldest(neighbour.node, 1) else neighbour.compare_at
        )
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Those that waited for another's comparison to end."""
        for neighbour in self._neighbours.values():
            if neighbour.waiting:
                neighbour.waiting = False
                self._wake(neighbour, self._desk.now)

    def _failed(self, neighbour: _Neighbour, problem: Message) -> None:
        """It was away: once it answers again, there may be more than our hints know."""
        delay_s = self._back_off_s(neighbour)
        neighbour.failure_count += 1
        neighbour.compare_at = self._desk.now
        self._wake(neighbour, self._desk.now + delay_s)
        self._refused(problem)  # last: it may bring a newer ring, and with it another turn

    def _abandon(self, neighbour: _Neighbour) -> None:
        neighbour.turn += 1
        neighbour.wake_at = math.inf
        neighbour.working = neighbour.waiting = False
        if neighbour.comparing is not None:
            neighbour.comparing.abandon()
            neighbour.comparing = None
            neighbour.compare_at = self._after_change(neighbour.node)

    def _back_off_s(self, neighbour: _Neighbour) -> float:
        options = self._options
        delay_s = min(options.retry_max_s, options.retry_min_s * 2.0 ** min(neighbour.failure_count, 16))
        return self._jittered(delay_s, neighbour.node, neighbour.failure_count)

    def _jittered(self, delay_s: float, *what: object) -> float:
        """Give or take a quarter, so that shards that were started together do not stay in step."""
        drawn = xxh3_64_intdigest(repr((self._node, *what)).encode()) / 2.0**64
        return delay_s * (0.75 + 0.5 * drawn)

    def _check_caught_up(self) -> None:
        """A cluster whose very first ring we hear has nothing yet that we could have lost."""
        ring = self._ring()
        first = self._new_cluster and ring.epoch == NO_RING.epoch + 1
        self._new_cluster &= ring.epoch == NO_RING.epoch
        known = self._node in ring and self._readiness.caught_up
        if not self.caught_up and (first or known):
            self.caught_up = True
            self._notes.save(CAUGHT_UP, b"1")
            self._tell_caught_up()

    # -- what goes on now and then

    def _tidy(self) -> None:
        """Give up old hints, try again to mend what is damaged, bury old tombstones."""
        self._recover()
        self.hints.expire(self._wall_ms())
        if self._burial is None and self.purge.clean and self._node in self._ring():
            before_ms = self._wall_ms() - int(self._options.tombstone_age_s * 1_000)
            self._burial = Burial(
                self._node,
                self._ring().epoch,
                pack(max(0, before_ms)),
                self._desk,
                self._lines,
                self.forest,
                replicas=self._keepers,
                forget=self.forget,
                done=self._buried,
            )
            self.forest.settle(partial(self._bury, self._burial))
        self._timers.at(self._desk.now + self._jittered(self._options.interval_s, "tidy"), self._tidy)

    def _bury(self, burial: Burial, read: bool) -> None:
        if burial is not self._burial:
            return
        if read:
            burial.start()
        else:
            self._burial = None

    def _buried(self, problem: Message | None) -> None:
        self._burial = None
        if problem is not None:
            self._refused(problem)

    def forget(
        self, keys: Sequence[bytes], states: Sequence[RecordState], done: Callable[[int], None]
    ) -> None:
        """Remove records that are still exactly as given; ``done`` hears how many went.  The floor is durable
        first."""
        forgetting = _Forgetting(len(keys), partial(self._forgotten, done))

        def floor_known(durable: bool) -> None:
            for key, state in zip(keys, states, strict=True):
                try:
                    if durable:
                        self._lines.change(key, Forget(state, forgetting.settled))
                    else:
                        forgetting.settled(False)
                except Refused:  # busy: the next pass asks again
                    forgetting.settled(False)

        self._raise_floor(states, floor_known)

    def _raise_floor(self, states: Sequence[RecordState], told: Callable[[bool], None]) -> None:
        """So that no counter in ``states`` is given out again; ``told`` hears whether that is durable."""
        self.floor = floor = max(self.floor, self._last_counter(states))
        if floor <= self._durable_floor:
            told(True)
            return

        def noted(durable: bool) -> None:
            if durable:
                self._durable_floor = max(floor, self._durable_floor)
            told(durable)

        self._notes.save(FLOOR, floor.to_bytes(8, "big"), noted)

    def _forgotten(self, done: Callable[[int], None], count: int) -> None:
        self._removed_count += count
        done(count)

    # -- what neighbours ask

    def tree_get(self, origin: Origin, message: TreeGet) -> None:
        """Answer with digests; for the root once everything written so far is in the tree.  For what is
        below it, too, when we started after the root was told: a tree that is empty yet would equal another
        empty one.

        Raises:
            Refused: the shard is busy, or no tree has such nodes.
        """
        width = FAN_OUT**message.depth if 0 <= message.depth < DEPTH else 0
        if len(message.indices) > NODES_MAX or not all(0 <= index < width for index in message.indices):
            raise Refused(f"no question for at most {NODES_MAX} inner nodes of depth {message.depth}")
        request = self._open(origin, message.node)

        def answer(read: bool) -> None:
            if not request.open:
                return
            if not read:
                self._desk.close(request, Unavailable("the shard's records cannot be read"))
                return
            tree = self.forest.tree(message.node)
            digests = [
                digest for index in message.indices for digest in tree.children((message.depth, index))
            ]
            self._desk.close(request, TreeDigests(digests, not self._vouches()))

        if message.depth and self.forest.whole:
            answer(True)
        else:
            self._taken(lambda: self.forest.settle(answer))

    def _vouches(self) -> bool:
        """Whether everything that we acknowledged is in our trees: not on a new disk, nor where a record was
        damaged and what came since has taken its place."""
        return self.caught_up and not any(map(self._keepers, self._lines.damaged()))

    def leaf_get(self, origin: Origin, message: LeafGet) -> None:
        """Answer with the records of as many leaves as fit.

        Raises:
            Refused: the shard is busy, or no tree has such leaves.
        """
        leaves_known = all(0 <= leaf < LEAVES for leaf in message.leaves)
        if not 1 <= len(message.leaves) <= LEAVES_MAX or not leaves_known:
            raise Refused(f"no question for 1 to {LEAVES_MAX} leaves of {LEAVES}")
        request = self._open(origin, message.node)

        def answer(leaves: Sequence[Sequence[Entry]] | None) -> None:
            if not request.open:
                return
            if leaves is None:
                self._desk.close(request, Unavailable("the shard's records cannot be read"))
                return
            entries: list[Entry] = []
            count = 0
            for leaf in leaves:
                shared = self.forest.shared(leaf, message.node)
                if count and len(entries) + len(shared) > KEYS_MAX // 16:
                    break
                entries += shared
                count += 1
            keys, digests = [entry.key for entry in entries], [entry.digest for entry in entries]
            self._desk.close(request, LeafRecords(count, keys, digests))

        self.forest.list_leaves(message.leaves, answer)

    def _open(self, origin: Origin, node: str) -> Request:
        if node not in self._neighbours:
            raise Refused(f"{node!r} keeps no record with {self._node}")
        request = self._desk.open(origin, 1)
        request.expire = partial(self._desk.close, request, Unavailable("the shard was too slow"))
        return request

    # -- looking inside

    def left(self) -> tuple[int, int]:
        """Records and bytes of values to be got or dropped because of a move, about."""
        if not self.ready:
            comparing = [each.comparing for each in self._neighbours.values() if each.comparing is not None]
            count, mean_bytes = sum(each.left_count for each in comparing), self._compare_counts.mean_bytes
        else:
            count, mean_bytes = self.purge.left_count, self.purge.mean_bytes
        return count, int(count * mean_bytes)

    def counts(self) -> RepairCounts:
        hints, compared = self.hints.counts, self._compare_counts
        return RepairCounts(
            len(self.hints),
            self.hints.held_bytes,
            asdict(hints),
            {"equal": compared.equal, "repaired": compared.repaired, "failed": compared.failed},
            {"pulled": compared.pulled, "pushed": compared.pushed},
            compared.contradictions,
            self._removed_count,
            self.purge.dropped_count,
            int(self.caught_up),
        )

    def check(self) -> None:
        """Assert every invariant."""
        self.hints.check()
        self.forest.check()


def _fetches(neighbour: _Neighbour) -> bool:
    """Whether records are coming from it: one that did not answer last time holds up nobody."""
    return neighbour.comparing is not None and not neighbour.failure_count


@dataclass(eq=False, slots=True)
class _Forgetting:
    """Removals under way."""

    open_count: int
    done: Callable[[int], None]
    removed_count: int = 0

    def settled(self, removed: bool) -> None:
        self.removed_count += removed
        self.open_count -= 1
        if not self.open_count:
            self.done(self.removed_count)
