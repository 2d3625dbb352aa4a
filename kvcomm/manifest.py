"""``Manifest``: one agent's context, as the ordered block keys by which anybody can fetch it.

A manifest joins the two planes: the blocks it names are immutable and found by key, and the manifest itself
is a small value that a record points to ("what session S of agent A looks like now").  It is immutable too:
:meth:`Manifest.append` returns the next one and hashes only what is new.

It covers one whole context from its first token, computed under one lineage.  Tokens whose block is not full
yet have no key; they are carried along so that a follower knows the rest of the text and the next append
continues the chain.

The encoding is deterministic and versioned, all integers little-endian::

    0    magic 8s = "KVCMANIF"      80   token_count u32
    8    version u16                84   run_count u32
    10   reserved u16 (zero)        88   runs, 12 bytes each: first_token u32, position u64
    12   block_tokens u32           ..   tokens, u32 each
    16   namespace 32s              ..   keys, 32 bytes each: token_count // block_tokens of them
    48   lineage 32s                ..   checksum u64, xxh3-64 of everything before it
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvcomm.block import (
    NO_PARENT,
    POSITION_MAX,
    ROOT_LINEAGE,
    BlockKey,
    Buffer,
    block_keys,
    little_endian,
    token_array,
)
from kvcomm.errors import Corrupt, ManifestError, NamespaceError, TokenError, TooLarge
from kvcomm.namespace import BLOCK_TOKENS_MAX, Namespace, NamespaceId
from kvcomm.wire.messages import VALUE_BYTES_MAX

MAGIC = b"KVCMANIF"
VERSION = 1
MANIFEST_BYTES_MAX = VALUE_BYTES_MAX
"""A manifest must fit a record's value: about 174,000 tokens in blocks of 16."""

_HEAD = struct.Struct("<8sHHI32s32sII")
_RUN = struct.Struct("<IQ")
_CHECKSUM = struct.Struct("<Q")
_TOKEN_BYTES, _KEY_BYTES = 4, 32


class Run(NamedTuple):
    """From token ``first_token`` on, logical positions follow one by one from ``position``."""

    first_token: int
    position: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One agent's context.  Equal contexts have equal manifests and equal bytes, however they were built up.

    Raises:
        ManifestError: the parts contradict each other.
    """

    namespace: NamespaceId
    """Of the blocks; tenant included, so a manifest is of no use to another tenant."""
    block_tokens: int
    lineage: bytes
    """32-byte digest of the compaction events under which every block here was computed."""
    runs: tuple[Run, ...]
    """Logical positions; the first run starts at token 0, each later one where positions jump."""
    token_bytes: bytes
    """Every token id, u32 little-endian, those of the partial last block included; see :attr:`tokens`."""
    keys: tuple[BlockKey, ...]
    """One for each full block, in order."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ManifestError(problem)

    @staticmethod
    def empty(namespace: Namespace, *, logical_start: int = 0, lineage: bytes = ROOT_LINEAGE) -> Manifest:
        """A context without tokens; its first token will stand at ``logical_start``."""
        return Manifest(namespace.id, namespace.block_tokens, lineage, (Run(0, logical_start),), b"", ())

    @property
    def token_count(self) -> int:
        return len(self.token_bytes) // _TOKEN_BYTES

    @property
    def covered_tokens(self) -> int:
        """Tokens that :attr:`keys` stand for; the rest belong to the partial last block."""
        return len(self.keys) * self.block_tokens

    @property
    def tokens(self) -> array[int]:
        """Every token id, as a fresh array of unsigned 32-bit integers."""
        return self._tokens_from(0)

    @property
    def tail(self) -> array[int]:
        """The tokens after the last full block, fewer than ``block_tokens``."""
        return self._tokens_from(self.covered_tokens)

    @property
    def next_position(self) -> int:
        """Logical position of the token that would be appended next."""
        last = self.runs[-1]
        return last.position + self.token_count - last.first_token

    def position(self, index: int) -> int:
        """Logical position of token ``index``."""
        run = self.runs[bisect_right(self.runs, index, key=lambda each: each.first_token) - 1]
        return run.position + index - run.first_token

    def extends(self, other: Manifest) -> bool:
        """Whether appending something (or nothing) to ``other`` can give this context."""
        # Runs have one form for the same positions, so those that begin inside ``other`` are all of its own.
        within = tuple(run for run in self.runs if run.first_token < other.token_count)
        return (
            (self.namespace, self.lineage) == (other.namespace, other.lineage)
            and self.token_bytes.startswith(other.token_bytes)
            and self.keys[: len(other.keys)] == other.keys
            and (not other.token_count or within == other.runs)
        )

    def append(self, tokens: Sequence[int], namespace: Namespace, *, position: int | None = None) -> Manifest:
        """This context and then ``tokens``; keys continue from the last full block.

        Args:
            tokens: ids in ``[0, namespace.vocab_size)``.
            namespace: the one that the manifest was made for.
            position: logical position of ``tokens[0]`` where it does not follow the last one.

        Raises:
            NamespaceError: ``namespace`` is another one.
            TokenError: an id or the position is out of range.
        """
        self._require_namespace(namespace)
        added = token_array(tokens, namespace.vocab_size)
        if not added:
            return self
        runs = self._runs_then(self.next_position if position is None else position, len(added))
        fresh = _chain(namespace, runs, self.covered_tokens, self.tail + added, self._tip, self.lineage)
        token_bytes = self.token_bytes + little_endian(added)
        return replace(self, runs=runs, token_bytes=token_bytes, keys=(*self.keys, *fresh))

    def verify(self, namespace: Namespace) -> None:
        """Recompute the whole chain of keys.

        Raises:
            NamespaceError: the manifest was made for another namespace.
            Corrupt: the keys do not follow from the tokens, positions and lineage, or a token is not one of
                the namespace's vocabulary.
        """
        self._require_namespace(namespace)
        try:
            keys = _chain(namespace, self.runs, 0, self.tokens, NO_PARENT, self.lineage)
        except TokenError as error:
            raise Corrupt(f"manifest holds a token that its namespace does not have: {error}") from error
        if tuple(keys) != self.keys:
            at = next(index for index, key in enumerate(keys) if key != self.keys[index])
            raise Corrupt(f"manifest key {at} does not follow from the tokens before it")

    def encode(self) -> bytes:
        """The canonical bytes; :meth:`decode` is the exact inverse.

        Raises:
            TooLarge: over :data:`MANIFEST_BYTES_MAX`.
        """
        size = _encoded_bytes(len(self.runs), self.token_count, self.block_tokens)
        if size > MANIFEST_BYTES_MAX:
            raise TooLarge(
                f"a manifest of {self.token_count} tokens in {len(self.keys)} blocks takes {size} bytes, "
                f"over the {MANIFEST_BYTES_MAX} of a record value; use larger blocks or a new session"
            )
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            0,
            self.block_tokens,
            self.namespace,
            self.lineage,
            self.token_count,
            len(self.runs),
        )
        runs = b"".join(_RUN.pack(*run) for run in self.runs)
        body = b"".join((head, runs, self.token_bytes, *self.keys))
        return body + _CHECKSUM.pack(xxh3_64_intdigest(body))

    @staticmethod
    def decode(buffer: Buffer) -> Manifest:
        """The manifest in ``buffer``, all of it.

        The result is well-formed and not damaged; only :meth:`verify` says that its keys are right.

        Raises:
            Corrupt: not a manifest of this version, damaged, truncated, over-long, or not in canonical form.
        """
        data = bytes(buffer)
        if not _HEAD.size + _CHECKSUM.size <= len(data) <= MANIFEST_BYTES_MAX:
            raise Corrupt(f"a manifest cannot have {len(data)} bytes")
        magic, version, reserved, block_tokens, namespace, lineage, token_count, run_count = (
            _HEAD.unpack_from(data)
        )
        if magic != MAGIC or version != VERSION:
            raise Corrupt(f"not a version {VERSION} manifest (magic {magic!r}, version {version})")
        body, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
        if xxh3_64_intdigest(body) != checksum:
            raise Corrupt("manifest checksum does not match")
        if reserved or not block_tokens or len(data) != _encoded_bytes(run_count, token_count, block_tokens):
            raise Corrupt("manifest counts do not match its size")
        tokens_at = _HEAD.size + run_count * _RUN.size
        keys_at = tokens_at + token_count * _TOKEN_BYTES
        try:
            return Manifest(
                NamespaceId(namespace),
                block_tokens,
                lineage,
                tuple(Run(*run) for run in _RUN.iter_unpack(data[_HEAD.size : tokens_at])),
                data[tokens_at:keys_at],
                tuple(BlockKey(body[at : at + _KEY_BYTES]) for at in range(keys_at, len(body), _KEY_BYTES)),
            )
        except ManifestError as error:
            raise Corrupt(f"manifest is not well-formed: {error}") from error

    @property
    def _tip(self) -> BlockKey:
        return self.keys[-1] if self.keys else NO_PARENT

    def _tokens_from(self, index: int) -> array[int]:
        values = array("I", self.token_bytes[index * _TOKEN_BYTES :])
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def _require_namespace(self, namespace: Namespace) -> None:
        if namespace.id != self.namespace or namespace.block_tokens != self.block_tokens:
            raise NamespaceError(
                f"the manifest is of namespace {self.namespace.hex()[:12]}, not {namespace.id.hex()[:12]}: "
                "another model, revision, precision, parallel slice or tenant cannot use its blocks"
            )

    def _runs_then(self, position: int, count: int) -> tuple[Run, ...]:
        if not 0 <= position <= POSITION_MAX - count:
            raise TokenError(
                f"position {position} is not in [0, 2**63) together with the {count} tokens from it on"
            )
        if position == self.next_position:
            return self.runs
        if not self.token_bytes:
            return (Run(0, position),)
        return (*self.runs, Run(self.token_count, position))

    def _problem(self) -> str | None:
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            return f"block_tokens must be in [1, {BLOCK_TOKENS_MAX}]"
        if len(self.namespace) != 32 or len(self.lineage) != 32 or any(len(key) != 32 for key in self.keys):
            return "namespace, lineage and keys must be 32 bytes each"
        if len(self.token_bytes) % _TOKEN_BYTES or len(self.keys) != self.token_count // self.block_tokens:
            return f"{len(self.token_bytes)} token bytes do not go with {len(self.keys)} keys"
        return self._run_problem()

    def _run_problem(self) -> str | None:
        if not self.runs or self.runs[0].first_token != 0:
            return "the first run must start at token 0"
        if len(self.runs) > 1 and self.runs[-1].first_token >= self.token_count:
            return "the last run holds no token"
        for run, span in zip(self.runs, _spans(self.runs, self.token_count), strict=True):
            if not 0 <= run.position <= POSITION_MAX - len(span):
                return "positions must be in [0, 2**63)"
        for run, following in pairwise(self.runs):
            length = following.first_token - run.first_token
            if length <= 0 or following.position == run.position + length:
                return "runs must be in order, and one that continues the run before it is part of that run"
        return None


def _encoded_bytes(run_count: int, token_count: int, block_tokens: int) -> int:
    fixed = _HEAD.size + _CHECKSUM.size + run_count * _RUN.size
    return fixed + token_count * _TOKEN_BYTES + token_count // block_tokens * _KEY_BYTES


def _spans(runs: Sequence[Run], token_count: int) -> list[range]:
    """The logical positions of each run's tokens."""
    ends = [run.first_token for run in runs[1:]] + [token_count]
    lengths = [end - run.first_token for run, end in zip(runs, ends, strict=True)]
    return [range(run.position, run.position + length) for run, length in zip(runs, lengths, strict=True)]


def _chain(
    namespace: Namespace,
    runs: Sequence[Run],
    first: int,
    tokens: array[int],
    parent: BlockKey,
    lineage: bytes,
) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``, which start at token ``first`` of the context."""
    whole = zip(runs, _spans(runs, first + len(tokens)), strict=True)
    rests = [span[max(0, first - run.first_token) :] for run, span in whole]
    spans = [span for span in rests if span]
    if len(spans) == 1:
        return block_keys(namespace, tokens, parent=parent, logical_start=spans[0].start, lineage=lineage)
    positions = array("q", chain.from_iterable(spans))
    return block_keys(namespace, tokens, parent=parent, positions=positions, lineage=lineage)
