"""``Runtime``: runs a :class:`Machine` under asyncio; the only place where a machine meets the clock and the
wire.

Events are handed in one at a time, in order of arrival; one that an effect causes at once waits for its turn,
so the machine is never entered twice.  When the process stood still the machine is told first
(``kvcomm.machine.Resumed``).
"""

from __future__ import annotations

import asyncio
import logging
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
    Resumed,
    Stop,
    Tick,
    Ticket,
)
from kvcomm.pulse import Pulse
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.serve import ReplyFunction
from kvcomm.steps import Answer, Ask
from kvcomm.wire.messages import Failure, Message

_log = logging.getLogger(__name__)


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
        self._pulse = Pulse()
        self._beating: asyncio.TimerHandle | None = None
        self.resumed_count = 0
        """How often this process stood still."""

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
        if self._draining:
            self._events.append(event)
            return
        if self._beating is None:
            self._beat()
        if self._stood_still():
            self._events.append(Resumed())
        self._events.append(event)
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
        for timer in (self._timer, self._beating):
            if timer is not None:
                timer.cancel()
        self._timer = self._beating = None

    def _stood_still(self) -> bool:
        """Once for each time."""
        still_s = self._pulse.stood_still_s(self._clock())
        if still_s:
            self.resumed_count += 1
            _log.warning("this process stood still for %.1f s", still_s)
        return still_s > 0

    def _beat(self) -> None:
        """Who has nothing to do finds out as well."""
        if self._stood_still():
            self.deliver(Resumed())
        if not self._closed:
            self._pulse.beat(self._clock())
            self._beating = asyncio.get_running_loop().call_later(self._pulse.beat_s, self._beat)

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
