"""``Runtime``: runs a :class:`Machine` under asyncio; the only place where a machine meets the clock and the
wire.

Events are handed in one at a time, in order of arrival; one that an effect causes at once waits for its turn,
so the machine is never entered twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from kvcomm.errors import KVCommError, Refused
from kvcomm.machine import (
    Answered,
    AskPeer,
    Closed,
    ConnectionId,
    Effect,
    Event,
    Machine,
    Origin,
    Received,
    Reply,
    Stop,
    Tick,
    Ticket,
)
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.serve import ReplyFunction
from kvcomm.steps import Answer, Ask
from kvcomm.wire.messages import Failure, Message


class Runtime:
    """Drives one machine on the running event loop.

    Args:
        clock: monotonic seconds; the machine's ``now``.
        resolve: node id -> address on the data wire; a ``KVCommError`` or ``KeyError`` answers the ask with
        ``unavailable``. perform: every effect that is not ``Reply``, ``AskPeer`` or ``Stop``. on_stop: the
        process must end, and why: the machine said so, or it raised (then nothing is handled any more).
    """

    def __init__(
        self,
        machine: Machine,
        *,
        clock: Callable[[], float] = time.monotonic,
        peers: AsyncPeers,
        resolve: Callable[[str], str],
        perform: Callable[[Effect], None],
        on_stop: Callable[[str], None],
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._peers = peers
        self._resolve = resolve
        self._perform = perform
        self._on_stop = on_stop
        self._events: deque[Event] = deque()
        self._replies: dict[ConnectionId, dict[int, ReplyFunction]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._draining = False
        self._closed = False

    def received(self, origin: Origin, message: Message, reply: ReplyFunction) -> None:
        """A request for the machine; its ``Reply`` effect will go to ``reply``.

        Raises:
            Refused: the caller has a request of this number open.
        """
        waiting = self._replies.setdefault(origin.connection, {})
        if origin.request in waiting:
            raise Refused(
                f"request {origin.request} of this connection is not answered yet; number them apart"
            )
        waiting[origin.request] = reply
        self.deliver(Received(origin, message))

    def disconnected(self, connection: ConnectionId) -> None:
        """A connection ended: nobody waits for its replies any more."""
        self._replies.pop(connection, None)
        self.deliver(Closed(connection))

    def deliver(self, event: Event) -> None:
        """Hand an event in, or queue it when the machine is at work."""
        if self._closed:
            return
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events and not self._closed:
                self._handle(self._events.popleft())
        except Exception as error:
            self._draining = False
            self._stop(f"broken invariant: {error!r}")
            raise
        self._draining = False
        self._arm()

    def close(self) -> None:
        """Stop: no more events, no more timers.  Idempotent."""
        self._closed = True
        self._events.clear()
        self._replies.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event, self._clock()):
            if self._closed:
                return  # stopped: nothing more is said or done
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._reply(effect.origin, effect.message)
        elif isinstance(effect, AskPeer):
            self._ask(effect)
        elif isinstance(effect, Stop):
            self._stop(effect.reason)
        else:
            self._perform(effect)

    def _reply(self, origin: Origin, message: Message) -> None:
        waiting = self._replies.get(origin.connection)
        if waiting is None:
            return  # its connection has ended
        waiting.pop(origin.request)(message)  # a KeyError: the machine answered twice

    def _ask(self, effect: AskPeer) -> None:
        try:
            address = self._resolve(effect.node)
        except (KVCommError, KeyError) as error:
            self.deliver(
                Answered(effect.ticket, Failure("unavailable", f"no address of {effect.node}: {error}"))
            )
            return
        ticket = effect.ticket
        self._peers.start(
            [Ask(address, effect.message)], effect.deadline, lambda answer: self._answered(ticket, answer)
        )

    def _answered(self, ticket: Ticket, answer: Answer) -> None:
        self.deliver(Answered(ticket, answer.message))

    def _stop(self, reason: str) -> None:
        self.close()
        self._on_stop(reason)

    def _arm(self) -> None:
        """Have the next tick come when the machine wants it."""
        deadline = None if self._closed else self._machine.deadline()
        if deadline == self._timer_at and (deadline is None) == (self._timer is None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at = None
        self.deliver(Tick())
