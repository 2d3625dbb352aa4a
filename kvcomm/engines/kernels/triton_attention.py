"""The Triton kernels of ``attention``; imported there when they are first run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def attend_part(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    tables,
    counts,
    parts,
    weights,
    scale,
    table_stride,
    table_step,
    count_stride,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of the slots of one sequence, for the query heads of one K/V head.

    The parts are equal, whatever the sequence's length: ``counts`` are read here, so that one recorded launch
    serves every length.
    """
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + sequence * count_stride)
    tiles = (count + TILE - 1) // TILE
    each = (tiles + PARTS - 1) // PARTS
    first = part * each * TILE
    end = tl.minimum(first + each * TILE, count)

    row = tl.arange(0, GROUP_ROWS)
    dim = tl.arange(0, DIM)
    query_heads = sequence * KV_HEADS * GROUP + head * GROUP + row
    there = row < GROUP
    query = tl.load(queries + query_heads[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0)

    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    sums = tl.zeros([GROUP_ROWS, DIM], tl.float32)
    for start in range(first, end, TILE):
        slots = start + tl.arange(0, TILE)
        inside = slots < end
        at = tables + sequence * table_stride + (slots // BLOCK_TOKENS) * table_step
        blocks = tl.load(at, mask=inside, other=0).to(tl.int64)
        places = blocks * BLOCK_STRIDE + head * HEAD_STRIDE + (slots % BLOCK_TOKENS) * DIM
        key = tl.load(keys + places[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrunk = tl.exp(best - higher)
        probable = tl.exp(scores - higher[:, None])
        total = total * shrunk + tl.sum(probable, 1)
        value = tl.load(values + places[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        taken = tl.dot(probable.to(value.dtype), value, input_precision=PRECISION)
        sums = sums * shrunk[:, None] + taken
        best = higher

    out = query_heads * PARTS + part
    mean = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(parts + out[:, None] * DIM + dim[None, :], mean, mask=there[:, None])
    tl.store(weights + out, tl.where(total > 0, best + tl.log(total), float("-inf")), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def join_parts(  # type: ignore[no-untyped-def]
    parts,
    weights,
    out,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The parts of one query head, weighted by what they saw."""
    head = tl.program_id(0)
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
    weight = tl.load(weights + head * PARTS + part)
    weight = tl.exp(weight - tl.max(weight, 0))
    weight = weight / tl.sum(weight, 0)
    mean = tl.load(parts + (head * PARTS + part)[:, None] * DIM + dim[None, :])
    tl.store(out + head * DIM + dim, tl.sum(mean * weight[:, None], 0))
