"""``StrongPlane``: linearizable values under names, as sans-I/O operations.

Names are ``strong/<name>/<key>`` (``kvcomm.stateplane.record_name``).  Every value has a version: opaque
bytes that are different after every change, so that "only if it is still what I saw" can be said.

Each change has one of three outcomes.  It returned: done.  ``Conflict``, ``Unavailable``, ``Refused``
(``Fenced`` is one): not done.  ``OutcomeUnknown``: whether it was done only a read can tell.

A change may carry a *fence*, the epoch of the lease that it is made under (``kvcomm.lease``); 0 = none.  A
record remembers the largest fence that it was changed under and refuses smaller ones with ``Fenced``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcomm.errors import Conflict, KVCommError, TooLarge, failure_to_error
from kvcomm.steps import Park, Steps
from kvcomm.tally import Tally
from kvcomm.tier import Registers
from kvcomm.wire.messages import VALUE_BYTES_MAX, StrongOrder, StrongOutcome

NO_VERSION = b""
"""Of a value that was never there.  As an expected version: there must be no value."""
BACKOFF_FIRST_S = 0.002
BACKOFF_MAX_S = 0.25


@dataclass(frozen=True, slots=True)
class StrongValue:
    """What a strong record holds."""

    value: bytes | None
    """``None`` = absent or deleted."""
    version: bytes
    """Hand it to ``compare_and_set``."""
    fence: int = 0
    """The largest lease epoch under which it was changed: changes under a smaller one, or under none, are
    refused."""


class StrongConflict(Conflict):
    """The record has another version than the one named; ``found`` is what it has."""

    code = Conflict.code

    def __init__(self, message: str, found: StrongValue) -> None:
        super().__init__(message)
        self.found = found


class Never:
    """A waiter that is never done: to wait for a while and nothing else."""

    def add_callback(self, call: Callable[[], None]) -> None:
        """``call`` is not called."""


class StrongPlane:
    """Operations on strong records; may be used by many threads.

    ``draw`` gives random numbers from [0, 1).
    """

    def __init__(self, registers: Registers, tally: Tally, draw: Callable[[], float]) -> None:
        self._registers, self._tally, self._draw = registers, tally, draw

    def read(self, names: Sequence[bytes]) -> Steps[list[StrongValue]]:
        """The values as of a moment between call and return, each by itself.

        Raises:
            Unavailable: some record's majority could not be reached.
        """
        reading = self._registers.strong_read(names)
        outcomes: list[StrongOutcome] = yield from self._tally.timed("strong_read", reading)
        return [_value(outcome, outcome.value) for outcome in outcomes]

    def put(self, name: bytes, value: bytes, fence: int = 0) -> Steps[StrongValue]:
        """Write, whatever was there.

        Raises:
            Fenced: a later lease epoch has changed the record; nothing was written.
            TooLarge: over ``VALUE_BYTES_MAX``; nothing was written.
            Unavailable: the record's majority could not be reached; nothing was written.
            OutcomeUnknown: read before writing again.
        """
        return (yield from self._change(StrongOrder(name, "put", NO_VERSION, value, fence)))

    def compare_and_set(
        self, name: bytes, expected: bytes, value: bytes | None, fence: int = 0
    ) -> Steps[StrongValue]:
        """Write (``None``: delete) if the record has the version ``expected``; ``NO_VERSION``: has no value.

        Raises as :meth:`put`, and ``StrongConflict``: it has not; nothing was written.
        """
        return (yield from self._change(StrongOrder(name, "cas", expected, value, fence)))

    def delete(self, name: bytes, fence: int = 0) -> Steps[StrongValue]:
        """Delete, whatever was there; the fence is remembered.  Raises as :meth:`put`."""
        return (yield from self._change(StrongOrder(name, "delete", fence=fence)))

    def change(
        self, name: bytes, function: Callable[[bytes | None], bytes | None], fence: int = 0
    ) -> Steps[StrongValue]:
        """Replace the value by ``function(value)`` (``None``: no value), as if nobody else wrote meanwhile.

        ``function`` is called again, with the newer value, when somebody did; after a jittered wait, as often
        as the operation's deadline allows.  A function that changes nothing writes nothing, unless the fence
        is new to the record: that closes it to earlier epochs.

        Raises as :meth:`put`.
        """
        (found,) = yield from self.read([name])
        failed_count = 0
        while True:
            value = function(found.value)
            if value == found.value and fence in (0, found.fence):
                return found
            expected = found.version if found.value is not None else NO_VERSION
            try:
                return (yield from self.compare_and_set(name, expected, value, fence))
            except StrongConflict as conflict:
                found = conflict.found
            failed_count += 1
            ceiling_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failed_count - 1, 16))
            yield Park(Never(), ceiling_s * self._draw())

    def _change(self, order: StrongOrder) -> Steps[StrongValue]:
        if order.value is not None and len(order.value) > VALUE_BYTES_MAX:
            raise TooLarge(f"record {order.key!r}: {len(order.value)} bytes, the limit is {VALUE_BYTES_MAX}")
        changing = self._registers.strong_change([order])
        outcomes: list[StrongOutcome] = yield from self._tally.timed("strong_change", changing)
        return _value(outcomes[0], order.value)


def _value(outcome: StrongOutcome, value: bytes | None) -> StrongValue:
    """Of an outcome that is done; raises what it is otherwise."""
    if not outcome.code:
        return StrongValue(value, outcome.version, outcome.fence)
    if outcome.code == Conflict.code:
        raise StrongConflict(outcome.text, StrongValue(outcome.value, outcome.version, outcome.fence))
    error: KVCommError = failure_to_error(outcome.code, outcome.text)
    raise error
