"""Runs the attention kernels in Triton's interpreter (``TRITON_INTERPRET=1``) against plain torch."""

import sys

import torch

from kvcomm.engines.kernels.attention import _attend, attend_plain
from tests.kvcomm.engines.kernels.test_attention import SHAPES, case


def main() -> None:
    for number, (heads, kv_heads, dim, block_tokens, kind) in enumerate(SHAPES):
        dtype = (
            torch.float16 if kind == torch.bfloat16 else kind
        )  # the interpreter multiplies bf16 as integers
        given = case(number, heads, kv_heads, dim, block_tokens, dtype)
        mine, plain = _attend(*given), attend_plain(*given)
        close = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(mine.float(), plain.float(), atol=close, rtol=close)
    sys.stdout.write(f"{len(SHAPES)} shapes\n")


if __name__ == "__main__":
    main()
