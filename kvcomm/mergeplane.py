"""``MergePlane``: records whose concurrent writes are resolved (``kvcomm.resolvers``), as sans-I/O
operations.

Names are ``<class>/<name>/<key>`` (``kvcomm.stateplane.record_name``).  A write is a delta and needs no read
before; a read joins whatever siblings there are.

Each write has one of three outcomes, and nothing here is retried.  It returned: it is in every later join.
``Rejected``, ``Refused``, ``Conflict``, ``TooLarge``, ``Corrupt``, ``Unavailable``: not done.
``OutcomeUnknown``: it may have been done, now or later; elements, fields, extremes and registers may simply
be written again, an add to a counter may then count twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcomm.errors import KVCommError, name_outcomes
from kvcomm.resolvers import Resolver
from kvcomm.stateplane import StatePlane, record_name, record_path
from kvcomm.steps import Steps
from kvcomm.wire.messages import Dots

S = TypeVar("S")
D = TypeVar("D")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Merged(Generic[V]):
    """What a resolved record holds: the join of all that was found."""

    value: V
    context: Dots
    """Empty = the record was never written, as far as those who answered know."""
    degraded: bool
    """Fewer replicas answered than the read quorum, so the value may lack writes."""


class MergePlane:
    """Operations on the resolved records of one client."""

    def __init__(self, state: StatePlane) -> None:
        self._state = state

    def get(self, resolver: Resolver[S, D, V], name: str, keys: Sequence[str]) -> Steps[list[Merged[V]]]:
        """Read records in one batch.

        Raises:
            Unavailable: no owner of some record answered.
            Corrupt: a stored value is none of this class.
        """
        found = yield from self._state.get([record_name(resolver.name, name, key) for key in keys])
        return [Merged(resolver.show(each.values), each.context, each.degraded) for each in found]

    def change(self, resolver: Resolver[S, D, V], name: str, changes: Sequence[tuple[str, D]]) -> Steps[None]:
        """Apply (key, delta) in one batch; each by itself, not a transaction.

        Raises:
            ValueError: a delta cannot be; nothing was written.
            Rejected: a value would break a rule of ``records.validators``; the record stays as it was.
            Refused, TooLarge: a state would leave its range; the record stays as it was.
            Corrupt: the stored value is none of this class; the record stays as it was.
            Unavailable: no owner could be reached; nothing was written.
            OutcomeUnknown: see above.
            PartlyDone: some of several; ``outcomes`` says what became of each.
        """
        deltas: list[tuple[bytes, bytes | None]] = [
            (record_name(resolver.name, name, key), resolver.encode_delta(delta)) for key, delta in changes
        ]
        yield from self._send(deltas, resolver.uses_known, [key for key, _ in changes])

    def delete(self, resolver: Resolver[S, D, V], name: str, keys: Sequence[str]) -> Steps[None]:
        """Delete what this client and the coordinating shard have seen.

        A write that had not heard of it survives *with all that it was based on*: what was added before the
        delete may come back.  Raises as :meth:`change`.
        """
        deletes: list[tuple[bytes, bytes | None]] = [
            (record_name(resolver.name, name, key), None) for key in keys
        ]
        yield from self._send(deletes, True, keys)

    def _send(
        self, changes: Sequence[tuple[bytes, bytes | None]], knowing: bool, keys: Sequence[str]
    ) -> Steps[None]:
        try:
            yield from self._state.change(changes, knowing)
        except KVCommError as error:
            name_outcomes(error, keys)
            raise

    def keys(self, resolver: Resolver[S, D, V], name: str) -> Steps[list[str]]:
        """The keys that exist under this name."""
        found = yield from self._state.names(record_name(resolver.name, name) + b"/")
        return [record_path(record)[-1] for record in found]
