"""``MemoryKV``: a client that keeps copies in a dict and verifies them as the real one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcomm.block import (
    HEADER_BYTES,
    NO_PARENT,
    BlockHeader,
    BlockKey,
    Buffer,
    Incarnation,
    block_keys,
    header_for,
    verify_copy,
)
from kvcomm.errors import Corrupt, Unavailable
from kvcomm.namespace import Namespace
from kvcomm.tier import Block


@dataclass
class MemoryHit:
    token_count: int
    blocks: list[Block]


@dataclass
class MemoryStored:
    stored: int = 0
    present: int = 0
    failed: int = 0


@dataclass
class MemoryKV:
    verify: bool = True
    """``False`` = serve whatever is there: the negative control."""
    reachable: bool = True
    copies: dict[BlockKey, bytearray] = field(default_factory=dict)
    fetch_count: int = 0
    refused_count: int = 0

    def fetch(self, namespace: Namespace, tokens: Sequence[int], *, deadline_s: float) -> MemoryHit:
        if not self.reachable:
            raise Unavailable("nobody answers")
        self.fetch_count += 1
        hit = MemoryHit(0, [])
        for key in block_keys(namespace, tokens):
            copy = self.copies.get(key)
            if copy is None:
                break
            try:
                header = verify_copy(copy, key) if self.verify else BlockHeader.unpack(copy)
            except Corrupt:
                self.refused_count += 1
                del self.copies[key]
                break
            hit.blocks.append(Block(header, memoryview(bytes(copy)), "l2"))
            hit.token_count += namespace.block_tokens
        return hit

    def publish(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        blocks: Sequence[Buffer],
        *,
        first_block: int,
        deadline_s: float,
    ) -> MemoryStored:
        if not self.reachable:
            raise Unavailable("nobody answers")
        result, keys = MemoryStored(), block_keys(namespace, tokens)
        for index, payload in enumerate(blocks, first_block):
            if keys[index] in self.copies:
                result.present += 1
                continue
            header = header_for(
                namespace,
                keys[index],
                keys[index - 1] if index else NO_PARENT,
                memoryview(payload),
                logical_start=index * namespace.block_tokens,
                producer=Incarnation(1),
            )
            self.copies[keys[index]] = bytearray(header.pack() + bytes(payload))
            result.stored += 1
        return result

    def flip(self, key: BlockKey, offset: int = HEADER_BYTES + 4, mask: int = 0xFF) -> None:
        self.copies[key][offset] ^= mask

    def scramble(self, layers: int) -> None:
        """Reverse the order of the layers in every payload, leaving headers and checksums alone.

        (Exchanging whole blocks would not do: the keys carry their rotation, and softmax does not mind the
        order of rows.)
        """
        for copy in self.copies.values():
            width = (len(copy) - HEADER_BYTES) // layers
            parts = [copy[at : at + width] for at in range(HEADER_BYTES, len(copy), width)]
            copy[HEADER_BYTES:] = b"".join(reversed(parts))
