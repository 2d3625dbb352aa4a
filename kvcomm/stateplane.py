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

**A session.**  The plane also remembers the most that this client has seen or written of each record, and a
get says so: the answer has seen it too, or says ``degraded``.  That is *read your writes* and *monotonic
reads*, whichever shard answers; *writes follow reads* and *monotonic writes* are what contexts are for, as
long as no degraded answer was read in between.  The promise is one plane's, it begins with nothing, and
lapses for the record that was used longest ago when there are more than ``CONTEXTS_MAX``.

**Hot records** may be answered from a copy that this client was given a moment ago (``kvcomm.hotcopies``);
within the session, and not where a read asks for a fresh answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from urllib.parse import quote, unquote

from kvcomm.errors import Conflict, KVCommError, TooLarge, WriteOutcome
from kvcomm.heat import Heat
from kvcomm.hotcopies import HotCopies
from kvcomm.manifest import Manifest
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

    __slots__ = ("least", "own", "record")

    def __init__(
        self, record: bytes, dots: Dots, own: tuple[str, int] | None = None, least: Dots | None = None
    ) -> None:
        super().__init__(dots)
        self.least: Dots = self if least is None else least
        """What the next get must have seen."""
        self.record = record
        self.own = own
        """The caller's own last write, where the counters cannot say that it was seen."""


@dataclass(frozen=True, slots=True)
class StateValue:
    """What a record holds.

    ``values`` is empty when the record is absent or deleted, and has more than one entry when writers did
    not know of each other.  Hand ``context`` to the next put to replace exactly what you saw.  ``degraded``:
    fewer replicas answered than the read quorum, or none that has seen what this client saw before, so the
    values may be old.
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

    def __init__(
        self,
        records: Records,
        tally: Tally,
        *,
        copies: HotCopies | None = None,
        heat: Heat | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            copies: of hot records; ``None`` = every read asks a shard.
            heat: counts what is read; ``None`` = nobody does.
            clock: monotonic seconds, for the age of copies.
        """
        self._records = records
        self._tally = tally
        self._copies, self._heat, self._clock = copies, heat, clock
        self._contexts: OrderedDict[bytes, Context] = OrderedDict()

    def get(self, names: Sequence[bytes], *, fresh: bool = False) -> Steps[list[StateValue]]:
        """Read records in one batch; absent ones have no values.  Nothing older than what this plane has read
        or written before, unless ``degraded`` says so.

        Args:
            fresh: ask the shards also for hot records of which a copy is at hand.
        """
        least = [self._contexts.get(name, _NOTHING_SEEN).least for name in names]
        answers = yield from self._tally.timed("record_get", self._read(names, least, fresh), len(names))
        found: list[StateValue] = []
        for name, asked, answer in zip(names, least, answers, strict=True):
            self._tally.read(answer)
            self._remember(Context(name, answer.context, least=self._least(name, asked, answer)))
            found.append(StateValue(answer.values, Context(name, answer.context), answer.degraded))
        return found

    def _read(self, names: Sequence[bytes], least: Sequence[Dots], fresh: bool) -> Steps[list[RecordAnswer]]:
        """From copies as far as they go, the rest from the shards."""
        if self._heat is not None:
            self._heat.read_records(names)
        copies, begun = self._copies, self._clock()
        if not copies or fresh:
            return (yield from self._ask(names, least, begun))
        answers = [copies.get(name, known, begun) for name, known in zip(names, least, strict=True)]
        rest = [index for index, answer in enumerate(answers) if answer is None]
        if rest:
            asked = [names[index] for index in rest]
            told = yield from self._ask(asked, [least[index] for index in rest], begun)
            for index, answer in zip(rest, told, strict=True):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    def _ask(self, names: Sequence[bytes], least: Sequence[Dots], begun: float) -> Steps[list[RecordAnswer]]:
        """From the shards; what is hot is kept."""
        reading = self._records.record_get(names, least)
        answers = yield from (reading if self._heat is None else self._heat.riding(reading))
        if self._copies is not None:
            for name, answer in zip(names, answers, strict=True):
                if answer.hot:
                    self._copies.keep(name, answer, begun, self._clock())
        return answers

    def put(self, writes: Sequence[tuple[bytes, bytes | None, Dots | None]]) -> Steps[list[Context]]:
        """Write ``(name, value or None to delete, context or None for the remembered one)`` in one batch;
        the contexts for the next puts.

        Raises:
            ValueError: a context is another record's; nothing was written.
            TooLarge: a value is over ``VALUE_BYTES_MAX``; nothing was written.
            Unavailable: no owner could be reached; nothing was written.
            OutcomeUnknown: fewer replicas than the write quorum confirmed in time; read before writing again.
            Conflict: the record already has the most siblings it may have; read, merge, put with the context.
            PartlyDone: a batch of several was done in part; ``outcomes`` says what became of each.
        """
        for name, value, _ in writes:
            if value is not None and len(value) > VALUE_BYTES_MAX:
                raise TooLarge(f"record {name!r}: {len(value)} bytes is over the limit of {VALUE_BYTES_MAX}")
        return (yield from self._send([self._write(name, value, context) for name, value, context in writes]))

    def change(self, changes: Sequence[tuple[bytes, bytes | None]], knowing: bool) -> Steps[None]:
        """Change records that are resolved, by ``(name, delta or None to delete)``; see ``MergePlane``.

        ``knowing``: send along all that was ever seen of them.  (Siblings are different: a put may replace
        only what was shown together.)  Coordinators differ in what they have heard, and what was read from
        one may be removed at another.
        """
        batch: list[RecordWrite] = []
        for name, delta in changes:
            if delta is not None and len(delta) > VALUE_BYTES_MAX:
                raise TooLarge(f"record {name!r}: {len(delta)} bytes is over the limit of {VALUE_BYTES_MAX}")
            seen = self._contexts.get(name, _NOTHING_SEEN).least if knowing else _NOTHING_SEEN
            if len(seen) > ENTRIES_MAX:  # no replica would take it
                seen = self._contexts.get(name, _NOTHING_SEEN)
            batch.append(RecordWrite(name, None, seen, None, delta))
        yield from self._send(batch)

    def _send(self, batch: Sequence[RecordWrite]) -> Steps[list[Context]]:
        if self._copies is not None:
            now = self._clock()
            for write in batch:
                self._copies.wrote(write.key, now)
        writing = self._records.record_put(batch)
        try:
            versions: list[RecordVersion] = yield from self._tally.timed("record_put", writing, len(batch))
        except KVCommError as error:
            error.outcomes = [self._learned(outcome) for outcome in error.outcomes]
            self._tally.wrote(sum(outcome.status == "done" for outcome in error.outcomes))
            raise
        self._tally.wrote(len(versions))
        return [
            self._written(write.key, version.context, (version.replica, version.counter), version.own)
            for write, version in zip(batch, versions, strict=True)
        ]

    def names(self, prefix: bytes) -> Steps[list[bytes]]:
        """Names of the records under ``prefix``, sorted."""
        found = yield from self._tally.timed("record_scan", self._records.record_scan(prefix))
        self._tally.scanned(len(found))
        return found

    def manifest(self, name: bytes, *, fresh: bool = False) -> Steps[Manifest | None]:
        """The head of a context; ``None`` when there is none.  ``fresh`` as in :meth:`get`: what is to be
        extended must not be a copy, or two writers part that have not met.

        Two writers of one session leave siblings.  When one of them extends the other, the longer one is the
        head.

        Raises:
            Conflict: the siblings went different ways.
            Corrupt: the record does not hold a manifest.
        """
        (state,) = yield from self.get([name], fresh=fresh)
        heads = sorted((Manifest.decode(value) for value in state.values), key=lambda head: head.token_count)
        for shorter, longer in pairwise(heads):
            if not longer.extends(shorter):
                raise Conflict(
                    f"{len(heads)} writers took context {record_path(name)} different ways; fork it"
                )
        return heads[-1] if heads else None

    def _learned(self, outcome: WriteOutcome) -> WriteOutcome:
        """A write that was done counts, whatever became of the rest of its batch."""
        if outcome.dot is None or outcome.context is None:
            return outcome
        assert isinstance(outcome.key, bytes), "records are named by bytes down here"
        context = self._written(outcome.key, outcome.context, outcome.dot, outcome.own)
        return replace(outcome, context=context)

    def _written(self, name: bytes, dots: Dots, dot: tuple[str, int], own: bool) -> Context:
        mine = dot if own else None
        least = _union(self._contexts.get(name, _NOTHING_SEEN).least, dots, {dot[0]: dot[1]})
        self._remember(Context(name, dots, mine, least))
        return Context(name, dots, mine)

    def _write(self, name: bytes, value: bytes | None, context: Dots | None) -> RecordWrite:
        if context is None:
            context = self._contexts.get(name, _NOTHING_SEEN)
        if not isinstance(context, Context):
            return RecordWrite(name, value, context)
        if context.record != name and context is not _NOTHING_SEEN:
            raise ValueError(f"the context of record {context.record!r} says nothing about {name!r}")
        return RecordWrite(name, value, context, context.own)

    def _least(self, name: bytes, asked: Dots, answer: RecordAnswer) -> Dots | None:
        """What later gets must have seen, when this one has; ``None`` = the answer itself."""
        now = self._contexts.get(name, _NOTHING_SEEN).least
        outdated = now is not asked  # by another thread, for one
        if not now or not (answer.degraded or outdated):
            return None  # it covers what was asked for, or the record was removed everywhere
        return _union(now, answer.context)

    def _remember(self, context: Context) -> None:
        self._contexts.pop(context.record, None)  # then it is the newest; another thread may have evicted it
        self._contexts[context.record] = context
        while len(self._contexts) > CONTEXTS_MAX:
            self._contexts.popitem(last=False)


def _union(*contexts: Dots) -> Dots:
    union: Dots = {}
    for context in contexts:
        for replica, counter in context.items():
            if counter > union.get(replica, 0):
                union[replica] = counter
    return union


_NOTHING_SEEN = Context(b"", {})
