"""``StatePlane``: small, versioned, replicated state, and the heads of agents' contexts, as sans-I/O
operations.

Record names are paths of percent-encoded parts, so a name can hold any text and a prefix scan never crosses
a part::

    state/<name>/<key>               a value somebody put
    context/<agent>/<session>        the head of an agent's context: an encoded Manifest

The plane remembers the causal context of what this client last saw of each record (bounded), so that a plain
read-modify-write replaces what was read and two clients that write without having seen each other become
siblings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from urllib.parse import quote, unquote

from kvcomm.errors import Conflict, TooLarge
from kvcomm.manifest import Manifest
from kvcomm.steps import Steps
from kvcomm.tally import Tally
from kvcomm.tier import RecordAnswer, Records
from kvcomm.wire.messages import VALUE_BYTES_MAX, Dots, RecordVersion, RecordWrite

CONTEXTS_MAX = 65_536
"""Causal contexts remembered; the least recently used goes first, and a put without one may make a
sibling."""


@dataclass(frozen=True, slots=True)
class StateValue:
    """What a record holds.

    ``values`` is empty when the record is absent or deleted, and has more than one entry when writers did
    not know of each other.  Hand ``context`` to the next put to replace exactly what you saw.  ``degraded``:
    fewer replicas answered than the read quorum, so the values may be old.
    """

    values: tuple[bytes, ...]
    context: Dots
    degraded: bool

    @property
    def value(self) -> bytes | None:
        """The only value, or ``None`` when there is none.

        Raises:
            Conflict: there are siblings; look at ``values`` and put a merged one.
        """
        if len(self.values) > 1:
            raise Conflict(
                f"{len(self.values)} concurrent values; read .values, merge them and put the result"
            )
        return self.values[0] if self.values else None


def record_name(*parts: str) -> bytes:
    """The record name of a path.  Raises ``ValueError`` for an empty part."""
    if not all(parts):
        raise ValueError(f"a name has no empty parts: {parts}")
    return "/".join([_quoted(part) for part in parts]).encode()


def record_path(name: bytes) -> tuple[str, ...]:
    """The inverse of :func:`record_name`."""
    return tuple(unquote(part) for part in name.decode().split("/"))


@lru_cache(maxsize=4_096)
def _quoted(part: str) -> str:
    return quote(part, safe="")


class StatePlane:
    """Operations on records.  One plane may be used by many threads: the only shared state is the context
    memory, whose single operations are atomic."""

    def __init__(self, records: Records, tally: Tally) -> None:
        self._records = records
        self._tally = tally
        self._contexts: OrderedDict[bytes, Dots] = OrderedDict()

    def get(self, names: Sequence[bytes]) -> Steps[list[StateValue]]:
        """Read records in one batch; absent ones have no values."""
        reading = self._records.record_get(names)
        answers: list[RecordAnswer] = yield from self._tally.timed("record_get", reading)
        for name, answer in zip(names, answers, strict=True):
            self._remember(name, answer.context)
            self._tally.read(answer)
        return [StateValue(answer.values, answer.context, answer.degraded) for answer in answers]

    def put(self, writes: Sequence[tuple[bytes, bytes | None, Dots | None]]) -> Steps[list[RecordVersion]]:
        """Write ``(name, value or None to delete, context or None for the remembered one)`` in one batch.

        Raises:
            TooLarge: a value is over ``VALUE_BYTES_MAX``; nothing was written.
            Unavailable: no owner could be reached; nothing was written.
            OutcomeUnknown: fewer replicas than the write quorum confirmed in time; read before writing again.
            Conflict: the record already has the most siblings it may have; read, merge, put with the context.
        """
        for name, value, _ in writes:
            if value is not None and len(value) > VALUE_BYTES_MAX:
                raise TooLarge(f"record {name!r}: {len(value)} bytes is over the limit of {VALUE_BYTES_MAX}")
        batch = [
            RecordWrite(name, value, self._contexts.get(name, {}) if context is None else context)
            for name, value, context in writes
        ]
        writing = self._records.record_put(batch)
        versions: list[RecordVersion] = yield from self._tally.timed("record_put", writing)
        self._tally.wrote(len(versions))
        for write, version in zip(batch, versions, strict=True):
            self._remember(write.key, version.context)
        return versions

    def names(self, prefix: bytes) -> Steps[list[bytes]]:
        """Names of the records under ``prefix``, sorted."""
        return (yield from self._tally.timed("record_scan", self._records.record_scan(prefix)))

    def manifest(self, name: bytes) -> Steps[Manifest | None]:
        """The head of a context; ``None`` when there is none.

        Two writers of one session leave siblings.  When one of them extends the other, the longer one is the
        head.

        Raises:
            Conflict: the siblings went different ways.
            Corrupt: the record does not hold a manifest.
        """
        (state,) = yield from self.get([name])
        heads = sorted((Manifest.decode(value) for value in state.values), key=lambda head: head.token_count)
        for shorter, longer in pairwise(heads):
            if not longer.extends(shorter):
                raise Conflict(
                    f"{len(heads)} writers took context {record_path(name)} different ways; fork it"
                )
        return heads[-1] if heads else None

    def _remember(self, name: bytes, context: Dots) -> None:
        self._contexts[name] = context
        self._contexts.move_to_end(name)
        while len(self._contexts) > CONTEXTS_MAX:
            self._contexts.popitem(last=False)
