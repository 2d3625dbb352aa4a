"""``check_register``: is the history of one register linearizable [Herlihy, Wing 1990]?

Just-in-time linearization [Lowe 2017] over the begins and ends of operations: keep every *situation* the
register can be in, which is its value and which of the open operations have taken effect.  When an operation
ends, each situation is extended by open operations, in every order, until that one has taken effect; a
history is explained as long as a situation is left.  An operation whose outcome is unknown stays open for
ever: it may take effect at any later time, once, or never.

Cheap because of three rules, each harmless to the verdict:

* what changes nothing (a read, a compare-and-set that failed and says what it saw) takes effect as soon as
  the value is right: later it could only be harder;
* an unknown write of a value that nobody ever saw is left out;
* a situation that another one equals is dropped.

Values should be written once; then a situation's value names the write that made it, and few situations fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["read", "write", "cas"]
Ended = Literal["ok", "mismatch", "unknown"]

UNSEEN: Final = "\x00unseen"
"""What a compare-and-set saw that failed and does not say."""

SITUATIONS_MAX = 200_000
"""Over the whole check; enough for 10 clients on one key with a few percent unknown."""


class TooHard(Exception):
    """More situations than allowed: no verdict.  Fewer clients a key, or fewer unknown outcomes."""


@dataclass(frozen=True, slots=True)
class Access:
    """One operation on the register.

    ``read`` ends ``ok`` with what it ``saw``.  ``write`` puts ``value``.  ``cas`` puts ``value`` if the
    register holds ``expected``, or ends as a ``mismatch`` with what it ``saw``.  ``None`` = the register is
    empty.
    """

    kind: Kind
    begin: float
    end: float | None
    """``None`` = it never ended, or its outcome is unknown."""
    value: str | None = None
    expected: str | None = None
    ended: Ended = "ok"
    saw: str | None = None

    @property
    def open(self) -> bool:
        """Whether it may take effect at any time after its begin."""
        return self.end is None or self.ended == "unknown"

    @property
    def passive(self) -> bool:
        """Whether it changes nothing and says which value it needs."""
        return self.kind == "read" or (self.ended == "mismatch" and self.saw not in (UNSEEN, self.expected))


def check_register(
    accesses: Sequence[Access], initial: str | None = None, *, situations_max: int = SITUATIONS_MAX
) -> Access | None:
    """``None`` if there is an explanation, else the first operation whose end cannot be explained.

    Raises:
        TooHard: too many situations to look at.
    """
    relevant = [access for access in accesses if _matters(access, accesses)]
    return _Register(relevant, initial, situations_max).check()


def _matters(access: Access, accesses: Sequence[Access]) -> bool:
    if not access.open:
        return True
    if access.kind == "read":
        return False
    return any(
        (access.value in (other.saw, other.expected)) or other.saw == UNSEEN
        for other in accesses
        if other.kind != "write"
    )


class _Register:
    def __init__(self, accesses: Sequence[Access], initial: str | None, situations_max: int) -> None:
        self._accesses, self._situations_max = accesses, situations_max
        self._situations: set[tuple[str | None, int]] = {(initial, 0)}
        self._begun: list[int] = []
        self._looked_at = 0

    def check(self) -> Access | None:
        for _, is_end, index in self._events():
            if not is_end:
                self._begun.append(index)
                continue
            self._situations = self._after(index)
            self._begun.remove(index)
            if not self._situations:
                return self._accesses[index]
        return None

    def _events(self) -> list[tuple[float, bool, int]]:
        """In order; what begins when another one ends may have come before it."""
        events = [(access.begin, False, index) for index, access in enumerate(self._accesses)]
        for index, access in enumerate(self._accesses):
            if not access.open:
                assert access.end is not None
                events.append((access.end, True, index))
        return sorted(events)

    def _after(self, ending: int) -> set[tuple[str | None, int]]:
        """The situations in which ``ending`` has taken effect; it is forgotten in them."""
        bit = 1 << ending
        left = list(self._situations)
        seen: set[tuple[str | None, int]] = set()
        done: set[tuple[str | None, int]] = set()
        while left:
            situation = self._settle(left.pop())
            if situation in seen:
                continue
            seen.add(situation)
            self._looked_at += 1
            if self._looked_at > self._situations_max:
                raise TooHard(f"more than {self._situations_max} situations")
            value, taken = situation
            if taken & bit:
                done.add((value, taken ^ bit))
                continue
            left += self._next(value, taken)
        return done

    def _settle(self, situation: tuple[str | None, int]) -> tuple[str | None, int]:
        """Everything passive that fits takes effect."""
        value, taken = situation
        for index in self._begun:
            access = self._accesses[index]
            if access.passive and access.saw == value:
                taken |= 1 << index
        return value, taken

    def _next(self, value: str | None, taken: int) -> list[tuple[str | None, int]]:
        """One more operation takes effect."""
        found: list[tuple[str | None, int]] = []
        for index in self._begun:
            access = self._accesses[index]
            if taken >> index & 1 or access.passive:
                continue
            fits, after = _effect(access, value)
            if fits:
                found.append((after, taken | 1 << index))
        return found


def _effect(access: Access, value: str | None) -> tuple[bool, str | None]:
    """(whether ``access`` can take effect on ``value``, the value afterwards)."""
    if access.kind == "write":
        return True, access.value
    if access.ended == "mismatch":
        return value != access.expected and access.saw in (UNSEEN, value), value
    if access.open:
        return value == access.expected, access.value  # where it does not match it may as well wait
    return value == access.expected, access.value
