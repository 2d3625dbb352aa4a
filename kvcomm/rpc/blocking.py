"""``Peers``: the blocking client; a thread-safe pool of connections, and the driver that runs ``Steps`` over
them.

Theory of operation.  An operation has one connection a peer, checked out of the pool, so nothing but the pool
itself is shared between threads.  Its waits move every connection of the operation at once, sends and
receives together: a peer that stops reading until its replies are taken (both sides hold payloads) is never
met by a client that only sends.  What is outstanding when the operation ends dies with its connection.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from kvcomm.block import Buffer
from kvcomm.errors import Corrupt, TooLarge, Unavailable, failure_to_error
from kvcomm.rpc.link import Link
from kvcomm.rpc.session import Exchange, Identity, lost_reason
from kvcomm.steps import Answer, Ask, Call, Emit, Park, Step, Steps, Submit, Wait, WaitAny, Work
from kvcomm.wire.frames import Frame, Sink
from kvcomm.wire.messages import Failure, Message, Welcome

T = TypeVar("T")

_LOST = (OSError, Corrupt, TooLarge)


class Peers:
    """Idle connections by address.  Belongs to one process; a forked child starts with none."""

    def __init__(
        self,
        identity: Identity,
        *,
        connect_timeout_s: float = 2.0,
        idle_max: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``idle_max`` connections are kept for each address; what is over is closed after its operation."""
        self.identity = identity
        self.connect_timeout_s = connect_timeout_s
        self.clock = clock
        self._idle_max = idle_max
        self._idle: dict[str, deque[Link]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    def welcome(self, address: str, deadline: float) -> Welcome:
        """What the server at ``address`` says of itself; connects if needed.

        Raises:
            KVCommError: unreachable, refused, or not in time.
        """
        operation = _Operation(self, deadline)
        try:
            return operation.greet(address)
        finally:
            operation.close()

    def close(self) -> None:
        """Close what is idle now, and the rest when its operation ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for links in idle.values():
            for link in links:
                link.close()

    def take(self, address: str, deadline: float, *, fresh: bool = False) -> Link:
        """A connection for one operation; an idle one unless ``fresh``.

        Raises:
            Unavailable: cannot connect.
        """
        self._forget_after_fork()
        while not fresh:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    break
                link = idle.pop()  # the one used last: its caches are warm
            if link.alive():
                link.reused = True
                return link
            link.close()
        connect_timeout_s = min(self.connect_timeout_s, max(0.0, deadline - self.clock()))
        return Link(address, self.identity, connect_timeout_s=connect_timeout_s, clock=self.clock)

    def give_back(self, link: Link) -> None:
        """An operation is done with ``link``."""
        if not link.session.busy:
            with self._lock:
                idle = self._idle.setdefault(link.address, deque())
                if len(idle) < self._idle_max and not self._closed:
                    idle.append(link)
                    return
        link.close()

    def _forget_after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a thread that the child does not have may have held it
        idle, self._idle = self._idle, {}
        for links in idle.values():
            for link in links:
                link.close()  # our descriptor only: the parent's connection stands


def run_blocking(steps: Steps[T], peers: Peers, deadline: float) -> T:
    """Run an operation to its end and return its result; what it emits is dropped.

    ``deadline`` is absolute seconds of ``peers.clock``.  Trouble with peers reaches ``steps`` as ``Failure``
    answers; only what ``steps`` raises itself is raised here.
    """
    driver = _drive(steps, peers, deadline)
    while True:
        try:
            next(driver)
        except StopIteration as end:
            result: T = end.value
            return result


def iterate_blocking(steps: Steps[Any], peers: Peers, deadline: float) -> Generator[Any, None, None]:
    """Run an operation as far as each item that it emits.  Close the iterator to give the rest up."""
    return _drive(steps, peers, deadline)


def _drive(steps: Steps[T], peers: Peers, deadline: float) -> Steps[T]:
    operation = _Operation(peers, deadline)
    try:
        step = next(steps)
        while True:
            if type(step) is Emit:
                yield step.item
                step = steps.send(None)
            else:
                step = steps.send(operation.perform(step))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        operation.close()
        steps.close()


class Connection:
    """One connection that its owner holds; its life is the life of what the server ties to it (pins,
    reservations).

    Not thread-safe.  A call that fails in any other way than by the server's own ``Failure`` has closed the
    connection.
    """

    def __init__(self, operation: _Operation, address: str, welcome: Welcome) -> None:
        self._operation = operation
        self._address = address
        self.welcome = welcome

    @staticmethod
    def open(
        address: str, identity: Identity, deadline: float, *, clock: Callable[[], float] = time.monotonic
    ) -> Connection:
        """Connect and greet.

        Raises:
            KVCommError: unreachable, refused, or not by ``deadline``.
        """
        peers = Peers(identity, connect_timeout_s=max(0.0, deadline - clock()), idle_max=0, clock=clock)
        operation = _Operation(peers, deadline)
        try:
            return Connection(operation, address, operation.greet(address))
        except BaseException:
            operation.close()
            raise

    def call(
        self, message: Message, payload: Sequence[Buffer] = (), sink: Sink | None = None, *, deadline: float
    ) -> Frame:
        """Ask and wait.

        Raises:
            KVCommError: the server's failure, ``Unavailable`` or ``OutcomeUnknown``.
        """
        operation = self._operation
        if not operation.holds(self._address):
            raise Unavailable(f"{self._address}: this connection is closed")
        operation.deadline = deadline
        answer = operation.only(Ask(self._address, message, payload, sink))
        if isinstance(answer.message, Failure):
            raise failure_to_error(answer.message.code, answer.message.text, answer.message.detail)
        return Frame(0, answer.message, answer.payload)

    def alive(self) -> bool:
        """Whether the server still holds its end, as far as is known here.  Does not wait."""
        return self._operation.alive(self._address)

    def close(self) -> None:
        """Idempotent."""
        self._operation.close()


class _Operation:
    """The connections and requests of one running operation."""

    def __init__(self, peers: Peers, deadline: float) -> None:
        self.deadline = deadline
        self._peers = peers
        self._clock = peers.clock
        self._links: dict[str, Link] = {}

    def perform(self, step: Step) -> Any:
        if type(step) is Wait:
            return self._wait(step.call.handle)
        if type(step) is WaitAny:
            return self._wait_any(step)
        if type(step) is Submit:
            return self._submit(step.asks)
        if type(step) is Work:
            return step.call(step.deadline(self._clock(), self.deadline))
        assert type(step) is Park, f"{step!r} is not a step"
        return self._park(step)

    def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            self._peers.give_back(link)

    # -- held connections

    def greet(self, address: str) -> Welcome:
        link = self._links[address] = self._peers.take(address, self.deadline)
        while link.session.welcome is None:
            left_s = min(self.deadline, link.greet_deadline) - self._clock()
            if left_s <= 0:
                self._drop(link)
                raise Unavailable(f"{address}: no welcome in time")
            try:
                self._move_one(link, left_s)
            except _LOST as error:
                self._drop(link)
                refusal = link.session.refusal
                if refusal is not None:
                    raise failure_to_error(refusal.code, refusal.text, refusal.detail) from error
                raise Unavailable(f"{address}: {lost_reason(error)}") from error
        return link.session.welcome

    def only(self, ask: Ask) -> Answer:
        [call] = self._submit([ask])
        answer = self._wait(call.handle)
        link = self._links.get(ask.address)
        if link is not None and link.session.busy:
            self._drop(link)  # a reply may still come, and nobody waits for it
        return answer

    def holds(self, address: str) -> bool:
        return address in self._links

    def alive(self, address: str) -> bool:
        link = self._links.get(address)
        return link is not None and link.alive()

    # -- steps

    def _submit(self, asks: Sequence[Ask]) -> list[Call]:
        now = self._clock()
        calls: list[Call] = []
        touched: dict[str, Link] = {}
        for ask in asks:
            deadline = self.deadline if ask.timeout_s is None else min(self.deadline, now + ask.timeout_s)
            exchange = Exchange(ask, deadline)
            calls.append(Call(ask, exchange))
            link = self._start(exchange, now)
            if link is not None:
                touched[ask.address] = link
        for link in touched.values():
            try:
                link.send()
            except _LOST as error:
                self._lost(link, error)
        return calls

    def _start(self, exchange: Exchange, now: float, *, fresh: bool = False) -> Link | None:
        """Hand an exchange to the connection to its peer; ``None`` if there is none and it failed."""
        link = self._links.get(exchange.ask.address)
        if link is None:
            try:
                link = self._peers.take(exchange.ask.address, self.deadline, fresh=fresh)
            except Unavailable as error:
                exchange.finish(Answer(Failure(error.code, error.message), [], now))
                return None
            self._links[link.address] = link
        exchange.reused = link.reused
        link.session.start(exchange, now)
        return link

    def _wait(self, exchange: Exchange) -> Answer:
        while exchange.answer is None:
            left_s = exchange.deadline - self._clock()
            if left_s <= 0:
                self._expire(exchange)
                break
            self._move(exchange.ask.address, left_s)
        assert exchange.answer is not None
        return exchange.answer

    def _wait_any(self, step: WaitAny) -> Call | None:
        exchanges: list[Exchange] = [call.handle for call in step.calls]
        first = min(exchanges, key=lambda exchange: exchange.deadline)
        until = first.deadline if step.timeout_s is None else self._clock() + step.timeout_s
        looked = False  # bytes may have come while nobody looked
        while True:
            for call, exchange in zip(step.calls, exchanges, strict=True):
                if exchange.answer is not None:
                    return call
            now = self._clock()
            if now >= first.deadline:
                self._expire(first)
            elif looked and now >= until:
                return None
            else:
                self._move(first.ask.address, max(0.0, min(until, first.deadline) - now))
                looked = True

    def _expire(self, exchange: Exchange) -> None:
        link = self._links[exchange.ask.address]
        if not link.session.give_up(exchange, "no answer in time", self._clock()):
            # It cannot be finished: its buffers are the caller's again.
            self._lost(link, ConnectionAbortedError("given up while a request was being sent"))

    def _park(self, park: Park) -> bool:
        done = threading.Event()
        park.waiter.add_callback(done.set)
        left_s = self.deadline - self._clock()
        return done.wait(max(0.0, left_s if park.timeout_s is None else min(left_s, park.timeout_s)))

    # -- moving bytes

    def _move(self, address: str, timeout_s: float) -> None:
        """Wait for something to happen on any connection, at most ``timeout_s``."""
        busy = [link for link in self._links.values() if link.session.busy]
        if len(busy) == 1 and busy[0].only_waits:
            link = busy[0]
            try:
                link.receive(timeout_s)
            except _LOST as error:
                self._lost(link, error)
            return
        self._move_all(busy, timeout_s)

    def _move_all(self, busy: list[Link], timeout_s: float) -> None:
        now = self._clock()
        poll = select.poll()
        by_descriptor: dict[int, Link] = {}
        for link in busy:
            poll.register(link.descriptor, link.interest)
            by_descriptor[link.descriptor] = link
            if link.session.welcome is None:
                timeout_s = min(timeout_s, link.greet_deadline - now)
        for descriptor, events in poll.poll(max(0.0, timeout_s) * 1000 + 1):
            link = by_descriptor[descriptor]
            try:
                link.on_events(events)
            except _LOST as error:
                self._lost(link, error)
        now = self._clock()
        for link in busy:
            if link.session.welcome is None and now >= link.greet_deadline:
                self._lost(link, TimeoutError("no connection and welcome in time"))

    def _move_one(self, link: Link, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(link.descriptor, link.interest)
        for _, events in poll.poll(timeout_s * 1000 + 1):
            link.on_events(events)

    def _lost(self, link: Link, error: Exception) -> None:
        """Answer what was outstanding on ``link``; what can be is sent once more on a fresh connection."""
        if self._links.get(link.address) is not link:
            return
        left = link.session.lost()
        self._drop(link)
        now = self._clock()
        again: Link | None = None
        for exchange in left:
            if exchange.may_retry():
                exchange.retried = True
                again = self._start(exchange, now, fresh=True)
            else:
                exchange.fail(lost_reason(error), now, failure=link.session.refusal)
        if again is not None:
            try:
                again.send()
            except _LOST as second:
                self._lost(again, second)

    def _drop(self, link: Link) -> None:
        self._links.pop(link.address, None)
        link.close()
