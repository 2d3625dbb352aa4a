"""``Conductor``: the leader's operations: orders become entries of the journal, and these become maps.

One at a time; what is decided here is written down by ``controller.leading`` before it is acted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from controller import orders
from controller.journal import Journal, Operation
from controller.moving import Moving, ShardReport
from controller.operating import go_on, resumed, taken_back
from controller.placement import shards_of
from controller.policies.port import Policy
from controller.policies.table import policy_named
from controller.policies.view import LoadHistory
from controller.price import Holdings, planned_moves
from controller.progress import Progress
from controller.roster import Roster
from kvcomm.errors import Refused, Unavailable
from kvcomm.wire.messages import (
    CancelOrder,
    DrainOrder,
    Heartbeat,
    MoveOrder,
    OperationView,
    OrderAnswer,
    PlannedMove,
    RebalanceOrder,
    RingMap,
    ScaleOrder,
)

Order = ScaleOrder | DrainOrder | MoveOrder | RebalanceOrder | CancelOrder
ORDERS = (ScaleOrder, DrainOrder, MoveOrder, RebalanceOrder, CancelOrder)

POLICY_S = 10.0
"""How often a standing policy is asked."""


@dataclass(frozen=True, slots=True)
class ConductorOptions:
    replace_after_s: float = 600.0
    """A shard that has been dead for so long is gone on without; 0 = never."""
    give_up_after_s: float = 120.0
    """An operation is taken back when a shard that is to get keys has been dead for so long."""
    move_rate_bytes_s: float = 64e6
    """That a shard takes while keys are moved to it."""
    policy: str = ""
    """That moves keys by itself; "" = none."""


@dataclass(frozen=True, slots=True)
class Decision:
    journal: Journal
    """Noted first, if it is another one."""
    ring: RingMap | None = None
    """The next map, but for its epoch."""


class Conductor:
    """For one term.  Times are monotonic seconds."""

    def __init__(self, roster: Roster, options: ConductorOptions, now: float) -> None:
        self._roster, self._options = roster, options
        self._policy: Policy | None = policy_named(options.policy) if options.policy else None
        self._policy_at = now
        self._history = LoadHistory()
        self._progress = Progress()
        self._phase: tuple[int, str] = (0, "")
        self._spent_from = now
        self._trouble = ""
        self._declined = ""
        """Why the last plan of the standing policy cannot be carried out."""
        self._copied = False

    def saw(self, beat: Heartbeat, now: float) -> None:
        """A heartbeat that was news."""
        if beat.role == "shard" and beat.load is not None:
            self._history.saw(beat.node, beat.load, now)

    # -- what is next

    def next(self, journal: Journal, ring: RingMap, now: float) -> Decision:
        shards = self._reports(journal, ring, now)
        operation = journal.under_way
        if operation is None:
            self._trouble = ""
            return Decision(self._begin(journal, ring, shards, now))
        where = self._roster.at(node.node for node in operation.shards)
        onward = go_on(operation, ring, shards, where, patience_s=self._options.give_up_after_s)
        self._trouble, self._copied = onward.trouble, onward.copied
        self._measure(onward.operation, shards, now)
        if onward.operation != operation:
            spent_s = operation.spent_s + now - self._spent_from
            self._spent_from = now
            journal = journal.now(replace(onward.operation, spent_s=spent_s))
        return Decision(journal, onward.ring)

    def _begin(
        self, journal: Journal, ring: RingMap, shards: Mapping[str, ShardReport], now: float
    ) -> Journal:
        """What nobody has ordered."""
        self._spent_from = now
        if ring.transition is not None:
            self._history.forget()
            return journal.begun(resumed(ring, journal.next_number))
        idle = self._left_over(journal, ring, shards)
        if idle:
            return journal.without(idle)
        operation = self._replacing(journal, ring, shards) or self._rebalancing(journal, ring, now)
        return journal if operation is None else journal.begun(self._priced(operation, ring))

    def _left_over(self, journal: Journal, ring: RingMap, shards: Mapping[str, ShardReport]) -> list[str]:
        """Shards that run, are in no map, and keep nothing: of an operation that the journal has lost."""
        present = shards_of(ring)
        outside = [node.node for node in journal.of_role("shard") if node.node not in present]
        return [
            node
            for node in outside
            if shards[node].move.clean_epoch >= ring.epoch
            or shards[node].gone_s > self._options.give_up_after_s
        ]

    def _replacing(
        self, journal: Journal, ring: RingMap, shards: Mapping[str, ShardReport]
    ) -> Operation | None:
        after_s = self._options.replace_after_s
        dead = [node.node for node in ring.shards if after_s and shards[node.node].gone_s > after_s]
        if not dead:
            return None
        try:
            operation = orders.replace_dead(dead, ring, journal)
            # Not begun before it may start: whoever comes back meanwhile is not gone on without.
            target = [node.node for node in operation.shards]
            trouble = Moving(ring, shards, target=target).judge_start().trouble
            if not trouble:
                return operation
        except Refused as error:
            trouble = error.message
        self._trouble = f"{', '.join(dead)} has been dead for too long: {trouble}"
        return None

    def _rebalancing(self, journal: Journal, ring: RingMap, now: float) -> Operation | None:
        if self._policy is None or now < self._policy_at:
            return None
        self._policy_at = now + POLICY_S
        self._declined = ""
        view = self._history.view(ring, self._options.move_rate_bytes_s, now)
        if view is None:
            return None
        try:
            return orders.rebalance(self._options.policy, self._policy.plan(view), ring, journal)
        except Refused as error:
            self._declined = error.message
            return None

    def _reports(self, journal: Journal, ring: RingMap, now: float) -> dict[str, ShardReport]:
        """On the shards of the map, and on those that are planned beside it."""
        names = {*shards_of(ring), *(node.node for node in journal.of_role("shard"))}
        roster, liveness = self._roster, self._roster.liveness
        return {
            name: ShardReport(
                liveness.state(name),
                liveness.gone_s(name, now),
                roster.epoch(name),
                roster.told_epoch(name),
                roster.move(name),
            )
            for name in sorted(names)
        }

    # -- orders

    def order(
        self, message: Order, journal: Journal, ring: RingMap, now: float
    ) -> tuple[OrderAnswer, Journal]:
        """The answer, to be given once that journal is noted.

        Raises:
            Refused: it cannot be done, or not now; the text says why.
            Unavailable: not enough is known yet.
        """
        under_way = journal.under_way
        if isinstance(message, CancelOrder):
            return _cancelled(message, journal, ring)
        if under_way is not None:
            raise Refused(
                f"operation {under_way.number} ({under_way.what}) is under way, {under_way.step}: "
                f"wait for it, or cancel it"
            )
        if ring.transition is not None:
            raise Unavailable("a move is under way that this leader has just found: try again")
        operation = self._ordered(message, journal, ring, now)
        if operation is None:
            return OrderAnswer(0, []), journal
        operation = self._priced(operation, ring)
        if message.dry_run:
            return OrderAnswer(0, operation.moves), journal
        self._spent_from = now
        return OrderAnswer(operation.number, operation.moves), journal.begun(operation)

    def _ordered(self, message: Order, journal: Journal, ring: RingMap, now: float) -> Operation | None:
        match message:
            case ScaleOrder():
                return orders.scale(message, ring, journal)
            case DrainOrder():
                beat = self._roster.beat(message.node)
                return orders.drain(message, ring, journal, "" if beat is None else beat.role)
            case MoveOrder():
                return orders.move(message, ring, journal)
            case RebalanceOrder():
                policy = policy_named(message.policy, at_once=True)
                view = self._history.view(ring, self._options.move_rate_bytes_s, now)
                if view is None:
                    raise Unavailable("not every shard has said how busy it is yet: try again")
                return orders.rebalance(message.policy, policy.plan(view), ring, journal)
        raise AssertionError(f"no such order: {message}")

    def _priced(self, operation: Operation, ring: RingMap) -> Operation:
        loads = {
            node: beat.load
            for node in shards_of(ring)
            if (beat := self._roster.beat(node)) is not None and beat.load is not None
        }
        moves = planned_moves(
            ring,
            orders.entries(operation),
            operation.ranges,
            Holdings.of(loads, ring),
            self._options.move_rate_bytes_s,
        )
        return replace(operation, moves=moves)

    # -- for people

    def views(self, journal: Journal, now: float) -> list[OperationView]:
        """Newest first."""
        views = [_past(each) for each in reversed(journal.operations)]
        under_way = journal.under_way
        if under_way is not None:
            views[0] = self._present(under_way, now)
            return views
        wishes = (
            ("go on without dead shards", self._trouble),
            (f"rebalance ({self._options.policy})", self._declined),
        )
        wanted = [
            OperationView(0, what, "planned", 0.0, -1.0, [], trouble) for what, trouble in wishes if trouble
        ]
        return [*wanted, *views]

    def _present(self, operation: Operation, now: float) -> OperationView:
        step: str = operation.step
        done_share = 1.0
        if step in ("planned", "copying"):
            done_share = self._progress.done_share if step == "copying" else 0.0
            step = "verifying" if step == "copying" and self._copied else step
        trouble = "; ".join(each for each in (operation.trouble, self._trouble) if each)
        eta_s = self._progress.eta_s(now)
        return OperationView(
            operation.number, operation.what, step, done_share, eta_s, operation.moves, trouble
        )

    def _measure(self, operation: Operation, shards: Mapping[str, ShardReport], now: float) -> None:
        phase = (operation.number, operation.step)
        if phase != self._phase:
            self._phase, self._progress = phase, Progress()
            self._history.forget()
        moves = [report.move for report in shards.values() if report.lives]
        items_left = sum(move.records_left + move.blocks_left for move in moves)
        self._progress.saw(items_left, sum(move.bytes_left for move in moves), now)


def _cancelled(message: CancelOrder, journal: Journal, ring: RingMap) -> tuple[OrderAnswer, Journal]:
    operation = journal.under_way
    if operation is None or operation.number != message.operation:
        now = "nothing is" if operation is None else f"operation {operation.number} is"
        raise Refused(f"operation {message.operation} is not under way: {now}")
    if operation.back:
        raise Refused(f"operation {operation.number} is being taken back already")
    if operation.step == "purging" or (ring.transition is None and operation.step != "planned"):
        raise Refused(f"operation {operation.number} is done but for dropping what moved away")
    back = taken_back(operation, "cancelled", "cancelled by an operator")
    return OrderAnswer(operation.number, _nothing()), journal.now(back)


def _nothing() -> list[PlannedMove]:
    return []


def _past(operation: Operation) -> OperationView:
    done_share = 1.0 if operation.step == "done" else 0.0
    return OperationView(
        operation.number, operation.what, operation.step, done_share, -1.0, operation.moves, operation.trouble
    )
