"""``Steps``: sans-I/O client code that both the blocking and the asyncio face run.

A client operation is a generator.  It yields what it wants done and is resumed with the result, so it holds
the decisions (which peers, what to retry, what to verify) and no socket:

* ``Submit(asks)`` starts requests and is resumed at once with one :class:`Call` an ask; requests to one peer
  are pipelined in order.
* ``Wait(call)`` is resumed with an :class:`Answer` when that call is done, failed or out of time.
* ``WaitAny(calls)`` is resumed with the first of them that is done, or with ``None`` after a while: for
  asking somebody else too (hedging) without giving up who was asked first.
* ``Park(waiter)`` waits for another operation of this process (single flight); resumed with whether it is
  done.
* ``Work(call)`` runs I/O of another kind than messages (one-sided reads), which blocks; resumed with its
  result.
* ``Emit(item)`` hands an item to whoever iterates over the operation (``fetch`` streaming blocks as they
  arrive).

The drivers are ``kvcomm.rpc``'s; ``kvcomm.client`` and the tiers write generators.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvcomm.block import Buffer
from kvcomm.wire.frames import Sink
from kvcomm.wire.messages import Message

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to one peer (``tcp://host:port`` or ``unix:///path``)."""

    address: str
    message: Message
    payload: Sequence[Buffer] = ()
    sink: Sink | None = None
    """Where the reply's payload is received; ``None`` = a fresh buffer."""
    timeout_s: float | None = None
    """Give up on this request after so long, even if the operation's deadline is later."""


@dataclass(eq=False, slots=True)
class Call:
    """A started request.  Only the driver looks inside."""

    ask: Ask
    handle: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request.

    ``message`` is the reply, or a ``Failure``: what the peer said, or ``unavailable`` (not sent, sent and
    idempotent, or left undone by a peer that said goodbye), or ``outcome_unknown`` (sent, not idempotent, and
    no reply).
    """

    message: Message
    payload: list[memoryview]
    now: float
    """Monotonic seconds when it finished."""
    spoken: bool = True
    """Whether it is the peer's word; else the peer was silent, and the failure is ours."""


@dataclass(frozen=True, slots=True)
class Submit:
    asks: Sequence[Ask]


@dataclass(frozen=True, slots=True)
class Wait:
    call: Call


@dataclass(frozen=True, slots=True)
class WaitAny:
    """Resumed with one of ``calls`` that is done (``Wait`` for it costs nothing then), the first in their
    order; with ``None`` when none was after ``timeout_s``.  The others stay under way."""

    calls: Sequence[Call]
    timeout_s: float | None = None


class Waiter(Protocol):
    """Something that will be done once: the leader of a single flight."""

    def add_callback(self, call: Callable[[], None]) -> None:
        """``call`` when done, at once if that is now.  Thread-safe; may call from any thread; ``call`` does
        not block."""
        ...


@dataclass(frozen=True, slots=True)
class Park:
    """Resumed with True when ``waiter`` is done, with False when ``timeout_s`` or the operation's deadline
    passed.

    A parked operation makes no progress on its own requests: wait for what you lead before you park behind
    another, or two operations that lead for each other both stand still until their deadlines.
    """

    waiter: Waiter
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Resumed with what ``call(deadline)`` returned, monotonic seconds; what it raises ends the operation.

    ``call`` blocks until then at most.  The asyncio driver runs it in a thread, and leaves it to its deadline
    when the operation is cancelled.
    """

    call: Callable[[float], Any]
    timeout_s: float | None = None
    """Give up after so long, even if the operation's deadline is later."""

    def deadline(self, now: float, latest: float) -> float:
        """For the drivers: until when ``call`` may take, begun ``now`` in an operation that has until
        ``latest``."""
        return latest if self.timeout_s is None else min(latest, now + self.timeout_s)


@dataclass(frozen=True, slots=True)
class Emit:
    item: Any


Step = Submit | Wait | WaitAny | Park | Work | Emit
Steps = Generator[Step, Any, T]
"""An operation that returns ``T``.  Deadlines belong to the driver: every operation runs under one."""


def ask_all(asks: Sequence[Ask]) -> Steps[list[Answer]]:
    """Ask everybody at once, wait for all; answers in the order of ``asks``."""
    calls: list[Call] = yield Submit(asks)
    answers: list[Answer] = []
    for call in calls:
        answers.append((yield Wait(call)))
    return answers
