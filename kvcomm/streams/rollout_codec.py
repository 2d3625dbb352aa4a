"""``encode``/``decode`` and ``to_json``/``from_json``: a ``Rollout`` as bytes, in two forms with one content.

Both go through a :class:`RolloutRecord`, in which runs of rows are one entry and a sample's token is not said
twice (it is the token of the next row), so the forms cannot contradict themselves.  Both carry the same
checksum, of the binary form: a stage that rewrites the JSON (other spacing, other order of keys) keeps it,
one that changes a number does not.

The binary form, all numbers little-endian; it can be concatenated (``kvcomm.streams.rollout_file``)::

    0    magic 8s = "KVCROLLS"     16   namespace 32s
    8    version u16               48   view_digest 32s        after the last event
    10   reserved u16 (zero)       80   block_tokens u32
    12   record_bytes u32, all     84   row_count u32, event_count u32: what there must be
    92   sections, each a count u32 and so many of:
         name u8 · tokens u32 · filler runs (first row u32, rows u32) · repeated runs, likewise
         samplings (temperature f64, top_k u32, top_p f64)
         sample runs (first row u32, samples u32, sampling u16, loss u8) · log probabilities f64
         pending token u32, none or one · events
    ..   checksum u64, xxh3-64 of everything before it

    event: kind u8, at_row i64, insert_at i64, weights_version i64, span bytes u8 (0 or 32), ranges u32,
           reason bytes u16, view_digest 32s, then span, ranges (start i64, end i64), reason in UTF-8
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Annotated, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from kvcomm.block import Buffer, little_endian
from kvcomm.errors import Corrupt, Refused, TooLarge
from kvcomm.streams.events import KINDS, Event, EventKind, SlotRange, SpanId, ViewDigest, row_runs
from kvcomm.streams.rollout import Rollout, Sample, Sampling

MAGIC = b"KVCROLLS"
FORMAT = "kvcomm.rollout"
VERSION = 1
ROLLOUT_BYTES_MAX = 64 << 20
"""Of the binary form: 5 million rows, all of them sampled."""
JSON_BYTES_MAX = 4 * ROLLOUT_BYTES_MAX

_HEAD = struct.Struct("<8sHHI32s32sIII")
_COUNT = struct.Struct("<I")
_RUN = struct.Struct("<II")
_SAMPLING = struct.Struct("<dId")
_SAMPLE_RUN = struct.Struct("<IIHB")
_LOGPROB = struct.Struct("<d")
_EVENT = struct.Struct("<BqqqBIH32s")
_RANGE = struct.Struct("<qq")
_CHECKSUM = struct.Struct("<Q")
FRAME_BYTES = 16
"""From the start of a record: what :func:`frame_bytes` needs."""

_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_I63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class RowRun(NamedTuple):
    """Rows that follow one by one."""

    first_row: _U32
    row_count: _U32


class SamplingRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See ``rollout.Sampling``."""

    temperature: float
    top_k: _U32
    top_p: float


class SampleRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples of rows that follow one by one, all alike but for their log probabilities."""

    first_row: _U32
    logprobs: list[float]
    sampling: _U16
    """Index into the record's samplings."""
    loss: bool


class EventRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """See ``events.Event``; digests are hexadecimal."""

    kind: EventKind
    at_row: _I63
    view_digest: _Hex
    ranges: list[tuple[_I63, _I63]] = msgspec.field(default_factory=list)
    span: _Hex | None = None
    insert_at: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    reason: str = ""
    weights_version: _I63 = 0

    def event(self) -> Event:
        """Raises ``Corrupt`` when it contradicts itself."""
        return Event(
            self.kind, self.at_row, tuple(SlotRange(*each) for each in self.ranges),
            SpanId(bytes.fromhex(self.span or "")), self.insert_at, self.reason, self.weights_version,
            ViewDigest(bytes.fromhex(self.view_digest)),
        )  # fmt: skip


class RolloutRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rollout as its sender wrote it or as it arrived: only :meth:`rollout` says that it is sound."""

    name: str
    namespace: _Hex
    block_tokens: _U32
    row_count: _U32
    event_count: _U32
    view_digest: _Hex
    tokens: list[_U32]
    filler_rows: list[RowRun]
    repeated_rows: list[RowRun]
    samplings: list[SamplingRecord]
    samples: list[SampleRun]
    events: list[EventRecord]
    pending: _U32 | None = None
    """Token of the last sample, if it was never fed."""
    checksum: str = ""
    """16 hexadecimal digits; of the binary form."""

    def rollout(self) -> Rollout:
        """Raises ``Corrupt``: it is not what was written, or was never a rollout."""
        if self.checksum != _checksum(self):
            raise Corrupt(f"rollout {self.name!r} was changed on its way: its checksum does not match")
        found = Rollout(
            self.name, bytes.fromhex(self.namespace), self.block_tokens, tuple(self.tokens),
            self._rows(self.filler_rows), tuple(each.event() for each in self.events),
            tuple(self._samples()), self.row_count, self.event_count,
            ViewDigest(bytes.fromhex(self.view_digest)), self._rows(self.repeated_rows),
        )  # fmt: skip
        if record_of(found) != self:
            raise Corrupt(f"rollout {self.name!r} is not in canonical form")
        return found

    def _rows(self, runs: Sequence[RowRun]) -> tuple[int, ...]:
        # Before anything is made of it: eight bytes can claim four billion rows.
        if any(run.first_row + run.row_count > len(self.tokens) for run in runs):
            raise Corrupt(f"rollout {self.name!r} marks rows that it does not have")
        if any(before.first_row + before.row_count > after.first_row for before, after in pairwise(runs)):
            raise Corrupt(f"rollout {self.name!r} marks rows that do not ascend")
        return tuple(chain.from_iterable(range(run.first_row, run.first_row + run.row_count) for run in runs))

    def _samples(self) -> Iterator[Sample]:
        samplings = [_sampling(each) for each in self.samplings]
        tokens = self.tokens if self.pending is None else [*self.tokens, self.pending]
        for run in self.samples:
            if run.sampling >= len(samplings) or run.first_row + len(run.logprobs) >= len(tokens):
                raise Corrupt(f"rollout {self.name!r} has samples without a token or a sampling")
            for row, logprob in enumerate(run.logprobs, run.first_row):
                try:
                    yield Sample(row, tokens[row + 1], logprob, samplings[run.sampling], run.loss)
                except ValueError as error:
                    raise Corrupt(str(error)) from error


# -- the two forms


def encode(rollout: Rollout) -> bytes:
    """The binary form; :func:`decode` is the exact inverse.

    Raises:
        TooLarge: over :data:`ROLLOUT_BYTES_MAX`, or a number or text that has no room in it.
    """
    return _packed(record_of(rollout))


def decode(buffer: Buffer) -> Rollout:
    """The rollout in ``buffer``, all of it.

    Raises:
        Refused: of another version.
        Corrupt: no rollout, damaged, truncated, over-long, or not in canonical form.
    """
    return unpacked(buffer).rollout()


def to_json(rollout: Rollout) -> bytes:
    """The JSON form, in one line without its end; :func:`from_json` is the exact inverse.

    Raises:
        TooLarge: as :func:`encode`.
    """
    record = msgspec.Raw(msgspec.json.encode(record_of(rollout)))
    return msgspec.json.encode(_Envelope(FORMAT, VERSION, record))


def from_json(buffer: Buffer) -> Rollout:
    """As :func:`decode`.  Spaces and the order of keys do not matter; a key too many or too few does."""
    return parsed(buffer).rollout()


def record_of(rollout: Rollout) -> RolloutRecord:
    """With its checksum.  Raises ``TooLarge`` as :func:`encode`."""
    samplings = list(dict.fromkeys(sample.sampling for sample in rollout.samples))
    last = rollout.samples[-1] if rollout.samples else None
    record = RolloutRecord(
        name=rollout.name,
        namespace=rollout.namespace.hex(),
        block_tokens=rollout.block_tokens,
        row_count=rollout.row_count,
        event_count=rollout.event_count,
        view_digest=rollout.view_digest.hex(),
        tokens=list(rollout.tokens),
        filler_rows=[RowRun(*run) for run in row_runs(rollout.filler_rows)],
        repeated_rows=[RowRun(*run) for run in row_runs(rollout.repeated_rows)],
        samplings=[SamplingRecord(each.temperature + 0.0, each.top_k, each.top_p) for each in samplings],
        samples=_sample_runs(rollout.samples, samplings),
        events=[_event_record(event) for event in rollout.events],
        pending=last.token if last is not None and last.query_row == rollout.row_count - 1 else None,
    )
    return msgspec.structs.replace(record, checksum=_checksum(record))


def parsed(buffer: Buffer) -> RolloutRecord:
    """The record in a line of JSON, sound or not.

    Raises:
        Refused: of another version.
        Corrupt: not the JSON of a record.
    """
    if len(buffer) > JSON_BYTES_MAX:
        raise Corrupt(f"the JSON of a rollout cannot have {len(buffer)} bytes")
    try:
        envelope = msgspec.json.decode(buffer, type=_Envelope)
        _require_version(envelope.format == FORMAT, envelope.version)
        return msgspec.json.decode(envelope.rollout, type=RolloutRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not the JSON of a rollout: {error}") from error


def unpacked(buffer: Buffer) -> RolloutRecord:
    """The record in the binary form, sound or not: then ``RolloutRecord.rollout`` raises.

    Raises:
        Refused: of another version.
        Corrupt: not the size, or not the parts, of a record.
    """
    data = bytes(buffer)
    if len(data) != frame_bytes(data):
        raise Corrupt(f"a rollout cannot have these {len(data)} bytes")
    _, _, _, _, namespace, digest, block_tokens, row_count, event_count = _HEAD.unpack_from(data)
    reader = _Reader(data, _HEAD.size, len(data) - _CHECKSUM.size)
    try:
        record = RolloutRecord(
            namespace=namespace.hex(),
            block_tokens=block_tokens,
            row_count=row_count,
            event_count=event_count,
            view_digest=digest.hex(),
            name=reader.take(reader.count()).decode(),
            tokens=[token for (token,) in reader.many(_COUNT)],
            filler_rows=[RowRun(*run) for run in reader.many(_RUN)],
            repeated_rows=[RowRun(*run) for run in reader.many(_RUN)],
            samplings=[SamplingRecord(*each) for each in reader.many(_SAMPLING)],
            samples=_read_samples(reader),
            pending=_read_pending(reader),
            events=[_read_event(reader) for _ in range(reader.count())],
            checksum=_sum_of(data),
        )
    except UnicodeDecodeError as error:
        raise Corrupt(f"a rollout's text is not UTF-8: {error}") from error
    return record


def frame_bytes(head: Buffer) -> int:
    """Size of the record that begins with these :data:`FRAME_BYTES` or more.

    Raises:
        Refused: of another version.
        Corrupt: no record begins with them, or one that is over :data:`ROLLOUT_BYTES_MAX`.
    """
    if len(head) < FRAME_BYTES:
        raise Corrupt(f"a rollout cannot have {len(head)} bytes")
    magic, version, _, size = struct.unpack_from("<8sHHI", head)
    _require_version(magic == MAGIC, version)
    if not _HEAD.size + _CHECKSUM.size <= size <= ROLLOUT_BYTES_MAX:
        raise Corrupt(f"a rollout cannot have {size} bytes")
    return int(size)


# -- inside


class _Envelope(msgspec.Struct):
    """What every version has."""

    format: str
    version: int
    rollout: msgspec.Raw


class _Reader:
    """Takes sections off ``data[at:end]``; a count is believed only if so much is there.

    Whether that is all, and as a writer writes it, shows when ``RolloutRecord.rollout`` writes it again.
    """

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def take(self, size: int) -> bytes:
        if size > self.end - self.at:
            raise Corrupt(f"a rollout's record ends inside a section, at byte {self.end}")
        self.at += size
        return self.data[self.at - size : self.at]

    def one(self, shape: struct.Struct) -> tuple[int, ...]:
        return shape.unpack(self.take(shape.size))

    def count(self) -> int:
        return self.one(_COUNT)[0]

    def many(self, shape: struct.Struct) -> Iterator[tuple[int, ...]]:
        return shape.iter_unpack(self.take(self.count() * shape.size))


def _sum_of(data: bytes) -> str:
    """The checksum at the end of ``data``; empty if it is not that of these very bytes, of which some could
    read the same as others."""
    body, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    return f"{checksum:016x}" if checksum == xxh3_64_intdigest(body) else ""


def _read_samples(reader: _Reader) -> list[SampleRun]:
    runs = list(reader.many(_SAMPLE_RUN))
    logprobs = [float(each) for (each,) in reader.many(_LOGPROB)]
    samples: list[SampleRun] = []
    at = 0
    for first_row, count, sampling, loss in runs:
        samples.append(SampleRun(first_row, logprobs[at : at + count], sampling, bool(loss)))
        at += count
    return samples


def _read_pending(reader: _Reader) -> int | None:
    return next((token for (token,) in reader.many(_COUNT)), None)


def _read_event(reader: _Reader) -> EventRecord:
    kind, at_row, insert_at, weights, span_bytes, range_count, reason_bytes = reader.one(_EVENT)[:7]
    digest = reader.data[reader.at - 32 : reader.at]
    if kind >= len(KINDS) or span_bytes not in (0, 32):
        raise Corrupt(f"a rollout has an event of kind {kind} with a span of {span_bytes} bytes")
    span = reader.take(span_bytes)
    ranges = _RANGE.iter_unpack(reader.take(range_count * _RANGE.size))
    reason = reader.take(reason_bytes).decode()
    return EventRecord(
        KINDS[kind], at_row, digest.hex(), list(ranges), span.hex() or None, insert_at, reason, weights
    )


def _packed(record: RolloutRecord) -> bytes:
    body = _body(record)
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def _checksum(record: RolloutRecord) -> str:
    return f"{xxh3_64_intdigest(_body(record)):016x}"


def _body(record: RolloutRecord) -> bytes:
    try:
        sections = _sections(record)
        size = _HEAD.size + len(sections) + _CHECKSUM.size
        if size > ROLLOUT_BYTES_MAX:
            raise TooLarge(
                f"a rollout of {len(record.tokens)} rows takes {size} bytes, over {ROLLOUT_BYTES_MAX}"
            )
        head = _HEAD.pack(
            MAGIC, VERSION, 0, size, bytes.fromhex(record.namespace), bytes.fromhex(record.view_digest),
            record.block_tokens, record.row_count, record.event_count,
        )  # fmt: skip
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        raise TooLarge(f"a rollout holds what has no room in its record: {error}") from error
    return head + sections


def _sections(record: RolloutRecord) -> bytes:
    name = record.name.encode()
    pending = [] if record.pending is None else [record.pending]
    samplings = ((each.temperature, each.top_k, each.top_p) for each in record.samplings)
    runs = ((run.first_row, len(run.logprobs), run.sampling, run.loss) for run in record.samples)
    return b"".join((
        _COUNT.pack(len(name)), name,
        _COUNT.pack(len(record.tokens)), little_endian(array("I", record.tokens)),
        _counted(_RUN, record.filler_rows),
        _counted(_RUN, record.repeated_rows),
        _counted(_SAMPLING, samplings),
        _counted(_SAMPLE_RUN, runs),
        _counted(_LOGPROB, ((each,) for run in record.samples for each in run.logprobs)),
        _counted(_COUNT, ((token,) for token in pending)),
        _COUNT.pack(len(record.events)), *map(_event_bytes, record.events),
    ))  # fmt: skip


def _counted(shape: struct.Struct, items: Iterable[tuple[float, ...]]) -> bytes:
    packed = [shape.pack(*item) for item in items]
    return _COUNT.pack(len(packed)) + b"".join(packed)


def _event_bytes(event: EventRecord) -> bytes:
    span, reason = bytes.fromhex(event.span or ""), event.reason.encode()
    head = _EVENT.pack(
        KINDS.index(event.kind), event.at_row, event.insert_at, event.weights_version, len(span),
        len(event.ranges), len(reason), bytes.fromhex(event.view_digest),
    )  # fmt: skip
    return b"".join((head, span, *(_RANGE.pack(*each) for each in event.ranges), reason))


def _event_record(event: Event) -> EventRecord:
    return EventRecord(
        event.kind, event.at_row, event.view_digest.hex(), [(each.start, each.end) for each in event.ranges],
        event.span.hex() or None, event.insert_at, event.reason, event.weights_version,
    )  # fmt: skip


def _sample_runs(samples: Sequence[Sample], samplings: Sequence[Sampling]) -> list[SampleRun]:
    index = {sampling: at for at, sampling in enumerate(samplings)}
    runs: list[SampleRun] = []
    last: Sample | None = None
    for sample in samples:
        alike = last is not None and (last.query_row + 1, last.sampling, last.loss) == (
            sample.query_row, sample.sampling, sample.loss
        )  # fmt: skip
        if not alike:
            runs.append(SampleRun(sample.query_row, [], index[sample.sampling], sample.loss))
        runs[-1].logprobs.append(sample.logprob + 0.0)
        last = sample
    return runs


def _sampling(record: SamplingRecord) -> Sampling:
    try:
        return Sampling(record.temperature, record.top_k, record.top_p)
    except ValueError as error:
        raise Corrupt(str(error)) from error


def _require_version(ours: bool, version: int) -> None:
    if not ours:
        raise Corrupt("not a rollout")
    if version != VERSION:
        raise Refused(
            f"a rollout of version {version}; this is for version {VERSION}: read it with the KVCOMM that "
            "wrote it, or a later one"
        )
