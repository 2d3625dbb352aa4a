"""``Notebook``: what a leader writes down before anybody hears of it, one record at a time.

A note that may or may not have been made is made again, the same bytes, until it is known to be there or
somebody else's lease has fenced it off.  What was replaced before it was sent is never sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcomm.machine import Effect, Event, Ticket

NAMES: tuple[Literal["plan", "ring"], ...] = ("plan", "ring")
"""In this order: what is to run is journaled before the map that it is for."""
ANSWER_S = 10.0
"""A note without an outcome for so long may have been lost by the shell: it is made again."""


AGAIN_S = 0.25
"""Between two attempts when the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Note(Effect):
    """Write this metadata record, under the lease's epoch as fence; answered by :class:`Noted`."""

    ticket: Ticket
    name: Literal["ring", "plan"]
    value: bytes


@dataclass(frozen=True, slots=True)
class Noted(Event):
    """What became of a :class:`Note`: ``done``, ``fenced`` (somebody else leads) or ``unknown``."""

    ticket: Ticket
    outcome: Literal["done", "fenced", "unknown"]


class Notebook:
    """For one term; times are monotonic seconds."""

    def __init__(self, tickets: Iterator[int]) -> None:
        self._tickets = tickets
        self._waiting: dict[str, bytes] = {}
        self._sent: Note | None = None
        self._again_at = 0.0

    def write(self, name: Literal["ring", "plan"], value: bytes) -> None:
        """To be noted; replaces what waits under this name."""
        self._waiting[name] = value

    def pending(self, name: str) -> bool:
        """Whether something of this name is not known to be noted yet."""
        return name in self._waiting or (self._sent is not None and self._sent.name == name)

    def due(self, now: float) -> list[Effect]:
        """The next note to be made, if it is time."""
        if self._sent is None:
            name = next((each for each in NAMES if each in self._waiting), None)
            return [] if name is None else [self._send(name, self._waiting.pop(name), now)]
        return [self._send(self._sent.name, self._sent.value, now)] if now >= self._again_at else []

    def noted(self, event: Noted, now: float) -> Note | None:
        """The note that is known to be made now.  ``None``: not the one that waits, or nobody knows."""
        sent = self._sent
        if sent is None or event.ticket != sent.ticket:
            return None
        if event.outcome == "done":
            self._sent = None
            return sent
        self._again_at = now + AGAIN_S
        return None

    def deadline(self) -> float | None:
        return None if self._sent is None else self._again_at

    def _send(self, name: Literal["ring", "plan"], value: bytes, now: float) -> Note:
        self._sent = Note(Ticket(next(self._tickets)), name, value)
        self._again_at = now + ANSWER_S
        return self._sent
