"""``StreamContext``: a compacted context as another agent can take it over: what was fed, what was cut, and
the keys under which the K/V of what is left can be had.

The sibling of ``kvcomm.manifest.Manifest``, and never taken for one: another magic, another kind of record
(``stream/<agent>/<session>``).  A manifest is a text that anybody may compute again; the K/V of a compacted
context saw text that is out of view, so it can be fetched, or not be had.

**All tokens are in it, also those of rows out of view**: an event's lineage digests everything fed before it,
and who continues the stream hands a trainer the tokens by row.  It is 4 bytes a row, of which a row's K/V is
thousands.  A record's value holds about 200,000 rows; a longer stream is refused (``TooLarge``), at a length
that positions of today's models do not reach.

What can be computed from tokens and events (view, keys, lineage) is in it all the same, so that the bytes can
be looked at without a namespace; :meth:`StreamContext.verify` computes it again and compares.

The encoding is deterministic and versioned, all integers little-endian::

    0    magic 8s = "KVCSTREM"      112  producer u64, weights_version u64
    8    version u16                128  pending i64 (-1: none), protected u64
    10   codec u8, reserved u8      144  row_count, event_count, turn_count, run_count u32
    12   block_tokens u32           160  filler_runs, repeated_runs, key_count, span_count u32
    16   namespace 32s              176  policy_bytes u32, reserved u32; policy, UTF-8
    48   lineage 32s                ..   tokens, u32 each
    80   view_digest 32s            ..   runs: first_row u64, count u64; turns: start u64, end u64
                                    ..   keys, 32 bytes each
                                    ..   spans: id 32s, key count u32, keys
                                    ..   events: see _EVENT
                                    ..   checksum u64, xxh3-64 of everything before it
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import pairwise
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvcomm.block import BlockKey, Buffer, Incarnation, little_endian, token_array
from kvcomm.errors import Corrupt, NamespaceError, TokenError, TooLarge
from kvcomm.namespace import BLOCK_TOKENS_MAX, CODECS, Namespace, NamespaceId
from kvcomm.streams.chain import Chain, ChainBlock, chain_of
from kvcomm.streams.events import (
    KINDS,
    ROOT_DIGEST,
    Event,
    Run,
    SlotRange,
    SpanId,
    ViewDigest,
    row_runs,
    run_rows,
)
from kvcomm.streams.session import Session, Turn
from kvcomm.streams.view import require_bounded
from kvcomm.wire.messages import VALUE_BYTES_MAX

MAGIC = b"KVCSTREM"
VERSION = 1
CONTEXT_BYTES_MAX = VALUE_BYTES_MAX
"""A context must fit a record's value."""

_HEAD = struct.Struct("<8sHBBI32s32s32sQQqQIIIIIIIIII")
_PAIR = struct.Struct("<QQ")
_SPAN = struct.Struct("<32sI")
_EVENT = struct.Struct("<BBHIQqQ32s32s")
"""Kind, whether it has a span, bytes of the reason, ranges; row, insert_at, weights, span, digest.  The
reason and the ranges follow."""
_CHECKSUM = struct.Struct("<Q")
_REASON_BYTES_MAX = (1 << 16) - 1


class ArchivedSpan(NamedTuple):
    """Rows out of view that can be restored: their K/V is under ``keys``."""

    span: SpanId
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class StreamContext:
    """Raises ``Corrupt`` when the parts contradict each other."""

    namespace: NamespaceId
    """Of the K/V; tenant included, so a context is of no use to another tenant."""
    block_tokens: int
    token_bytes: bytes
    """Every token by row, u32 little-endian; see :attr:`tokens`."""
    view_runs: tuple[Run, ...]
    """The rows in view, in the order of their slots."""
    keys: tuple[BlockKey, ...]
    """One a block of the table, in order; the last one a tail's, where the last block is partial."""
    lineage: bytes
    """Of what is fed next."""
    events: tuple[Event, ...]
    turns: tuple[Turn, ...]
    protected: int
    pending: int | None
    """Sampled and not fed."""
    archived: tuple[ArchivedSpan, ...]
    """Sorted."""
    filler_runs: tuple[Run, ...]
    """Rows that were fed only to end a block, like :attr:`view_runs`."""
    repeated_runs: tuple[Run, ...]
    """Rows whose text is that of archived ones that were lost."""
    policy: str
    """Name of what decided the cuts."""
    producer: Incarnation
    codec: str

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise Corrupt(f"not a stream's context: {problem}")

    @staticmethod
    def of(
        session: Session,
        chain: Chain,
        *,
        producer: Incarnation,
        policy: str = "",
        filler_rows: Sequence[int] = (),
        repeated_rows: Sequence[int] = (),
    ) -> StreamContext:
        """What ``session`` is now.

        Args:
            chain: of its tokens and events.
            filler_rows, repeated_rows: as its recorder has them; whoever goes on needs them to tell the
                stream's text.
        """
        assert len(session.table) == len(chain.blocks), "the table follows from the log"
        for block, known in zip(session.table, chain.table, strict=False):
            assert session.pool.key_of(block) == known.key
        archived = {span: tuple(each.keys) for span, each in session.archive.items()}
        return StreamContext(
            session.namespace.id,
            session.namespace.block_tokens,
            little_endian(chain.tokens),
            tuple(session.view.runs),
            _keys_of(chain.blocks),
            session.lineage,
            tuple(session.events),
            tuple(session.turns),
            session.protected,
            session.pending,
            tuple(ArchivedSpan(span, keys) for span, keys in sorted(archived.items())),
            tuple(row_runs(filler_rows)),
            tuple(row_runs(repeated_rows)),
            policy,
            producer,
            session.namespace.codec,
        )

    @property
    def row_count(self) -> int:
        """Rows ever fed."""
        return len(self.token_bytes) // 4

    @property
    def slot_count(self) -> int:
        """Rows in view."""
        return sum(count for _, count in self.view_runs)

    @property
    def tokens(self) -> array[int]:
        """By row, as a fresh array of unsigned 32-bit integers."""
        values = array("I", self.token_bytes)
        if sys.byteorder == "big":
            values.byteswap()
        return values

    @property
    def filler_rows(self) -> list[int]:
        """As ``Recorder`` and ``Conversation`` have them."""
        return run_rows(self.filler_runs).tolist()

    @property
    def repeated_rows(self) -> list[int]:
        """As ``Recorder`` has them."""
        return run_rows(self.repeated_runs).tolist()

    @property
    def view_digest(self) -> ViewDigest:
        return self.events[-1].view_digest if self.events else ROOT_DIGEST

    @property
    def weights_version(self) -> int:
        return self.events[-1].weights_version if self.events else 0

    def extends(self, other: StreamContext) -> bool:
        """Whether going on from ``other`` can give this context."""
        next_token = b"" if other.pending is None else other.pending.to_bytes(4, "little")
        fed = (
            self.token_bytes
            if self.pending is None
            else self.token_bytes + self.pending.to_bytes(4, "little")
        )
        return (
            (self.namespace, self.block_tokens) == (other.namespace, other.block_tokens)
            and self.row_count >= other.row_count
            and fed.startswith(other.token_bytes + next_token)
            and self.events[: len(other.events)] == other.events
            and all(event.at_row >= other.row_count for event in self.events[len(other.events) :])
        )

    def verify(self, namespace: Namespace) -> Chain:
        """Compute everything again from tokens and events; the chain that they give.

        Raises:
            NamespaceError: the context is of another namespace.
            Corrupt: view, keys, lineage or archived spans do not follow from tokens and events, or a token is
                none of the namespace.
            TooLarge: see ``kvcomm.streams.view.require_bounded``.
        """
        if (namespace.id, namespace.block_tokens) != (self.namespace, self.block_tokens):
            raise NamespaceError(
                f"the stream is of namespace {self.namespace.hex()[:12]}, not {namespace.id.hex()[:12]}: "
                "another model, revision, precision, parallel slice or tenant cannot use its blocks"
            )
        require_bounded(self.row_count, self.events)
        try:
            token_array(() if self.pending is None else (self.pending,), namespace.vocab_size)
            chain = chain_of(namespace, self.tokens, self.events)
        except TokenError as error:
            raise Corrupt(f"the stream holds a token that its namespace does not have: {error}") from error
        if not chain.archived.keys() >= {each.span for each in self.archived}:
            raise Corrupt("the stream's archive does not follow from its tokens and events")
        archived = [chain.archived[each.span] for each in self.archived]
        for what, said, follows in (
            ("view", self.view_runs, tuple(chain.view.runs)),
            ("lineage", self.lineage, chain.lineage),
            ("table", self.keys, _keys_of(chain.blocks)),
            ("archive", [each.keys for each in self.archived], list(map(_keys_of, archived))),
            ("codec", self.codec, namespace.codec),
        ):
            if said != follows:
                raise Corrupt(f"the stream's {what} does not follow from its tokens and events")
        return chain

    def encode(self) -> bytes:
        """The canonical bytes; :meth:`decode` is the exact inverse.

        Raises:
            TooLarge: over :data:`CONTEXT_BYTES_MAX`.
        """
        policy = self.policy.encode()
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            CODECS.index(self.codec),
            0,
            self.block_tokens,
            self.namespace,
            self.lineage,
            self.view_digest,
            self.producer,
            self.weights_version,
            -1 if self.pending is None else self.pending,
            self.protected,
            self.row_count,
            len(self.events),
            len(self.turns),
            len(self.view_runs),
            len(self.filler_runs),
            len(self.repeated_runs),
            len(self.keys),
            len(self.archived),
            len(policy),
            0,
        )
        runs = (*self.view_runs, *self.filler_runs, *self.repeated_runs)
        pairs = [_PAIR.pack(*pair) for pair in (*runs, *self.turns)]
        spans = [_SPAN.pack(each.span, len(each.keys)) + b"".join(each.keys) for each in self.archived]
        events = map(_event_bytes, self.events)
        body = b"".join((head, policy, self.token_bytes, *pairs, *self.keys, *spans, *events))
        size = len(body) + _CHECKSUM.size
        if size > CONTEXT_BYTES_MAX:
            raise TooLarge(
                f"a stream of {self.row_count} rows, {len(self.events)} events and {len(self.keys)} blocks "
                f"takes {size} bytes, over the {CONTEXT_BYTES_MAX} of a record value; use larger blocks, cut "
                "more rows at a time, or begin a new stream"
            )
        return body + _CHECKSUM.pack(xxh3_64_intdigest(body))

    @staticmethod
    def decode(buffer: Buffer) -> StreamContext:
        """The context in ``buffer``, all of it.

        The result is well-formed and not damaged; only :meth:`verify` says that its keys are right.

        Raises:
            Corrupt: not a stream's context of this version, damaged, truncated, over-long, or not canonical.
        """
        data = bytes(buffer)
        if not _HEAD.size + _CHECKSUM.size <= len(data) <= CONTEXT_BYTES_MAX:
            raise Corrupt(f"a stream's context cannot have {len(data)} bytes")
        magic, version = data[:8], int.from_bytes(data[8:10], "little")
        if magic != MAGIC or version != VERSION:
            raise Corrupt(f"not a version {VERSION} stream's context (magic {magic!r}, version {version})")
        body, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
        if xxh3_64_intdigest(body) != checksum:
            raise Corrupt("the checksum of a stream's context does not match")
        context = _read(body)
        if context.encode() != data:
            raise Corrupt("a stream's context is not in canonical form")
        return context

    def _problem(self) -> str | None:
        spans = [each.span for each in self.archived]
        keys = chained(self.keys, *(each.keys for each in self.archived))
        if any(len(digest) != 32 for digest in (self.namespace, self.lineage, *spans, *keys)):
            return "namespace, lineage, spans and keys are 32 bytes each"
        if spans != sorted(set(spans)):
            return "archived spans are doubled or not sorted"
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX or self.codec not in CODECS:
            return f"blocks of {self.block_tokens} tokens in codec {self.codec!r}"
        if len(self.token_bytes) % 4 or len(self.keys) != -(-self.slot_count // self.block_tokens):
            return f"{len(self.token_bytes)} token bytes, {self.slot_count} slots and {len(self.keys)} keys"
        marked = sorted((*self.filler_runs, *self.repeated_runs))
        runs = (*self.view_runs, *marked)
        if any(not 0 <= row < row + count <= self.row_count for row, count in runs):
            return "it names rows that were not fed"
        if not _ascend(self.filler_runs) or not _ascend(self.repeated_runs):
            return "rows that are marked do not ascend"
        if any(row + count > after for (row, count), (after, _) in pairwise(marked)):
            return "rows that are marked twice"
        if self.protected < 0 or self.protected % self.block_tokens:
            return f"a protected prefix of {self.protected} slots"
        ends = [0, *chained(*self.turns), self.slot_count]
        if ends != sorted(ends) or any(start == end for start, end in self.turns):
            return "turns overlap, are empty or go past the end"
        if self.pending is not None and not (0 <= self.pending < 1 << 32 and self.row_count):
            return f"pending token {self.pending} after {self.row_count} rows"
        if any(event.at_row > self.row_count for event in self.events):
            return "an event behind the last row"
        if any(len(event.reason.encode()) > _REASON_BYTES_MAX for event in self.events):
            return f"an event's reason over {_REASON_BYTES_MAX} bytes"
        return None


def _ascend(runs: Sequence[Run]) -> bool:
    """Whether they are the one form of rows that are named once: sixteen bytes claim all rows again."""
    return all(row + count < after for (row, count), (after, _) in pairwise(runs))


def _keys_of(blocks: Sequence[ChainBlock]) -> tuple[BlockKey, ...]:
    return tuple(block.key for block in blocks)


def _event_bytes(event: Event) -> bytes:
    reason = event.reason.encode()
    head = _EVENT.pack(
        KINDS.index(event.kind),
        bool(event.span),
        len(reason),
        len(event.ranges),
        event.at_row,
        event.insert_at,
        event.weights_version,
        event.span,
        event.view_digest,
    )
    return head + reason + b"".join(_PAIR.pack(*each) for each in event.ranges)


def _read(body: bytes) -> StreamContext:
    (_, _, codec, _, block_tokens, namespace, lineage, _, producer, _, pending, protected, row_count,
     event_count, turn_count, run_count, filler_count, repeated_count, key_count, span_count, policy_bytes,
     _) = _HEAD.unpack_from(body)  # fmt: skip
    rest = _Reader(body, _HEAD.size)
    try:
        policy = rest.take(policy_bytes).decode()
        token_bytes = rest.take(4 * row_count)
        runs, filler, repeated = (
            tuple(Run(*pair) for pair in rest.pairs(count))
            for count in (run_count, filler_count, repeated_count)
        )
        turns = tuple(Turn(*pair) for pair in rest.pairs(turn_count))
        keys = rest.keys(key_count)
        spans = tuple(rest.span() for _ in range(span_count))
        events = tuple(rest.event() for _ in range(event_count))
    except UnicodeDecodeError as error:
        raise Corrupt(f"text in a stream's context: {error}") from error
    if codec >= len(CODECS) or rest.at != len(body):
        raise Corrupt("the counts of a stream's context do not match its size")
    return StreamContext(
        NamespaceId(namespace), block_tokens, token_bytes, runs, keys, lineage, events, turns, protected,
        None if pending == -1 else pending, spans, filler, repeated, policy, Incarnation(producer),
        CODECS[codec],
    )  # fmt: skip


class _Reader:
    def __init__(self, body: bytes, at: int) -> None:
        self.body, self.at = body, at

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.body):
            raise Corrupt("a stream's context is truncated")
        return self.body[self.at - count : self.at]

    def pairs(self, count: int) -> list[tuple[int, int]]:
        return [(first, second) for first, second in _PAIR.iter_unpack(self.take(_PAIR.size * count))]

    def keys(self, count: int) -> tuple[BlockKey, ...]:
        data = self.take(32 * count)
        return tuple(BlockKey(data[at : at + 32]) for at in range(0, len(data), 32))

    def span(self) -> ArchivedSpan:
        span, key_count = _SPAN.unpack(self.take(_SPAN.size))
        return ArchivedSpan(SpanId(span), self.keys(key_count))

    def event(self) -> Event:
        kind, has_span, reason_bytes, range_count, row, insert_at, weights, span, digest = _EVENT.unpack(
            self.take(_EVENT.size)
        )
        reason = self.take(reason_bytes).decode()
        ranges = tuple(SlotRange(*pair) for pair in self.pairs(range_count))
        if kind >= len(KINDS):
            raise Corrupt(f"an event of an unknown kind {kind}")
        named = SpanId(span if has_span else b"")
        return Event(KINDS[kind], row, ranges, named, insert_at, reason, weights, ViewDigest(digest))


def newest(contexts: Sequence[StreamContext]) -> StreamContext | None:
    """Of siblings that writers left: the one that extends all others.  ``None`` where they went different
    ways."""
    longest = max(
        contexts,
        key=lambda each: (each.row_count, len(each.events), each.pending is not None),
        default=None,
    )
    if longest is None or not all(longest.extends(each) for each in contexts):
        return None
    return longest
