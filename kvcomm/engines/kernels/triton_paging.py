"""The Triton kernel of ``paging``; imported there when it is first run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def move(  # type: ignore[no-untyped-def]
    bases,
    table,
    first,
    stride,
    pages,
    PLANES: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PAGES_A_BLOCK: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PROGRAM_WORDS: tl.constexpr,
    TO_PAYLOAD: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One (layer, K or V) of one page of one block.

    ``bases`` int64 [layer * 2] are addresses; those of the payloads are ``table``, int64 [block], or,
    without it, ``first + block * stride``; ``pages`` integers [block,
    page]. Strides are in words; ``WIDE`` = those inside a page reach further than 32 bits.
    """
    plane = tl.program_id(0) % PLANES  # next to each other in a payload, so neighbours in time, too
    page_of_block = (tl.program_id(0) // PLANES) % PAGES_A_BLOCK
    block = tl.program_id(0) // (PLANES * PAGES_A_BLOCK)
    word = (
        tl.int64
        if WORD_BYTES == 8
        else tl.int32
        if WORD_BYTES == 4
        else tl.int16
        if WORD_BYTES == 2
        else tl.int8
    )
    base = tl.load(bases + plane)
    if table is None:
        payload = first + block.to(tl.int64) * stride
    else:
        payload = tl.load(table + block)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        payload = tl.multiple_of(payload, 16)
    base = base.to(tl.pointer_type(word))
    payload = payload.to(tl.pointer_type(word))
    page = tl.load(pages + block * PAGES_A_BLOCK + page_of_block).to(tl.int64)

    TILE_WORDS: tl.constexpr = HEADS * PAGE_TOKENS * ROW_WORDS
    tile = tl.program_id(1)
    if WIDE:
        tile = tile.to(tl.int64)  # and with it all that is made from it; 32 bits are faster
    at = tile * PROGRAM_WORDS + tl.arange(0, PROGRAM_WORDS)
    inside = at < TILE_WORDS
    in_row = at % ROW_WORDS
    token = (at // ROW_WORDS) % PAGE_TOKENS
    head = at // (ROW_WORDS * PAGE_TOKENS)

    engine = base + page * PAGE_STRIDE + (token * TOKEN_STRIDE + head * HEAD_STRIDE + in_row)
    block_tokens: tl.constexpr = PAGE_TOKENS * PAGES_A_BLOCK
    first = plane.to(tl.int64) * (HEADS * block_tokens * ROW_WORDS) + page_of_block.to(tl.int64) * (
        PAGE_TOKENS * ROW_WORDS
    )
    mine = payload + first + (head * (block_tokens * ROW_WORDS) + token * ROW_WORDS + in_row)
    if TO_PAYLOAD:
        tl.store(mine, tl.load(engine, mask=inside), mask=inside)
    else:
        tl.store(engine, tl.load(mine, mask=inside), mask=inside)
