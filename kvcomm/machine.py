"""``Machine``: how every part that waits for messages or time is built, and the events and effects all
machines share.

A machine decides in plain synchronous code: an event and the time go in, a list of effects comes out.  It
reads no clock, draws no randomness and does no I/O, so the asyncio runtime (``kvcomm.runtime``) and a
deterministic simulator drive the same object.  Payload bytes never pass through it; only extents and digests
do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from kvcomm.wire.messages import Message

ConnectionId = NewType("ConnectionId", int)
"""One accepted connection; never reused in one process life."""

Ticket = NewType("Ticket", int)
"""Ties an effect that is answered later to its answer."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asked, and under which number the reply is expected."""

    connection: ConnectionId
    request: int
    tenant: bytes
    caller: int
    """Incarnation of the calling process."""


class Event:
    """Something that happened.  Subclasses are frozen dataclasses."""

    __slots__ = ()


class Effect:
    """Something that the shell must do.  Subclasses are frozen dataclasses."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Received(Event):
    """A request arrived."""

    origin: Origin
    message: Message


@dataclass(frozen=True, slots=True)
class Closed(Event):
    """A connection ended, whoever ended it."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class Answered(Event):
    """The reply to an :class:`AskPeer`; a ``Failure`` message when the peer refused, was unreachable or too
    late."""

    ticket: Ticket
    message: Message


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """The time given by ``deadline()`` has come (or passed; ticks may come late, never rely on one)."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """This process stood still, for a second at least: what comes next may be old, and so may be what the
    machine believes.  Handed in before anything else that came meanwhile."""


@dataclass(frozen=True, slots=True)
class Reply(Effect):
    """Answer a request, once."""

    origin: Origin
    message: Message


@dataclass(frozen=True, slots=True)
class AskPeer(Effect):
    """Send a request to another node; answered by :class:`Answered` at the latest at ``deadline``."""

    ticket: Ticket
    node: str
    message: Message
    deadline: float


@dataclass(frozen=True, slots=True)
class Stop(Effect):
    """The process must end now and say why (a broken promise is worse than an absent process)."""

    reason: str


class Machine(Protocol):
    """What the runtime and the simulator drive."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Decide.  ``now`` is monotonic seconds and never goes back."""
        ...

    def deadline(self) -> float | None:
        """When to hand in the next :class:`Tick`; ``None`` = not before another event."""
        ...

    def check(self) -> None:
        """Assert every invariant; called by tests after each step."""
        ...

    def story(self, key: bytes) -> str:
        """What this machine knows of ``key``, for a person."""
        ...
