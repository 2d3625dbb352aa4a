"""``Desk``: the requests that a shard is working on, the questions it has out, and what happens when time is
up.

Everything here has a bound and a deadline: a request is answered exactly once, by whoever decides it or, at
the latest, by its ``expire``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcomm.errors import KVCommError, OutcomeUnknown, Refused, Unavailable
from kvcomm.machine import Answered, AskPeer, Effect, Origin, Reply, Ticket
from kvcomm.wire.messages import Failure, Message


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """The bounds of one shard; at each of them a request is refused, nothing is dropped."""

    request_timeout_s: float = 1.5
    """A request is answered within this time.  Keep it below the clients' own timeout: they then hear *what*
    happened.
    """
    strong_timeout_s: float = 1.5
    """The same for a few strong records; see :func:`strong_wait_s`."""
    requests_max: int = 4_096
    """Requests being worked on."""
    changes_max: int = 256
    """Changes that wait for one record."""
    held_bytes_max: int = 256 << 20
    """Values that open requests and unanswered questions to peers hold together (and 256 bytes a key)."""
    recent_bytes_max: int = 64 << 20
    """Records kept in memory beside those in use, about: a read of one of them needs no disk."""
    message_bytes: int = 8 << 20
    """Target size of a message with many records."""
    scan_count_max: int = 4_096
    """Keys of one scan answer."""


STRONG_WAIT_MIN_S, STRONG_WAIT_SHARE = 0.7, 0.35
STRONG_FEW = 8
"""Records of a request that should not take long."""


def strong_wait_s(request_timeout_s: float, record_count: int = 1) -> float:
    """How long a caller waits for a shard to read or change so many strong records.

    A shard that hangs is found out by nothing else, and until then the records that it coordinates stand
    still: so not for the whole ``network.request_timeout``.
    """
    if record_count > STRONG_FEW:
        return request_timeout_s
    return min(request_timeout_s, max(STRONG_WAIT_MIN_S, STRONG_WAIT_SHARE * request_timeout_s))


@dataclass(eq=False, slots=True)
class Request:
    """One request being worked on."""

    origin: Origin
    deadline: float
    held_bytes: int
    expire: Callable[[], None]
    """Called once when the deadline has passed; must close the request."""
    open: bool = True


class Desk:
    """See the module.  ``now`` is the time of the event being handled."""

    def __init__(self, limits: ShardLimits, tickets: Iterator[int]) -> None:
        self.limits = limits
        self.now = 0.0
        self.arrived_at: float | None = None
        """When the request being begun came, if that was before ``now``."""
        self.refused_count = 0
        self._tickets = tickets
        self._effects: list[Effect] = []
        self.heard: Callable[[str], None] = _nobody
        """Hears who has answered a question, whatever it said."""
        self.unheard: Callable[[str], None] = _nobody
        """Hears of whom a question came to nothing, it may be because it is away."""
        self._asks: dict[Ticket, tuple[str, Callable[[Message], None], int]] = {}
        self._open_count = 0
        self._held_bytes = 0
        self._deadlines: list[tuple[float, int, Request]] = []

    def open(
        self, origin: Origin, key_count: int, value_bytes: int = 0, *, timeout_s: float | None = None
    ) -> Request:
        """Start working on a request, for ``timeout_s`` or as long as the limits say; the caller sets
        ``expire``.

        Raises:
            Refused: the shard is busy.
        """
        held_bytes = value_bytes + 256 * key_count
        over = self._held_bytes + held_bytes > self.limits.held_bytes_max
        if self._open_count >= self.limits.requests_max or over:
            self.refused_count += 1
            raise Refused(
                f"busy: {self._open_count} requests are open, {self._held_bytes} bytes held; slow down"
            )
        arrived_at = self.now if self.arrived_at is None else self.arrived_at
        deadline = arrived_at + (self.limits.request_timeout_s if timeout_s is None else timeout_s)
        request = Request(origin, deadline, held_bytes, _nothing)
        self._open_count += 1
        self._held_bytes += held_bytes
        heapq.heappush(self._deadlines, (request.deadline, next(self._tickets), request))
        return request

    def close(self, request: Request, answer: Message | KVCommError) -> None:
        """Answer a request, once."""
        assert request.open, "a request is answered once"
        request.open, request.expire = (
            False,
            _nothing,
        )  # the heap may keep the request for a while, not its values
        self._open_count -= 1
        self._held_bytes -= request.held_bytes
        self.reply(request.origin, answer)

    def reply(self, origin: Origin, answer: Message | KVCommError) -> None:
        """Answer what was never opened."""
        if isinstance(answer, KVCommError):
            answer = Failure(answer.code, answer.message, answer.detail)
        self._effects.append(Reply(origin, answer))

    def ask(
        self,
        node: str,
        message: Message,
        then: Callable[[Message], None],
        held_bytes: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Ask a peer; ``then`` gets its reply or a ``Failure``, after ``timeout_s`` or what the limits say.
        The question holds ``held_bytes`` until then.
        """
        ticket = self.ticket()
        self._asks[ticket] = (node, then, held_bytes)
        self._held_bytes += held_bytes
        wait_s = self.limits.request_timeout_s if timeout_s is None else timeout_s
        self._effects.append(AskPeer(ticket, node, message, self.now + wait_s))

    def answered(self, event: Answered) -> None:
        node, then, held_bytes = self._asks.pop(event.ticket)
        self._held_bytes -= held_bytes
        unsaid = isinstance(event.message, Failure) and event.message.code in _PERHAPS_UNSAID
        (self.unheard if unsaid else self.heard)(node)
        then(event.message)

    def ticket(self) -> Ticket:
        """A number that no effect has used."""
        return Ticket(next(self._tickets))

    def order(self, effect: Effect) -> None:
        self._effects.append(effect)

    def take(self) -> list[Effect]:
        """What has been ordered since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def expire(self) -> None:
        """End the requests whose time is up."""
        while self._deadlines and (not self._deadlines[0][2].open or self._deadlines[0][0] <= self.now):
            request = heapq.heappop(self._deadlines)[2]
            if request.open:
                request.expire()
                assert not request.open, "expire closes the request"

    def deadline(self) -> float | None:
        """When the next request ends by itself."""
        while self._deadlines and not self._deadlines[0][2].open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def check(self) -> None:
        """Assert that the counters are those of the open requests."""
        requests = [request for _, _, request in self._deadlines if request.open]
        assert len(requests) == self._open_count <= self.limits.requests_max
        held_bytes = sum(request.held_bytes for request in requests) + sum(
            held for _, _, held in self._asks.values()
        )
        assert held_bytes == self._held_bytes


_PERHAPS_UNSAID = (Unavailable.code, OutcomeUnknown.code)
"""Failures that a peer may have answered, or nobody."""


def _nobody(_node: str) -> None:
    """Hears nothing."""


def _nothing() -> None:
    """Of a request that is over."""
