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
    sys.stdout.write(f"{checked} layouts\n")


if __name__ == "__main__":
    main()
