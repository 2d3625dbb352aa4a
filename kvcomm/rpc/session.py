"""``Session``: the client's side of one connection, sans I/O; the blocking and the asyncio client both drive
it.

Theory of operation.  A session greets first: ``Hello`` goes out at once, and every request is *held* until
``Welcome`` has come, so that a request to a server that never answered was certainly not received.  Then held
requests move to the outbox as long as it is below its high-water mark.  An :class:`Exchange` walks through::

    held -> queued -> sent (its last byte was taken) -> begun (its reply arrives) -> answered
       \\________\\_______\\_____________________________\\-> failed

``failed`` says what is true: ``unavailable`` if nothing can have happened (never sent whole, idempotent, or
unanswered by a server that has said ``Goodbye``), else ``outcome_unknown``.  An exchange that was given up
stays in the table until its reply has been thrown away, so that no late byte is written to a destination that
the caller has back.

Requests carry their deadline on the server's clock as soon as the server has told its own
(``kvcomm.wire.deadlines``), so that one that was given up here is not begun there later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from kvcomm.block import BlockKey, Incarnation, block_keys
from kvcomm.errors import Corrupt, KVCommError, TooLarge
from kvcomm.namespace import Namespace
from kvcomm.steps import Answer, Ask
from kvcomm.wire.deadlines import ServerClock
from kvcomm.wire.frames import HELLO_NUMBER, KNOWS_STAMPS, Frame, FrameReader, discard, encode_frame
from kvcomm.wire.messages import PROTOCOL_VERSION, Failure, Goodbye, Hello, Message, Welcome
from kvcomm.wire.outbox import HIGH_WATER_BYTES, Outbox, Parcel


def _key_vector() -> BlockKey:
    """Key of a block that never changes: two sides that derive another one would never find each other's
    blocks."""
    vector = Namespace(
        model="kvcomm/vector", revision="1", tokenizer="1", vocab_size=64, dtype="float16", layout="LKHTD",
        layers=2, kv_heads=2, head_dim=8, block_tokens=4, rope="default", rope_parameters={"theta": 10000.0},
    )  # fmt: skip
    tokens = range(2 * vector.block_tokens)
    return block_keys(vector, tokens, lineage=bytes(range(32)), extra=b"vector")[-1]


KEY_VECTOR: Final[bytes] = _key_vector()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are in ``Hello``."""

    token: str = field(repr=False)
    caller: Incarnation


@dataclass(eq=False, slots=True)
class Exchange:
    """One request on its way, and its answer once there is one."""

    ask: Ask
    deadline: float
    """Absolute monotonic seconds."""
    done: Callable[[Exchange], None] | None = None
    """Called once with the answer set (the asyncio client's way to hear of it)."""
    answer: Answer | None = None
    sent: bool = False
    """Whether the whole request left this process, for a server that may have looked at it."""
    begun: bool = False
    """Whether its reply has started to arrive."""
    reused: bool = False
    """Whether it went to a connection that stood before: one that may turn out dead without anybody having
    read it."""
    retried: bool = False
    number: int = 0
    queued_at: float = 0.0
    parcel: Parcel | None = None
    session: Session | None = None
    """Of the connection that it was handed to last."""

    def finish(self, answer: Answer) -> None:
        if self.answer is not None:
            return
        self.answer = answer
        self.parcel = None
        if self.done is not None:
            self.done(self)

    def fail(self, reason: str, now: float, *, failure: Failure | None = None) -> None:
        """Finish without a reply; ``failure`` is the peer's own word where there is one."""
        spoken = failure is not None and not self.sent
        if failure is None or self.sent:
            certain = self.ask.message.idempotent or not self.sent
            code = "unavailable" if certain else "outcome_unknown"
            failure = Failure(code, f"{self.ask.address}: {reason}")
        self.finish(Answer(failure, [], now, spoken))

    def may_retry(self) -> bool:
        """Whether it is worth sending once more, can do no harm, and its destination was not touched."""
        return (
            self.reused
            and not self.retried
            and not self.begun
            and (self.ask.message.idempotent or not self.sent)
        )

    def _left(self, whole: bool) -> None:
        self.sent = whole


class Session:
    """Numbers requests, matches replies, knows what was sent.  The driver moves bytes: ``outbox`` and
    ``reader``."""

    def __init__(self, identity: Identity) -> None:
        self.outbox = Outbox()
        self.reader = FrameReader(self._sink)
        self.welcome: Welcome | None = None
        self.refusal: Failure | None = None
        """What the server said instead of ``Welcome``."""
        self.heard_at = -inf
        """When bytes came last."""
        self._held: deque[Exchange] = deque()
        self._pending: dict[int, Exchange] = {}
        self._last_number = HELLO_NUMBER
        self._clock = ServerClock()
        hello = Hello(PROTOCOL_VERSION, identity.token, identity.caller, KEY_VECTOR)
        self.outbox.put(encode_frame(HELLO_NUMBER, hello, flags=KNOWS_STAMPS))

    @property
    def busy(self) -> bool:
        """Whether anything is outstanding: such a connection cannot be handed to another operation."""
        return bool(self._pending or self._held or self.outbox or self.welcome is None)

    @property
    def awaited(self) -> bool:
        """Whether anybody still waits for an answer."""
        return any(exchange.answer is None for exchange in (*self._pending.values(), *self._held))

    def silent_since(self, exchange: Exchange) -> bool:
        """Whether nothing at all has come since ``exchange``, one of this session's, was queued."""
        return exchange.session is self and exchange.queued_at > 0.0 and self.heard_at < exchange.queued_at

    def start(self, exchange: Exchange, now: float) -> None:
        """Take a request on.  One that is over the wire's bounds fails at once."""
        exchange.sent, exchange.parcel, exchange.session = False, None, self
        exchange.queued_at = 0.0
        if self._held or not self._open:
            self._held.append(exchange)
        else:
            self._queue(exchange, now)

    def pump(self, now: float) -> None:
        """Move held requests to the outbox while it takes them; call after bytes were sent."""
        while self._held and self._open:
            exchange = self._held.popleft()
            if exchange.answer is None:
                self._queue(exchange, now)

    def received(self, received_bytes: int, now: float) -> None:
        """So many bytes have arrived in ``reader.buffer()``.

        Raises:
            Corrupt, TooLarge: not our protocol; the connection must be dropped.
            ConnectionAbortedError: the server stops; the connection must be dropped.
        """
        self.heard_at = now
        for frame in self.reader.advance(received_bytes):
            exchange = self._pending.pop(frame.request, None)
            if exchange is not None:
                self._clock.heard(frame.stamp, exchange.queued_at, now)
                exchange.finish(Answer(frame.message, frame.payload, now))
            elif frame.request == HELLO_NUMBER and self.welcome is None:
                self._greeted(frame, now)
            elif frame.request == HELLO_NUMBER and isinstance(frame.message, Goodbye):
                self._dismissed()
            else:
                raise Corrupt(f"reply to request {frame.request}, which is not outstanding")

    def give_up(self, exchange: Exchange, reason: str, now: float) -> bool:
        """Answer with a failure; whatever still comes for it touches neither its destination nor its caller.

        False = the request has been sent in part, and its buffers, which the caller may reuse, are still
        referred to.
        """
        parcel, clean = exchange.parcel, True
        if parcel is not None and self.outbox.withdraw(parcel):
            del self._pending[exchange.number]
        elif parcel is not None:
            self.reader.discard(exchange.number)
            clean = exchange.sent
        exchange.fail(reason, now)
        return clean

    def lost(self) -> list[Exchange]:
        """The connection is gone; the unanswered exchanges, in order.  The session is of no further use."""
        left = [*self._pending.values(), *self._held]
        self._pending.clear()
        self._held.clear()
        self.outbox.clear()
        return [exchange for exchange in left if exchange.answer is None]

    @property
    def _open(self) -> bool:
        return self.welcome is not None and self.outbox.unsent_bytes < HIGH_WATER_BYTES

    def _queue(self, exchange: Exchange, now: float) -> None:
        self._last_number += 1
        stamp = self._clock.stamp(exchange.deadline, now)
        try:
            frame = encode_frame(self._last_number, exchange.ask.message, exchange.ask.payload, stamp)
        except TooLarge as error:
            exchange.fail(error.message, now, failure=Failure(error.code, error.message))
            return
        exchange.number, exchange.queued_at = self._last_number, now
        exchange.parcel = self.outbox.put(frame, exchange._left)
        self._pending[exchange.number] = exchange

    def _greeted(self, frame: Frame, now: float) -> None:
        if isinstance(frame.message, Failure):
            self.refusal = frame.message
            raise Corrupt(f"refused: {frame.message.text}")
        if not isinstance(frame.message, Welcome):
            raise Corrupt(f"{type(frame.message).__name__} in place of Welcome")
        self.welcome = frame.message
        self._clock.heard(frame.stamp, -inf, now)
        self.pump(now)

    def _dismissed(self) -> None:
        """What the server has not answered it has not done: as good as never sent."""
        for exchange in self._pending.values():
            exchange.sent = False
        raise ConnectionAbortedError("the server is stopping, nothing was done")

    def _sink(self, number: int, message: Message, payload_bytes: int) -> list[memoryview] | None:
        exchange = self._pending.get(number)
        if exchange is None:
            raise Corrupt(f"payload for request {number}, which is not outstanding")
        if exchange.answer is not None:
            return discard(payload_bytes)
        exchange.begun = True
        return exchange.ask.sink(number, message, payload_bytes) if exchange.ask.sink else None


def lost_reason(error: Exception) -> str:
    """What to tell the caller of a connection that failed with ``error``."""
    if isinstance(error, KVCommError):
        return error.message
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
