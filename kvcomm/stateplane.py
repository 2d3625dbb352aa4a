"""``StatePlane``: small, versioned, replicated state, and the heads of agents' contexts, as sans-I/O
operations.

Record names are paths of percent-encoded parts, so a name can hold any text and a prefix scan never crosses
a part::

    state/<name>/<key>               a value somebody put
    counter/<name>/<key>             one of the classes whose siblings are resolved: kvcomm.resolvers
    context/<agent>/<session>        the head of an agent's context: an encoded Manifest

The plane remembers the causal context of what this client last saw of each record (bounded), so that a plain
read-modify-write replaces what was read and two clients that write without having seen each other become
siblings.  A context counts the writes of *one* record: put with another record's, it would tell the replicas
that writes were seen which have yet to come, and they would drop them.  So a context knows its record.
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
from kvcomm.resolvers import resolver_of
from kvcomm.steps import Steps
from kvcomm.tally import Tally
from kvcomm.tier import RecordAnswer, Records
from kvcomm.version import ENTRIES_MAX
from kvcomm.wire.messages import VALUE_BYTES_MAX, Dots, RecordVersion, RecordWrite

CONTEXTS_MAX = 65_536
"""Causal contexts remembered; the least recently used goes first, and a put without one may make a
sibling."""


class Context(dict[str, int]):
    """What a caller has seen of one record: replica -> counter.  Hand it to a put of the same record."""

    __slots__ = ("own", "record")

    def __init__(self, record: bytes, dots: Dots, own: tuple[str, int] | None = None) -> None:
        super().__init__(dots)
        self.record = record
        self.own = own
        """The caller's own last write, where the counters cannot say that it was seen."""


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
    memory, and no thread relies on what another may have dropped from it."""

    def __init__(self, records: Records, tally: Tally) -> None:
        self._records = records
        self._tally = tally
        self._contexts: OrderedDict[bytes, Context] = OrderedDict()

    def get(self, names: Sequence[bytes]) -> Steps[list[StateValue]]:
        """Read records in one batch; absent ones have no values."""
        reading = self._records.record_get(names)
        answers: list[RecordAnswer] = yield from self._tally.timed("record_get", reading, len(names))
        found: list[StateValue] = []
        for name, answer in zip(names, answers, strict=True):
            self._tally.read(answer)
            self._remember(Context(name, answer.context))
            found.append(StateValue(answer.values, Context(name, answer.context), answer.degraded))
        return found

    def put(self, writes: Sequence[tuple[bytes, bytes | None, Dots | None]]) -> Steps[list[Context]]:
        """Write ``(name, value or None to delete, context or None for the remembered one)`` in one batch;
        the contexts for the next puts.

        Raises:
            ValueError: a context is another record's; nothing was written.
            TooLarge: a value is over ``VALUE_BYTES_MAX``; nothing was written.
            Unavailable: no owner could be reached; nothing was written.
            OutcomeUnknown: fewer replicas than the write quorum confirmed in time; read before writing again.
            Conflict: the record already has the most siblings it may have; read, merge, put with the context.
        """
        for name, value, _ in writes:
            if value is not None and len(value) > VALUE_BYTES_MAX:
                raise TooLarge(f"record {name!r}: {len(value)} bytes is over the limit of {VALUE_BYTES_MAX}")
        return (yield from self._send([self._write(name, value, context) for name, value, context in writes]))

    def change(self, changes: Sequence[tuple[bytes, bytes | None]], knowing: bool) -> Steps[None]:
        """Change records that are resolved, by ``(name, delta or None to delete)``; see ``MergePlane``.
        ``knowing``: send what was last seen of them along."""
        batch: list[RecordWrite] = []
        for name, delta in changes:
            if delta is not None and len(delta) > VALUE_BYTES_MAX:
                raise TooLarge(f"record {name!r}: {len(delta)} bytes is over the limit of {VALUE_BYTES_MAX}")
            context = self._contexts.get(name, _NOTHING_SEEN) if knowing else _NOTHING_SEEN
            batch.append(RecordWrite(name, None, context, None, delta))
        yield from self._send(batch)

    def _send(self, batch: Sequence[RecordWrite]) -> Steps[list[Context]]:
        writing = self._records.record_put(batch)
        versions: list[RecordVersion] = yield from self._tally.timed("record_put", writing, len(batch))
        self._tally.wrote(len(versions))
        contexts: list[Context] = []
        for write, version in zip(batch, versions, strict=True):
            own = (version.replica, version.counter) if version.own else None
            self._remember(Context(write.key, version.context, own))
            contexts.append(Context(write.key, version.context, own))
        return contexts

    def names(self, prefix: bytes) -> Steps[list[bytes]]:
        """Names of the records under ``prefix``, sorted."""
        found = yield from self._tally.timed("record_scan", self._records.record_scan(prefix))
        self._tally.scanned(len(found))
        return found

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

    def _write(self, name: bytes, value: bytes | None, context: Dots | None) -> RecordWrite:
        if context is None:
            context = self._contexts.get(name, _NOTHING_SEEN)
        if not isinstance(context, Context):
            return RecordWrite(name, value, context)
        if context.record != name and context is not _NOTHING_SEEN:
            raise ValueError(f"the context of record {context.record!r} says nothing about {name!r}")
        return RecordWrite(name, value, context, context.own)

    def _remember(self, context: Context) -> None:
        # Popped, it becomes the newest; another thread may have evicted it.
        before = self._contexts.pop(context.record, None)
        if before is not None and resolver_of(context.record) is not None:
            context = Context(context.record, _either(before, context))
        self._contexts[context.record] = context
        while len(self._contexts) > CONTEXTS_MAX:
            self._contexts.popitem(last=False)


def _either(one: Dots, two: Dots) -> Dots:
    """What was seen of a resolved record at either time: coordinators differ in what they have heard, and
    what was read from one may be removed at another.  (Siblings are different: a put may replace only what was
    shown together.)  Of too many replicas only the newer, which costs a removal its reach."""
    union = {**one, **{replica: max(counter, one.get(replica, 0)) for replica, counter in two.items()}}
    return union if len(union) <= ENTRIES_MAX else two


_NOTHING_SEEN = Context(b"", {})
