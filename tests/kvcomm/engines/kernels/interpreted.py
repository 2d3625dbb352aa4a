"""Runs the Triton kernel in Triton's interpreter (``TRITON_INTERPRET=1``) against plain torch."""

import sys

import torch

from kvcomm.engines.kernels import paging
from kvcomm.engines.kernels.layouts import vllm_layout
from tests.kvcomm.engines.kernels.test_paging import AXES, engine_cache, pages_of


def main() -> None:
    torch.manual_seed(1)
    checked = 0
    for axes in AXES:
        for dtype, dim in ((torch.bfloat16, 8), (torch.bfloat16, 5), (torch.float8_e4m3fn, 12)):
            for per_block in (1, 2):
                caches, _ = engine_cache(axes, dtype, dim=dim)
                layout = vllm_layout(caches, axes=axes)
                pages = pages_of(3, per_block)
                plain = torch.zeros((3, layout.block_bytes(per_block)), dtype=torch.uint8)
                mine = torch.full_like(plain, 0xAA)
                paging.gather_plain(layout, pages, plain)
                paging._move(layout, pages, mine, True)
                assert torch.equal(mine, plain), (axes, dtype, dim, per_block, "gather")
                for cache in caches:
                    cache.view(torch.uint8).zero_()
                paging._move(layout, pages, [row.data_ptr() for row in mine], False)
                again = torch.zeros_like(plain)
                paging.gather_plain(layout, pages, again)
                assert torch.equal(again, plain), (axes, dtype, dim, per_block, "scatter")
                checked += 1
    pages_of_a_wider_table()
    rows_far_from_each_other()
    sys.stdout.write(f"{checked} layouts\n")


def pages_of_a_wider_table() -> None:
    """An engine's block table has a row for each sequence, and blocks are a part of it."""
    caches, _ = engine_cache("KPTHD")
    layout = vllm_layout(caches)
    table = torch.randperm(8).reshape(2, 4)
    for pages in (table[:, :3], table.T):
        plain = torch.zeros((pages.shape[0], layout.block_bytes(pages.shape[1])), dtype=torch.uint8)
        mine = torch.zeros_like(plain)
        paging.gather_plain(layout, pages, plain)
        paging._move(layout, pages, mine, True)
        assert torch.equal(mine, plain), pages


def rows_far_from_each_other() -> None:
    """Heads that are gigabytes apart, of which only the pages that are used have memory behind them."""
    stride = (1 << 30) + 1
    memory = torch.empty(3 * stride + 64, dtype=torch.uint8)
    states = memory.as_strided((2, 2, 4, 5), (10, 5, stride, 1))  # [page, token, head, dim]
    states.copy_(torch.randint(0, 256, states.shape, dtype=torch.uint8))
    for axes, far in (("HKPTD", states), ("TKPHD", states.transpose(1, 2))):
        layout = vllm_layout([far.unsqueeze(0).expand(2, -1, -1, -1, -1).permute(order_of(axes))], axes=axes)
        pages = torch.tensor([[1], [0]])
        plain = torch.zeros((2, layout.block_bytes()), dtype=torch.uint8)
        mine = torch.zeros_like(plain)
        paging.gather_plain(layout, pages, plain)
        paging._move(layout, pages, mine, True)
        assert torch.equal(mine, plain), axes


def order_of(axes: str) -> list[int]:
    return ["KPTHD".index(axis) for axis in axes]


if __name__ == "__main__":
    main()
