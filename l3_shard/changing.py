"""``Changing``: coordinates strong reads and changes: runs the proposals of this shard.

* Changes of one record wait for each other here, so that one proposer does not duel with itself.  Those that
  come while a round is under way share the next one (``proposer``), so a hot record costs one round whatever
  the number of those who change it.  Reads do not wait, they begin by looking and change nothing.
* The promise that a quorum gave together with its last accept is kept for the record's next change: one round
  trip and one sync instead of two.  It is used once, and forgotten when anything goes wrong, when the ring
  changes, and after a delete.
* A round that failed is repeated after a jittered wait, until the request's time is up; after one that met
  another proposer the wait leaves that one the time to end (``proposer.backoff_s``).  When time is up, the
  refusal names the shard that was in the way, so that its caller asks that one.  A round that *too few
  answered* is repeated only ``MISSING_ROUNDS_MAX`` times, and one that needs acceptors which were silent when
  they were asked last waits for them no longer than ``SILENT_WAIT_S``: once a split has been noticed, its
  minority side refuses soon.  They are asked all the same, and one answer ends that.
* Three outcomes: done; ``conflict``, ``unavailable`` and ``refused``, which mean that nothing was changed;
  and ``outcome_unknown``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

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
from l3_shard.ballot import NO_BALLOT, STEPS_MAX, Ballot, Ballots
from l3_shard.desk import STRONG_FEW, Desk, Request
from l3_shard.proposer import (
    CONFIRM,
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
SILENT_WAIT_S = 0.25
CONFIRM_ROUNDS_MAX = 8
"""Failed rounds after which a record that is confirmed in the background is left for later."""
PROMISES_MAX = 65_536
PROMISE_BYTES_MAX = 32 << 20
"""Values of kept promises together."""


class _Batch(Protocol):
    """Whom outcomes go to."""

    def take(self, index: int, outcome: StrongOutcome) -> None: ...


@dataclass(eq=False, slots=True)
class _Asked:
    """A caller's request."""

    desk: Desk
    request: Request
    outcomes: list[StrongOutcome | None]
    open_count: int
    tasks: list[_Task] = field(default_factory=list)
    rival: str = ""
    """Whose proposals were in the way, when time was up."""

    def take(self, index: int, outcome: StrongOutcome) -> None:
        self.outcomes[index] = outcome
        self.open_count -= 1
        if not self.open_count:
            verdict = _verdict(self.outcomes, self.desk.limits.message_bytes, self.rival)
            self.desk.close(self.request, verdict)


@dataclass(frozen=True, slots=True)
class _Background:
    """One record that we confirm of ourselves."""

    then: Callable[[StrongOutcome], None]

    def take(self, index: int, outcome: StrongOutcome) -> None:
        self.then(outcome)


@dataclass(eq=False, slots=True)
class _Task:
    """One order, and who waits for its outcome."""

    order: StrongOrder
    batch: _Batch
    index: int
    run: _Run | None = None
    over: bool = False


@dataclass(eq=False, slots=True)
class _Run:
    """A proposal at work for some tasks of one record."""

    proposal: Proposal
    tasks: Sequence[_Task]
    """In the order of the proposal's orders."""
    queued: bool
    """It is the one whose turn it is; a look is not."""
    failed_count: int = 0
    missing_count: int = 0
    resting: bool = False
    """Between two rounds."""
    asked_at: float = 0.0
    phase_s: float = 0.0
    """The longest phase so far, from asking to the answer that decided it."""
    trouble: str = ""
    """What the last acceptor that did not vote said."""

    @property
    def key(self) -> bytes:
        return self.proposal.orders[0].key

    @property
    def over(self) -> bool:
        return all(task.over for task in self.tasks)


@dataclass(eq=False, slots=True)
class _Queue:
    """The changes of one record."""

    run: _Run | None = None
    """Whose turn it is; ``None`` = it is about to begin."""
    waiting: deque[_Task] = field(default_factory=deque)


class Changing:
    """See the module.

    Args:
        tickets: unused numbers.
        node: this shard.
        draw: random numbers from [0, 1), for the waits.
        quorum: of a stored key, by the newest configuration; raises ``KVCommError`` when this shard may not
            coordinate it (any more).
        epoch: of the newest map.
        refused: hears of every ``Failure`` that a peer answered, and which peer.
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
        refused: Callable[[str, Message], None],
    ) -> None:
        self.contended_count = self.unknown_count = self.unavailable_count = 0
        self._desk, self._voting, self._tickets = desk, voting, tickets
        self._node, self._ballots, self._draw = node, ballots, draw
        self._quorum, self._epoch, self._refused = quorum, epoch, refused
        self._queues: dict[bytes, _Queue] = {}
        self._promises: OrderedDict[bytes, Promise] = OrderedDict()
        self._promise_bytes = 0
        self._resting: list[tuple[float, int, _Run]] = []
        self._silent: set[str] = set()
        """Acceptors that gave no answer to what they were asked last."""
        self._waits: list[tuple[float, int, _Run, int]] = []
        """When a round has waited enough for them; a heap."""
        self._starting: dict[bytes, None] = {}
        """Queues that a round is due for."""

    def run(self, origin: Origin, orders: Sequence[StrongOrder]) -> None:
        """Coordinate one request of checked orders with stored keys.

        Raises:
            Refused: the shard is busy.
            KVCommError: it may not coordinate one of them; nothing was begun.
        """
        quorums = [self._quorum(order.key) for order in orders]
        size = sum(len(order.value or b"") for order in orders)
        limits = self._desk.limits
        few = len(orders) <= STRONG_FEW
        timeout_s = limits.strong_timeout_s if few else limits.request_timeout_s
        request = self._desk.open(origin, len(orders), size, timeout_s=timeout_s)
        asked = _Asked(self._desk, request, [None] * len(orders), len(orders))
        asked.tasks = [_Task(order, asked, index) for index, order in enumerate(orders)]
        request.expire = partial(self._expire, asked)
        for task, quorum in zip(asked.tasks, quorums, strict=True):
            if task.order.op == READ:
                self._look(task, quorum)
            else:
                self._queue(task)

    def confirm(self, key: bytes, then: Callable[[StrongOutcome], None]) -> None:
        """Have what the record holds, and everything promised for it, known to every quorum that is possible
        from now on.

        Raises:
            KVCommError: this shard may not coordinate it.
        """
        quorum = self._quorum(key)
        self._look(_Task(StrongOrder(key, CONFIRM), _Background(then), 0), quorum)

    def _look(self, task: _Task, quorum: Quorum) -> None:
        proposal = Proposal([task.order], quorum, self._ballots, looks=True)
        task.run = _Run(proposal, [task], queued=False)
        self._step(task.run, proposal.begin())

    def forget_promises(self) -> None:
        """The ring has changed: other acceptors count from now on."""
        self._promises.clear()
        self._promise_bytes = 0

    def forget_promise(self, key: bytes) -> None:
        """Somebody has deleted the record."""
        self._take_promise(key)

    def wake(self) -> None:
        """Begin the rounds whose wait is over."""
        while self._starting:
            key = next(iter(self._starting))
            del self._starting[key]
            self._start(self._queues[key])
        while self._waits and self._waits[0][0] <= self._desk.now:
            _, _, run, round_ = heapq.heappop(self._waits)
            self._wait_no_longer(run, round_)
        while self._resting and (self._resting[0][2].over or self._resting[0][0] <= self._desk.now):
            run = heapq.heappop(self._resting)[2]
            if not run.over:
                run.resting = False
                self._begin(run)

    def deadline(self) -> float | None:
        """When to :meth:`wake` next."""
        if self._starting:
            return self._desk.now
        while self._resting and self._resting[0][2].over:
            heapq.heappop(self._resting)
        while self._waits and not self._is_in(self._waits[0][2], self._waits[0][3]):
            heapq.heappop(self._waits)
        waits = [heap[0][0] for heap in (self._resting, self._waits) if heap]
        return min(waits, default=None)

    # -- one record's turn

    def _queue(self, task: _Task) -> None:
        queue = self._queues.setdefault(task.order.key, _Queue())
        if len(queue.waiting) >= self._desk.limits.changes_max:
            text = f"busy: {len(queue.waiting)} changes wait for one record; slow down"
            self._finish(task, StrongOutcome(Refused.code, b"", None, text))
            return
        task.run = None
        queue.waiting.append(task)
        if queue.run is None:
            self._starting[task.order.key] = None

    def _start(self, queue: _Queue) -> None:
        """A proposal of what waits."""
        tasks = [queue.waiting.popleft() for _ in range(min(STEPS_MAX, len(queue.waiting)))]
        key = tasks[0].order.key
        try:
            quorum = self._quorum(key)
        except KVCommError as error:
            self._next(key)
            for task in tasks:
                self._finish(task, StrongOutcome(Unavailable.code, b"", None, error.message))
            return
        queue.run = _Run(Proposal([task.order for task in tasks], quorum, self._ballots), tasks, queued=True)
        for task in tasks:
            task.run = queue.run
        self._step(queue.run, queue.run.proposal.begin(self._take_promise(key)))

    def _begin(self, run: _Run) -> None:
        """Another round, under the newest map."""
        try:
            run.proposal.quorum = self._quorum(run.key)
        except KVCommError as error:
            self._end(run, run.proposal.given_up(error.message))
        else:
            usable = not run.proposal.looks and not run.proposal.attempted
            self._step(run, run.proposal.begin(self._take_promise(run.key) if usable else None))

    def _step(self, run: _Run, step: Step) -> None:
        maps = list(run.proposal.quorum.maps)
        match step:
            case Prepare():
                self._ask(run, StrongPrepare(self._epoch(), run.key, step.ballot, maps))
            case Accept():
                self._ask(
                    run,
                    StrongAccept(self._epoch(), run.key, step.ballot, step.register, step.following, maps),
                )
            case Again():
                self._rest(run, step)
            case Turn():
                self._queue(run.tasks[0])
            case Finished():
                self._end(run, step.outcomes)

    def _ask(self, run: _Run, message: StrongPrepare | StrongAccept) -> None:
        proposal, round_ = run.proposal, run.proposal.round
        run.asked_at = self._desk.now
        held_bytes = len(message.register.value or b"") if isinstance(message, StrongAccept) else 0
        for node in proposal.quorum.nodes:
            if proposal.phase == "over" or proposal.round != round_:
                return  # an answer that came at once has decided
            then = partial(self._heard, run, round_, node)
            if node == self._node:
                self._voting.vote(message, then)
            else:
                self._desk.ask(node, message, then, held_bytes)
        if self._silent and self._is_in(run, round_) and not proposal.possible_without(self._silent):
            wait = (self._desk.now + SILENT_WAIT_S, next(self._tickets), run, round_)
            heapq.heappush(self._waits, wait)

    @staticmethod
    def _is_in(run: _Run, round_: int) -> bool:
        """Whether the run still waits for answers of this round."""
        return not run.over and not run.resting and run.proposal.round == round_

    def _wait_no_longer(self, run: _Run, round_: int) -> None:
        for node in run.proposal.quorum.nodes:
            if node in self._silent and self._is_in(run, round_):
                step = run.proposal.heard(node, Failure(Unavailable.code, "silent"))
                if step is not None:
                    self._step(run, step)

    def _heard(self, run: _Run, round_: int, node: str, answer: Message) -> None:
        if isinstance(answer, Failure):
            self._refused(node, answer)
            run.trouble = f"; {node}: {answer.text}"
            if node != self._node:
                self._silent.add(node)
        else:
            self._silent.discard(node)
        if run.over or run.resting or run.proposal.round != round_:
            return
        step = run.proposal.heard(node, answer)
        if step is not None:
            run.phase_s = max(run.phase_s, self._desk.now - run.asked_at)
            self._step(run, step)

    def _rest(self, run: _Run, again: Again) -> None:
        run.failed_count += 1
        run.missing_count += not again.contended
        self.contended_count += again.contended
        background = run.proposal.orders[0].op == CONFIRM and run.failed_count >= CONFIRM_ROUNDS_MAX
        if run.missing_count >= MISSING_ROUNDS_MAX or background:
            nodes = ", ".join(run.proposal.quorum.nodes)
            self._end(run, run.proposal.given_up(f"no majority of {nodes} voted{run.trouble}"))
            return
        run.resting = True
        phase_s = run.phase_s if again.contended else 0.0
        when = self._desk.now + backoff_s(run.failed_count, self._draw, phase_s)
        heapq.heappush(self._resting, (when, next(self._tickets), run))

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

    def _expire(self, asked: _Asked) -> None:
        """A round that others wait for too goes on, and the next one leaves these orders out."""
        why = "no decision in time"
        for task in asked.tasks:
            if task.over:
                continue
            run = task.run
            asked.rival = self._rival(run or self._queues[task.order.key].run) or asked.rival
            if run is None:
                self._queues[task.order.key].waiting.remove(task)
                self._finish(task, StrongOutcome(Unavailable.code, b"", None, f"{why}; nothing was changed"))
                self._forget(task.order.key)
            else:
                at = run.tasks.index(task)
                run.proposal.drop(at)
                self._finish(task, run.proposal.left(at, why + run.trouble))
                if run.over:
                    self._leave(run)

    def _rival(self, run: _Run | None) -> str:
        """Who was in the way of its last round."""
        if run is None or run.proposal.rival == NO_BALLOT:
            return ""
        node = Ballot.from_code(run.proposal.rival).node
        return "" if node == self._node else node

    def _end(self, run: _Run, outcomes: Sequence[StrongOutcome]) -> None:
        promise = run.proposal.promise
        if promise is not None and self._current(run.proposal):
            self._keep_promise(run.key, promise)
        self._leave(run)
        for task, outcome in zip(run.tasks, outcomes, strict=True):
            if not task.over:
                self._finish(task, outcome)

    def _finish(self, task: _Task, outcome: StrongOutcome) -> None:
        task.over = True
        self.unknown_count += outcome.code == OutcomeUnknown.code
        self.unavailable_count += outcome.code == Unavailable.code
        task.batch.take(task.index, outcome)

    def _current(self, proposal: Proposal) -> bool:
        """Whether its acceptors are those of the newest map: a promise of others is worth nothing."""
        try:
            return self._quorum(proposal.orders[0].key) == proposal.quorum
        except KVCommError:
            return False

    def _leave(self, run: _Run) -> None:
        """The next one's turn, if it was the turn of this one."""
        queue = self._queues.get(run.key)
        if run.queued and queue is not None and queue.run is run:
            self._next(run.key)

    def _next(self, key: bytes) -> None:
        queue = self._queues[key]
        queue.run = None
        if queue.waiting:
            self._starting[key] = None
        else:
            del self._queues[key]

    def _forget(self, key: bytes) -> None:
        """A queue that nobody waits in any more."""
        queue = self._queues[key]
        if queue.run is None and not queue.waiting:
            del self._queues[key]
            self._starting.pop(key, None)

    def check(self) -> None:
        """Assert that nothing is stuck and the bounds hold."""
        for key, queue in self._queues.items():
            run = queue.run
            assert queue.waiting or run, f"an empty queue of {key!r} is kept"
            assert all(not task.over and task.run is None for task in queue.waiting), (
                f"{key!r} waits for ever"
            )
            assert (run is None) == (key in self._starting), f"{key!r} is stuck"
            assert run is None or run.resting or run.proposal.phase != "over", f"{key!r} is stuck in a round"
            assert run is None or not run.over, f"a run of {key!r} is over and keeps its turn"
        assert self._starting.keys() <= self._queues.keys()
        held_bytes = sum(len(promise.register.value or b"") for promise in self._promises.values())
        assert held_bytes == self._promise_bytes <= PROMISE_BYTES_MAX and len(self._promises) <= PROMISES_MAX

    def story(self, key: bytes) -> str:
        """What is going on with the stored ``key``, for a person."""
        queue = self._queues.get(key)
        kept = ", a promise is kept" if key in self._promises else ""
        if queue is None:
            return f"no change under way{kept}"
        if queue.run is None:
            return f"{len(queue.waiting)} changes are about to begin{kept}"
        proposal = queue.run.proposal
        doing = f"{proposal.phase} in round {proposal.round} with {len(proposal.orders)} changes"
        return f"{doing}, {len(queue.waiting)} wait{kept}"


def _verdict(
    outcomes: Sequence[StrongOutcome | None], bytes_max: int, rival: str = ""
) -> Message | KVCommError:
    """A request of which nothing was done can be sent to another owner: a ``Failure`` says so, and names the
    one that was in the way, for it is alive.  Values are those of reads and of conflicts: who wrote one has
    it."""
    told = [outcome for outcome in outcomes if outcome is not None]
    if told and all(outcome.code == Unavailable.code for outcome in told):
        return Unavailable(told[0].text, rival.encode())
    size = sum(len(outcome.value or b"") for outcome in told)
    if len(told) > 1 and size > bytes_max:  # of reads: there are never so many changes
        return TooLarge(f"{size} bytes of values do not fit one answer; split the batch")
    return StrongOutcomes(told)
