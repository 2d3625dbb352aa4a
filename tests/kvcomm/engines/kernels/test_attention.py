"""Attention over pages: the plain form against torch's own, the kernel against the plain form."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from kvcomm.engines.kernels.attention import attend_pages, takes

ROOT = Path(__file__).parents[4]
COUNTS = (1, 15, 16, 17, 64, 130, 1_100)
"""Slots of the sequences: parts without any, tiles that are full, and one more."""
SHAPES = (
    (4, 2, 16, 16, torch.float32),
    (4, 4, 32, 16, torch.bfloat16),
    (12, 2, 64, 8, torch.float16),
    (2, 1, 128, 128, torch.bfloat16),
    (3, 1, 16, 1, torch.float32),
)
"""Heads, K/V heads, head dim, block tokens, dtype."""


def case(
    seed: int, heads: int, kv_heads: int, dim: int, block_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Sequences of :data:`COUNTS` slots in blocks in any order; the rest of the memory is not a number."""
    torch.manual_seed(seed)
    needed = [-(-count // block_tokens) for count in COUNTS]
    states = torch.full((2, sum(needed) + 3, kv_heads, block_tokens, dim), torch.nan).to(dtype)
    order = torch.randperm(sum(needed)) + 3
    tables = torch.zeros(len(COUNTS), max(needed) + 2, dtype=torch.int32)
    for at, (count, blocks) in enumerate(zip(COUNTS, needed, strict=True)):
        mine, order = order[:blocks], order[blocks:]
        tables[at, :blocks] = mine
        for slot in range(count):
            place = (slice(None), mine[slot // block_tokens], slice(None), slot % block_tokens)
            states[place] = torch.randn(2, kv_heads, dim).to(dtype)
    query = torch.randn(len(COUNTS), heads, dim).to(dtype)
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    return query, states[0], states[1], tables, counts, dim**-0.5


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_a_row_attends_its_slots_and_nothing_else(number: int):
    heads, kv_heads, dim, block_tokens, dtype = SHAPES[number]
    query, keys, values, tables, counts, scale = case(number, heads, kv_heads, dim, block_tokens, dtype)
    found = attend_pages(query, keys, values, tables, counts, scale)
    for at, count in enumerate(COUNTS):
        slots = torch.arange(count)
        blocks = tables[at, slots // block_tokens].long()
        key, value = (states[blocks, :, slots % block_tokens].transpose(0, 1) for states in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[None, at, :, None].float(), key[None].float(), value[None].float(),
            scale=scale, enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(found[at].float(), expected[0, :, 0], atol=1e-2, rtol=1e-2)
        if dtype == torch.float32:
            torch.testing.assert_close(found[at], expected[0, :, 0], atol=1e-5, rtol=1e-5)


def test_shapes_without_tiles_are_known():
    assert takes(128, 16, 8) and takes(64, 14, 2)
    assert not takes(80, 16, 8) and not takes(8, 4, 2) and not takes(64, 10, 4)


@pytest.mark.slow
def test_the_attention_kernels_interpreted_on_the_host():
    """Their arithmetic, where there is no GPU: Triton runs them in Python, one program after the other."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (pip install kvcomm[gpu])")
    if tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter loops with numpy below 2.4 only")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvcomm.engines.kernels.interpreted_attention"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [str(len(SHAPES)), "shapes"]
