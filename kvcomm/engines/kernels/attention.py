"""``attend_pages``: one row of each of several sequences attends its own pages, where they lie.

No copy of K/V is made, neither in one piece nor for the query heads that share a K/V head: a cut costs what
its numbers cost.  The slots of a sequence are split between programs, whose results are joined by the weight
of what each saw (flash decoding: T. Dao et al., "Flash-Decoding for long-context inference", 2023).
"""

from __future__ import annotations

import torch

PARTS = 16
"""Programs that share a sequence: together with sequences and K/V heads, enough to fill a GPU."""
_TILE = 64
_DOT_ROWS_MIN = 16
"""Tensor cores multiply as many rows."""


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one row a sequence over all its slots.

    Args:
        query: ``[sequence, head, head dim]``, contiguous; neighbouring heads share a K/V head.
        keys: ``[block, K/V head, token, head dim]``, of the same dtype; blocks contiguous.
        values: like ``keys``, with the same strides.
        tables: int32 ``[sequence, blocks]``; block of each run of slots, any number behind the last one.
        counts: int32 ``[sequence]``, at least 1.

    Returns ``[sequence, head, head dim]`` of the query's dtype.

    Raises:
        ValueError: see :func:`takes`.
    """
    if query.device.type == "cpu":
        return attend_plain(query, keys, values, tables, counts, scale)
    return _attend(query, keys, values, tables, counts, scale)


def takes(head_dim: int, heads: int, kv_heads: int) -> bool:
    """Whether the kernel computes this shape: powers of two fill its tiles."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0 and heads % kv_heads == 0


def attend_plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same in plain torch, a sequence after the other."""
    out = torch.empty_like(query)
    for at, count in enumerate(counts.tolist()):
        blocks = tables[at, : -(-count // keys.shape[2])].long()
        ours = [states[blocks].transpose(0, 1).flatten(1, 2)[:, :count] for states in (keys, values)]
        key, value = (states.repeat_interleave(query.shape[1] // keys.shape[1], 0) for states in ours)
        scores = (query[at, :, None].float() @ key.float().transpose(1, 2)) * scale
        out[at] = (scores.softmax(-1) @ value.float())[:, 0].to(query.dtype)
    return out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    from kvcomm.engines.kernels.triton_attention import attend_part, join_parts

    sequences, heads, dim = query.shape
    kv_heads, block_tokens = keys.shape[1:3]
    if not takes(dim, heads, kv_heads) or keys.stride() != values.stride():
        raise ValueError(f"the kernel has no tiles for {heads} heads of {dim} over {kv_heads}")
    group = heads // kv_heads
    parts = torch.empty(sequences, heads, PARTS, dim, dtype=torch.float32, device=query.device)
    weights = torch.empty(sequences, heads, PARTS, dtype=torch.float32, device=query.device)
    attend_part[(sequences, kv_heads, PARTS)](
        query, keys, values, tables, counts, parts, weights, scale,
        tables.stride(0), tables.stride(1), counts.stride(0),
        BLOCK_STRIDE=keys.stride(0), HEAD_STRIDE=keys.stride(1), KV_HEADS=kv_heads, GROUP=group,
        GROUP_ROWS=max(_DOT_ROWS_MIN, 1 << (group - 1).bit_length()), BLOCK_TOKENS=block_tokens, DIM=dim,
        TILE=_TILE, PARTS=PARTS, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    out = torch.empty_like(query)
    join_parts[(sequences * heads,)](parts, weights, out, DIM=dim, PARTS=PARTS)
    return out
