"""``gather`` and ``scatter``: many blocks between a paged cache and their payloads, in one launch.

Payloads are byte tensors, or memory that no tensor owns (``addresses``): a pool's slots in GPU memory,
mapped from another process, are scattered straight into an engine's pages without a copy in between.

The copies are of raw words, whatever the dtype: bit for bit.  The launch has one program for each (block,
page, layer, K or V), which moves ``heads * page_tokens`` rows; on the payload's side they lie next to each
other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from kvcomm.engines.kernels.layouts import PagedLayout
from kvcomm.errors import PayloadError

_ALIGNMENT = 16
"""From here on a thread moves 16 bytes at a time."""
_PROGRAM_WORDS_MAX = 8192


def gather(layout: PagedLayout, pages: torch.Tensor, payloads: torch.Tensor) -> None:
    """Copy blocks from the cache to their payloads.  On a GPU this is enqueued in the current stream.

    Args:
        pages: integers ``[block, pages of a block]``: where the engine keeps each block's tokens, in order.
        payloads: uint8 ``[block, block bytes]``, rows contiguous, on the cache's device.

    Raises:
        PayloadError: the shapes do not fit, or a page is not in the cache (seen only for ``pages`` on the
        host).
    """
    _check(layout, pages, payloads)
    if layout.device.type == "cpu":
        gather_plain(layout, pages, payloads)
    else:
        _move(layout, pages, payloads, True)


def scatter(layout: PagedLayout, pages: torch.Tensor, payloads: torch.Tensor) -> None:
    """Copy payloads into the cache; the same arguments and errors as :func:`gather`."""
    _check(layout, pages, payloads)
    if layout.device.type == "cpu":
        scatter_plain(layout, pages, payloads)
    else:
        _move(layout, pages, payloads, False)


def scatter_from(layout: PagedLayout, pages: torch.Tensor, addresses: Sequence[int]) -> None:
    """Copy payloads at ``addresses`` (GPU memory that the cache's GPU can reach, one a block) into the cache.

    They must stay what they are until the current stream has come past this.
    """
    _check_pages(layout, pages, len(addresses))
    _move(layout, pages, addresses, False)


def gather_to(layout: PagedLayout, pages: torch.Tensor, addresses: Sequence[int]) -> None:
    """Copy blocks to payloads at ``addresses``; see :func:`scatter_from`."""
    _check_pages(layout, pages, len(addresses))
    _move(layout, pages, addresses, True)


def gather_plain(layout: PagedLayout, pages: torch.Tensor, payloads: torch.Tensor) -> None:
    """:func:`gather` in plain torch, on any device: what the kernel is held against."""
    for keys_and_values, rows in _sides(layout, pages, payloads):
        for states, target in zip(keys_and_values, rows, strict=True):
            taken = states[pages.to(states.device).long()]  # [block, page, token, head, dim bytes]
            target.copy_(taken.permute(0, 3, 1, 2, 4))


def scatter_plain(layout: PagedLayout, pages: torch.Tensor, payloads: torch.Tensor) -> None:
    """:func:`scatter` in plain torch, on any device."""
    for keys_and_values, rows in _sides(layout, pages, payloads):
        for states, source in zip(keys_and_values, rows, strict=True):
            states[pages.to(states.device).long()] = source.permute(0, 2, 3, 1, 4)


def _sides(layout: PagedLayout, pages: torch.Tensor, payloads: torch.Tensor) -> list[tuple[Any, Any]]:
    """Of each layer: (K, V) as bytes ``[page, token, head, row]``, and their places in the payloads as
    ``[block, head, page, token, row]``."""
    count, per_block = pages.shape
    shape = (count, layout.layers, 2, layout.heads, per_block, layout.page_tokens, layout.row_bytes)
    rows = payloads.view(shape)
    return [
        ([states.view(torch.uint8) for states in pair], [rows[:, layer, 0], rows[:, layer, 1]])
        for layer, pair in enumerate(layout.tensors)
    ]


def _check(layout: PagedLayout, pages: torch.Tensor, payloads: torch.Tensor) -> None:
    _check_pages(layout, pages, payloads.shape[0])
    expected = layout.block_bytes(pages.shape[1])
    if payloads.dtype != torch.uint8 or payloads.dim() != 2 or payloads.shape[1] != expected:
        raise PayloadError(
            f"payloads must be uint8 [{pages.shape[0]}, {expected}], not {payloads.dtype} "
            f"{list(payloads.shape)}"
        )
    if payloads.stride(1) != 1 or payloads.device != layout.device:
        raise PayloadError("a payload's bytes must be contiguous, and on the cache's device")


def _check_pages(layout: PagedLayout, pages: torch.Tensor, count: int) -> None:
    if pages.dim() != 2 or pages.shape[0] != count or pages.dtype not in (torch.int32, torch.int64):
        raise PayloadError(f"pages must be integers [{count}, pages of a block], not {list(pages.shape)}")
    if pages.device.type == "cpu" and pages.numel():
        first, last = int(pages.min()), int(pages.max())
        if first < 0 or last >= layout.page_count:
            raise PayloadError(f"pages [{first}, {last}] are not all in [0, {layout.page_count})")


def _move(
    layout: PagedLayout, pages: torch.Tensor, payloads: torch.Tensor | Sequence[int], to_payload: bool
) -> None:
    """``payloads``: rows of a tensor, or addresses."""
    count, per_block = pages.shape
    if not count or not per_block:
        return
    if isinstance(payloads, torch.Tensor):
        first, stride = payloads.data_ptr(), payloads.stride(0)
        table, alignment = None, math.gcd(layout.alignment, first, stride)
    else:
        first = stride = 0
        table = torch.tensor(payloads, dtype=torch.int64, device=layout.device)
        alignment = math.gcd(layout.alignment, *payloads)
    word_bytes = min(alignment, 8)
    row_words = layout.row_bytes // word_bytes
    tile_words = layout.heads * layout.page_tokens * row_words
    program_words = min(_PROGRAM_WORDS_MAX, 1 << (tile_words - 1).bit_length())
    planes = 2 * layout.layers
    reach = layout.page_tokens * layout.token_stride + layout.heads * layout.head_stride + layout.row_bytes
    words_inside = max(reach // word_bytes, per_block * tile_words)
    grid = (count * per_block * planes, -(-tile_words // program_words))
    on_gpu = layout.device.type == "cuda"  # else it is Triton's interpreter, in tests
    with torch.cuda.device(layout.device) if on_gpu else nullcontext():
        _kernel()[grid](
            layout.bases,
            table,
            first,
            stride,
            pages.to(layout.device).contiguous(),  # often columns of an engine's wider block table
            PLANES=planes,
            WORD_BYTES=word_bytes,
            ALIGNED=alignment == _ALIGNMENT,
            HEADS=layout.heads,
            PAGE_TOKENS=layout.page_tokens,
            ROW_WORDS=row_words,
            PAGES_A_BLOCK=per_block,
            PAGE_STRIDE=layout.page_stride // word_bytes,
            TOKEN_STRIDE=layout.token_stride // word_bytes,
            HEAD_STRIDE=layout.head_stride // word_bytes,
            PROGRAM_WORDS=program_words,
            TO_PAYLOAD=to_payload,
            WIDE=words_inside + program_words >= 1 << 31,
            num_warps=8 if program_words >= 2048 else 4,
        )


@cache
def _kernel() -> Any:
    """Compiled by Triton once for each layout; raises ``ImportError`` without it."""
    from kvcomm.engines.kernels.triton_paging import move

    return move
