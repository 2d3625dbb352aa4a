"""``Changing``: coordinates strong reads and changes: runs the proposals of this shard.

* Changes of one record wait for each other here, so that one proposer does not duel with itself; reads do not
  wait, they begin by looking and change nothing.
* The promise that a quorum gave together with its last accept is kept for the record's next change: one round
  trip and one sync instead of two.  It is used once, and forgotten when anything goes wrong, when the ring
  changes, and after a delete.
* A round that failed is repeated after a jittered, doubling wait, until the request's time is up.  A round
  that *too few answered* is repeated only ``MISSING_ROUNDS_MAX`` times: the minority side of a split refuses
  soon rather than late.
* Three outcomes: done; ``conflict``, ``unavailable`` and ``refused``, which mean that nothing was changed;
  and ``outcome_unknown``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvcomm.errors import KVCommError, OutcomeUnknown, Refused, TooLarge, Unavailable
from kvcomm.machine import Origin
from kvcomm.wire.messages import (
    Failure,
    Message,
    StrongAccept,
    StrongOrder,
    StrongOutcome,
    StrongOutcomes,
    StrongPrepare,
)
from l3_shard.ballot import Ballots
from l3_shard.desk import Desk, Request
from l3_shard.proposer import (
    READ,
    Accept,
    Again,
    Finished,
    Jitter,
    Prepare,
    Promise,
    Proposal,
    Step,
    Turn,
    backoff_s,
)
from l3_shard.quorum import Quorum
from l3_shard.voting import Voting

MISSING_ROUNDS_MAX = 3
PROMISES_MAX = 65_536
PROMISE_BYTES_MAX = 32 << 20
"""Values of kept promises together."""


@dataclass(eq=False, slots=True)
class _Batch:
    """One request."""

    request: Request
    outcomes: list[StrongOutcome | None]
    tasks: list[_Task] = field(default_factory=list)
    open_count: int = 0


@dataclass(eq=False, slots=True)
class _Task:
    """One of its records."""

    batch: _Batch
    index: int
    proposal: Proposal
    failed_count: int = 0
    missing_count: int = 0
    resting: bool = False
    """Between two rounds."""
    over: bool = False
    trouble: str = ""
    """What the last acceptor that did not vote said."""

    @property
    def key(self) -> bytes:
        return self.proposal.order.key


class Changing:
    """See the module.

    Args:
        tickets: unused numbers.
        node: this shard.
        draw: random numbers from [0, 1), for the waits.
        quorum: of a stored key, by the newest map; raises ``KVCommError`` when this shard may not coordinate
            it (any more).
        epoch: of the newest map.
        refused: hears of every ``Failure`` that a peer answered.
    """

    def __init__(
        self,
        desk: Desk,
        voting: Voting,
        tickets: Iterator[int],
        *,
        node: str,
        ballots: Ballots,
        draw: Jitter,
        quorum: Callable[[bytes], Quorum],
        epoch: Callable[[], int],
        refused: Callable[[Message], None],
    ) -> None:
        self.contended_count = self.unknown_count = self.unavailable_count = 0
        self._desk, self._voting, self._tickets = desk, voting, tickets
        self._node, self._ballots, self._draw = node, ballots, draw
        self._quorum, self._epoch, self._refused = quorum, epoch, refused
        self._queues: dict[bytes, deque[_Task]] = {}
        """The first of each is at work."""
        self._promises: OrderedDict[bytes, Promise] = OrderedDict()
        self._promise_bytes = 0
        self._resting: list[tuple[float, int, _Task]] = []

    def run(self, origin: Origin, orders: Sequence[StrongOrder]) -> None:
        """Coordinate one request of checked orders with stored keys.

        Raises:
            Refused: the shard is busy.
            KVCommError: it may not coordinate one of them; nothing was begun.
        """
        proposals = [Proposal(order, self._quorum(order.key), self._ballots) for order in orders]
        size = sum(len(order.value or b"") for order in orders)
        request = self._desk.open(origin, len(orders), size)
        batch = _Batch(request, [None] * len(orders), open_count=len(orders))
        batch.tasks = [_Task(batch, index, proposal) for index, proposal in enumerate(proposals)]
        request.expire = partial(self._expire, batch)
        for task in batch.tasks:
            if task.proposal.order.op == READ:
                self._step(task, task.proposal.begin())
            else:
                self._queue(task)

    def forget_promises(self) -> None:
        """The ring has changed: other acceptors count from now on."""
        self._promises.clear()
        self._promise_bytes = 0

    def wake(self) -> None:
        """Begin the rounds whose wait is over."""
        while self._resting and (self._resting[0][2].over or self._resting[0][0] <= self._desk.now):
            task = heapq.heappop(self._resting)[2]
            if not task.over:
                task.resting = False
                self._begin(task)

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        while self._resting and self._resting[0][2].over:
            heapq.heappop(self._resting)
        return self._resting[0][0] if self._resting else None

    # -- one record's turn

    def _queue(self, task: _Task) -> None:
        queue = self._queues.setdefault(task.key, deque())
        if len(queue) >= self._desk.limits.changes_max:
            text = f"busy: {len(queue)} changes wait for one record; slow down"
            self._finish(task, StrongOutcome(Refused.code, b"", None, text))
            return
        queue.append(task)
        if queue[0] is task:
            self._begin_at(self._desk.now, task)

    def _begin(self, task: _Task) -> None:
        """A round, under the newest map."""
        try:
            task.proposal.quorum = self._quorum(task.key)
        except KVCommError as error:
            self._finish(task, task.proposal.given_up(error.message))
        else:
            promise = None if task.proposal.looks else self._take_promise(task.key)
            self._step(task, task.proposal.begin(promise))

    def _step(self, task: _Task, step: Step) -> None:
        match step:
            case Prepare():
                self._ask(task, StrongPrepare(self._epoch(), task.key, step.ballot))
            case Accept():
                message = StrongAccept(self._epoch(), task.key, step.ballot, step.register, step.following)
                self._ask(task, message)
            case Again():
                self._rest(task, step)
            case Turn():
                self._queue(task)
            case Finished():
                self._finish(task, step.outcome)

    def _ask(self, task: _Task, message: StrongPrepare | StrongAccept) -> None:
        round_ = task.proposal.round
        held_bytes = len(message.register.value or b"") if isinstance(message, StrongAccept) else 0
        for node in task.proposal.quorum.nodes:
            if task.over or task.proposal.round != round_:
                return  # an answer that came at once has decided
            then = partial(self._heard, task, round_, node)
            if node == self._node:
                self._voting.vote(message, then)
            else:
                self._desk.ask(node, message, then, held_bytes)

    def _heard(self, task: _Task, round_: int, node: str, answer: Message) -> None:
        if isinstance(answer, Failure):
            self._refused(answer)
            task.trouble = f"; {node}: {answer.text}"
        if task.over or task.resting or task.proposal.round != round_:
            return
        step = task.proposal.heard(node, answer)
        if step is not None:
            self._step(task, step)

    def _rest(self, task: _Task, again: Again) -> None:
        task.failed_count += 1
        task.missing_count += not again.contended
        self.contended_count += again.contended
        if task.missing_count >= MISSING_ROUNDS_MAX:
            nodes = ", ".join(task.proposal.quorum.nodes)
            self._finish(task, task.proposal.given_up(f"no majority of {nodes} voted{task.trouble}"))
            return
        self._begin_at(self._desk.now + backoff_s(task.failed_count, self._draw), task)

    def _begin_at(self, when: float, task: _Task) -> None:
        task.resting = True
        heapq.heappush(self._resting, (when, next(self._tickets), task))

    def _take_promise(self, key: bytes) -> Promise | None:
        promise = self._promises.pop(key, None)
        if promise is not None:
            self._promise_bytes -= len(promise.register.value or b"")
        return promise

    def _keep_promise(self, key: bytes, promise: Promise) -> None:
        self._promises[key] = promise
        self._promise_bytes += len(promise.register.value or b"")
        while len(self._promises) > PROMISES_MAX or self._promise_bytes > PROMISE_BYTES_MAX:
            self._take_promise(next(iter(self._promises)))

    # -- ends

    def _expire(self, batch: _Batch) -> None:
        for task in batch.tasks:
            if not task.over:
                self._finish(task, task.proposal.given_up(f"no decision in time{task.trouble}"))

    def _finish(self, task: _Task, outcome: StrongOutcome) -> None:
        task.over = True
        self.unknown_count += outcome.code == OutcomeUnknown.code
        self.unavailable_count += outcome.code == Unavailable.code
        batch = task.batch
        batch.outcomes[task.index] = outcome
        batch.open_count -= 1
        if task.proposal.promise is not None and self._current(task.proposal):
            self._keep_promise(task.key, task.proposal.promise)
        self._leave(task)
        if not batch.open_count:
            self._desk.close(batch.request, _verdict(batch.outcomes, self._desk.limits.message_bytes))

    def _current(self, proposal: Proposal) -> bool:
        """Whether its acceptors are those of the newest map: a promise of others is worth nothing."""
        try:
            return self._quorum(proposal.order.key) == proposal.quorum
        except KVCommError:
            return False

    def _leave(self, task: _Task) -> None:
        """Out of the queue; the next one's turn if it was the first."""
        queue = self._queues.get(task.key)
        if queue is None or task not in queue:
            return
        first = queue[0] is task
        queue.remove(task)
        if not queue:
            del self._queues[task.key]
        elif first:
            self._begin_at(self._desk.now, queue[0])

    def check(self) -> None:
        """Assert that nothing is stuck and the bounds hold."""
        for key, queue in self._queues.items():
            assert queue, f"an empty queue of {key!r} is kept"
            assert all(not task.over for task in queue), f"a task of {key!r} that is over waits"
            head = queue[0]
            assert head.resting or head.proposal.phase != "over", f"{key!r} is stuck"
            assert all(task.proposal.phase == "over" and not task.resting for task in list(queue)[1:]), (
                f"two proposals of {key!r} at once"
            )
        held_bytes = sum(len(promise.register.value or b"") for promise in self._promises.values())
        assert held_bytes == self._promise_bytes <= PROMISE_BYTES_MAX and len(self._promises) <= PROMISES_MAX

    def story(self, key: bytes) -> str:
        """What is going on with the stored ``key``, for a person."""
        queue = self._queues.get(key)
        kept = ", a promise is kept" if key in self._promises else ""
        if not queue:
            return f"no change under way{kept}"
        head = queue[0]
        return f"{head.proposal.phase} in round {head.proposal.round}, {len(queue) - 1} changes wait{kept}"


def _verdict(outcomes: Sequence[StrongOutcome | None], bytes_max: int) -> Message | KVCommError:
    """A request of which nothing was done can be sent to another owner: a ``Failure`` says so.  Values are
    those of reads and of conflicts: who wrote one has it."""
    told = [outcome for outcome in outcomes if outcome is not None]
    if told and all(outcome.code == Unavailable.code for outcome in told):
        return Unavailable(told[0].text)
    size = sum(len(outcome.value or b"") for outcome in told)
    if len(told) > 1 and size > bytes_max:  # of reads: there are never so many changes
        return TooLarge(f"{size} bytes of values do not fit one answer; split the batch")
    return StrongOutcomes(told)
