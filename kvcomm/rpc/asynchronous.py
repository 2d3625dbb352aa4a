"""``AsyncPeers``: the asyncio client; one multiplexed connection a peer, and the driver that runs ``Steps``
over them.

Requests of all operations share the connection to a peer and are matched by number.  An operation that ends
early (cancelled, out of time) gives up its own requests only: their replies are thrown away when they come.
A request that is half sent then is sent to its end, so the buffers of a given-up *put* must still be left
unchanged until the peer's answer or the end of the connection; blocks are protected by their checksum in any
case.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from kvcomm.errors import Unavailable, failure_to_error
from kvcomm.rpc import droptable
from kvcomm.rpc.droptable import Gate, Peer
from kvcomm.rpc.session import Exchange, Identity, Session, lost_reason
from kvcomm.rpc.sockets import connecting_result, start_connecting
from kvcomm.rpc.stream import FrameStream
from kvcomm.steps import Answer, Ask, Call, Emit, Park, Step, Steps, Submit, Wait, WaitAny, Work
from kvcomm.wire.address import Address, parse_address
from kvcomm.wire.messages import Failure, Ping, Welcome

WORKERS = 32
"""So many ``Work`` steps of one client block at once; threads of our own, so that neither the application's
work nor another client's takes them."""

REOPEN_S = 0.4
"""A connection that takes longer to open has perhaps lost its first packet, which TCP sends again after a
second and then less and less often: whoever asks next opens another one beside it."""
BURY_EVERY_S = 0.5
"""How often a connection that is used no more is looked at, until nobody waits for it."""

T = TypeVar("T")


class Request:
    """A started request; ``answer`` is set when it is done.  Belongs to one event loop."""

    __slots__ = ("_done", "exchange", "timer")

    def __init__(self, exchange: Exchange, done: Callable[[Answer], None] | None) -> None:
        self.exchange = exchange
        self.timer: asyncio.TimerHandle | None = None
        self._done = done
        exchange.done = self._finished

    async def answer(self) -> Answer:
        """Wait for it; at the latest the request's deadline brings a ``Failure``."""
        if self.exchange.answer is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._done = lambda _: None if future.done() else future.set_result(None)
            await future
        assert self.exchange.answer is not None
        return self.exchange.answer

    def tell(self, done: Callable[[Answer], None] | None) -> None:
        """Whom to tell when it is done, from now on; nobody else is."""
        self._done = done

    def _finished(self, exchange: Exchange) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self._done is not None:
            assert exchange.answer is not None
            self._done(exchange.answer)


class AsyncPeers:
    """Connections by address, for one event loop."""

    def __init__(
        self,
        identity: Identity,
        *,
        connect_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.connect_timeout_s = connect_timeout_s
        self.clock = clock
        self._links: dict[str, _Link] = {}
        self._retired: set[_Link] = set()
        self._workers = ThreadPoolExecutor(WORKERS, "kvcomm-work")
        self._closed = False

    async def welcome(self, address: str, deadline: float) -> Welcome:
        """What the server at ``address`` says of itself; connects if needed.

        Raises:
            KVCommError: unreachable, refused, or not in time.
        """
        answer = await self.start([Ask(address, Ping())], deadline)[0].answer()
        if isinstance(answer.message, Failure):
            raise failure_to_error(answer.message.code, answer.message.text, answer.message.detail)
        link = self._links.get(address)
        if link is None or link.session.welcome is None:
            raise Unavailable(f"{address}: the connection ended")
        return link.session.welcome

    async def close(self) -> None:
        """Close every connection; what is outstanding is answered with a failure."""
        self._closed = True
        for link in [*self._links.values(), *self._retired]:
            link.end(ConnectionAbortedError("this client is closed"))
        self._workers.shutdown(wait=False)

    def work(self, step: Work, deadline: float) -> Future[Any]:
        """Start its call in a thread, when one is free.

        Raises:
            Unavailable: this client is closed.
        """
        if self._closed:
            raise Unavailable("this client is closed")
        return self._workers.submit(step.call, deadline)

    def start(
        self, asks: Sequence[Ask], deadline: float, done: Callable[[Answer], None] | None = None
    ) -> list[Request]:
        """Start requests without waiting; ``done`` is called for each when it has an answer (before this
        returns, if it failed at once).

        Raises:
            ConfigError: an address is not one.
        """
        now = self.clock()
        requests: list[Request] = []
        touched: dict[str, _Link] = {}
        for ask in asks:
            until = deadline if ask.timeout_s is None else min(deadline, now + ask.timeout_s)
            request = Request(Exchange(ask, until), done)
            requests.append(request)
            if not self._closed:
                touched[ask.address] = self._enter(request.exchange)
                if request.exchange.answer is None:
                    delay_s = max(0.0, until - now)
                    request.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, request)
            else:
                request.exchange.fail("this client is closed", now)
        for link in touched.values():
            link.flush()
        return requests

    def give_up(self, request: Request, reason: str) -> None:
        """Nobody waits for it any more; its destination is not written to from now on."""
        session = request.exchange.session
        if request.exchange.answer is None and session is not None:
            session.give_up(request.exchange, reason, self.clock())

    def _expire(self, request: Request) -> None:
        exchange = request.exchange
        self.give_up(request, "no answer in time")
        link = self._links.get(exchange.ask.address)
        if link is not None and (link.session.silent_since(exchange) or link.opening_s() >= REOPEN_S):
            self._retire(link)

    def _retire(self, link: _Link) -> None:
        """Send nothing more over a connection that has been silent for a whole request's time: what it
        carries may be lost, and TCP tries again less and less often, up to half a minute after the network is
        back.  A new connection asks at once.  Who is still waiting for an answer here may get it."""
        del self._links[link.address]
        self._retired.add(link)
        self._bury(link)

    def _bury(self, link: _Link) -> None:
        if not link.session.awaited:
            link.end(ConnectionAbortedError("it was silent for too long"))
        elif not link.ended:
            asyncio.get_running_loop().call_later(BURY_EVERY_S, self._bury, link)

    def _enter(self, exchange: Exchange) -> _Link:
        address = exchange.ask.address
        link = self._links.get(address)
        if link is None:
            link = _Link(address, self.identity, self.connect_timeout_s, self.clock, self._lost)
            self._links[address] = link
        exchange.reused = link.session.welcome is not None
        link.session.start(exchange, self.clock())
        return link

    def _lost(self, link: _Link, error: Exception) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self._retired.discard(link)
        now = self.clock()
        again: _Link | None = None
        for exchange in link.session.lost():
            if exchange.may_retry() and not self._closed:
                exchange.retried = True
                again = self._enter(exchange)
            else:
                exchange.fail(lost_reason(error), now, failure=link.session.refusal)
        if again is not None:
            again.flush()


async def run_async(steps: Steps[T], peers: AsyncPeers, deadline: float) -> T:
    """Run an operation to its end and return its result; what it emits is dropped.

    ``deadline`` is absolute seconds of ``peers.clock``.  Trouble with peers reaches ``steps`` as ``Failure``
    answers; only what ``steps`` raises itself is raised here.  Cancellation closes ``steps`` and gives its
    requests up.
    """
    operation = _Operation(peers, deadline)
    try:
        step = next(steps)
        while True:
            step = steps.send(await operation.perform(step))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        operation.close()
        steps.close()


async def iterate_async(steps: Steps[Any], peers: AsyncPeers, deadline: float) -> AsyncGenerator[Any, None]:
    """Run an operation as far as each item that it emits.  ``aclose()`` gives the rest up."""
    operation = _Operation(peers, deadline)
    try:
        step = next(steps)
        while True:
            if type(step) is Emit:
                yield step.item
            step = steps.send(await operation.perform(step))
    except StopIteration:
        return
    finally:
        operation.close()
        steps.close()


class _Operation:
    def __init__(self, peers: AsyncPeers, deadline: float) -> None:
        self._peers = peers
        self._deadline = deadline
        self._requests: list[Request] = []

    async def perform(self, step: Step) -> Any:
        if type(step) is Wait:
            request: Request = step.call.handle
            return request.exchange.answer or await request.answer()
        if type(step) is Submit:
            started = self._peers.start(step.asks, self._deadline)
            self._requests = [
                request for request in self._requests if request.exchange.answer is None
            ] + started
            return [Call(request.exchange.ask, request) for request in started]
        if type(step) is WaitAny:
            return await self._wait_any(step)
        if type(step) is Park:
            return await self._park(step)
        if type(step) is Work:
            return await self._work(step)
        return None

    def close(self) -> None:
        for request in self._requests:
            self._peers.give_up(request, "given up by its operation")

    async def _wait_any(self, step: WaitAny) -> Call | None:
        requests: list[Request] = [call.handle for call in step.calls]
        if all(request.exchange.answer is None for request in requests):
            done = asyncio.Event()
            for request in requests:
                request.tell(lambda _: done.set())
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(step.timeout_s):
                        await done.wait()
            finally:
                for request in requests:
                    request.tell(None)
        answered = zip(step.calls, requests, strict=True)
        return next((call for call, request in answered if request.exchange.answer is not None), None)

    async def _work(self, step: Work) -> Any:
        now = self._peers.clock()
        deadline = step.deadline(now, self._deadline)
        working = self._peers.work(step, deadline)
        result = asyncio.wrap_future(working)
        try:
            await asyncio.wait([result], timeout=max(0.0, deadline - now))
            if not result.done() and working.cancel():
                return step.call(deadline)  # no thread was free; it does not block, its time is over
            return await result
        finally:
            result.cancel()

    async def _park(self, park: Park) -> bool:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def call() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody is parked any more
                loop.call_soon_threadsafe(done.set)

        park.waiter.add_callback(call)
        left_s = self._deadline - self._peers.clock()
        timeout_s = left_s if park.timeout_s is None else min(left_s, park.timeout_s)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await done.wait()
        except TimeoutError:
            return False
        return True


class _Link:
    """One connection: being resolved, connecting, greeting, open, ended."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        connect_timeout_s: float,
        clock: Callable[[], float],
        lost: Callable[[_Link, Exception], None],
    ) -> None:
        self.address = address
        self.session = Session(identity)
        self._clock = clock
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._stream: FrameStream | None = None
        self._ended = False
        target = parse_address(address)
        self._began_at = clock()
        self._greet_timer = self._loop.call_later(
            connect_timeout_s, self.end, TimeoutError("no connection and welcome in time")
        )
        self._resolving: asyncio.Task[None] | None = None
        if target.path or _is_literal(target.host):
            self._loop.call_soon(self._connect, target)
        else:
            self._resolving = self._loop.create_task(self._resolve(target))

    @property
    def ended(self) -> bool:
        return self._ended

    def opening_s(self) -> float:
        """For how long it has been waiting for its welcome; 0 = it has it."""
        return self._clock() - self._began_at if self.session.welcome is None else 0.0

    @property
    def peer(self) -> Peer:
        return self.address

    def hold(self, gate: Gate) -> None:
        if self._stream is not None:
            self._stream.hold(gate)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def end(self, error: Exception) -> None:
        """Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._greet_timer.cancel()
        if self._resolving is not None:
            self._resolving.cancel()
        if self._stream is not None:
            self._stream.close()
        elif self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        self._lost(self, error)

    async def _resolve(self, target: Address) -> None:
        try:
            found = await self._loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except OSError as error:
            self.end(error)
        else:
            self._connect(Address(host=str(found[0][4][0]), port=target.port))

    def _connect(self, target: Address) -> None:
        if self._ended:
            return
        try:
            self._socket = start_connecting(target, 0.0)
        except OSError as error:
            self.end(error)
        else:
            self._loop.add_writer(self._socket.fileno(), self._connected)

    def _connected(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket.fileno())
        try:
            connecting_result(self._socket)
        except OSError as error:
            self.end(error)
            return
        session = self.session
        self._stream = FrameStream(
            self._loop, self._socket, reader=session.reader, outbox=session.outbox, received=self._received,
            lost=self.end, drained=self._drained,
        )  # fmt: skip
        table = droptable.installed()
        if table is not None:
            self._stream.hold(table.watch(self))
        self._stream.flush()

    def _received(self, received_bytes: int) -> None:
        self.session.received(received_bytes, self._clock())
        if self.session.welcome is not None:
            self._greet_timer.cancel()
        if self.session.outbox:
            self.flush()

    def _drained(self) -> None:
        self.session.pump(self._clock())
        if self.session.outbox:
            self.flush()


def _is_literal(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False
