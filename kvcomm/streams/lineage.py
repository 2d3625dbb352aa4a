"""Names of K/V that was computed under a compacted view.

Behind an event the same tokens at the same positions have *other* K/V than without it, for they saw another
past.  So every event changes the **lineage**, a digest that goes into the key of each block that is filled
from then on (``kvcomm.block.block_keys``)::

    lineage' = H(lineage, everything fed so far, the event)

Everything fed so far is needed: two rollouts can cut the same slots at the same row after different tokens,
and what they keep has seen what they dropped.  With it, equal lineages mean equal histories, whoever had
them, so forks and siblings of one rollout share blocks and nobody else does.  Blocks keep the key that they
got when they were filled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcomm.block import BlockKey, little_endian, token_array
from kvcomm.streams.events import Event, SpanId

_LINEAGE_DOMAIN = b"kvcomm.streams.lineage/1\x00"
_SPAN_DOMAIN = b"kvcomm.streams.span/1\x00"


class History:
    """The digest of the tokens fed so far."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def feed(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Raises ``TokenError`` for an id out of range; nothing is added then."""
        self._digest.update(little_endian(token_array(tokens, vocab_size)))

    def digest(self) -> bytes:
        return self._digest.digest()

    def copy(self) -> History:
        other = History()
        other._digest = self._digest.copy()
        return other


def next_lineage(before: bytes, history: bytes, event: Event) -> bytes:
    """32 bytes.  A fork changes nothing: the child's blocks are its parent's."""
    if event.kind == "fork":
        return before
    return hashlib.sha256(_LINEAGE_DOMAIN + before + history + event.content()).digest()


def span_id(lineage: bytes, history: bytes, keys: Sequence[BlockKey]) -> SpanId:
    """Of rows that are archived: by content, so that engines which count alike never restore each other's."""
    return SpanId(hashlib.sha256(_SPAN_DOMAIN + lineage + history + b"".join(keys)).digest())
